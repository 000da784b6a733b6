"""Tracing a function into an FX graph, functionalization included."""

from __future__ import annotations

import linecache
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.torch_private.operators import aten

Run = Callable[[list[Tensor]], Sequence[Tensor]]
"""A graph that runs. It takes the tensors out of the list that it is called with, so that it can release them."""


# Tracing

TORCH_LOCK = threading.RLock()
"""Held while torch's tracer, its compiler, or what they go by is another one for a time. Threads share them."""


def functional() -> AbstractContextManager[Any]:
    """Turn writes into new values. `torch.func.functionalize` refuses the autograd functions that a stage may hold."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    class Unprofiled(FunctionalTensorMode):
        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            with unprofiled():
                return super().__torch_dispatch__(*args, **kwargs)

    context: AbstractContextManager[Any] = Unprofiled()
    return context


@contextmanager
def unprofiled() -> Iterator[None]:
    """Let Python report no calls of what runs inside, which is torch's own code: a report of each call of a function
    takes more than half of the time of a traced layer."""
    profiler: Any = sys.getprofile()
    if profiler is not None and not callable(profiler):  # a profiler in C, which could not be given back
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profiler)


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
