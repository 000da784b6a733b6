"""RandomOps: the random operations of a stage, each with a key of its own in the place of torch's generator.

A key is found by the module that draws and by how many draws the module has made before in the same forward. Names
stay out of graphs, so that equal layers share one: a graph takes the keys of its draws as one more tensor [draws].
What torch's checkpoint runs again in the backward draws with the keys of the first time.

stage    keys [5] ─┬─ [0:2] ─▶ block of layers.0     keys [2] ─┬─ [0] ─▶ dropout of attn
                   ├─ [2:4] ─▶ block of layers.1               └─ [1] ─▶ dropout of mlp
                   └─ [4] ───▶ dropout
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pipegraph.errors import PipegraphError
from pipegraph.kernels.random import internals
from pipegraph.kernels.random.counter_generator import CounterGenerator, Key, function_of

LOSS = "(loss)"
"""The name under which a loss draws. No module is called so."""

_seeding = threading.RLock()


class RandomOps:
    """Finds the random operations of a function that calls modules, and replaces them by functions of keys.

    Args:
        root: draws are named by the modules inside it.
        outside: the name of a draw outside all modules.
        key: the key of a draw, by its position among all. None leaves random operations as they are.

    Attributes:
        modules: the name of the module of each draw, in order.
        device: where the first one draws; None before.
    """

    def __init__(self, root: nn.Module, outside: str, key: Callable[[int], Key] | None = None) -> None:
        self.modules: list[str] = []
        self.device: torch.device | None = None
        self._names = {id(module): name for name, module in root.named_modules()}
        self._calls = [outside]
        self._key = key
        self._keys: dict[int, Key] = {}  # by position, for what is run again when other microbatches have drawn
        self._again: int | None = None  # the position of the next draw of what is run again
        self._thread = threading.get_ident()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """A context for the function."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with self._redirected():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self, modules: Sequence[str]) -> slice:
        """Note the draws of a block that the innermost module is now, by their names inside it; return their places."""
        start, outer = self._next, self._calls[-1]
        if self._again is None:
            self.modules += [f"{outer}.{name}" if outer and name else outer or name for name in modules]
        else:
            self._again += len(modules)
        return slice(start, start + len(modules))

    @property
    def _next(self) -> int:
        """The position of the next draw."""
        return len(self.modules) if self._again is None else self._again

    @contextmanager
    def _redirected(self) -> Iterator[None]:
        with internals.redirecting(self._dispatch), internals.checkpointing(self._repeatable):
            yield

    def _repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What a checkpoint that begins now is to run again: with the keys of the draws to come."""
        start = self._next

        def again(*args: Any, **kwargs: Any) -> Any:
            previous_position, self._again = self._again, start
            try:
                with self._redirected():
                    return function(*args, **kwargs)
            finally:
                self._again = previous_position

        return again

    def _enter(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() == self._thread:
            self._calls.append(self._names.get(id(module), self._calls[-1]))

    def _leave(self, module: nn.Module, _: Any, returned: Any) -> None:
        if threading.get_ident() == self._thread:
            self._calls.pop()

    def _dispatch(self, operation: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not is_draw(operation, args, kwargs):
            return operation(*args, **kwargs)
        if internals.takes_distributed(types):  # it draws for the shard of this rank, by an operation of its own
            return NotImplemented
        position = self.take([""]).start
        arguments = internals.arguments(operation, args, kwargs)
        device = _device(arguments)
        self.device = self.device or device
        if self._key is None:
            return operation(*args, **kwargs)
        if position not in self._keys:
            self._keys[position] = self._key(position)
        return _draw(operation, args, kwargs, arguments, self._keys[position], device)


def is_draw(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers with these arguments, from the generator of its device.

    An attention has the tag without a dropout too; and its backward, which repeats the numbers of its forward.
    """
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    arguments = internals.arguments(operation, args, kwargs)
    if arguments.get("generator") is not None or "philox_seed" in arguments:
        return False
    if "dropout_p" in arguments:
        return arguments["dropout_p"] != 0 and operation is not torch.ops.aten._fused_sdp_choice.default
    if "p" in arguments and "train" in arguments:
        return arguments["p"] != 0 and arguments["train"] is not False
    return arguments.get("dropout") != 0  # of an RNN


def _device(arguments: Mapping[str, Any]) -> torch.device:
    """Where an operation draws: the device it is asked for, or that of its arguments."""
    if arguments.get("device") is not None:
        return torch.device(arguments["device"])
    tensors = (tensor.device for tensor in arguments.values() if isinstance(tensor, Tensor))
    return next(tensors, None) or torch.get_default_device()


def _draw(
    operation: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    arguments: Mapping[str, Any],
    key: Key,
    device: torch.device,
) -> Any:
    name = operation.overloadpacket.__name__
    function = None if "out" in arguments else function_of(name.removesuffix("_"))
    if function is not None:
        result = function(CounterGenerator(key, device), arguments)
        return arguments["self"].copy_(result) if name.endswith("_") else result
    if isinstance(key, Tensor):
        raise RuntimeError(f"with seed=, what {operation} draws is seeded outside a graph alone{_remedy(name)}")
    # Threads share the generator that is seeded here.
    with _seeding, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(key)
        return operation(*args, **kwargs)


def _remedy(name: str) -> str:
    if "attention" not in name:
        return ""
    return ": torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around the step has a dropout that can be traced"


def numbered(modules: Sequence[str], position: int) -> tuple[str, int]:
    """The module of a draw, and how many draws it has made before."""
    module = modules[position]
    return module, modules[:position].count(module)


@contextmanager
def refusing_draws() -> Iterator[None]:
    """A context for a backward. Raises PipegraphError for a draw in it: it repeats one of the forward, and nothing says
    which."""

    def dispatch(operation: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if is_draw(operation, args, kwargs):
            raise PipegraphError(
                f"a backward draws random numbers ({operation}), and seed= cannot tell which of the forward's they "
                'are.\nTry: torch.utils.checkpoint, or recompute="block", for what is to be computed again.'
            )
        return operation(*args, **kwargs)

    with internals.redirecting(dispatch):
        yield
