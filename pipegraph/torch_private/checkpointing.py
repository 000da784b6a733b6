"""Checkpointed regions and the generators of random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


def arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included, which torch leaves out. Only its schema has them.

    The default of a dtype stays out: it is a number there.
    """
    schema = operation._schema.arguments
    defaults = {arg.name: arg.default_value for arg in schema if arg.has_default_value() and arg.name != "dtype"}
    return {**defaults, **dict(zip((arg.name for arg in schema), args, strict=False)), **kwargs}


def redirecting(
    dispatch: Callable[[Any, Any, Sequence[Any], Mapping[str, Any]], Any],
) -> AbstractContextManager[Any]:
    """Give each ATen operation to a function (operation, types, args, kwargs) → result, below autograd.

    The class of such modes has no public place, although torch documents it.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Redirection(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return dispatch(func, types, args, kwargs or {})

    context: AbstractContextManager[Any] = Redirection()
    return context


def takes_distributed(types: Sequence[type]) -> bool:
    """Return whether an operation with arguments of these classes is one of DTensors. `types` holds their classes, and
    that of DTensor is not imported for it."""
    return any(tensor_type.__name__ == "DTensor" for tensor_type in types)


_lock = threading.Lock()


_users = 0


_replaced = ExitStack()


_local = threading.local()


@contextmanager
def checkpointing(repeatable: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let `torch.utils.checkpoint`, called in this thread, run another function again in the backward.

    When a checkpoint begins, `repeatable` takes the checkpoint's function and returns the one to run again. Several
    threads may use this context at once, each with its own `repeatable`.
    """
    global _users
    repeatables: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = vars(_local).setdefault("repeatables", [])
    with _lock:
        if not _users:
            _replaced.enter_context(_repeating_checkpoints())
        _users += 1
    repeatables.append(repeatable)
    try:
        yield
    finally:
        repeatables.pop()
        with _lock:
            _users -= 1
            if not _users:
                _replaced.close()


@contextmanager
def _repeating_checkpoints() -> Iterator[None]:
    """Let checkpoints of all threads run again what `_repeatable` says.

    A checkpoint puts the state of torch's generators back, and tells nobody. Its public `context_fn` is the caller's.
    """
    from torch.utils import checkpoint

    frame, forward = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction.forward

    def make_frame(run_again: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return frame(_repeatable(run_again), *args, **kwargs)

    def reentrant(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        again = _repeatable(function)
        outputs = forward(ctx, function, *args)
        ctx.run_function = again
        return outputs

    checkpoint._CheckpointFrame = make_frame  # type: ignore[assignment, misc]
    checkpoint.CheckpointFunction.forward = staticmethod(reentrant)  # type: ignore[method-assign]
    try:
        yield
    finally:
        checkpoint._CheckpointFrame = frame  # type: ignore[misc]
        checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]


def _repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a checkpoint that begins now in this thread is to run again, in the place of what it runs."""
    for repeatable in reversed(vars(_local).get("repeatables", ())):
        function = repeatable(function)
    return function
