"""Forward and backward of a function of tensors as one graph of ATen operations.

(primals, tangents) ─▶ joint graph ─▶ (outputs, what was written, gradients of the primals)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.kernels import internals
from pipegraph.kernels.graphs.block_operation import is_random
from pipegraph.kernels.modules.module_state import ModuleState

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass(frozen=True)
class JointGraph:
    """A joint graph. A node's `meta["val"]` is its value without memory.

    `tangents` holds one node per output, None for an output that no gradient comes from; `written` the new value of
    each primal that the function wrote to, by position; `gradients` one node per primal, None where there is none.
    """

    module: fx.GraphModule
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
) -> JointGraph:
    """The joint graph of `function`, whose outputs have `tangents` (None: no gradient comes).

    The first primals stand in the place of `state`, in the backward too, which may run parts of the forward again.
    Primals and tangents are fake. A primal that requires a gradient gets one. Run in the grad mode of the caller.
    """
    given = [tangent for tangent in tangents if tangent is not None]
    written: list[int] = []

    def joint(primals: list[Tensor], tangents_: list[Tensor]) -> list[Tensor | None]:
        with internals.functional():
            leaves = [internals.to_functional(primal) for primal in primals]
            with state.replaced(leaves[: len(state)]):
                outputs = function(leaves)
                forward = set(internals.graph_so_far().nodes)
                new = [internals.from_functional(leaf) for leaf in leaves]
                written[:] = [index for index, primal in enumerate(primals) if new[index] is not primal]
                gradients = _gradients(leaves, outputs, tangents, map(internals.to_functional, tangents_))
            _check_backward(node for node in internals.graph_so_far().nodes if node not in forward)
            found = [*outputs, *(leaves[index] for index in written), *gradients]
            return [None if each is None else internals.from_functional(each) for each in found]

    with internals.python_decompositions():
        module = internals.trace(joint, (list(primals), given), decompositions)
    return _joint(module, primals, tangents, written)


def _gradients(
    leaves: Sequence[Tensor], outputs: Sequence[Tensor], tangents: Sequence[Tensor | None], given: Any
) -> list[Tensor | None]:
    ends = [output for output, tangent in zip(outputs, tangents, strict=True) if tangent is not None]
    starts = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
    gradients: list[Tensor | None] = [None] * len(leaves)
    if not ends or not starts:
        return gradients
    # As eager code is differentiated: behind the regions of autocast that the forward ran in.
    with torch.autocast(ends[0].device.type, enabled=False):
        found = torch.autograd.grad(ends, [leaves[index] for index in starts], list(given), allow_unused=True)
    for index, gradient in zip(starts, found, strict=True):
        gradients[index] = gradient
    return gradients


def _joint(
    module: fx.GraphModule, primals: Sequence[Tensor], tangents: Sequence[Tensor | None], written: Sequence[int]
) -> JointGraph:
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
    _check(module)
    _keep_what_was_there(graph, written)
    graph.eliminate_dead_code()
    module.graph = graph = internals.without_duplicates(graph)
    placeholders = graph.find_nodes(op="placeholder")
    (end,) = graph.find_nodes(op="output")
    results = list(end.args[0])
    outputs, new, gradients = _cut(results, len(tangents), len(written), len(primals))
    given = iter(placeholders[len(primals) :])
    names = [f"primals_{index}" for index in range(len(primals))]
    names += [f"tangents_{index}" for index, tangent in enumerate(tangents) if tangent is not None]
    for node, name in zip(placeholders, names, strict=True):
        node.target = node.name = name
    return JointGraph(
        module,
        primals=tuple(placeholders[: len(primals)]),
        tangents=tuple(None if tangent is None else next(given) for tangent in tangents),
        outputs=tuple(outputs),
        written=dict(zip(written, new, strict=True)),
        gradients=tuple(gradients),
    )


def _check_backward(nodes: Iterable[fx.Node]) -> None:
    """A forward that the backward runs again (torch's checkpoint) would draw other numbers, as it is traced: what puts
    the state of the generator back is no operation."""
    if any(map(is_random, nodes)):
        raise RuntimeError("its backward draws random numbers, as a checkpoint around a dropout does")


def _check(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.mkldnn_rnn_layer_backward.default:
            forward = node.args[-1].args[0]
            if not forward.args[-1]:  # not in training, as far as the operation knows
                raise RuntimeError("an LSTM on CPU keeps nothing for a backward where its input needs no gradient")
        if isinstance(constant := constant_of(module, node), Tensor):
            _check_constant(constant, node)


def constant_of(module: fx.GraphModule, node: fx.Node) -> Any:
    """What an attribute of a graph holds: a tensor that is no primal."""
    return getattr(module, str(node.target)) if node.op == "get_attr" else None


def _check_constant(constant: Tensor, node: fx.Node) -> None:
    if internals.is_fake(constant):
        raise RuntimeError("it keeps a tensor from one call to the next")
    if torch.is_grad_enabled() and constant.requires_grad:
        raise RuntimeError(
            f"a tensor of shape {list(constant.shape)} requires a gradient, and is no parameter of a module"
        )
    for user in node.users:
        if internals.is_mutable(user.target):
            raise RuntimeError(f"it writes to a tensor of shape {list(constant.shape)} that is no buffer of a module")


def _keep_what_was_there(graph: fx.Graph, written: Sequence[int]) -> None:
    """Read a primal that is written to as a copy: what the backward reads is the value from before."""
    placeholders = graph.find_nodes(op="placeholder")
    behind = next(node for node in graph.nodes if node.op != "placeholder")
    for index in written:
        with graph.inserting_before(behind):
            copy = graph.call_function(torch.ops.aten.clone.default, (placeholders[index],))
        copy.meta.update(placeholders[index].meta)
        placeholders[index].replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _cut(items: Sequence[Any], *lengths: int) -> list[list[Any]]:
    cut, start = [], 0
    for length in lengths:
        cut.append(list(items[start : start + length]))
        start += length
    return cut
