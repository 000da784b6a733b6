"""The names that the text of a function reads: what a package has to import, to copy or to set."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, Final

import torch
import torch.nn.functional
from torch import fx, nn

from pipegraph.codegen.author_text.cut import FunctionCut, Line, UnwritableError
from pipegraph.codegen.syntax.expressions import Expression, Name, literal
from pipegraph.codegen.syntax.line_breaks import LINE_LENGTH
from pipegraph.codegen.syntax.statements import FunctionSource, SourceText, Statement
from pipegraph.graph.captured import ExecutedLines, LineStep

_IMPORTED: Final = (torch, torch.nn.functional, torch.nn, math, typing)
"""Modules whose members a package may import."""
_SELF: Final = "self"
_CLASS_INDENT: Final = 4
WITH_EFFECTS: Final = frozenset(
    {"breakpoint", "eval", "exec", "globals", "input", "open", "print", "super", "__import__"}
)
"""Built-in functions that do more than to return a value, or that ask for the class around them."""
_NOT_IN_A_STAGE: Final = frozenset({"checkpoint", "compile", "distributed"})
"""Members of torch that a stage does without: what is computed again is decided for the pipeline."""


_Needs = tuple[frozenset[str], tuple[tuple[str, Expression], ...], frozenset[str], str]


@dataclass(frozen=True)
class TextPart:
    """A statement of a ``forward`` that keeps its text.

    Attributes:
        lines: its text, and the comments before it.
        numbers: its lines in the file of the model.
        reads, assigns: the variables that it reads and assigns.
        is_plain: whether it does nothing but assign sizes, attributes and the like on one line.
        is_dead: whether it is an assignment without an operation in the graph.
    """

    lines: tuple[Line, ...]
    numbers: frozenset[int]
    reads: frozenset[str]
    assigns: frozenset[str]
    is_plain: bool
    is_dead: bool

    def without_unused(self, used: AbstractSet[str]) -> tuple[Line, ...]:
        """Its lines, with ``_`` for variables that are not used when it unpacks sizes; none if no variable is."""
        if not (self.is_plain or self.is_dead) or self.assigns <= used:
            return self.lines
        if self.assigns.isdisjoint(used):
            return ()
        if not self.is_plain:
            return self.lines
        targets, equals, value = self.lines[-1].text.partition(" = ")
        for name in sorted(self.assigns - used):
            targets = re.sub(rf"\b{name}\b", "_", targets)
        return (*self.lines[:-1], Line(f"{targets}{equals}{value}", self.lines[-1].number))


@dataclass(frozen=True)
class GraphPart:
    """Consecutive statements of a ``forward`` that cannot stand in a package. Their operations are written instead.

    Attributes:
        comments: the lines before the first of them that has operations.
        numbers: their lines in the file of the model.
        assigns: the variables that are tensors and that they assign.
        returns: whether the last of them is the ``return``.
        reason: why the first of them cannot stand in a package.
    """

    comments: tuple[Line, ...]
    numbers: frozenset[int]
    assigns: frozenset[str]
    returns: bool
    reason: str

    def joined(self, next_part: GraphPart) -> GraphPart:
        """This part and the one after it."""
        numbers, assigns = self.numbers | next_part.numbers, self.assigns | next_part.assigns
        comments = self.comments or next_part.comments
        return replace(self, comments=comments, numbers=numbers, assigns=assigns, returns=next_part.returns)


@dataclass(frozen=True)
class AbsentPart:
    """A statement of a ``forward`` that another stage runs.

    Attributes:
        numbers: its lines in the file of the model.
        assigns: the variables that it assigns and that the part takes as parameters.
    """

    numbers: frozenset[int]
    assigns: frozenset[str]


Part = TextPart | GraphPart | AbsentPart


@dataclass(frozen=True)
class StagePart:
    """The part of a ``forward`` that one stage runs.

    Attributes:
        lines: the lines of the ``forward`` with operations that the stage runs.
        other_lines: those with operations that other stages run.
        parameters: the values that the part takes → their names.
        results: how many values it returns.
    """

    lines: frozenset[int]
    other_lines: frozenset[int]
    parameters: Mapping[fx.Node, str]
    results: int


@dataclass(frozen=True)
class ForwardSurroundings:
    """What is known about a ``forward`` besides its text.

    Attributes:
        stage_part: what the stage runs of it; None if that is all.
        value: returns the tensor that a variable is after these lines have run; None if it is none.
        unread: its parameters that are objects, or tensors that no operation reads. A package passes None instead.
        is_none: returns whether a variable is None after these lines have run.
        check_child: raises UnwritableError if text cannot call a child as the model does.
        lines: the lines of the ``forward`` that led to operations of the graph.
        graph_lines: files and lines of statements whose text computes something else than the graph.
        autograd_functions: the custom Functions whose text the package has, with the functions that they read, by name.
    """

    stage_part: StagePart | None
    unread: frozenset[str]
    value: Callable[[str, frozenset[int]], fx.Node | None]
    is_none: Callable[[str, frozenset[int]], bool]
    check_child: Callable[[str], None]
    lines: frozenset[int]
    graph_lines: frozenset[tuple[str, int]]
    autograd_functions: Mapping[str, SourceText]


@dataclass
class ReadNames:
    """What the text of a class or of a function reads.

    Attributes:
        origin: the file of the class, with its license.
        file: its path.
        header: the lines of ``forward`` before its first statement, its decorators included.
        parts: the statements of ``forward``, at an indentation of 4.
        methods: the other methods of the class, by name → their text, with decorators of ``property`` and the like.
        attributes: of the module that are no tensors and no modules → their values.
        children: attributes that are modules.
        functions: of the model's source → their text, each after those that it calls.
        constants: of the model's source → their values.
        imports: the name in the text → the import that it needs.
        needs: of each function, the functions that it calls, the constants that it reads, its imports and its origin.
    """

    origin: str = ""
    file: str = ""
    header: tuple[Line, ...] = ()
    parts: tuple[Part, ...] = ()
    methods: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Expression] = field(default_factory=dict)
    children: set[str] = field(default_factory=set)
    functions: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Expression] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    needs: dict[str, _Needs] = field(default_factory=dict)

    def attributes_in(self, forward: Iterable[Line]) -> dict[str, Expression]:
        """The attributes that the lines of ``forward``, or other methods, read."""
        text = "\n".join([*(line.text for line in forward), *self.methods.values()])
        read = set(re.findall(r"\bself\.(\w+)", text))
        return {name: value for name, value in self.attributes.items() if name in read}

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """A context after which everything is as before if a text in it turns out to be unwritable."""
        collections = [value for value in vars(self).values() if isinstance(value, (dict, set))]
        copies = [collection.copy() for collection in collections]
        try:
            yield
        except UnwritableError:
            for collection, copy in zip(collections, copies, strict=True):
                collection.clear()
                collection.update(copy)
            raise


def names_of_module(module: nn.Module, fqn: str, lines: ExecutedLines, surroundings: ForwardSurroundings) -> ReadNames:
    """Return the text of the ``forward`` of a module, of the methods that it calls, and what these read.

    Raises:
        UnwritableError: they read something that a package does not have.
    """
    function = inspect.unwrap(type(module).forward)
    if not isinstance(function, FunctionType):
        raise UnwritableError("its forward is not written in Python")
    file = function.__code__.co_filename
    names = ReadNames(origin_of(file), file)
    try:
        reader = _SourceReader(names, lines, module, fqn, surroundings.autograd_functions)
        reader.read_forward(function, surroundings)
    except (AttributeError, RuntimeError, SyntaxError, TypeError, ValueError) as error:
        # Attributes and properties of a model's objects may raise any of these.
        raise UnwritableError(f"it cannot be read: {error}") from error
    return names


_LICENSES: Final = (
    re.compile(r"SPDX-License-Identifier: *([\w.+-]+)"),
    re.compile(r"[Ll]icensed under the ([A-Z][\w .-]*?[Ll]icense)"),
    re.compile(r"\b((?:MIT|BSD|Apache|ISC)[\w .-]*? [Ll]icense)"),
)
"""How the head of a file names its license."""
_HEAD: Final = 4000  # characters


@functools.cache
def origin_of(file: str) -> str:
    """``modeling_llama.py (Apache License)``: the name of a file, and the license that its head names."""
    path = Path(file)
    try:
        head = path.read_text(encoding="utf-8")[:_HEAD]
    except (OSError, ValueError):
        head = ""
    license_name = next(filter(None, (pattern.search(head) for pattern in _LICENSES)), None)
    return path.name if license_name is None else f"{path.name} ({license_name[1]})"


_STANDARD: Final = {
    "F": "import torch.nn.functional as F",
    "OrderedDict": "from collections import OrderedDict",
    "Tensor": "from torch import Tensor",
    "math": "import math",
    "nn": "from torch import nn",
    "torch": "import torch",
}
"""The imports of classes that are written from the graph, by name."""


class SharedNames:
    """The names that all classes of ``blocks.py`` share. Each means one thing there.

    Args:
        classes: the names of classes, which nothing else has.

    Attributes:
        functions: the functions that texts call, each after those that it calls.
    """

    def __init__(self, classes: set[str]) -> None:
        names = "|".join(map(re.escape, classes))
        self._is_class = re.compile(rf"({names})(Start|Middle|End)?\d*").fullmatch
        self._meanings: dict[str, object] = dict(_STANDARD)
        self.functions: list[FunctionSource] = []

    def text_of(self, names: ReadNames, forward: Sequence[Line], written: Sequence[Statement]) -> SourceText:
        """Return the text of a class. Raises UnwritableError if one of its names means something else elsewhere.

        Args:
            forward: the lines of its ``forward``.
            written: the statements in it that are written from the graph.
        """
        meanings: dict[str, object] = {**names.imports, **names.constants, **names.functions}
        for name, meaning in meanings.items():
            if self._meanings.get(name, meaning) != meaning or self._is_class(name):
                raise UnwritableError(f"{name} means something else in the package")
        new = [name for name in names.functions if name not in self._meanings]
        self._meanings |= meanings
        imports = frozenset(names.imports.values())
        needs = frozenset(names.functions), tuple(names.constants.items()), imports, names.origin
        self.functions += [
            FunctionSource(name, "", (), (SourceText((names.functions[name],), *names.needs[name]),)) for name in new
        ]
        functions = ("\n".join(line.text for line in forward), *names.methods.values())
        return SourceText(functions, *needs, tuple(written), tuple((names.file, line.number) for line in forward))


class _SourceReader:
    """Reads the names of functions, one after the other."""

    def __init__(
        self,
        names: ReadNames,
        lines: ExecutedLines,
        module: nn.Module | None,
        fqn: str,
        autograd_functions: Mapping[str, SourceText],
    ) -> None:
        self._names, self._lines, self._module, self._fqn = names, lines, module, fqn
        self._autograd_functions = autograd_functions

    def add_autograd_function(self, name: str) -> None:
        """Add a custom Function whose text the package has. Raises UnwritableError if it does not."""
        if name not in self._autograd_functions:
            raise UnwritableError(f"{name} is a Function without text")
        if name in self._names.functions:
            return
        text = self._autograd_functions[name]
        for called in sorted(text.calls):
            self.add_autograd_function(called)
        self._names.functions[name] = text.functions[0]
        self._names.needs[name] = text.calls, text.constants, text.imports, text.origin
        self._names.constants |= dict(text.constants)

    def read_forward(self, function: FunctionType, surroundings: ForwardSurroundings) -> None:
        """Read the ``forward``, statement by statement."""
        assert self._module is not None
        self._check_closure(function)
        cut = FunctionCut(
            function.__code__.co_filename,
            function.__code__.co_firstlineno,
            self._lines.modules.get(self._fqn, frozenset()),
        )
        text = _Text(self, function.__globals__, cut.lines)
        parts = list(text.parts(surroundings))
        decorators = [Line(decorator, 0) for decorator in self._decorators(cut)]
        header: Sequence[Line] = text.header
        if surroundings.stage_part is not None:
            parts.append(GraphPart((), frozenset({_END}), frozenset(), True, "it is cut"))
            self._names.imports["Tensor"] = "from torch import Tensor"
            header = [Line(line, 0) for line in _part_header(surroundings.stage_part)]
        self._names.parts = tuple(_joined(parts))
        self._names.header = (*decorators, *header)

    def _check_closure(self, function: FunctionType) -> None:
        if set(function.__code__.co_freevars) - {"__class__"}:
            raise UnwritableError(f"{function.__name__} reads variables of the function around it")

    def add_method(self, name: str) -> None:
        """Add a method of the module's class, and what it reads."""
        if name in self._names.methods:
            return
        member = inspect.getattr_static(type(self._module), name)
        decorator = ""
        function = member
        if isinstance(member, (staticmethod, classmethod)):
            decorator, function = f"@{type(member).__name__}\n", member.__func__
        elif isinstance(member, property):
            decorator, function = "@property\n", member.fget
        if isinstance(member, classmethod) or not isinstance(inspect.unwrap(function), FunctionType):
            raise UnwritableError(f"{name} is not a plain method")
        self._names.methods[name] = ""  # so that a method that calls itself ends
        steps = self._lines.modules.get(self._fqn, frozenset())
        if isinstance(member, staticmethod):
            code = inspect.unwrap(function).__code__
            steps = self._lines.functions.get((code.co_filename, code.co_firstlineno), frozenset())
        self._names.methods[name] = decorator + self._text(function, steps)

    def _add_function(self, function: Callable[..., Any], name: str) -> None:
        """Add a function of the model's source."""
        if name in self._names.functions:
            return
        code = inspect.unwrap(function).__code__
        if code.co_name != name:
            raise UnwritableError(f"{name} is defined under another name")
        steps = self._lines.functions.get((code.co_filename, code.co_firstlineno), frozenset())
        inner = ReadNames(origin_of(code.co_filename), functions=self._names.functions, needs=self._names.needs)
        text = _SourceReader(inner, self._lines, None, "", self._autograd_functions)._text(function, steps)
        self._names.functions[name] = text  # after those that it calls
        self._names.constants |= inner.constants
        self._names.imports |= inner.imports
        calls = frozenset(inner.functions) - {name}
        constants, imports = tuple(inner.constants.items()), frozenset(inner.imports.values())
        self._names.needs[name] = calls, constants, imports, inner.origin

    def _text(self, decorated: Callable[..., Any], steps: frozenset[LineStep]) -> str:
        """The text of a function, cut to what ran, with the names in it resolved."""
        function = inspect.unwrap(decorated)
        code = function.__code__
        self._check_closure(function)
        cut = FunctionCut(code.co_filename, code.co_firstlineno, steps)
        return "\n".join([*self._decorators(cut), *_Text(self, function.__globals__, cut.lines).resolved()])

    def _decorators(self, cut: FunctionCut) -> list[str]:
        # Those of other libraries are left out: if they compute anything, the comparison with the graph says so.
        decorators = [f"@{decorator}" for decorator in cut.decorators if decorator.startswith("torch.")]
        if decorators:
            self._names.imports["torch"] = "import torch"
        return decorators


_END: Final = sys.maxsize  # the line of the ``return`` of a part


def _part_header(part: StagePart) -> list[str]:
    """``def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:``."""
    parameters = [_SELF, *(f"{name}: Tensor" for name in part.parameters.values())]
    returns = "Tensor" if part.results == 1 else f"tuple[{', '.join(['Tensor'] * part.results)}]"
    return _wrapped_header("forward", parameters, f" -> {returns}")


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Parts, with those that are written from the graph and follow each other as one."""
    waiting: GraphPart | None = None
    for part in parts:
        if isinstance(part, GraphPart):
            waiting = part if waiting is None else waiting.joined(part)
            continue
        if isinstance(part, AbsentPart):
            yield part
            continue
        if waiting is not None:
            yield waiting
        waiting = None
        yield part
    if waiting is not None:
        yield waiting


class _Text:
    """The text of one function, and where it reads what."""

    def __init__(self, reader: _SourceReader, namespace: Mapping[str, Any], lines: Sequence[Line]) -> None:
        self._reader, self._names, self._module = reader, reader._names, reader._module
        self._namespace = namespace
        self._lines, self._tree = _with_known_annotations(lines, _parsed(lines), namespace)
        tree = self._tree
        self._local = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and _is_stored(node)}
        self._local |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        self._local |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self._owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        self._parents = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        self._edits: list[tuple[ast.expr, str]] = []

    @property
    def header(self) -> list[Line]:
        """The lines before the first statement. It is there when the text was read."""
        return self._edited()[: _header_end(self._lines, self._tree)]

    def resolved(self) -> list[str]:
        """The lines, with numbers in the place of what a package does not have."""
        self._resolve(self._tree)
        return [line.text for line in self._edited()]

    def parts(self, surroundings: ForwardSurroundings) -> Iterator[Part]:
        """Yield the statements of a ``forward``.

        A statement that reads something that a package does not have is written from the graph. So is one that reads a
        variable that such a statement assigns, if the variable is no tensor.
        """
        stage_part = surroundings.stage_part
        unknown, none_variables = set(surroundings.unread), set[str]()
        if stage_part is None:
            self._resolve(self._tree.args)
        else:
            arguments = {node.arg for node in ast.walk(self._tree.args) if isinstance(node, ast.arg)}
            unknown = arguments - {_SELF} - set(stage_part.parameters.values())
        start = _header_end(self._lines, self._tree)
        parts: list[tuple[range, Part]] = []
        for statement in self._tree.body:
            end = statement.end_lineno or statement.lineno
            numbers = frozenset(line.number for line in self._lines[start:end])
            reads, assigns = _variables(statement, ast.Load) & self._local, _variables(statement, ast.Store)
            edits = len(self._edits)
            if stage_part is not None and numbers & stage_part.other_lines and not numbers & stage_part.lines:
                values = {name: surroundings.value(name, numbers) for name in assigns}
                taken = {name for name, value in values.items() if value and stage_part.parameters.get(value) == name}
                parts.append((range(start, end), AbsentPart(numbers, frozenset(taken))))
                unknown = (unknown - taken) | (assigns - taken)
                none_variables -= assigns
                start = end
                continue
            try:
                with self._names.undone_on_error():
                    if stage_part is not None:
                        _check_part(statement, numbers, stage_part)
                    if any((self._names.file, number) in surroundings.graph_lines for number in numbers):
                        raise UnwritableError("it computes something else than the graph")
                    self._keep(statement, unknown, none_variables, surroundings)
            except UnwritableError as reason:
                del self._edits[edits:]
                is_return = isinstance(statement, ast.Return)
                if not is_return and _returns(statement):
                    raise
                has_operations = is_return or bool(numbers & surroundings.lines)
                comments = tuple(self._lines[start : _first_line_of(statement) - 1]) if has_operations else ()
                tensors = frozenset(name for name in assigns if surroundings.value(name, numbers) is not None)
                parts.append((range(start, end), GraphPart(comments, numbers, tensors, is_return, str(reason))))
                for name in assigns:
                    unknown.discard(name)
                    none_variables.discard(name)
                    if name not in tensors:
                        (none_variables if surroundings.is_none(name, numbers) else unknown).add(name)
            else:
                unknown -= assigns
                none_variables -= assigns
                # What it computes is in no graph: nothing reads it.
                is_dead = isinstance(statement, ast.Assign) and not numbers & surroundings.lines
                is_plain = _assigns_sizes(statement)
                parts.append((range(start, end), TextPart((), numbers, reads, assigns, is_plain, is_dead)))
            start = end
        lines = self._edited()
        for place, part in parts:
            text = tuple(lines[place.start : place.stop])
            yield replace(part, lines=text) if isinstance(part, TextPart) else part

    def _keep(
        self,
        statement: ast.stmt,
        unknown: AbstractSet[str],
        none_variables: AbstractSet[str],
        surroundings: ForwardSurroundings,
    ) -> None:
        """Take over the text of a statement. Raises UnwritableError."""
        calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call) and self._is_child(node.func))
        passed_on = {id(argument) for call in calls for argument in _arguments(call)}
        for node in ast.walk(statement):
            if not isinstance(node, ast.Name) or node.id not in unknown or _is_stored(node):
                continue
            part = surroundings.stage_part
            names = surroundings.unread if part is None else part.parameters.values()
            is_left_out = node.id in names and id(node) in passed_on
            if not is_left_out:
                raise UnwritableError(f"{node.id} is no tensor")
        texts = {*self._names.methods, *self._names.functions}
        try:
            self._resolve(statement)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            # Attributes and properties of a model's objects may raise any of these.
            raise UnwritableError(f"it cannot be read: {error}") from error
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and _is_self(node.value):
                surroundings.check_child(node.attr)
            if isinstance(node, ast.Name) and node.id in none_variables and not _is_stored(node):
                self._edits.append((node, "None"))
        called = {**self._names.methods, **self._names.functions}
        trees = [statement, *(ast.parse(text) for name, text in called.items() if name not in texts)]
        if self._module is not None and any(_divides_features(self._module, tree, self._tree) for tree in trees):
            raise UnwritableError("it names numbers of features, which ranks along tp divide")

    def _is_child(self, function: ast.expr) -> bool:
        """Return whether a call may be that of a child: ``self.attention``, ``self.layers[0]``, ``layer`` of a loop."""
        while isinstance(function, (ast.Attribute, ast.Subscript)):
            function = function.value
        return isinstance(function, ast.Name) and (function.id == _SELF or function.id in self._local)

    def _resolve(self, tree: ast.AST) -> None:
        """Read the names in a part of the function. Raises UnwritableError."""
        for node in ast.walk(tree):
            check_node(node)
            if isinstance(node, ast.Attribute) and _is_self(node.value) and self._module is not None:
                self._read_attribute(node, self._parents)
            elif isinstance(node, ast.Name) and not _is_stored(node):
                if node.id == _SELF and self._module is not None and id(node) not in self._owners:
                    raise UnwritableError("it hands itself on")
                if node.id not in self._local:
                    self._read_global(node.id)

    # ---- attributes --------------------------------------------------------------------------------------------------

    def _read_attribute(self, node: ast.Attribute, parents: Mapping[int, ast.Attribute]) -> None:
        module, name = self._module, node.attr
        assert module is not None
        if not isinstance(node.ctx, ast.Load):
            raise UnwritableError(f"it sets self.{name}")
        if name == "training":
            return
        for registered in (module._modules, module._parameters, module._buffers):
            if name in registered:
                if registered[name] is None:
                    self._names.attributes[name] = literal(None)
                elif registered is module._modules:
                    self._names.children.add(name)
                return
        if name in vars(module):
            self._read_value(node, vars(module)[name], parents)
            return
        try:
            member = inspect.getattr_static(type(module), name)
        except AttributeError:
            raise UnwritableError(f"self.{name} is not there") from None
        if isinstance(member, (FunctionType, staticmethod, classmethod, property)):
            if getattr(nn.Module, name, None) is not None:
                raise UnwritableError(f"it calls self.{name}")
            self._reader.add_method(name)
        else:
            self._read_value(node, member, parents)

    def _read_value(self, node: ast.Attribute, value: Any, parents: Mapping[int, ast.Attribute]) -> None:
        """Read an attribute, or what an object in it has: ``self.config.eps`` is written as ``self.eps``."""
        first, outer = node, node
        while not (_is_plain(value) or _function_name(value)) and id(outer) in parents:
            outer = parents[id(outer)]
            value = getattr(value, outer.attr, _MISSING)
        if isinstance(value, torch.Tensor):
            if outer is not first:
                raise UnwritableError(f"it reads a tensor of self.{first.attr}")
            return
        written = Name(_function_name(value)) if _function_name(value) else plain_expression(value)
        if written is None:
            raise UnwritableError(f"self.{first.attr} is a {type(value).__name__}")
        name = outer.attr
        if outer is not first:
            is_taken = name in vars(self._module) and plain_expression(vars(self._module)[name]) != written
            if is_taken or name in self._registered():
                name = f"{first.attr}_{name}"
            self._edits.append((outer, f"self.{name}"))
        if self._names.attributes.setdefault(name, written) != written:
            raise UnwritableError(f"self.{name} would be two things")

    def _registered(self) -> set[str]:
        assert self._module is not None
        return {*self._module._modules, *self._module._parameters, *self._module._buffers}

    # ---- global names ------------------------------------------------------------------------------------------------

    def _read_global(self, name: str) -> None:
        if name not in self._namespace:
            if not hasattr(builtins, name) or name in WITH_EFFECTS:
                raise UnwritableError(f"it uses {name}")
            return
        value = self._namespace[name]
        imported = import_of(name, value)
        if imported is not None:
            self._names.imports[name] = imported
        elif isinstance(value, FunctionType) and not value.__module__.startswith("torch."):
            self._reader._add_function(value, name)
        elif isinstance(value, type) and issubclass(value, torch.autograd.Function) and value.__name__ == name:
            self._reader.add_autograd_function(name)
        elif (constant := plain_expression(value)) is not None:
            self._names.constants[name] = constant
        else:
            raise UnwritableError(f"{name} is a {type(value).__name__}, which no package can import")

    def _edited(self) -> list[Line]:
        lines = list(self._lines)
        for node, text in sorted(self._edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
            if node.lineno != node.end_lineno:
                raise UnwritableError("an attribute stands on two lines")
            line = lines[node.lineno - 1].text.encode()  # columns are bytes of UTF-8
            changed = line[: node.col_offset] + text.encode() + line[node.end_col_offset :]
            lines[node.lineno - 1] = Line(changed.decode(), lines[node.lineno - 1].number)
        return lines


def _parsed(lines: Sequence[Line]) -> ast.FunctionDef:
    try:
        tree = ast.parse("\n".join(line.text for line in lines)).body[0]
    except (SyntaxError, IndexError) as error:
        raise UnwritableError("its text cannot be parsed after it was cut") from error
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _header_end(lines: Sequence[Line], tree: ast.FunctionDef) -> int:
    """The number of lines before the first statement of a function, and before the comments that precede it."""
    first = tree.body[0].lineno
    return next(line for line in range(first - 1, 0, -1) if lines[line - 1].text.split("#")[0].rstrip().endswith(":"))


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


_PLAIN_CALLS: Final = frozenset({"size", "dim", "numel", "stride", "len", "int", "min", "max"})


def _assigns_sizes(statement: ast.stmt) -> bool:
    """Return whether a statement on one line does nothing but assign sizes, attributes and the like to variables."""
    if not isinstance(statement, ast.Assign) or statement.lineno != statement.end_lineno:
        return False
    targets = statement.targets[0].elts if isinstance(statement.targets[0], ast.Tuple) else statement.targets
    calls = (node.func for node in ast.walk(statement.value) if isinstance(node, ast.Call))
    names = (call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls)
    are_names = len(statement.targets) == 1 and all(isinstance(target, ast.Name) for target in targets)
    return are_names and all(name in _PLAIN_CALLS for name in names)


def _check_part(statement: ast.stmt, numbers: frozenset[int], stage_part: StagePart) -> None:
    """Raise UnwritableError for a statement that a part of a ``forward`` does not keep."""
    if isinstance(statement, ast.Return):
        raise UnwritableError("a part returns other values")
    if numbers & stage_part.other_lines:
        raise UnwritableError("it is cut")
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        raise UnwritableError("it describes more than the part")


def _returns(statement: ast.stmt) -> bool:
    is_function = isinstance(statement, ast.FunctionDef)
    return not is_function and any(isinstance(node, ast.Return) for node in ast.walk(statement))


def _first_line_of(statement: ast.stmt) -> int:
    return min([statement.lineno, *(decorator.lineno for decorator in getattr(statement, "decorator_list", ()))])


def _variables(tree: ast.AST, context: type[ast.expr_context]) -> frozenset[str]:
    """The variables that a statement reads or stores. ``x += 1`` does both, ``x[0] = 1`` reads ``x``, and
    ``x.append(1)`` stores it."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and context is ast.Store}
    if context is ast.Load:
        targets = (node.target for node in ast.walk(tree) if isinstance(node, ast.AugAssign))
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    else:
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        owners = (call.value for call in calls if isinstance(call, ast.Attribute) and call.attr in _CHANGES)
        names |= {owner.id for owner in owners if isinstance(owner, ast.Name)}
    return frozenset(names)


_CHANGES: Final = frozenset({"append", "clear", "extend", "insert", "pop", "remove", "reverse", "setdefault", "update"})
"""Methods that change a list, a dict or a set: a variable that has one is another value afterwards."""
_MISSING: Final = object()


def import_of(name: str, value: Any) -> str | None:
    """The import by which a package has a value of torch, math or typing under a name; None without one."""
    if isinstance(value, ModuleType):
        if value.__name__.partition(".")[0] not in ("torch", "math"):
            return None
        if value is nn and name == "nn":
            return "from torch import nn"
        return f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
    own_name = getattr(value, "__name__", None) or getattr(value, "_name", None) or name
    for module in _IMPORTED:
        for candidate in dict.fromkeys((own_name, name)):
            if isinstance(candidate, str) and module.__dict__.get(candidate, _MISSING) is value:
                return f"from {module.__name__} import {candidate}" + ("" if candidate == name else f" as {name}")
    return None


def plain_expression(value: Any) -> Expression | None:
    """A plain value as it is written; None for anything else."""
    if not _is_plain(value):
        return None
    try:
        return literal(tuple(value) if isinstance(value, torch.Size) else value)
    except TypeError:
        return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return type(value) in (tuple, list, torch.Size) and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


@functools.cache
def _functions_of_torch() -> Mapping[Any, str]:
    pairs = (
        (value, f"{prefix}.{name}")
        for prefix, module in (("F", torch.nn.functional), ("torch", torch))
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and not isinstance(value, type)
    )
    names: dict[Any, str] = {}
    for value, name in pairs:
        try:
            names.setdefault(value, name)
        except TypeError:  # without a hash
            continue
    return MappingProxyType(names)


def _function_name(value: Any) -> str:
    """``F.gelu`` for a function of torch that a module has as an attribute."""
    if not callable(value) or isinstance(value, (type, nn.Module)):
        return ""
    try:
        return _functions_of_torch().get(value, "")
    except TypeError:
        return ""


_RESHAPES: Final = frozenset({"view", "reshape", "unflatten", "expand", "repeat"})
"""Methods that take sizes."""


def _divides_features(module: nn.Module, tree: ast.AST, function: ast.AST) -> bool:
    """Return whether a statement has numbers of features in its code, such as ``x.view(b, t, self.heads, -1)``.

    Ranks along `tp` have some of the features of a linear layer, and of the heads. Statements that are written from the
    graph name the sizes that no rank divides.

    Args:
        module: the module that has the statement.
        tree: the statement.
        function: the function that it is in, which may assign a shape: ``shape = (b, t, self.heads, self.width)``.
    """
    if not any(isinstance(child, nn.Linear) for child in module.children()):
        return False
    shapes = {
        node.targets[0].id: list(node.value.elts)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Tuple)
    }
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Attribute)
            or node.func.attr not in _RESHAPES
        ):
            continue
        match node.args:
            case [ast.Name(id=name) | ast.Starred(value=ast.Name(id=name))]:
                sizes = shapes.get(name, node.args)
            case _:
                sizes = node.args
        if _names_features(sizes):
            return True
    return False


def _names_features(sizes: Sequence[ast.expr]) -> bool:
    """Return whether sizes leave no dimension open, or name a number other than a size of a tensor.

    Of ``x.view(*rows, -1, self.head_dim)`` ranks divide the dimension that is open, which is the number of heads.
    """
    is_open = [isinstance(size, ast.UnaryOp) for size in sizes]
    if len(sizes) > 2 and is_open.index(True) == len(sizes) - 2 if True in is_open else False:
        sizes = sizes[:-1]
    return any(map(_is_number_of_features, sizes)) or (len(sizes) > 1 and True not in is_open)


def _is_number_of_features(argument: ast.expr) -> bool:
    """Return whether an argument is more than 1, and not a size of a tensor: ``self.heads``, ``3 * width``."""
    match argument:
        case ast.Constant(value=int(value)):
            return value > 1
        case ast.UnaryOp():
            return False
        case ast.Name() | ast.Subscript() | ast.Starred():
            return False  # rows, x.shape[1], *x.shape[:-1]
    return True


def check_node(node: ast.AST) -> None:
    """Raise UnwritableError for what no stage has."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Yield, ast.Await)):
        raise UnwritableError("it imports a module, or is not a plain function")
    if isinstance(node, ast.Attribute) and node.attr in _NOT_IN_A_STAGE and ast.unparse(node).startswith("torch."):
        raise UnwritableError(f"it uses {ast.unparse(node)}, which is an option of the pipeline")


# ---- annotations -----------------------------------------------------------------------------------------------------


def _with_known_annotations(
    lines: Sequence[Line], tree: ast.FunctionDef, namespace: Mapping[str, Any]
) -> tuple[list[Line], ast.FunctionDef]:
    """A function without the annotations whose names a package does not have."""
    unknown = [holder for holder, annotation in _annotations(tree) if not _is_known(annotation, namespace)]
    if not unknown:
        return list(lines), tree
    for holder in unknown:
        if isinstance(holder, ast.FunctionDef):
            holder.returns = None
        else:
            holder.annotation = None
    changed = [*(Line(text, 0) for text in _header(tree)), *lines[_header_end(lines, tree) :]]
    return changed, _parsed(changed)


def _header(tree: ast.FunctionDef) -> list[str]:
    """The header of a function on one line, or with the parameters on lines of their own."""
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns is not None else ""
    return _wrapped_header(tree.name, _parameters(tree.args), returns)


def _wrapped_header(name: str, parameters: Sequence[str], returns: str) -> list[str]:
    joined = ", ".join(parameters)
    for inside in ([joined], [f"{parameter}," for parameter in parameters]):
        if inside == [joined] and len(line := f"def {name}({joined}){returns}:") <= LINE_LENGTH - _CLASS_INDENT:
            return [line]
        lines = [f"def {name}(", *(f"    {line}" for line in inside), f"){returns}:"]
        if all(len(line) <= LINE_LENGTH - _CLASS_INDENT for line in lines):
            break
    return lines


def _parameters(arguments: ast.arguments) -> list[str]:
    """The parameters of a function: ``x: Tensor``, ``scale: float = 1.0``, ``*args``."""

    def parameter(argument: ast.arg, default: ast.expr | None) -> str:
        annotation = f": {ast.unparse(argument.annotation)}" if argument.annotation is not None else ""
        equals = " = " if annotation else "="
        return f"{argument.arg}{annotation}" + (f"{equals}{ast.unparse(default)}" if default is not None else "")

    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    parameters = [parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        parameters.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        parameters.append(f"*{parameter(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        parameters.append("*")
    parameters += [parameter(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg is not None:
        parameters.append(f"**{parameter(arguments.kwarg, None)}")
    return parameters


def _annotations(tree: ast.FunctionDef) -> Iterator[tuple[Any, ast.expr]]:
    if tree.returns is not None:
        yield tree, tree.returns
    for node in ast.walk(tree.args):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node, node.annotation


def _is_known(annotation: ast.expr, namespace: Mapping[str, Any]) -> bool:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return False
        if isinstance(node, ast.Name):
            if node.id in namespace:
                if import_of(node.id, namespace[node.id]) is None:
                    return False
            elif not hasattr(builtins, node.id):
                return False
    return True


def _is_stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == _SELF
