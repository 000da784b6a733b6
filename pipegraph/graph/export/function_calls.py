"""Calls of the helper functions in a model's files."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from pipegraph.graph.calls import ArgumentPlace, ResultPlace
from pipegraph.graph.nodes import HELPER_MARK
from pipegraph.torch_private.export import traced_node

_PLAIN = (torch.Tensor, bool, int, float, str, type(None), torch.SymInt, torch.dtype, torch.device)


class HelperCalls:
    """Names the calls of helper functions, which are in the files of a model's modules, while the model is traced.

    Such a function takes tensors and numbers, and no modules. Each call gets a separate name, which replaces the name
    of the function in the stack traces of its operations: ``rotate_half()@3``.

    Args:
        model: the model that is traced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._files = {type(module).__module__ for module in model.modules()}
        self._count: Counter[str] = Counter()
        self._names: dict[FrameType, str] = {}  # of helpers, kept to mark what they return

    def name(self, tracer: Any, frame: FrameType) -> str:
        """The name of the call that a frame belongs to; the name of its function if that is not a helper.

        The parameters are read at the first operation that the call runs.
        """
        if frame in self._names:
            return self._names[frame]
        name = self._new_name(tracer, frame)
        if HELPER_MARK in name:
            self._names[frame] = name
        return name

    def end(self, tracer: Any) -> None:
        """Mark what the calls returned that were named since the last time."""
        for frame, name in self._names.items():
            _mark_results(tracer, frame, name)
        self._names.clear()

    def _new_name(self, tracer: Any, frame: FrameType) -> str:
        code = frame.f_code
        function = frame.f_globals.get(code.co_name)
        if frame.f_globals.get("__name__") not in self._files or not inspect.isfunction(function):
            return code.co_name
        names = [*inspect.signature(function).parameters]
        values = [frame.f_locals.get(name) for name in names]
        if function.__code__ is not code or not all(map(_is_plain, values)):
            return code.co_name
        self._count[code.co_name] += 1
        call = f"{code.co_name}{HELPER_MARK}{self._count[code.co_name]}"
        for order, (name, value) in enumerate(zip(names, values, strict=True)):
            node = traced_node(tracer, value) if isinstance(value, torch.Tensor) else None
            if node is not None:
                places = node.meta.setdefault("argument_of", {})
                place = ArgumentPlace(order, name)
                places[call] = places[call].joined(place) if call in places else place
        return call


def _mark_results(tracer: Any, frame: FrameType, call: str) -> None:
    names = _returned(frame.f_code).get(frame.f_lineno, ())
    for index, name in enumerate(names):
        value = frame.f_locals.get(name)
        node = traced_node(tracer, value) if isinstance(value, torch.Tensor) else None
        if node is not None:
            node.meta.setdefault("result_of", {}).setdefault(call, ResultPlace(index, index, len(names)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(number, (bool, int, float)) for number in value)
    return isinstance(value, _PLAIN)


@cache
def _returned(code: CodeType) -> dict[int, tuple[str, ...]]:
    """The lines of a function's ``return a, b`` → the names; lines of other statements are left out."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return {}
    names: dict[int, tuple[str, ...]] = {}
    for line, elements in _returns(tree.body):
        if all(isinstance(expression, ast.Name) for expression in elements):
            names[line + code.co_firstlineno - 1] = tuple(name.id for name in elements if isinstance(name, ast.Name))
    return names


def _returns(body: Sequence[ast.stmt]) -> Iterator[tuple[int, list[ast.expr]]]:
    for tree in body:
        for node in ast.walk(tree):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                yield from ((line, node.value.elts) for line in range(node.lineno, (node.end_lineno or 0) + 1))
