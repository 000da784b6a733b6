"""Every private interface of torch that the kernels use: one function each, with the reason.

All were checked with torch 2.11, 2.13 and 2.15. One that a new torch breaks raises, and the stage is then left to
autograd: a torch that changed makes a stage slower, and no stage wrong.
"""

from __future__ import annotations

import linecache
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipegraph.grouped_mm import register_grouped_mm
from pipegraph.kernels.symbolic.internals import UnboundSizeError

aten = torch.ops.aten

Run = Callable[[list[Tensor]], Sequence[Tensor]]
"""A graph that runs. It takes the tensors out of the list that it is called with, so that it can release them."""

tree_flatten, tree_unflatten, tree_leaves = pytree.tree_flatten, pytree.tree_unflatten, pytree.tree_leaves
"""Structures of lists, tuples, dicts and registered classes, as torch.export knows them. They have no public name."""

OpOverload = torch._ops.OpOverload
"""The class of an operation such as `torch.ops.aten.add.Tensor`. It has no public name."""


# Operations and tensors


def argument_names(operation: Any) -> list[str]:
    """Return the names of an operation's arguments. Only its schema has them."""
    return [argument.name for argument in operation._schema.arguments]


def is_mutable(operation: Any) -> bool:
    """Return whether an operation writes to an argument. Only its schema says so."""
    return isinstance(operation, OpOverload) and bool(operation._schema.is_mutable)


def is_view_operation(operation: Any) -> bool:
    """Return whether an operation's one result shares the memory of an argument. Only its schema says so."""
    returns = operation._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None


def is_collective(node: fx.Node) -> bool:
    """Return whether other ranks take part in a node, or it waits for them. Torch has no tag for that."""
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written to. Autograd's count has no public name."""
    return tensor._version


def storage_identity(tensor: Tensor) -> int:
    """Return a number for a tensor's memory. `data_ptr` has none for a fake tensor."""
    return tensor.untyped_storage()._cdata


def add_all(tensors: list[Tensor], addends: list[Tensor]) -> None:
    """Add tensors in place, as one operation on a GPU. Optimizers of torch do so too, by the same private function."""
    torch._foreach_add_(tensors, addends)


def copy_all(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others of any dtype, as one operation on a GPU, by a private function as `add_all`."""
    torch._foreach_copy_(tensors, sources)


def zero_all(tensors: list[Tensor]) -> None:
    """Fill tensors with zeros, as one operation on a GPU, by a private function as `add_all`."""
    torch._foreach_zero_(tensors)


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Return whether anything but this tensor holds its memory. Torch counts that under a private name alone."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the tensor and `storage`


def has_hooks(tensor: Tensor) -> bool:
    """Return whether autograd calls a hook of a parameter. There is no public way to ask."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def local_tensor(tensor: Any) -> Tensor:
    """Return what this rank holds of a DTensor. `to_local` is for autograd, and makes a view at each call."""
    return waited(tensor._local_tensor)


def waited(tensor: Tensor) -> Tensor:
    """Wait for the result of a functional collective. No public name distinguishes such a tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


# Modules

_ALL_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
_HOOKS = tuple(name for name in _ALL_HOOKS if "state_dict" not in name)


def tensor_dicts(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return a module's own parameters and buffers. `setattr` refuses to put a plain tensor in a parameter's place."""
    return module._parameters, module._buffers  # type: ignore[return-value]


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children by name. `named_children` leaves out None, and a child that comes again."""
    return module._modules


def hook_dicts(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return the hooks on a module's calls by kind and number. There is no public way to ask for them."""
    namespace = vars(module)
    return {name: namespace[name] for name in _HOOKS if namespace.get(name)}


def hook_numbers(module: nn.Module) -> tuple[int, ...]:
    """Return the numbers of a module's hooks, which no other hook of the process ever has."""
    return tuple(number for hooks in hook_dicts(module).values() for number in hooks)


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module other than tensors, children and hooks. Those are in private attributes.

    The state of torch's composable functions, such as `fully_shard`, is left out too, and also has private names.
    """
    places = {"_parameters", "_buffers", "_modules", *_ALL_HOOKS}
    items = vars(module).items()
    return {name: item for name, item in items if name not in places and not name.startswith("__composable_api_")}


def rnn_weight_lists(module: nn.Module) -> dict[str, Any]:
    """Return the copies of its weights that an RNN keeps, by attribute. They have private names."""
    names = ("_flat_weights", "_flat_weight_refs")
    return {name: item for name, item in vars(module).items() if name in names}


def renew_rnn_weights(module: nn.Module) -> None:
    """Let an RNN compute with the weights that it holds now, which it would notice only at some calls."""
    names: list[str] = module._flat_weights_names  # type: ignore[assignment]
    module._flat_weights = [getattr(module, name, None) for name in names]  # type: ignore[assignment]


# Tracing

TORCH_LOCK = threading.RLock()
"""Held while torch's tracer, its compiler, or what they go by is another one for a time. Threads share them."""


@contextmanager
def fake_tensors(environment: Any = None) -> Iterator[Any]:
    """Let tensors have a shape and no memory. The environment is that of the symbols in their shapes.

    Public torch has such tensors only inside `torch.export` and `torch.compile`. Tensors with memory are allowed: they
    become constants of the graph. Torch logs as an error what does not run on fake tensors, and raises it as well.

    Where torch asks itself whether a size is 1, as for a broadcast, a symbol counts as another number, and may still
    be 1: `backed_size_oblivious`. Where the model asks, a condition is noted; and also where torch cannot say without
    one how a size follows, as for a slice between two sizes.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import _config

    class WithConditions(FakeTensorMode):
        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().dispatch(*args, **kwargs)
            except UnboundSizeError:
                with _config.patch(backed_size_oblivious=False):  # type: ignore[attr-defined]
                    return super().dispatch(*args, **kwargs)

    register_grouped_mm()
    logger, thread = logging.getLogger("torch._subclasses.fake_tensor"), threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_another_thread)
    try:
        with ExitStack() as stack:
            if environment is not None:
                stack.enter_context(TORCH_LOCK)  # before torch 2.13 its configuration is that of all threads
                stack.enter_context(_config.patch(backed_size_oblivious=True))  # type: ignore[attr-defined]
            yield stack.enter_context(WithConditions(allow_non_fake_inputs=True, shape_env=environment))
    finally:
        logger.removeFilter(is_of_another_thread)


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory, or stands for a value of a graph."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, (FakeTensor, FunctionalTensor))


def functional() -> AbstractContextManager[Any]:
    """Turn writes into new values. `torch.func.functionalize` refuses the autograd functions that a stage may hold."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    context: AbstractContextManager[Any] = FunctionalTensorMode()
    return context


def to_functional(tensor: Tensor) -> Tensor:
    """Return the tensor as `functional()` wants it, with the same autograd properties."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    wrapped: Tensor = FunctionalTensor.to_functional(tensor)
    return wrapped


def from_functional(tensor: Tensor) -> Tensor:
    """Return what a functional tensor holds now: the tensor it was made of, if nothing wrote to it."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(tensor, FunctionalTensor):
        return tensor
    torch._sync(tensor)
    inner: Tensor = torch._from_functional_tensor(tensor.elem)
    return inner


@contextmanager
def python_dispatch() -> Iterator[None]:
    """Use torch's Python implementation of an operation if it exists: those in C++ often do not accept symbols."""
    from torch._dispatch.python import enable_python_dispatcher

    with enable_python_dispatcher(), _lstm_states_in_their_shapes():
        yield


@contextmanager
def _lstm_states_in_their_shapes() -> Iterator[None]:
    """Let the last states of an LSTM have the shapes of the layer's.

    Before torch 2.13 its decomposition squeezes the batch dimension instead of the one that it added.
    """
    if torch.__version__ >= "2.13":
        yield
        return
    from torch._decomp import decompositions

    with TORCH_LOCK:
        original = decompositions.one_layer_lstm

        def one_layer(*args: Any, **kwargs: Any) -> Any:
            output, states = original(*args, **kwargs)
            return output, tuple(state.squeeze(0) if state.dim() == 3 else state for state in states)

        decompositions.one_layer_lstm = one_layer
        try:
            yield
        finally:
            decompositions.one_layer_lstm = original


def trace(
    function: Callable[..., Any], arguments: Sequence[Any], decompositions: Mapping[Any, Any] | None
) -> fx.GraphModule:
    """Return the graph of ATen operations of a function, backward included.

    `torch.export` has no joint graph, and AOTAutograd's has no gradient for an output that is a view of an input.
    Operations are dispatched as AOTAutograd does: only so does batch norm return its new statistics.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # torch's tracer replaces methods of all modules meanwhile: two threads must not trace at once.
    with TORCH_LOCK, python_dispatch():
        module: fx.GraphModule = make_fx(function, decomposition_table=decompositions)(*arguments)
    return module


class GraphSources:
    """The sources of the graphs that torch.fx makes from now on, which it keeps for tracebacks and never removes.

    With graphs of several threads at once, a traceback may lack the line of a graph of the other thread.
    """

    def __init__(self) -> None:
        from torch.fx import graph_module

        self._sources: dict[str, str] = graph_module._loader.eval_cache
        self._old_names = {*self._sources}

    def release_with(self, owner: object) -> None:
        """Remove those of the graphs that were made until now when this object is gone."""
        weakref.finalize(owner, _remove_sources, self._sources, self._sources.keys() - self._old_names).atexit = False


def _remove_sources(sources: dict[str, str], names: Iterable[str]) -> None:
    for name in names:
        sources.pop(name, None)
        linecache.cache.pop(name, None)


# Running


def boxed(module: fx.GraphModule) -> Run:
    """Return a graph that runs uncompiled. `GraphModule.forward` would keep its arguments alive on the stack.

    Views take tensors of any layout, as those of Inductor do: some operations (the backward of softplus) give a fake
    tensor other strides than a real one.
    """
    from torch.fx.graph import _BoxedCodeGen

    for node in module.graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    run: Run = module.forward
    return run
