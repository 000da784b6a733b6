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

from pipegraph.graph.call_arguments import parameter_names, result_place
from pipegraph.graph.captured import Captured
from pipegraph.graph.nodes import path_of
from pipegraph.graph.passes.tie_casts_to_buffers import FOLLOWS_BUFFER

_TORCH = str(Path(torch.__file__).parent)
# Layers of torch.nn that become classes of their own are written with the names of torch's source.
_LAYERS = str(Path(torch.__file__).parent / "nn")
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')


@dataclass(frozen=True)
class SourceStatement:
    """A statement, the names it assigns to (none for a ``return``), the attributes it calls (``norm`` of
    ``self.norm(x)``), and whether a loop stands around it."""

    file: str
    line: int
    end: int
    targets: tuple[str, ...]
    calls: frozenset[str]
    in_loop: bool

    @property
    def is_of_torch(self) -> bool:
        """Whether it stands in a layer of ``torch.nn``."""
        return self.file.startswith(_TORCH)


class SourceStatements:
    """Looks statements up; nothing is found for a model whose source is not at hand."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured

    def of_operation(self, node: fx.Node) -> tuple[SourceStatement, ...]:
        """The statements of ``forward`` methods that led to an operation, outermost first."""
        return _known(_frames(node.meta["stack_trace"]))

    def of_helpers(self, node: fx.Node) -> tuple[SourceStatement, ...]:
        """The statements of functions called by the innermost ``forward`` that led to an operation, outermost first."""
        return _known(_frames(node.meta["stack_trace"], everything=True)[_innermost(node.meta["stack_trace"]) + 1 :])

    def is_within(self, node: fx.Node, statement: SourceStatement) -> bool:
        """Whether a statement led to an operation, through any functions."""
        return statement in _known(_frames(node.meta["stack_trace"], everything=True))

    def own_name(self, node: fx.Node) -> str | None:
        """What the innermost ``forward`` calls a value."""
        chain = self.of_operation(node)
        targets = chain[-1].targets if chain else ()
        if not targets and FOLLOWS_BUFFER in node.meta and isinstance(node.args[0], fx.Node):
            return self.own_name(node.args[0])  # ``return cos.to(x.dtype)``
        if node.target is operator.getitem and len(targets) == len(node.args[0].meta["val"]):  # type: ignore[union-attr]
            return targets[int(node.args[1])]  # type: ignore[arg-type]
        return targets[0] if len(targets) == 1 else None

    def unpacked_name(self, fqn: str, node: fx.Node) -> str | None:
        """What the caller of a module calls one of several values that the module returns:
        ``_, weights, chosen = self.router(x)``."""
        call = next((call for call, inner in path_of(node) if inner == fqn), None)
        place = result_place(node, call) if call is not None else None
        chain = self.of_call(fqn, node)
        if place is None or place.index is None or not chain or not 1 < len(chain[-1].targets) == place.count:
            return None
        name = chain[-1].targets[place.index]
        return None if name == "_" else name

    def parameter_name(self, node: fx.Node, name: str) -> str | None:
        """What a ``forward`` of the model's own that takes a value as an argument calls it, other than ``name``."""
        for fqn, parameter in parameter_names(node):
            module = self._captured.modules.get(fqn)
            own = module is not None and not type(module.module).forward.__module__.startswith("torch.nn")
            if own and parameter != name:
                return parameter
        return None

    def of_call(self, fqn: str, node: fx.Node) -> tuple[SourceStatement, ...]:
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
    kept = [match for match in _matches(stack_trace) if everything or match["function"] == "forward"]
    return tuple((match["file"], int(match["line"])) for match in kept)


@cache
def _innermost(stack_trace: str) -> int:
    """The position, among all frames, of the innermost in a ``forward``."""
    functions = [match["function"] for match in _matches(stack_trace)]
    return max((position for position, name in enumerate(functions) if name == "forward"), default=-1)


def _matches(stack_trace: str) -> list[re.Match[str]]:
    found = (_FRAME.match(line.strip()) for line in stack_trace.splitlines())
    return [match for match in found if match]


def _known(frames: Iterable[tuple[str, int]]) -> tuple[SourceStatement, ...]:
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
def _tree(file: str) -> ast.Module:
    """The syntax tree of a file; an empty one where it cannot be read."""
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ast.Module([], [])


@cache
def _statements(file: str) -> dict[int, SourceStatement]:
    """The simple statement on each line of a file."""
    found: dict[int, SourceStatement] = {}
    waiting: list[tuple[ast.AST, bool]] = [(_tree(file), False)]
    while waiting:
        node, in_loop = waiting.pop()
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)):
            end = node.end_lineno or node.lineno
            statement = SourceStatement(file, node.lineno, end, _targets(node), _attributes_called(node), in_loop)
            found |= dict.fromkeys(range(statement.line, statement.end + 1), statement)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):  # for step in x.unbind(1)
            end = node.iter.end_lineno or node.lineno
            header = SourceStatement(file, node.lineno, end, (node.target.id,), _attributes_called(node.iter), in_loop)
            found |= dict.fromkeys(range(header.line, header.end + 1), header)
        inside = not isinstance(node, ast.FunctionDef) and (in_loop or isinstance(node, (ast.For, ast.While)))
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found


def _attributes_called(node: ast.AST) -> frozenset[str]:
    functions = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return frozenset(function.attr for function in functions if isinstance(function, ast.Attribute))


def _targets(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.Assign):
        target = node.targets[-1]
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        target = node.target
    else:
        return ()
    while isinstance(target, ast.Subscript):  # x[0] = … makes x
        target = target.value
    if isinstance(target, ast.Name):
        return (target.id,)
    return _names(target) if isinstance(target, ast.Tuple) else ()


def _names(parts: ast.Tuple) -> tuple[str, ...]:
    """The names in a tuple of names; nothing for any other."""
    names = tuple(each.id for each in parts.elts if isinstance(each, ast.Name))
    return names if len(names) == len(parts.elts) else ()
