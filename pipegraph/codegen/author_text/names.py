"""The names that the text of a function reads: what a package has to import, to copy or to set."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

import torch
import torch.nn.functional
from torch import fx, nn

from pipegraph.codegen.author_text.cut import TextLine, UnwritableError
from pipegraph.codegen.syntax.expressions import Collection, Expression, Template, call, literal
from pipegraph.codegen.syntax.statements import FunctionSource, SourceText, Statement

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

    lines: tuple[TextLine, ...]
    numbers: frozenset[int]
    reads: frozenset[str]
    assigns: frozenset[str]
    is_plain: bool
    is_dead: bool

    def without_unused(self, used: AbstractSet[str]) -> tuple[TextLine, ...]:
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
        return (*self.lines[:-1], TextLine(f"{targets}{equals}{value}", self.lines[-1].number))


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

    comments: tuple[TextLine, ...]
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


class MixedMethodError(UnwritableError):
    """A method cannot have statements from the graph; another text may have what calls it from the graph.

    Attributes:
        method: its name.
    """

    def __init__(self, method: str, reason: str) -> None:
        super().__init__(f"{method}: {reason}")
        self.method = method


@contextmanager
def mixed_method(method: str) -> Iterator[None]:
    """A context in which an UnwritableError is one of a method."""
    try:
        yield
    except UnwritableError as reason:
        raise MixedMethodError(method, str(reason)) from reason


@dataclass(frozen=True)
class MixedMethod:
    """A method of which some statements are written from the graph. A ``forward`` calls it in one place.

    Attributes:
        header: its lines before its first statement.
        parts: its statements, at an indentation of 4.
        first_line: its first line in the file of the model.
        call_lines: the lines of the statement that calls it.
    """

    header: tuple[TextLine, ...]
    parts: tuple[Part, ...]
    first_line: int
    call_lines: frozenset[int]


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
    """Facts about a ``forward`` that its text does not say.

    Attributes:
        stage_part: what the stage runs of it; None if that is all.
        value: returns the tensor in a variable after these lines have run; None without one.
        unread: its parameters that are objects, or tensors that no operation reads. A package passes None instead.
        is_none: returns whether a variable is None after these lines have run.
        check_child: raises UnwritableError if text cannot call a child as the model does.
        lines: the lines of the ``forward`` that led to operations of the graph.
        graph_lines: files and lines of statements whose text computes something else than the graph.
        autograd_functions: the custom Functions whose text the package has, with the functions that they read, by name.
        whole_methods: names of methods that no text may mix with statements from the graph.
        module_lines: files and lines that the module runs, if the text has those that other modules of its class run as
            well; None if it has no others.
        of_method: (first line of a method, lines of the statement that calls it) → the same of the method; None in a
            method.
        unread_tensors: those of `unread` that are tensors, whose dtype and device a text may read.
        texts: the texts that modules of the model hold, such as the names of activations.
        feature_lines: those of `lines` that led to operations on values that depend on parameters; None if any may
            have.
    """

    stage_part: StagePart | None
    unread: frozenset[str]
    value: Callable[[str, frozenset[int]], fx.Node | None]
    is_none: Callable[[str, frozenset[int]], bool]
    check_child: Callable[[str], None]
    lines: frozenset[int]
    graph_lines: frozenset[tuple[str, int]]
    autograd_functions: Mapping[str, SourceText]
    whole_methods: AbstractSet[str]
    module_lines: frozenset[tuple[str, int]] | None = None
    of_method: Callable[[int, frozenset[int]], ForwardSurroundings] | None = None
    unread_tensors: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    feature_lines: frozenset[int] | None = None


@dataclass
class ReadNames:
    """What the text of a class or of a function reads.

    Attributes:
        origin: the file of the class, with its license.
        file: its path.
        header: the lines of ``forward`` before its first statement, its decorators included.
        parts: the statements of ``forward``, at an indentation of 4.
        methods: the other methods of the class, by name → their text, with decorators of ``property`` and the like.
        mixed_methods: those of which some statements are written from the graph, which have no text in ``methods`` yet.
        attributes: of the module that are no tensors and no modules → their values.
        base: the layer of torch whose ``forward`` the text calls by ``super()``; None without one.
        attributes_set: the attributes that the text sets.
        unread_tensors: the parameters of which the text reads the dtype or the device, and no operation the values.
        children: attributes that are modules, and attributes of containers of modules: ``transformer.wte``.
        functions: of the model's source → their text, each after those that it calls.
        constants: of the model's source → their values.
        imports: the name in the text → the import that it needs.
        needs: of each function, the functions that it calls, the constants that it reads, its imports and its origin.
    """

    origin: str = ""
    file: str = ""
    header: tuple[TextLine, ...] = ()
    parts: tuple[Part, ...] = ()
    methods: dict[str, tuple[TextLine, ...]] = field(default_factory=dict)
    mixed_methods: dict[str, MixedMethod] = field(default_factory=dict)
    attributes: dict[str, Expression] = field(default_factory=dict)
    base: type[nn.Module] | None = None
    attributes_set: set[str] = field(default_factory=set)
    unread_tensors: set[str] = field(default_factory=set)
    children: set[str] = field(default_factory=set)
    functions: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Expression] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    needs: dict[str, _Needs] = field(default_factory=dict)

    def remove_unused(self, forward: Iterable[TextLine]) -> None:
        """Remove what neither the lines of ``forward`` nor methods that these call read: statements without effect are
        not among the lines."""
        forward_lines = list(forward)
        waiting, methods, words = list(forward_lines), set[str](), set[str]()
        while waiting:
            new_words = {word for line in waiting for word in re.findall(r"\w+", line.text)}
            new_methods = (new_words & self.methods.keys()) - methods
            words |= new_words
            methods |= new_methods
            waiting = [line for name in new_methods for line in self.methods[name]]
        lines = [*forward_lines, *(line for name in methods for line in self.methods[name])]
        called = {
            word for line in lines for word in re.findall(r"(?<![.\w])(?<!def )\w+", line.text)
        }  # not self.scaled
        functions, new_functions = frozenset[str](), frozenset(called & self.functions.keys())
        while new_functions:
            functions |= new_functions
            new_functions = frozenset[str]().union(*(self.needs[name][0] for name in new_functions)) - functions
        self.methods = {name: lines for name, lines in self.methods.items() if name in methods}
        self.functions = {name: text for name, text in self.functions.items() if name in functions}
        self.constants = {name: value for name, value in self.constants.items() if name in words}
        self.imports = {name: text for name, text in self.imports.items() if name in words}

    def calls(self, function: str) -> bool:
        """Return whether statements that keep their text, methods or other functions call a function."""
        parts = (part.lines for part in self.parts if isinstance(part, TextPart))
        texts = [line.text for lines in (*parts, *self.methods.values()) for line in lines]
        texts += [text for name, text in self.functions.items() if name != function]
        return any(re.search(rf"(?<![.\w]){function}\(", text) for text in texts)

    def attributes_in(self, forward: Iterable[TextLine]) -> dict[str, Expression]:
        """The attributes that the lines of ``forward``, or other methods, read."""
        lines = itertools.chain(forward, *self.methods.values())
        read = {name for line in lines for name in re.findall(r"\bself\.(\w+)", line.text)}
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


_LICENSES: Final = (
    re.compile(r"SPDX-License-Identifier: *([\w.+-]+)"),
    re.compile(r"[Ll]icensed under the ([A-Z][\w .-]*?[Ll]icense)"),
    re.compile(r"\b((?:MIT|BSD|Apache|ISC)[\w .-]*? [Ll]icense)"),
)
"""How the head of a file names its license."""
_HEAD: Final = 4000  # characters
_COPYRIGHT: Final = re.compile(
    r"^[\W_]*(Copyright\b.*?)(?:[.,]?\s+All rights reserved)?\W*$", re.MULTILINE | re.IGNORECASE
)
"""A line of the head that says who wrote a file."""


@functools.cache
def origin_of(file: str) -> str:
    """``modeling_llama.py (Apache License; Copyright 2022 EleutherAI)``: the name of a file, and the license and the
    authors that its head names."""
    path = Path(file)
    try:
        head = path.read_text(encoding="utf-8")[:_HEAD]
    except (OSError, ValueError):
        head = ""
    license_match = next(filter(None, (pattern.search(head) for pattern in _LICENSES)), None)
    terms = [] if license_match is None else [license_match[1]]
    terms += dict.fromkeys(match[1] for match in _COPYRIGHT.finditer(head))
    return f"{path.name} ({'; '.join(terms)})" if terms else path.name


STANDARD: Final = {
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
        self._meanings: dict[str, object] = dict(STANDARD)
        self.functions: list[FunctionSource] = []

    def meanings_of(self, names: ReadNames) -> dict[str, object]:
        """Return what the names in a text mean. Raises UnwritableError if one means something else elsewhere."""
        meanings: dict[str, object] = {**names.imports, **names.constants, **names.functions}
        for name, meaning in meanings.items():
            if self._meanings.get(name, meaning) != meaning or self._is_class(name):
                raise UnwritableError(f"{name} means something else in the package")
        return meanings

    def text_of(self, names: ReadNames, forward: Sequence[TextLine], written: Sequence[Statement]) -> SourceText:
        """Return the text of a class. Raises UnwritableError if one of its names means something else elsewhere.

        Args:
            forward: the lines of its ``forward``.
            written: the statements in it that are written from the graph.
        """
        meanings = self.meanings_of(names)
        new = [name for name in names.functions if name not in self._meanings]
        self._meanings |= meanings
        imports = frozenset(names.imports.values())
        needs = frozenset(names.functions), tuple(names.constants.items()), imports, names.origin
        self.functions += [
            FunctionSource(name, SourceText((names.functions[name],), *names.needs[name])) for name in new
        ]
        methods = [forward, *names.methods.values()]
        functions = tuple("\n".join(line.text for line in lines) for lines in methods)
        places = tuple((names.file, line.number) for lines in methods for line in lines)
        return SourceText(functions, *needs, tuple(written), places)


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
    if not is_plain(value):
        return None
    if isinstance(value, (set, frozenset)):
        parts = [plain_expression(part) for part in sorted(value, key=repr)]
        written = Collection(tuple(filter(None, parts)), "{}") if parts else call("set")
        return call("frozenset", written) if isinstance(value, frozenset) else written
    if isinstance(value, dict):
        keys, entries = map(plain_expression, value), map(plain_expression, value.values())
        pairs = (
            (key, entry) for key, entry in zip(keys, entries, strict=True) if key is not None and entry is not None
        )
        items = tuple(Template("{}: {}", pair) for pair in pairs)
        return Collection(items, "{}") if len(items) == len(value) else None
    try:
        return literal(tuple(value) if isinstance(value, torch.Size) else value)
    except TypeError:
        return None


def is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return type(value) in (tuple, list, torch.Size) and all(map(is_plain, value))
    if isinstance(value, (set, frozenset)):
        return type(value) in (set, frozenset) and all(isinstance(part, str) for part in value)
    if isinstance(value, dict):
        return type(value) is dict and all(map(is_plain, (*value, *value.values())))
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


def function_name(value: Any) -> str:
    """``F.gelu`` for a function of torch that a module has as an attribute."""
    if not callable(value) or isinstance(value, (type, nn.Module)):
        return ""
    try:
        return _functions_of_torch().get(value, "")
    except TypeError:
        return ""


def check_node(node: ast.AST) -> None:
    """Raise UnwritableError for what no stage has."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Yield, ast.Await)):
        raise UnwritableError("it imports a module, or is not a plain function")
    if isinstance(node, ast.Attribute) and node.attr == "register_hook":
        raise UnwritableError("it adds a hook to a tensor, for which the graph has a Function")
    if isinstance(node, ast.Attribute) and node.attr in _NOT_IN_A_STAGE and ast.unparse(node).startswith("torch."):
        raise UnwritableError(f"it uses {ast.unparse(node)}, which is an option of the pipeline")
