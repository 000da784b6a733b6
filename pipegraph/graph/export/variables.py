"""The variables of a ``forward`` that had a value, and the functions that computed it, recorded during an export."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any

import torch
from torch import nn

from pipegraph.graph.calls import VariablePlace
from pipegraph.graph.export.executed_lines import UntracedOperations, is_of_model
from pipegraph.graph.export.function_runs import FunctionRecorder
from pipegraph.graph.export.handed_modules import handed_module
from pipegraph.torch_private.export import traced_node


class VariableRecorder:
    """Marks the node of each tensor with the variables that had it in the innermost ``forward`` and its methods, and
    with the calls of functions in which it was computed."""

    def __init__(self) -> None:
        self._functions = FunctionRecorder()
        self._running: list[tuple[str, nn.Module]] = []
        self._order = count()

    @property
    def running_call(self) -> str | None:
        """The name of the innermost call of a module; None outside of the model."""
        return self._running[-1][0] if self._running else None

    @contextmanager
    def recording(self, tracer: Any, module: nn.Module, call: str) -> Iterator[None]:
        """A context around a call of a module."""
        self._running.append((call, module))
        previous = sys.gettrace()
        try:
            if len(self._running) > 1:
                yield
            else:
                sys.settrace(lambda frame, event, argument: self._on_call(tracer, frame))
                with UntracedOperations():
                    yield
        finally:
            sys.settrace(previous)
            self._running.pop()

    def _on_call(self, tracer: Any, frame: FrameType) -> Callable[..., Any] | None:
        call, module = self._running[-1]
        on_return = self._functions.on_call(tracer, frame, call, module)
        on_event = self._variables_of(tracer, frame)
        if on_return is None:
            return on_event
        frame.f_trace_lines = on_event is not None

        def on_function_event(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            if on_event is not None:
                on_event(frame, event, argument)
            if event == "return":
                on_return(argument)
            return on_function_event

        return on_function_event

    def _variables_of(self, tracer: Any, frame: FrameType) -> Callable[..., Any] | None:
        """A function that records the variables of a frame; None unless it is a method of the running module."""
        code = frame.f_code
        if not is_of_model(code.co_filename):
            return None
        call, module = self._running[-1]
        handed = handed_module(frame)
        owner = frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None
        if (owner if handed is None else handed.module) is not module:
            return None
        values: dict[str, Any] = {}  # holds the values: two that live at once are different objects
        line = 0

        def on_line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            nonlocal line
            for name, value in frame.f_locals.items():
                if values.get(name) is not value:
                    place = VariablePlace(code.co_firstlineno, name, (), line, next(self._order))
                    _mark(tracer, call, place._replace(is_end=True), values.get(name))
                    _mark(tracer, call, place, value)
                    values[name] = value
            line = frame.f_lineno
            return on_line

        return on_line


def _mark(tracer: Any, call: str, place: VariablePlace, value: Any) -> None:
    for path, tensor in _tensors(value, ()):
        node = traced_node(tracer, tensor)
        if node is not None:
            places = node.meta.setdefault("variables", {})
            places[call] = (*places.get(call, ()), place._replace(path=path))


def _tensors(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif type(value) in (tuple, list):
        for index, part in enumerate(value):
            yield from _tensors(part, (*path, index))
