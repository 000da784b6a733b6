"""Calls in a forward or a loss that do something which no graph has: hooks, seeds, clocks.

They are found where they happen: Python reports each call while the model runs on fake tensors, whatever name the
function has in the model's file. A call counts if the model makes it, and not torch for itself.
"""

from __future__ import annotations

import datetime
import inspect
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.autograd import graph as autograd_graph
from torch.nn.modules import module as global_hooks
from torch.overrides import TorchFunctionMode

from pipegraph.errors import path_from_here
from pipegraph.torch_private.tracing import unprofiled

_PYTHON: Final = Path(os.__file__).parent
_TORCH: Final = Path(torch.__file__).parent
_PIPEGRAPH: Final = Path(__file__).parent
_WRAPPERS: Final = (_TORCH / "_dynamo", _TORCH / "_compile.py", _TORCH / "utils" / "_contextlib.py")
"""Where torch's decorators are, which call the function that they stand for."""


class Effect(NamedTuple):
    """A kind of call.

    Attributes:
        description: the call does, as the end of a sentence: "it adds a hook to a tensor".
        consequence: of leaving it out.
        advice: what to do instead.
        is_once: whether a traced function has what the call gave or did when it was traced, in each later call.
        is_compared: whether a model may make the call if nothing depends on it. The capture runs the model with several
            results.
    """

    description: str
    consequence: str
    advice: str
    is_once: bool = False
    is_compared: bool = False


class EffectCall(NamedTuple):
    """A call of a model. `line` is where: ``model.py:12``."""

    effect: Effect
    line: str


_HOOK: Final = Effect(
    "adds a hook to a tensor",
    "a stage would not call it",
    "a torch.autograd.Function whose backward does what the hook does; or the same arithmetic in forward: "
    "h = h * 0.5 + (h * 0.5).detach() halves a gradient",
)
_MODULE_HOOK: Final = Effect(
    "adds a hook for the backward of a module",
    "a stage would not call it",
    "a torch.autograd.Function around what the module returns",
)
_SAVED: Final = Effect(
    "changes how tensors are saved for the backward",
    "a stage would not do so",
    "Pipeline(recompute=...), which can also offload what is saved",
)
_GRADIENT: Final = Effect(
    "asks autograd to keep the gradient of a tensor",
    "a stage would not do so",
    "the tensor as an output of the model, or as an input with requires_grad=True",
)
_DERIVATIVE: Final = Effect(
    "differentiates inside of its forward",
    "torch.export cannot follow that",
    "the derivative as a formula in forward, or in a torch.autograd.Function; or in loss_fn, of an input that requires "
    "a gradient",
)
_SEED: Final = Effect(
    "sets the state of a random number generator",
    "a stage would draw other numbers",
    "Pipeline(seed=...), with which random numbers follow from the step and the place of the call",
    is_once=True,
)
_CLOCK: Final = Effect(
    "reads a clock",
    "a stage would have the time of the capture for ever",
    "the time as an input of the model",
    is_once=True,
)
_ENTROPY: Final = Effect(
    "draws random bytes of the system",
    "a stage would have those of the capture for ever",
    "torch.rand(), or an input of the model",
    is_once=True,
)

_CHANCE: Final = Effect(
    "draws a random number of Python or NumPy",
    "a stage would have that of the capture for ever",
    "torch.rand()",
    is_once=True,
    is_compared=True,
)

_BACKWARDS: Final = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_FUNCTIONS: Final[dict[CodeType, Effect]] = {
    inspect.unwrap(function).__code__: effect
    for effect, functions in (
        (
            _HOOK,
            (
                torch.Tensor.register_hook,
                torch.Tensor.register_post_accumulate_grad_hook,
                autograd_graph.register_multi_grad_hook,
            ),
        ),
        (
            _MODULE_HOOK,
            (
                nn.Module.register_backward_hook,
                nn.Module.register_full_backward_hook,
                nn.Module.register_full_backward_pre_hook,
                global_hooks.register_module_backward_hook,
                global_hooks.register_module_full_backward_hook,
                global_hooks.register_module_full_backward_pre_hook,
            ),
        ),
        (_DERIVATIVE, _BACKWARDS),
        (
            _SAVED,
            (autograd_graph.saved_tensors_hooks.__init__,),  # save_on_cpu, which calls it, changes no value
        ),
        (
            _SEED,
            (
                torch.manual_seed,
                torch.seed,
                torch.set_rng_state,
                torch.cuda.manual_seed,
                torch.cuda.manual_seed_all,
                torch.cuda.seed,
                torch.cuda.seed_all,
                torch.cuda.set_rng_state,
                torch.cuda.set_rng_state_all,
                torch.random.fork_rng,
            ),
        ),
        (_ENTROPY, (uuid.uuid1, uuid.uuid4, secrets.token_bytes, secrets.token_hex, secrets.randbelow)),
    )
    for function in functions
}
_BUILTINS: Final[dict[Any, Effect]] = {
    **{
        getattr(time, f"{name}{suffix}"): _CLOCK
        for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
        for suffix in ("", "_ns")
        if hasattr(time, f"{name}{suffix}")
    },
    time.localtime: _CLOCK,
    time.gmtime: _CLOCK,
    os.urandom: _ENTROPY,
}
_METHODS: Final[tuple[tuple[Callable[[Any], bool], frozenset[str], Effect], ...]] = (
    (
        lambda owner: isinstance(owner, type) and issubclass(owner, datetime.date),
        frozenset({"now", "utcnow", "today"}),
        _CLOCK,
    ),
    (
        lambda owner: isinstance(owner, torch.Generator),
        frozenset({"manual_seed", "seed", "set_state", "set_offset"}),
        _SEED,
    ),
    (lambda owner: isinstance(owner, random.Random), frozenset({"random", "getrandbits"}), _CHANCE),
    (lambda owner: isinstance(owner, torch.Tensor), frozenset({"retain_grad"}), _GRADIENT),
    # Nodes of autograd have many classes, of which torch gives only an abstract one a name.
    (
        lambda owner: hasattr(owner, "next_functions"),
        frozenset({"register_hook", "register_prehook"}),
        _HOOK,
    ),
)
_NAMES: Final = frozenset(function.__name__ for function in _BUILTINS).union(*(names for _, names, _ in _METHODS))
_ASSIGNMENT: Final = Effect("assigns to an attribute of a module", "", "")
_CONTAINER_METHODS: Final = frozenset(
    {
        *("append", "extend", "insert", "appendleft", "pop", "remove", "clear", "sort", "reverse"),
        *("add", "discard", "update", "setdefault", "popitem"),
    }
)
"""Methods that change a container."""


class Notes:
    """What was noted.

    Args:
        packages: the installed packages that the model is from. Calls of others count as torch's: they may be callbacks
            of the garbage collector, which runs at any time.

    Attributes:
        calls: with an effect, in order.
        lines: of each assignment to an attribute of a module, (id of the module, name) → line, and of each call of a
            method of a watched container, (id of the container, "") → line.
    """

    def __init__(self, packages: frozenset[str] = frozenset()) -> None:
        self._packages = packages
        self.calls: list[EffectCall] = []
        self.lines: dict[tuple[int, str], str] = {}
        self._random_states: dict[int, tuple[random.Random, Any]] = {}

    def keep_state(self, generator: random.Random) -> None:
        """Remember the state of a generator of Python before the first number that it draws."""
        if id(generator) not in self._random_states:
            self._random_states[id(generator)] = generator, generator.getstate()

    def restore_states(self) -> None:
        """Give the generators their states back: what was noted runs again, and draws the same numbers."""
        for generator, state in self._random_states.values():
            generator.setstate(state)

    def line_of(self, frame: FrameType | None) -> str | None:
        """The line of the model that a frame is, or that called Python's own library there; None for other calls."""
        while frame is not None:
            owner = _owner_of(frame.f_code.co_filename)
            if owner == _MODEL or owner in self._packages:
                return f"{path_from_here(frame.f_code.co_filename)}:{frame.f_lineno}"
            if owner != _PYTHONS:
                return None
            frame = frame.f_back
        return None


class UnprofiledOperations(TorchFunctionMode):
    """Runs operations of torch unprofiled.

    An operation that is called with a function, or with a tensor of a class that is not torch's, may run code of the
    model. So may a backward, and an operation that is registered with ``torch.library``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        runs_model = (
            func in _BACKWARDS
            or type(func).__module__ == "torch._ops"
            or any(map(callable, args))
            or any(map(callable, kwargs.values()))
            or not all(map(_is_of_torch, types))
        )
        if runs_model:
            return func(*args, **kwargs)
        with unprofiled():
            return func(*args, **kwargs)


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


@contextmanager
def effects_noted(watched: Container[int] = (), packages: frozenset[str] = frozenset()) -> Iterator[Notes]:
    """Note the effects of what runs inside, in this thread.

    Args:
        watched: the ids of containers.
        packages: as `Notes` takes them.
    """
    notes = Notes(packages)
    codes = {id(code): effect for code, effect in _FUNCTIONS.items()}
    codes[id(nn.Module.__setattr__.__code__)] = _ASSIGNMENT
    names = _NAMES | _CONTAINER_METHODS if watched else _NAMES

    # Python calls this for each call of a function, and most of them are torch's own: what is rare stands elsewhere.
    # Code is compared by its id, because its hash reads all of it.
    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            if argument.__name__ in names:
                note_builtin(frame, argument)
        elif event == "call" and id(frame.f_code) in codes:
            note_function(frame, codes[id(frame.f_code)])

    def note_function(frame: FrameType, effect: Effect) -> None:
        if effect is _ASSIGNMENT:
            local = frame.f_locals
            notes.lines.setdefault((id(local["self"]), local["name"]), notes.line_of(frame.f_back) or "")
        else:
            add(effect, frame.f_back)

    def note_builtin(frame: FrameType, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if id(owner) in watched:
            notes.lines.setdefault((id(owner), ""), notes.line_of(frame) or "")
        effect = _effect_of(function, owner)
        if effect is _CHANCE and owner is not None:
            notes.keep_state(owner)
        if effect is not None:
            add(effect, frame)

    def add(effect: Effect, caller: FrameType | None) -> None:
        line = notes.line_of(caller)
        if line is not None:
            notes.calls.append(EffectCall(effect, line))

    profiler: Any = sys.getprofile()
    if profiler is not None and not callable(profiler):  # a profiler in C, which could not be given back
        yield notes
        return
    state = _numpy_state()
    sys.setprofile(note)
    try:
        with UnprofiledOperations():
            yield notes
    finally:
        sys.setprofile(profiler)
        is_drawn = _described(_numpy_state()) != _described(state)
        if is_drawn:
            sys.modules["numpy"].random.set_state(state)
    if is_drawn:  # its functions are in Cython, whose calls Python does not report
        notes.calls.append(EffectCall(_CHANCE, "a call of numpy.random"))


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return state if isinstance(state, tuple) else None


def _described(state: Any) -> object:
    return state and (state[1].tobytes(), *state[2:])


def _effect_of(function: Any, owner: object) -> Effect | None:
    """The effect of a function in C, or of a method of `owner`."""
    if function.__name__ not in _NAMES:
        return None
    if isinstance(owner, ModuleType):
        return _BUILTINS.get(function)
    methods = (effect for is_owner, names, effect in _METHODS if function.__name__ in names and is_owner(owner))
    return next(methods, None)


_MODEL, _PYTHONS, _TORCHS = "of the model", "of Python", "of torch"


@cache
def _owner_of(filename: str) -> str:
    """Whose a source file is: the model's, Python's, torch's, or the name of an installed package."""
    file = Path(filename)
    if any(wrapper in (file, *file.parents) for wrapper in _WRAPPERS) or filename.startswith("<frozen"):
        return _PYTHONS
    if _TORCH in file.parents or _PIPEGRAPH in file.parents:
        return _TORCHS
    if "site-packages" in file.parts:
        return file.parts[file.parts.index("site-packages") + 1].removesuffix(".py")
    return _PYTHONS if _PYTHON in file.parents else _MODEL
