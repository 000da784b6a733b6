"""The statement of the model's own source that made a value: its names and line breaks are the ones to keep."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import fx

from pipegraph.graph.buffer_casts import FOLLOWS
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
    end: int
    targets: tuple[str, ...]


class Origins:
    """Looks statements up; nothing is found for a model whose source is not at hand."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured

    def of_operation(self, node: fx.Node) -> tuple[Statement, ...]:
        """The statements of ``forward`` methods that led to an operation, outermost first."""
        return _known(_frames(node.meta["stack_trace"]))

    def of_helper(self, node: fx.Node) -> Statement | None:
        """The statement that ran an operation, where it stands in a function that a ``forward`` called."""
        frames = _frames(node.meta["stack_trace"], everything=True)
        helper = frames[-1:] if frames != _frames(node.meta["stack_trace"]) else ()
        return next(iter(_known(helper)), None)

    def is_within(self, node: fx.Node, statement: Statement) -> bool:
        """Whether a statement led to an operation, through any functions."""
        return statement in _known(_frames(node.meta["stack_trace"], everything=True))

    def own_name(self, node: fx.Node) -> str | None:
        """What the innermost ``forward`` calls a value."""
        chain = self.of_operation(node)
        targets = chain[-1].targets if chain else ()
        if not targets and FOLLOWS in node.meta and isinstance(node.args[0], fx.Node):
            return self.own_name(node.args[0])  # ``return cos.to(x.dtype)``
        if node.target is operator.getitem and len(targets) == len(node.args[0].meta["val"]):  # type: ignore[union-attr]
            return targets[int(node.args[1])]  # type: ignore[arg-type]
        return targets[0] if len(targets) == 1 else None

    def unpacked_name(self, fqn: str, node: fx.Node) -> str | None:
        """What the caller of a module calls one of several values that the module returns:
        ``_, weights, chosen = self.router(x)``."""
        outside, inside, module = self.of_call(fqn, node), self.own_name(node), self._captured.modules.get(fqn)
        if not outside or inside is None or module is None:
            return None
        targets, returned = outside[-1].targets, _returned(type(module.module).forward)
        same = len(targets) == len(returned) > 1 and returned.count(inside) == 1
        name = targets[returned.index(inside)] if same else "_"
        return None if name == "_" else name

    def formal_names(self, fqn: str, node: fx.Node) -> dict[str, str]:
        """The caller's names for the arguments of a module's call → those of its ``forward``."""
        statement, module = self.of_call(fqn, node)[-1:], self._captured.modules.get(fqn)
        if not statement or module is None:
            return {}
        forward = type(module.module).forward
        formal = [name for name in inspect.signature(forward).parameters if name != "self"]
        return _arguments(statement[0], fqn.rpartition(".")[2], tuple(formal))

    def of_call(self, fqn: str, node: fx.Node) -> tuple[Statement, ...]:
        """The statements that led to the call of the module ``fqn``, in which ``node`` ran."""
        frames = _frames(node.meta["stack_trace"])
        position = -1
        for _, inner in path_of(node):
            entered = self._enters(inner, frames, position + 1)
            if inner == fqn:
                # A forward that was put in the place of the class's own is not found: the caller's is.
                return _known(frames[: position + 1 if entered is None else entered])
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
def _frames(stack_trace: str, everything: bool = False) -> tuple[tuple[str, int], ...]:
    """(file, line) of each frame in a ``forward``, or in any function, outermost first."""
    found = (_FRAME.match(line.strip()) for line in stack_trace.splitlines())
    kept = (match for match in found if match and (everything or match["function"] == "forward"))
    return tuple((match["file"], int(match["line"])) for match in kept)


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
def _returned(forward: Callable[..., object]) -> tuple[str, ...]:
    """The names in the last ``return`` of a function, where it returns a tuple of names; ``a`` after ``b = a`` is
    called ``a``."""
    file, first, last = _forward_lines(forward)
    inside = [node for node in ast.walk(_tree(file)) if first <= getattr(node, "lineno", 0) <= last]
    returns = [node for node in inside if isinstance(node, ast.Return)]
    value = max(returns, key=lambda node: node.lineno).value if returns else None
    aliases = {
        node.targets[0].id: node.value.id
        for node in inside
        if isinstance(node, ast.Assign)
        if isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Name)
    }
    return tuple(aliases.get(name, name) for name in _names(value)) if isinstance(value, ast.Tuple) else ()


@cache
def _arguments(statement: Statement, callee: str, formal: tuple[str, ...]) -> dict[str, str]:
    """The names that a statement hands to the only call of ``….callee(…)``, or of an element of a container."""
    calls = [
        node
        for node in ast.walk(_tree(statement.file))
        if isinstance(node, ast.Call) and statement.line <= node.lineno <= statement.end and _calls(node.func, callee)
    ]
    if len(calls) != 1 or any(isinstance(each, ast.Starred) for each in calls[0].args):
        return {}
    handed = [*zip(calls[0].args, formal, strict=False)]
    handed += [(each.value, each.arg) for each in calls[0].keywords if each.arg is not None]
    # Of a value that is handed over twice, the first.
    return {value.id: name for value, name in reversed(handed) if isinstance(value, ast.Name)}


def _calls(function: ast.expr, callee: str) -> bool:
    if callee.isdigit():
        return isinstance(function, (ast.Name, ast.Subscript))
    return isinstance(function, ast.Attribute) and function.attr == callee


@cache
def _tree(file: str) -> ast.Module:
    """The syntax tree of a file; an empty one where it cannot be read."""
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ast.Module([], [])


@cache
def _statements(file: str) -> dict[int, Statement]:
    """The simple statement on each line of a file."""
    found: dict[int, Statement] = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)):
            statement = Statement(file, node.lineno, node.end_lineno or node.lineno, _targets(node))
            for line in range(statement.line, statement.end + 1):
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
    return _names(target) if isinstance(target, ast.Tuple) else ()


def _names(parts: ast.Tuple) -> tuple[str, ...]:
    """The names in a tuple of names; nothing for any other."""
    names = tuple(each.id for each in parts.elts if isinstance(each, ast.Name))
    return names if len(names) == len(parts.elts) else ()
