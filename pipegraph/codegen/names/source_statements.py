"""Find the statements of the model's source that made a value. Their names and line breaks are kept."""

from __future__ import annotations

import ast
import inspect
import linecache
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import fx, nn

from pipegraph.codegen.names.identifiers import is_plain
from pipegraph.graph.calls import RETURNED, FunctionRun, parameter_names, result_place
from pipegraph.graph.captured import Captured
from pipegraph.graph.nodes import path_of
from pipegraph.graph.passes.dtypes import FOLLOWS_BUFFER

# ---- source sizes ----------------------------------------------------------------------------------------------------
# The sizes of tensors that a function of the model's source reads: ``x.shape[1]``, ``rows, length = x.shape``.


def assigned_sizes(function: ast.AST) -> dict[str, tuple[str, int]]:
    """Return the variables to which a function assigns the size of a tensor → the tensor, and its dimension:
    ``rows, length = x.shape``, ``length = x.size(1)``."""
    sizes: dict[str, tuple[str, int]] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name) and (dim := dimension_of(node.value)) is not None:
            sizes[target.id] = _owner(node.value), dim
        elif isinstance(target, ast.Tuple) and _is_shape(node.value):
            owner = _owner(node.value)
            sizes |= {part.id: (owner, dim) for dim, part in enumerate(target.elts) if isinstance(part, ast.Name)}
    return sizes


def dimension_of(node: ast.AST) -> int | None:
    """Return 1 for ``x.shape[1]`` and ``x.size(1)``; None for anything else."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=ast.Constant(value=int(dim))):
            return dim
        case ast.Call(func=ast.Attribute(attr="size"), args=[ast.Constant(value=int(dim))]):
            return dim
    return None


def _is_shape(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(attr="shape") | ast.Call(func=ast.Attribute(attr="size"), args=[]):
            return True
    return False


def _owner(node: ast.expr) -> str:
    """``x`` of ``x.shape``, ``x.shape[1]`` and ``x.size(1)``."""
    names = (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
    return next(names, "")


# ---- source files ----------------------------------------------------------------------------------------------------
# The files of the model's source, parsed once while they stay as they are.


_EMPTY = ast.Module(body=[], type_ignores=[])
_trees: dict[str, tuple[list[str], ast.Module]] = {}


def source_tree(file: str) -> ast.Module:
    """Return the tree of a file, or of a cell of a notebook; an empty one if it cannot be read.

    A process may change a file and import it again: it is looked at each time whether it changed.
    """
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if not lines:
        return _EMPTY
    parsed, tree = _trees.get(file, (None, _EMPTY))
    if parsed is not lines:  # linecache returns the same list until the file changes
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            tree = _EMPTY
        _trees[file] = lines, tree
    return tree


# ---- assigned names --------------------------------------------------------------------------------------------------
# The names that a statement of the model's source assigns to, or writes into.


def assigned_names(node: ast.stmt) -> tuple[str, ...]:
    """The names that a statement assigns to, or writes into; empty if a target is not a name."""
    if isinstance(node, ast.Assign):
        target = node.targets[-1]
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        target = node.target
    elif isinstance(node, ast.Expr) and (written := _written(node.value)) is not None:
        target = written
    else:
        return ()
    while isinstance(target, ast.Subscript):  # x[0] = … makes x
        target = target.value
    parts = _parts(target)
    names = tuple(part.id for part in parts if isinstance(part, ast.Name))
    return names if len(names) == len(parts) else ()


def _written(value: ast.expr) -> ast.expr | None:
    """``x`` of ``x.mul_(2).add_(y)``."""
    target: ast.expr | None = None
    part = value
    while isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
        name = part.func.attr
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name == "register_hook"
        target = part.func.value if is_in_place else None
        part = part.func.value
    return target


def _parts(target: ast.expr) -> list[ast.expr]:
    """``a``, ``b`` and ``c`` of ``a, (b, c) = …``."""
    return [part for element in target.elts for part in _parts(element)] if isinstance(target, ast.Tuple) else [target]


# ---- source statements -----------------------------------------------------------------------------------------------


_TORCH = f"{Path(torch.__file__).parent}{os.sep}"  # not torchvision
# Layers of torch.nn that become classes of a package keep the names of torch's source.
_LAYERS = f"{_TORCH}nn{os.sep}"
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)')


@dataclass(frozen=True)
class SourceStatement:
    """A statement of the model's source.

    Attributes:
        file, line, end: its place: the file, and its first and last line.
        targets: the names that it assigns to; none for a ``return``.
        calls: the attributes that it calls, such as ``norm`` in ``self.norm(x)``.
        in_loop: whether it is inside a loop.
        tree: its syntax; of a ``for``, that of what it goes over.
    """

    file: str
    line: int
    end: int
    targets: tuple[str, ...]
    calls: frozenset[str]
    in_loop: bool
    tree: ast.AST = field(compare=False, repr=False)

    @property
    def is_of_torch(self) -> bool:
        """Whether it is in a layer of ``torch.nn``."""
        return is_of_torch(self.file)

    def target_of(self, node: fx.Node) -> str | None:
        """The name that it assigns to a value that it makes: its only target, or the target of one part of a tuple."""
        if node.target is operator.getitem and len(self.targets) == len(node.args[0].meta["val"]):  # type: ignore[union-attr]
            return self.targets[int(node.args[1])]  # type: ignore[arg-type]
        return self.targets[0] if len(self.targets) == 1 else None

    def target_at(self, path: Sequence[int], count: int) -> str | None:
        """The name that it assigns to a part of a tuple: of ``out, (h, c) = …`` ``h`` to the part (1, 0).

        Args:
            count: how many parts the tuple has.
        """
        target = self.tree.targets[-1] if isinstance(self.tree, ast.Assign) else None
        if not isinstance(target, ast.Tuple) or len(target.elts) != count:
            return None
        for index in path:
            if not isinstance(target, ast.Tuple) or index >= len(target.elts):
                return None
            target = target.elts[index]
        return target.id if isinstance(target, ast.Name) else None


_OF_ANY_VALUE: Final = frozenset({"x", "input", "inputs", "hidden_states", "tensor", "value"})
"""Names of parameters that say less of a value than the operation that computes it."""


class SourceStatements:
    """Finds statements in the model's source. It finds nothing for a model without source files.

    Args:
        captured: the model.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured

    def of_operation(self, node: fx.Node) -> tuple[SourceStatement, ...]:
        """The statements of ``forward`` methods that led to an operation, outermost first."""
        return _model_statements(_forward_frames(node))

    def of_helpers(self, node: fx.Node) -> tuple[SourceStatement, ...]:
        """The statements of functions called by the innermost ``forward`` that led to an operation, outermost first."""
        frames = _frames(node.meta["stack_trace"])
        depth = max((position + 1 for position, frame in enumerate(frames) if frame.is_forward), default=0)
        return _model_statements(frames[depth:])

    def dimensions_mentioned(self, node: fx.Node) -> frozenset[int]:
        """The dimensions whose sizes the statement mentions that made a value: 1 for ``x[:, : y.shape[1]]``, and for
        ``x[:, :length]`` if the function says ``rows, length = y.shape``."""
        frames = [frame for frame in _frames(node.meta["stack_trace"]) if _model_statements([frame])]
        if not frames or not _functions_around(frames[-1].file, frames[-1].line):
            return frozenset()
        assigned = {name: dim for name, (_, dim) in _sizes_assigned(frames[-1].file, frames[-1].line).items()}
        parts = [*ast.walk(_model_statements(frames[-1:])[0].tree)]
        named = {assigned[part.id] for part in parts if isinstance(part, ast.Name) and part.id in assigned}
        return frozenset(named | {dim for part in parts if (dim := dimension_of(part)) is not None})

    def sizes_assigned(self, node: fx.Node) -> dict[str, tuple[str, int]]:
        """The variables that the function around an operation assigns a size → the tensor and its dimension: ``c`` →
        ``x`` and 2, if it says ``b, t, c = x.shape``."""
        frames = _frames(node.meta["stack_trace"])
        return _sizes_assigned(frames[-1].file, frames[-1].line) if _model_statements(frames[-1:]) else {}

    def is_within(self, node: fx.Node, statement: SourceStatement) -> bool:
        """Whether a statement led to an operation, through any functions."""
        return statement in _model_statements(_frames(node.meta["stack_trace"]))

    def own_name(self, node: fx.Node) -> str | None:
        """The name of a value in the innermost ``forward``."""
        chain = self.of_operation(node)
        if not (chain and chain[-1].targets) and FOLLOWS_BUFFER in node.meta and isinstance(node.args[0], fx.Node):
            return self.own_name(node.args[0])  # ``return cos.to(x.dtype)``
        return chain[-1].target_of(node) if chain else None

    def unpacked_name(self, fqn: str, node: fx.Node) -> str | None:
        """The name that the caller of a module gives to one of several values that the module returns:
        ``_, weights, chosen = self.router(x)``."""
        call = next((call for call, inner in path_of(node) if inner == fqn), None)
        place = result_place(node, call) if call is not None else None
        chain = self.of_call(fqn, node)
        name = chain[-1].target_at(place.path, place.count) if place is not None and place.path and chain else None
        return None if name == "_" else name

    def name_of_result(self, run: FunctionRun, node: fx.Node) -> str | None:
        """The name that the caller of a function gives to a value that it returns: ``rgb, weights = outputs(raw)``."""
        places = [place for place in node.meta.get("variables", {}).get(run.key, ()) if place.name == RETURNED]
        statement = _statements(run.caller[0]).get(run.caller[1])
        match statement.tree if statement is not None else None:
            case ast.Assign(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))) if name == run.name:
                pass
            case _:
                return None
        if not places or statement is None:
            return None
        path = places[0].path
        if not path:
            return statement.targets[0] if len(statement.targets) == 1 else None
        target = statement.target_at(path, len(run.result)) if isinstance(run.result, tuple) else None
        return None if target == "_" else target

    def recorded_name(self, node: fx.Node) -> str | None:
        """The first variable that was assigned a value, in any function of the model, or the parameter that took it."""
        places = [place for places in node.meta.get("variables", {}).values() for place in places]
        assigned = [place for place in places if place.line and not place.path and is_plain(place.name)]
        if assigned:
            return min(assigned, key=lambda place: place.order).name
        parameter = self.parameter_name(node, "")
        return None if parameter in _OF_ANY_VALUE else parameter

    def call_of(self, run: FunctionRun) -> ast.Call | None:
        """The call of a function in the text of its caller; None if it cannot be told from others."""
        calls = [
            node
            for node in ast.walk(source_tree(run.caller[0]))
            if isinstance(node, ast.Call)
            and node.lineno <= run.caller[1] <= (node.end_lineno or 0)
            and (node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")) == run.name
        ]
        return calls[0] if len(calls) == 1 else None

    def unpacked_parameter(self, fqn: str, parameter: str, index: int) -> str | None:
        """The name that a module gives to a part of a parameter that takes a tuple: ``h`` of ``h, c = state``."""
        for statement in self.of_forward(fqn):
            match statement.tree:
                case ast.Assign(value=ast.Name(id=name)) if name == parameter and index < len(statement.targets) > 1:
                    return statement.targets[index]
        return None

    def parameter_name(self, node: fx.Node, name: str) -> str | None:
        """The parameter of a ``forward`` of the model's own source that takes a value, if it is not called ``name``."""
        for fqn, parameter in parameter_names(node):
            module = self._captured.modules.get(fqn)
            is_of_model = module is not None and not type(module.module).forward.__module__.startswith("torch.nn")
            if is_of_model and parameter != name:
                return parameter
        return None

    def forward_of(self, fqn: str) -> Callable[..., object]:
        """The ``forward`` of a module, or the function to which that hands the module."""
        lines = self._captured.lines
        if lines is not None and fqn in lines.forwards:
            return lines.forwards[fqn].function
        return type(self._captured.modules[fqn].module).forward

    def of_forward(self, fqn: str) -> list[SourceStatement]:
        """The statements of the ``forward`` of a module."""
        file, first, last = _lines_of(self.forward_of(fqn))
        statements = _statements(file) if file else {}
        return list(dict.fromkeys(statements[line] for line in range(first, last + 1) if line in statements))

    def of_call(self, fqn: str, node: fx.Node) -> tuple[SourceStatement, ...]:
        """The statements that led to the call of the module ``fqn``, in which ``node`` ran."""
        frames = _forward_frames(node)
        position = -1
        for _, inner in path_of(node):
            module = self._captured.modules.get(inner)
            entered = None if module is None else _entered(type(module.module).forward, frames, position + 1)
            if inner == fqn:
                # If an instance replaced its forward, that one is not found, and the caller's statement counts.
                return _model_statements(frames[: position + 1 if entered is None else entered])
            position = entered if entered is not None else position
        return ()

    def lines_within(self, fqn: str, node: fx.Node, inner: str | None = None) -> tuple[tuple[str, int], ...]:
        """The files and lines that led to an operation, from the ``forward`` of the module ``fqn`` on, outermost first.

        Args:
            inner: a module inside; the lines are those that led to its call.
        """
        frames = _frames(node.meta["stack_trace"])
        first, stop, position = 0, len(frames), -1
        for _, module_fqn in path_of(node):
            is_module = module_fqn in self._captured.modules
            entered = _entered(self.forward_of(module_fqn), frames, position + 1) if is_module else None
            if entered is not None:
                first = entered if module_fqn == fqn else first
                stop = entered if module_fqn == inner else stop
                position = entered
        return tuple((frame.file, frame.line) for frame in frames[first:stop])

    def line_within(self, fqn: str, node: fx.Node) -> int:
        """The line of the ``forward`` of the module ``fqn`` that led to an operation; 0 if it is not known."""
        lines = self.lines_within(fqn, node)
        return lines[0][1] if lines and lines[0][0] == _lines_of(self.forward_of(fqn))[0] else 0


# ---- stack traces ----------------------------------------------------------------------------------------------------


class _Frame(NamedTuple):
    file: str
    line: int
    function: str

    @property
    def is_forward(self) -> bool:
        return self.function == "forward"


@cache
def _frames(stack_trace: str) -> tuple[_Frame, ...]:
    """The frames of a trace, outermost first."""
    matches = filter(None, map(_FRAME.match, stack_trace.splitlines()))
    return tuple(_Frame(match["file"], int(match["line"]), match["function"]) for match in matches)


def is_of_torch(file: str) -> bool:
    """Return whether a file is one of torch."""
    return file.startswith(_TORCH)


def _forward_frames(node: fx.Node) -> list[_Frame]:
    return [frame for frame in _frames(node.meta["stack_trace"]) if frame.is_forward]


def _entered(forward: Callable[..., object], frames: Sequence[_Frame], start: int) -> int | None:
    """The position of the first frame, from ``start`` on, that is inside ``forward``."""
    file, first, last = _lines_of(forward)
    for position, frame in enumerate(frames[start:], start):
        if frame.file == file and first <= frame.line <= last:
            return position
    return None


@cache
def _lines_of(function: Callable[..., object]) -> tuple[str, int, int]:
    try:
        function = inspect.unwrap(function)
        lines, first = inspect.getsourcelines(function)
        return inspect.getsourcefile(function) or "", first, first + len(lines) - 1
    except (OSError, TypeError):
        return "", 0, -1


def _model_statements(frames: Iterable[_Frame]) -> tuple[SourceStatement, ...]:
    """The statements of frames in the model's source."""
    model_frames = (frame for frame in frames if not frame.file.startswith(_TORCH) or frame.file.startswith(_LAYERS))
    statements = (_statements(frame.file).get(frame.line) for frame in model_frames)
    return tuple(statement for statement in statements if statement is not None)


# ---- statements of a file --------------------------------------------------------------------------------------------


def _statements(file: str) -> dict[int, SourceStatement]:
    """The simple statement, or the header of a ``for``, on each line of a file; none if it cannot be read."""
    return _statements_of(file, source_tree(file))


@cache
def _statements_of(file: str, tree: ast.Module) -> dict[int, SourceStatement]:
    statements: dict[int, SourceStatement] = {}
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, in_loop = waiting.pop()
        header: ast.stmt | ast.expr | None = None
        targets: tuple[str, ...] = ()
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)):
            is_no_tensor = isinstance(getattr(node, "value", None), (ast.Dict, ast.DictComp, ast.Lambda))
            header, targets = node, () if is_no_tensor else assigned_names(node)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):  # for step in x.unbind(1)
            header, targets = node.iter, (node.target.id,)
        if header is not None:
            first, last = node.lineno, header.end_lineno or header.lineno  # type: ignore[attr-defined]
            statement = SourceStatement(file, first, last, targets, _attributes_called(header), in_loop, header)
            statements |= dict.fromkeys(range(first, last + 1), statement)
        inside = not isinstance(node, ast.FunctionDef) and (in_loop or isinstance(node, (ast.For, ast.While)))
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
    return statements


def _function_at(file: str, line: int) -> ast.FunctionDef:
    """The innermost function that a line of a file is in."""
    return _functions_around(file, line)[0]


def _functions_around(file: str, line: int) -> list[ast.FunctionDef]:
    """The functions that a line of a file is in, the innermost first; none for that of a lambda outside of any."""
    around = (node for node in functions_in(source_tree(file)) if node.lineno <= line <= (node.end_lineno or 0))
    return sorted(around, key=lambda node: -node.lineno)


@cache
def functions_in(tree: ast.Module) -> tuple[ast.FunctionDef, ...]:
    """Return all functions of a file, those inside of others included."""
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _sizes_assigned(file: str, line: int) -> dict[str, tuple[str, int]]:
    functions = _functions_around(file, line)
    return _sizes_in(functions[0]) if functions else {}


@cache
def _sizes_in(function: ast.FunctionDef) -> dict[str, tuple[str, int]]:
    return assigned_sizes(function)


def _attributes_called(node: ast.AST) -> frozenset[str]:
    functions = (child.func for child in ast.walk(node) if isinstance(child, ast.Call))
    return frozenset(function.attr for function in functions if isinstance(function, ast.Attribute))


# ---- sequences -------------------------------------------------------------------------------------------------------
# What the model calls the values in an ``nn.Sequential``, whose own ``forward`` calls each of them ``input``.


_FILE = nn.Sequential.forward.__code__.co_filename


def named_by_caller(chain: Sequence[SourceStatement]) -> str | None:
    """``x`` of ``x = self.layers(h)`` or ``return self.layers(x)``: for what an ``nn.Sequential`` and its parts make.

    Args:
        chain: the statements that led to a value, outermost first.
    """
    outside = list(dropwhile(lambda statement: statement.file == _FILE, reversed(chain)))
    if len(outside) in (0, len(chain)):
        return None
    match outside[0].tree:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
            pass
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call() as call):
            pass
        case ast.Return(value=ast.Call(args=[ast.Name(id=name), *_]) as call):
            pass
        case _:
            return None
    return name if _is_module(call.func) else None


def _is_module(called: ast.expr) -> bool:
    """Return whether a call may be that of a module: ``self.layers``, or ``stage`` of ``for stage in self.stages``."""
    if isinstance(called, ast.Name):
        return True
    while isinstance(called, (ast.Attribute, ast.Subscript)):
        called = called.value
    return isinstance(called, ast.Name) and called.id == "self"
