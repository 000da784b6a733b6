"""The statement of the model's own source that made a value: its names and line breaks are the ones to keep."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import fx

from pipegraph.graph.captured import Captured, path_of

_TORCH = str(Path(torch.__file__).parent)
# Layers of torch.nn that become classes of their own are written with the names of torch's source.
_LAYERS = str(Path(torch.__file__).parent / "nn")
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')


@dataclass(frozen=True)
class Statement:
    """A statement and the names it assigns to (none for a ``return``)."""

    file: str
    line: int
    targets: tuple[str, ...]


class Origins:
    """Looks statements up; nothing is found for a model whose source is not at hand."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured

    def of_operation(self, node: fx.Node) -> tuple[Statement, ...]:
        """The statements that led to an operation, outermost first."""
        return _known(_frames(node.meta["stack_trace"]))

    def of_call(self, fqn: str, node: fx.Node) -> tuple[Statement, ...]:
        """The statements that led to the call of the module ``fqn``, in which ``node`` ran."""
        frames = _frames(node.meta["stack_trace"])
        position = -1
        for _, inner in path_of(node):
            entered = self._enters(inner, frames, position + 1)
            if inner == fqn:
                return _known(frames[:entered]) if entered is not None else ()
            position = entered if entered is not None else position
        return ()

    def parameter_name(self, fqn: str) -> str | None:
        """The name of the first argument of a module's ``forward``."""
        module = self._captured.modules.get(fqn)
        if module is None:
            return None
        names = [name for name in inspect.signature(type(module.module).forward).parameters if name != "self"]
        return names[0] if names and names[0] not in ("args", "kwargs") else None

    def _enters(self, fqn: str, frames: tuple[tuple[str, int], ...], start: int) -> int | None:
        """The position of the first frame, from ``start`` on, that lies in the ``forward`` of a module."""
        module = self._captured.modules.get(fqn)
        if module is None:
            return None
        file, first, last = _forward_lines(type(module.module).forward)
        for position in range(start, len(frames)):
            if frames[position][0] == file and first <= frames[position][1] <= last:
                return position
        return None


@cache
def _frames(stack_trace: str) -> tuple[tuple[str, int], ...]:
    """(file, line) of each frame, outermost first."""
    found = (_FRAME.match(line.strip()) for line in stack_trace.splitlines())
    return tuple((match["file"], int(match["line"])) for match in found if match)


def _known(frames: Iterable[tuple[str, int]]) -> tuple[Statement, ...]:
    """The statements of frames in the model's source."""
    own = [(file, line) for file, line in frames if not file.startswith(_TORCH) or file.startswith(_LAYERS)]
    found = [_statements(file).get(line) for file, line in own]
    return tuple(statement for statement in found if statement is not None)


@cache
def _forward_lines(forward: Callable[..., object]) -> tuple[str, int, int]:
    try:
        function = inspect.unwrap(forward)
        lines, first = inspect.getsourcelines(function)
        return inspect.getsourcefile(function) or "", first, first + len(lines) - 1
    except (OSError, TypeError):
        return "", 0, -1


@cache
def _statements(file: str) -> dict[int, Statement]:
    """The simple statement on each line of a file."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    found: dict[int, Statement] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)):
            statement = Statement(file, node.lineno, _targets(node))
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                found[line] = statement
    return found


def _targets(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.Assign):
        target = node.targets[-1]
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        target = node.target
    else:
        return ()
    if isinstance(target, ast.Name):
        return (target.id,)
    if isinstance(target, ast.Tuple) and all(isinstance(each, ast.Name) for each in target.elts):
        return tuple(each.id for each in target.elts if isinstance(each, ast.Name))
    return ()
