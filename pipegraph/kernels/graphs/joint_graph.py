"""Forward and backward of a function of tensors as one graph of ATen operations.

(sizes, primals, tangents) ─▶ joint graph ─▶ (outputs, new values of what was written to, gradients of the primals)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.kernels.graphs.block_operation import is_random
from pipegraph.kernels.graphs.regions import inherit_places
from pipegraph.kernels.symbolic_sizes import SymbolicSizes, compute_from_sizes
from pipegraph.kernels.trace_guard import ModuleState
from pipegraph.torch_private.fake_tensors import is_fake
from pipegraph.torch_private.operators import is_mutable
from pipegraph.torch_private.partitioner import graph_so_far, without_duplicates
from pipegraph.torch_private.tracing import from_functional, functional, to_functional, unprofiled
from pipegraph.torch_private.tracing import trace as torch_trace

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]

aten = torch.ops.aten


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of a function. A node's `meta["val"]` is its value without memory.

    Attributes:
        module: the graph. Its placeholders are the sizes, the primals and the tangents.
        sizes: those that may differ between calls.
        primals: the inputs of the function.
        tangents: the gradient of each output; None if none arrives.
        outputs: what the function returns.
        written: the new values of primals that the function writes to, by position.
        gradients: the gradient of each primal, or None.
    """

    module: fx.GraphModule
    sizes: SymbolicSizes
    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node | None, ...]
    outputs: tuple[fx.Node, ...]
    written: Mapping[int, fx.Node]
    gradients: tuple[fx.Node | None, ...]


def trace(
    function: Function,
    state: ModuleState,
    primals: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    decompositions: Mapping[Any, Any] | None,
    sizes: SymbolicSizes,
) -> JointGraph:
    """Trace a function with its backward, in the caller's grad mode.

    Args:
        function: takes the primals.
        state: the tensors that the first primals replace, in the backward too: it may run parts of the forward again.
        primals: fake. A primal that requires a gradient gets one.
        tangents: fake; None for an output without a gradient.
        decompositions: what operations are made of, by operation.
        sizes: the symbols in the shapes of primals and tangents.

    Raises:
        RuntimeError: the function does what a graph cannot.
    """
    written: list[int] = []

    def joint(_: list[Any], primals: list[Tensor], arriving: list[Tensor]) -> list[Tensor | None]:
        with functional():
            leaves = [to_functional(primal) for primal in primals]
            with state.replaced(leaves[: len(state)]):
                outputs = function(leaves)
                graph = graph_so_far()
                assert graph is not None
                forward = list(graph.nodes)
                values = [from_functional(leaf) for leaf in leaves]
                written[:] = [index for index, primal in enumerate(primals) if values[index] is not primal]
                gradients = _gradients(leaves, outputs, tangents, [to_functional(grad) for grad in arriving])
            backward = list(islice(graph.nodes, len(forward), None))
            _check_backward(backward)
            placeholders = graph.find_nodes(op="placeholder")
            inherit_places(forward, backward, placeholders[len(placeholders) - len(arriving) :])
            results = [*outputs, *(leaves[index] for index in written), *gradients]
            return [None if tensor is None else from_functional(tensor) for tensor in results]

    arriving = [tangent for tangent in tangents if tangent is not None]
    module = torch_trace(joint, (list(sizes.values), list(primals), arriving), decompositions)
    with unprofiled():
        return _joint_graph(module, sizes, len(primals), tangents, written)


def constant_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return the attribute of the graph that a node reads: a tensor that is not a primal. None for other nodes."""
    return getattr(module, str(node.target)) if node.op == "get_attr" else None


def _gradients(
    leaves: Sequence[Tensor], outputs: Sequence[Tensor], tangents: Sequence[Tensor | None], arriving: Sequence[Tensor]
) -> list[Tensor | None]:
    ends = [output for output, tangent in zip(outputs, tangents, strict=True) if tangent is not None]
    starts = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
    gradients: list[Tensor | None] = [None] * len(leaves)
    if ends and starts:
        # As for eager code, the backward runs outside the regions of autocast that the forward ran in.
        with torch.autocast(ends[0].device.type, enabled=False):
            leaf_grads = torch.autograd.grad(ends, [leaves[index] for index in starts], arriving, allow_unused=True)
        for index, gradient in zip(starts, leaf_grads, strict=True):
            gradients[index] = gradient
    return gradients


def _joint_graph(
    module: fx.GraphModule,
    sizes: SymbolicSizes,
    primal_count: int,
    tangents: Sequence[Tensor | None],
    written: Sequence[int],
) -> JointGraph:
    graph = module.graph
    compute_from_sizes(graph, sizes)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
    for node in graph.nodes:
        _check_node(module, node)
    _copy_written(graph, graph.find_nodes(op="placeholder")[len(sizes) :], written)
    graph.eliminate_dead_code()
    module.graph = graph = without_duplicates(graph)
    placeholders = graph.find_nodes(op="placeholder")
    names = [f"sizes_{index}" for index in range(len(sizes))]
    names += [f"primals_{index}" for index in range(primal_count)]
    names += [f"tangents_{index}" for index, tangent in enumerate(tangents) if tangent is not None]
    for node, name in zip(placeholders, names, strict=True):
        node.target = node.name = name
    primals = placeholders[len(sizes) :][:primal_count]
    arriving = iter(placeholders[len(sizes) + primal_count :])
    (end,) = graph.find_nodes(op="output")
    results = iter(end.args[0])
    return JointGraph(
        module,
        sizes,
        primals=tuple(primals),
        tangents=tuple(None if tangent is None else next(arriving) for tangent in tangents),
        outputs=tuple(islice(results, len(tangents))),
        written=dict(zip(written, islice(results, len(written)), strict=True)),
        gradients=tuple(results),
    )


def _check_backward(nodes: Iterable[fx.Node]) -> None:
    """Raise RuntimeError if the backward draws random numbers, as torch's checkpoint does when it runs a forward again.

    Restoring the state of the generator is not an operation of the graph, so the graph would draw other numbers.
    """
    if any(map(is_random, nodes)):
        raise RuntimeError("its backward draws random numbers, as a checkpoint around a dropout does")


def _check_node(module: fx.GraphModule, node: fx.Node) -> None:
    if node.target is aten.mkldnn_rnn_layer_backward.default:
        forward: Any = node.args[-1].args[0]  # type: ignore[union-attr]
        if not forward.args[-1]:  # not in training, says the operation
            raise RuntimeError("an LSTM on CPU keeps nothing for a backward if its input needs no gradient")
    constant = constant_of(module, node)
    if not isinstance(constant, Tensor):
        return
    shape = list(constant.shape)
    if is_fake(constant):
        readers = ", ".join(dict.fromkeys(str(user.target) for user in node.users))
        raise RuntimeError(f"it keeps a tensor of shape {shape}, which {readers} reads, from one call to the next")
    if torch.is_grad_enabled() and constant.requires_grad:
        raise RuntimeError(f"a tensor of shape {shape} requires a gradient, and is not a parameter of a module")
    if any(is_mutable(user.target) for user in node.users):
        raise RuntimeError(f"it writes to a tensor of shape {shape} that is not a buffer of a module")


def _copy_written(graph: fx.Graph, primals: Sequence[fx.Node], written: Sequence[int]) -> None:
    """Read a primal that is written to as a copy: the backward reads the value from before."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for index in written:
        with graph.inserting_before(first):
            copy = graph.call_function(aten.clone.default, (primals[index],))
        copy.meta.update(primals[index].meta)
        for user in set(primals[index].users) - {copy}:
            user.replace_input_with(primals[index], copy)
