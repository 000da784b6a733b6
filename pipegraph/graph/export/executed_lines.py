"""The lines of a model's source that run, from which its text is cut to the branches that ran."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import sympy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipegraph.graph.captured import ExecutedLines, ForwardFunction, LineStep
from pipegraph.graph.export.handed_modules import forward_function, handed_module
from pipegraph.graph.export.operation_record import without_memory

_STANDARD_LIBRARY: Final = tuple(f"{path}/" for path in {sysconfig.get_path("stdlib"), str(Path(ast.__file__).parent)})
_INSTALLED: Final = "/site-packages/", "/dist-packages/"
"""The folders of installed packages, some of which are inside the folder of the standard library."""
_FOLDERS: Final = tuple(
    f"{path.parents[level]}/"
    for file, level in ((torch.__file__, 0), (sympy.__file__, 0), (__file__, 2))
    for path in (Path(file), Path(file).resolve())  # an environment may be reached by a link
)
"""The folders of torch, of sympy, which computes its dynamic sizes, and of this package. Their functions are not
recorded: an export with dynamic sizes calls hundreds of thousands of them."""


class LineRecorder:
    """Records from which line to which line the functions of a model go.

    Attributes:
        asks_for_mode: whether one of these functions reads ``training`` of anything.
    """

    def __init__(self) -> None:
        self.asks_for_mode = False
        self._by_module: dict[int, set[LineStep]] = defaultdict(set)
        self._by_function: dict[tuple[str, int], set[LineStep]] = defaultdict(set)
        # The module, the name and the line → whether the variable was None each time.
        self._is_none: dict[int, dict[tuple[str, int], bool]] = defaultdict(dict)
        # File and line of a function → each argument → its values, ... for those that are neither None nor a truth.
        self._arguments: dict[tuple[str, int], dict[str, set[Any]]] = {}
        self._forwards: dict[int, dict[CodeType, ForwardFunction | None]] = defaultdict(dict)  # by module
        self._has_failed = False

    @contextmanager
    def recording(self, may_fail: bool = False) -> Iterator[None]:
        """A context around a call of the model.

        Args:
            may_fail: whether the lines are complete without this call if it fails.
        """
        previous = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            with UntracedOperations():
                yield
        except BaseException:
            self._has_failed |= not may_fail
            raise
        finally:
            sys.settrace(previous)

    def lines(self, model: nn.Module) -> ExecutedLines | None:
        """Return the lines that ran, by the names of the model's modules; None if a call failed."""
        if self._has_failed:
            return None
        modules = [(fqn, id(module)) for fqn, module in model.named_modules(remove_duplicate=False)]
        return ExecutedLines(
            {fqn: frozenset(self._by_module[key]) for fqn, key in modules if key in self._by_module},
            {function: frozenset(steps) for function, steps in self._by_function.items()},
            {fqn: dict(self._is_none[key]) for fqn, key in modules if key in self._is_none},
            {fqn: function for fqn, key in modules if (function := self._forward_function(key)) is not None},
            {
                function: {name: next(iter(values)) for name, values in arguments.items() if _is_constant(values)}
                for function, arguments in self._arguments.items()
            },
        )

    def _forward_function(self, module: int) -> ForwardFunction | None:
        """The function to which a module's ``forward`` always hands it; None without one."""
        functions = list(self._forwards[module].values()) if module in self._forwards else []
        return functions[0] if len(functions) == 1 else None

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not is_of_model(code.co_filename):
            return None
        self.asks_for_mode |= "training" in code.co_names
        arguments = self._arguments.setdefault((code.co_filename, code.co_firstlineno), {})
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(name, ...)
            arguments.setdefault(name, set()).add(value if value is None or isinstance(value, bool) else ...)
        owner = frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None
        handed = handed_module(frame)
        if handed is not None:
            owner = handed.module
            if handed.is_forward:
                self._forwards[id(owner)][code] = forward_function(frame, handed.parameter)
        variables: dict[tuple[str, int], bool] | None = None
        if isinstance(owner, nn.Module):
            steps, variables = self._by_module[id(owner)], self._is_none[id(owner)]
        else:
            steps = self._by_function[code.co_filename, code.co_firstlineno]
        previous = code.co_firstlineno

        def on_line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            nonlocal previous
            if variables is not None:
                for name, value in frame.f_locals.items():
                    place = name, previous
                    variables[place] = value is None and variables.get(place, True)
            if event == "line":
                steps.add(LineStep(code.co_filename, previous, frame.f_lineno))
                previous = frame.f_lineno
            elif event == "return":
                steps.add(LineStep(code.co_filename, previous, 0))
            return on_line

        return on_line


def _is_constant(values: set[Any]) -> bool:
    return len(values) == 1 and ... not in values


class UntracedOperations(TorchFunctionMode):
    """Traces no function inside an operation: thousands of calls of a fake tensor take ten times as long traced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            sys.settrace(trace)


def record_lines(
    recorder: LineRecorder,
    model: nn.Module,
    modes: Iterable[Mapping[nn.Module, bool]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None = None,
) -> None:
    """Run a model on fake tensors in these modes, and record the lines that run. The model is left as it was.

    Args:
        dtype: the floating dtype to which the model and its inputs are converted; None for their own. A model need not
            run in another one.
    """
    for mode in modes:
        with without_memory(model, args, kwargs, dtype=dtype) as (fake_args, fake_kwargs), torch.enable_grad():
            for module, training in mode.items():
                module.training = training
            # Whatever the model raises on tensors without values
            with suppress(Exception), recorder.recording(may_fail=dtype is not None):
                model(*fake_args, **fake_kwargs)


@cache
def is_of_model(file: str) -> bool:
    """Return whether a file is one of a model: not of torch, of the standard library, of pipegraph, or made by a
    program."""
    if file.startswith(_STANDARD_LIBRARY) and not any(folder in file for folder in _INSTALLED):
        return False
    return not file.startswith(("<", *_FOLDERS))
