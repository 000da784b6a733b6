"""Every private interface of torch that the kernels use: one function each, with the reason.

Checked with torch 2.11, 2.13 and 2.15. What one of them cannot do is an exception, and the stage then falls back to
autograd, so that a torch that changed makes a stage slower and no stage wrong.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipegraph.progress import track

Run = Callable[[list[Tensor]], Sequence[Tensor]]
"""Takes the tensors out of the list that it is called with, so that it can let them go."""


# Structures of lists, tuples, dicts and registered classes as torch.export knows them. torch.utils has no public name.
tree_flatten, tree_unflatten, tree_leaves = pytree.tree_flatten, pytree.tree_unflatten, pytree.tree_leaves

OpOverload = torch._ops.OpOverload
"""The class of an operation such as `torch.ops.aten.add.Tensor`. It has no public name."""


def argument_names(operation: Any) -> list[str]:
    """The names of an operation's arguments. Only its schema has them, and the schema has no public accessor."""
    return [argument.name for argument in operation._schema.arguments]


def is_mutable(operation: Any) -> bool:
    """Return whether an operation writes to an argument. Only the schema says so."""
    return isinstance(operation, OpOverload) and bool(operation._schema.is_mutable)


def is_view_operation(operation: Any) -> bool:
    """Return whether an operation's one result shares the memory of an argument. Only the schema says so."""
    returns = operation._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None


def version(tensor: Tensor) -> int:
    """How often a tensor was written to. Autograd's count has no public name."""
    return tensor._version


def storage_identity(tensor: Tensor) -> int:
    """A number for a tensor's memory. Without memory there is no `data_ptr`."""
    return tensor.untyped_storage()._cdata


_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)


def tensor_dicts(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """A module's own parameters and buffers. Through `setattr` a parameter cannot be replaced by a plain tensor."""
    return module._parameters, module._buffers  # type: ignore[return-value]


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's children by name. `named_children` leaves out None, and a child that comes again."""
    return module._modules


def hook_dicts(module: nn.Module) -> dict[str, dict[int, Any]]:
    """A module's hooks by kind and by number. There is no public way to ask for hooks."""
    held = vars(module)
    return {name: held[name] for name in _HOOKS if held.get(name)}


def hook_numbers(module: nn.Module) -> tuple[int, ...]:
    """The numbers of a module's hooks, which no other hook of the process ever has."""
    return tuple(number for hooks in hook_dicts(module).values() for number in hooks)


def has_hooks(tensor: Tensor) -> bool:
    """Return whether autograd calls a hook of a parameter. There is no public way to ask."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds that is no tensor, child or hook. The names of these places are private."""
    places = {"_parameters", "_buffers", "_modules", *_HOOKS}
    return {name: item for name, item in vars(module).items() if name not in places}


def fake_tensors() -> Any:
    """A mode in which tensors have a shape and no memory.

    Public torch makes one only together with `torch.export` or `torch.compile`. Tensors that are neither a parameter
    nor a buffer are allowed inside: they become constants of the graph.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def python_decompositions() -> AbstractContextManager[Any]:
    """Dispatch as AOTAutograd does: only so does batch norm return its new statistics instead of writing them."""
    from torch._dispatch.python import enable_python_dispatcher

    context: AbstractContextManager[Any] = enable_python_dispatcher()
    return context


def functional() -> AbstractContextManager[Any]:
    """The mode that turns writes into new values.

    `torch.func.functionalize`, the public one, refuses the autograd functions that a stage may hold.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    context: AbstractContextManager[Any] = FunctionalTensorMode()
    return context


def to_functional(tensor: Tensor) -> Tensor:
    """The tensor as `functional()` wants it; with the same autograd properties."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    wrapped: Tensor = FunctionalTensor.to_functional(tensor)
    return wrapped


def from_functional(tensor: Tensor) -> Tensor:
    """What stands in a functional tensor now: the tensor itself if it was never written to."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(tensor, FunctionalTensor):
        return tensor
    torch._sync(tensor)
    inner: Tensor = torch._from_functional_tensor(tensor.elem)
    return inner


def trace(
    function: Callable[..., Any], arguments: Sequence[Any], decompositions: Mapping[Any, Any] | None
) -> fx.GraphModule:
    """The graph of ATen operations of `function`, backward included.

    `torch.export` has no joint graph, and AOTAutograd's own has no gradient for an output that is a view of an input.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    traced: fx.GraphModule = make_fx(function, decomposition_table=decompositions)(*arguments)
    return traced


def is_fake(tensor: Tensor) -> bool:
    """Whether it has no memory, or stands for a value of a graph."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def graph_so_far() -> fx.Graph:
    """What `trace` has made until now. Public torch gives a graph only once it is done."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    graph: fx.Graph = mode.tracer.graph
    return graph


def without_duplicates(graph: fx.Graph) -> fx.Graph:
    """The graph with equal computations done once: as AOTAutograd does before it partitions.

    Except random ones, and collectives: two that are equal here need not be on a rank with a smaller shard, and then
    one rank would wait for the other. Until equal ones have been looked for, each has a number as one more argument.
    """
    from torch._functorch.compile_utils import fx_graph_cse

    for number, node in enumerate(filter(is_collective, graph.nodes)):
        node.args = (*node.args, number)
    found: fx.Graph = fx_graph_cse(graph)
    for node in filter(is_collective, found.nodes):
        node.args = node.args[:-1]
    return found


def is_collective(node: fx.Node) -> bool:
    """Whether other ranks take part in a node, or it waits for them. torch has no tag for that."""
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def min_cut(module: fx.GraphModule, outputs: int) -> set[str]:
    """The names of the values that torch's partitioner would keep from forward to backward.

    Placeholders are called primals_… and tangents_…; the first `outputs` outputs are the forward's. There is no public
    partitioner, and its answer is all that is taken: the graphs are divided here.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forward, _ = min_cut_rematerialization_partition(module, (), num_fwd_outputs=outputs)
    (output,) = forward.graph.find_nodes(op="output")
    return {node.name for node in output.args[0][outputs:] if isinstance(node, fx.Node)}


def inductor_decompositions() -> Mapping[Any, Any]:
    """What Inductor wants an operation to be made of, before it is given a graph."""
    import_module("torch._inductor.lowering")  # which some decompositions look into, and do not import
    from torch._inductor.decomposition import select_decomp_table

    table: Mapping[Any, Any] = select_decomp_table()
    return table


def boxed(module: fx.GraphModule) -> Run:
    """A graph to run uncompiled. The result empties the list it is called with, so that values live no longer than
    their last reader, which `GraphModule.forward` with its arguments on the stack cannot do.
    """
    from torch.fx.graph import _BoxedCodeGen

    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    run: Run = module.forward
    return run


@contextmanager
def without_log() -> Iterator[None]:
    """Torch logs as an error what does not run on tensors without memory. It is raised as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def quiet() -> Iterator[None]:
    """Torch's compiler uses deprecated parts of torch, and says so to its user, who can do nothing about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def compile_graphs(modules: Sequence[fx.GraphModule]) -> list[Run | Exception]:
    """Compile functional graphs of ATen operations. A result empties the list it is called with.

    `torch._inductor.compile` is the public way, and wraps each call in AOTAutograd's run-time checks, which cost more
    than some of the kernels; and it waits for each graph's C++ compiler before it looks at the next graph. Here all of
    them work at once. Outputs have the strides that the graph says: other graphs are compiled for them.
    """
    from torch._inductor.async_compile import AsyncCompile

    waits: list[Callable[[], None]] = []
    own = AsyncCompile.wait

    def later(pool: Any, scope: Any) -> None:
        waits.append(lambda: own(pool, scope))

    found: list[Run | Exception] = []
    begun: list[int] = []
    AsyncCompile.wait = later  # type: ignore[method-assign, assignment]
    try:
        for module in track("writing kernels", modules):
            try:
                found.append(_compile_graph(module))
            except Exception as error:
                found.append(error)
            begun.append(len(waits))
    finally:
        AsyncCompile.wait = own  # type: ignore[method-assign]
    for index, (first, last) in enumerate(track("compiling kernels", list(zip([0, *begun], begun, strict=False)))):
        try:
            for wait in waits[first:last]:
                wait()
        except Exception as error:
            found[index] = error
    return found


def _compile_graph(module: fx.GraphModule) -> Run:
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.virtualized import V

    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    mode = examples[0].fake_mode if examples else fake_tensors()
    with ExitStack() as stack:
        stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
        stack.enter_context(V.set_fake_mode(mode))
        module = _recursive_joint_graph_passes(module)
        (output,) = module.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        compiled: Run = compile_fx_inner(module, examples, is_inference=True)
    return compiled


def local_tensor(tensor: Any) -> Tensor:
    """What this rank holds of a DTensor. `to_local` is for autograd, and makes a view of a parameter at each call."""
    return waited(tensor._local_tensor)


def waited(tensor: Tensor) -> Tensor:
    """The result of a functional collective, when it is there. No public name tells such a tensor from others."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def compiler_is_missing() -> str | None:
    """Why Inductor has no C++ compiler to work with; None where it has one."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return None
