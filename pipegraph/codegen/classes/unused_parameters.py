"""Leave out the parameters that nothing reads after texts were cut, and the arguments that calls pass for them.

def forward(self, x, mask=None, **kwargs):        def forward(self, x):
    return self.ff(x, mask=mask, **kwargs)  ──▶       return self.ff(x)

A parameter is unused if its function does nothing with it but pass it to unused parameters. ``**kwargs`` is unused if
no call passes anything in it. The first parameter of a function always stays, as do those of a stage.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, Final

from pipegraph.codegen.author_text.cut import TextLine
from pipegraph.codegen.author_text.edits import Edit, edited, end_of, present, start_of
from pipegraph.codegen.author_text.headers import without_parameters
from pipegraph.codegen.author_text.simplify import is_pure, simplified_text, with_short_statement, without_statement
from pipegraph.codegen.author_text.statements import parsed
from pipegraph.codegen.classes.call_targets import FORWARD, Body, CallTargets, Key, positional
from pipegraph.codegen.syntax.expressions import FunctionCall, Name
from pipegraph.codegen.syntax.statements import ClassSource, FunctionSource, SourceText, lines

Parameter = tuple[Key, str]
"""A function and the name of one of its parameters."""
Part = ast.expr | ast.keyword
"""An argument of a call, with its name if it has one."""
_ANY: Final = "*"
"""In place of the names in a dict of which nothing is known."""


def without_unused_parameters(
    functions: Sequence[FunctionSource], blocks: Sequence[ClassSource], stages: Sequence[ClassSource]
) -> tuple[list[FunctionSource], list[ClassSource], list[ClassSource]]:
    """Leave out the parameters that nothing reads.

    Args:
        functions, blocks: of ``blocks.py``.
        stages: the classes of the stages.
    """
    texts = {("", source.name): _AuthorFunctions(source.author_text) for source in functions}
    texts |= {
        (cls.name, FORWARD): _AuthorFunctions(cls.author_text)
        for cls in (*blocks, *stages)
        if cls.author_text is not None
    }
    written = {cls.name: cls for cls in (*blocks, *stages) if cls.author_text is None and cls.forward}
    fixed = {(name, FORWARD) for name in (*written, *(stage.name for stage in stages))}
    constructors = {cls.name: _constructor(cls) for cls in (*blocks, *stages)}
    while True:
        bodies = [body for key, text in texts.items() for body in text.bodies(key)]
        names_in_classes = {("", name) for text in texts.values() for name in text.names_in_classes}
        usage = _Usage(bodies, [_written_body(cls) for cls in written.values()], constructors, fixed | names_in_classes)
        new_texts = {key: text.edited(key, usage) for key, text in texts.items()}
        new_written = {name: _with_calls(cls, usage) for name, cls in written.items()}
        if new_texts == texts and new_written == written:
            break
        texts, written = new_texts, new_written

    def changed(cls: ClassSource) -> ClassSource:
        text = texts.get((cls.name, FORWARD))
        return written.get(cls.name, cls) if text is None else replace(cls, forward=(text.source, *cls.forward[1:]))

    return (
        [replace(source, author_text=texts["", source.name].source) for source in functions],
        [changed(block) for block in blocks],
        [changed(stage) for stage in stages],
    )


def _written_body(cls: ClassSource) -> Body:
    """The ``forward`` of a class that is written from the graph."""
    header = f"def {FORWARD}({', '.join(('self', *cls.parameters))}):"
    tree = ast.parse("\n".join([header, *lines(cls.forward, 4)])).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return Body((cls.name, FORWARD), tree)


def _with_calls(cls: ClassSource, usage: _Usage) -> ClassSource:
    """A class that is written from the graph, without unused arguments of calls."""
    unused = usage.unused_names((cls.name, FORWARD))

    def with_call(node: Any) -> Any:
        node = node.rebuilt(with_call)
        names = unused.get(_normal(node.text), set()) if isinstance(node, FunctionCall) else set()
        if not names:
            return node
        return replace(node, arguments=tuple(argument for argument in node.arguments if argument.name not in names))

    return replace(cls, forward=tuple(map(with_call, cls.forward))) if unused else cls


def _normal(text: str) -> str:
    return ast.unparse(ast.parse(text))


def _constructor(cls: ClassSource) -> str:
    return "\n".join([FunctionCall(Name("super().__init__"), cls.children).text, *lines(cls.init, 0)])


# ---- texts -----------------------------------------------------------------------------------------------------------


class _AuthorFunctions:
    """The text of a function or of the methods of a class.

    Attributes:
        source: the text.
    """

    def __init__(self, source: SourceText) -> None:
        self.source = source

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _AuthorFunctions) and self.source.functions == other.source.functions

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def functions(self) -> list[list[TextLine]]:
        """The lines of each function without its decorators, numbered through from 1; none for a class."""
        functions, number = [], 0
        for text in self.source.functions:
            numbered = [TextLine(line, number + at) for at, line in enumerate(text.split("\n"), 1)]
            number += len(numbered)
            tree = ast.parse(text).body[0]
            functions.append(numbered[tree.lineno - 1 :] if isinstance(tree, ast.FunctionDef) else [])
        return functions

    @property
    def names_in_classes(self) -> Iterator[str]:
        """Yield the names in a class, which may call functions of the package."""
        for text, function in zip(self.source.functions, self.functions, strict=True):
            if not function:
                yield from re.findall(r"\w+", text)

    def bodies(self, key: Key) -> Iterator[Body]:
        """Yield each function with its syntax tree."""
        for function in filter(None, self.functions):
            tree = parsed(function)
            yield Body((key[0], tree.name), tree)

    def edited(self, key: Key, usage: _Usage) -> _AuthorFunctions:
        """The text without what is unused."""
        texts, places = [], list[tuple[str, int]]()
        file = next((file for file, number in self.source.places if number), "")
        number = 0
        for text, function in zip(self.source.functions, self.functions, strict=True):
            count = text.count("\n") + 1
            decorators = [TextLine(line, number + at) for at, line in enumerate(text.split("\n"), 1)]
            decorators = decorators[: count - len(function)]
            number += count
            new = function
            if function:
                new = _edited(function, usage.bodies[key[0], parsed(function).name], usage)
            new = [*decorators, *new]
            texts.append("\n".join(line.text for line in new))
            if self.source.places:
                places += [self.source.places[line.number - 1] if line.number else (file, 0) for line in new]
        if tuple(texts) == self.source.functions:
            return self
        names = set(re.findall(r"\w+", "\n".join(texts)))
        return _AuthorFunctions(
            replace(
                self.source,
                functions=tuple(texts),
                places=tuple(places),
                imports=frozenset(line for line in self.source.imports if line.split()[-1].split(".")[0] in names),
                constants=tuple(pair for pair in self.source.constants if pair[0] in names),
            )
        )


def _edited(function: Sequence[TextLine], body: Body, usage: _Usage) -> list[TextLine]:
    """A function without unused parameters and arguments."""
    remaining = list(function)
    edits = [edit for call in body.calls for edit in _edits(call, usage.unused_parts(body, call))]
    outermost = [edit for edit in edits if not any(_is_inside(edit, outer) for outer in edits)]
    for edit in sorted(outermost, reverse=True):  # from the end, so that the places of the others stay right
        remaining = with_short_statement(present(edited(remaining, [edit])), edit.start[0])
    for statement in reversed(usage.empty_assignments(body)):
        place = next(
            node for node in ast.walk(parsed(remaining)) if isinstance(node, ast.Assign) and _are_equal(node, statement)
        )
        remaining = without_statement(remaining, place)
    if unused := usage.unused_parameters(body.key):
        remaining = without_parameters(remaining, unused)
    return simplified_text(remaining, {}) if remaining != list(function) else remaining


def _are_equal(node: ast.AST, expected: ast.AST) -> bool:
    return ast.dump(node) == ast.dump(expected)


def _is_inside(edit: Edit, outer: Edit) -> bool:
    return edit != outer and outer.start <= edit.start and edit.end <= outer.end


def _edits(call: ast.Call, unused: AbstractSet[int]) -> Iterator[Edit]:
    """Yield the edits that leave arguments out of a call.

    Args:
        unused: the arguments, by their ``id``.
    """
    parts = sorted(_parts(call), key=start_of)
    previous: Part | None = None
    runs = [(is_unused, list(group)) for is_unused, group in groupby(parts, key=lambda part: id(part) in unused)]
    for at, (is_unused, run) in enumerate(runs):
        if not is_unused:
            previous = run[-1]
        elif previous is not None:
            yield Edit(end_of(previous), end_of(run[-1]), "")
        elif at + 1 < len(runs):
            yield Edit(start_of(run[0]), start_of(runs[at + 1][1][0]), "")
        else:
            line, column = end_of(call)
            yield Edit(start_of(run[0]), (line, column - 1), "")


# ---- what is used ----------------------------------------------------------------------------------------------------


class _Usage:
    """The parameters and arguments of a package that nothing reads.

    Args:
        texts: the functions and methods in their author's text.
        written: those that are written from the graph.
        constructors: the statements of ``__init__`` of each class, by its name.
        fixed: the functions that keep all of their parameters.

    Attributes:
        bodies: all functions and methods.
    """

    def __init__(
        self,
        texts: Sequence[Body],
        written: Sequence[Body],
        constructors: Mapping[str, str],
        fixed: AbstractSet[Key],
    ) -> None:
        self.bodies = {body.key: body for body in (*written, *texts)}
        self._texts = frozenset(body.key for body in texts)
        call_targets = CallTargets(self.bodies.values(), constructors)
        self._calls = [(body, call, call_targets.targets(body, call)) for body in texts for call in body.calls]
        for body in written:  # equal calls change together
            of_text: dict[str, set[Key]] = {}
            for call in body.calls:
                of_text.setdefault(ast.unparse(call), set()).update(call_targets.targets(body, call))
            self._calls += [(body, call, frozenset(of_text[ast.unparse(call)])) for call in body.calls]
        called = {key for _, _, keys in self._calls for key in keys}
        passed_on = {key for body in self.bodies.values() for key in call_targets.passed(body)}
        self._fixed = {key for key in self.bodies if key in fixed or key in passed_on or key not in called}
        self._passed: set[Parameter] = set()
        self._keywords: dict[Key, set[str]] = {key: {_ANY} for key in self._fixed}  # the names in ``**kwargs``
        self._learn_passed()
        self._used: set[Parameter] = {(key, name) for key in self._fixed for name in self._named(key)}
        self._used_parts: set[int] = set()  # arguments that stay, by their ``id``
        self._learn_used()

    def unused_parameters(self, key: Key) -> set[str]:
        """The names of the parameters of a function that nothing reads."""
        arguments = self.bodies[key].tree.args
        first = positional(arguments, is_method=False)[: 2 if key[0] else 1]
        return {name for name in self._named(key) if (key, name) not in self._used and name not in first}

    def unused_parts(self, body: Body, call: ast.Call) -> set[int]:
        """The arguments of a call that nothing reads, by their ``id``."""
        return {id(part) for part in _parts(call) if body.key in self._texts and id(part) not in self._used_parts}

    def unused_names(self, key: Key) -> dict[str, set[str]]:
        """The names of the arguments that nothing reads, by the text of the call, in a function from the graph."""
        names: dict[str, set[str]] = {}
        for call in self.bodies[key].calls:
            unused = {part.arg for part in call.keywords if part.arg is not None and id(part) not in self._used_parts}
            if unused:
                names.setdefault(ast.unparse(call), set()).update(unused)
        return names

    def empty_assignments(self, body: Body) -> list[ast.Assign]:
        """The statements that only assign empty dicts to variables for ``**``."""
        if body.key not in self._texts:
            return []
        return [
            node
            for node in body.tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and self._is_empty_variable(body, node.targets[0].id)
        ]

    # ---- what calls pass ---------------------------------------------------------------------------------------------

    def _learn_passed(self) -> None:
        """Find the parameters that calls pass, and what ``**kwargs`` may have."""
        while True:
            sizes = len(self._passed), sum(map(len, self._keywords.values()))
            for body, call, keys in self._calls:
                for key in keys:
                    kwargs = self.bodies[key].tree.args.kwarg
                    for part in _parts(call):
                        names = self._parameters(body, key, call, part)
                        self._passed |= {(key, name) for name in names}
                        if kwargs is not None and kwargs.arg in names:
                            unknown = self._names(body, part) if isinstance(part, ast.keyword) else {_ANY}
                            self._keywords.setdefault(key, set()).update(unknown - set(self._named(key)))
            if sizes == (len(self._passed), sum(map(len, self._keywords.values()))):
                return

    def _names(self, body: Body, keyword: ast.keyword) -> set[str]:
        """The names under which a keyword argument passes values; none for an empty dict after ``**``."""
        if keyword.arg is not None:
            return {keyword.arg}
        kwargs = body.tree.args.kwarg
        match keyword.value:
            case ast.Name(name) if kwargs is not None and name == kwargs.arg and name not in body.sources:
                return self._keywords.get(body.key, set())
            case ast.Name(name) if self._is_empty_variable(body, name):
                return set()
        return {_ANY}

    def _is_empty_variable(self, body: Body, name: str) -> bool:
        """Return whether a variable is always empty, and read for ``**`` alone: ``kwargs = kwargs or {}``."""
        values = body.sources.get(name, [])
        inside = {id(node) for value in values for node in ast.walk(value)}
        loads = [node for node in body.nodes if isinstance(node, ast.Name) and node.id == name]
        return (
            bool(values)
            and all(self._is_empty_dict(body, value) for value in values)
            and all(id(node) in inside or not isinstance(node.ctx, ast.Load) or _is_splat(body, node) for node in loads)
        )

    def _is_empty_dict(self, body: Body, value: ast.expr) -> bool:
        match value:
            case ast.Dict(keys=[]):
                return True
            case ast.BoolOp(ast.Or(), [ast.Name(name), ast.Dict(keys=[])]):
                return (body.key, name) not in self._passed and _default_is_none(body.tree.args, name)
        return False

    # ---- what functions read -----------------------------------------------------------------------------------------

    def _learn_used(self) -> None:
        """Find the parameters that functions read, and the arguments that stay because of them."""
        parts = [(body, call, part, keys) for body, call, keys in self._calls for part in _parts(call)]
        reads = [
            (body.key, node.id, self._around(body, node)) for body in self.bodies.values() for node in _loads(body)
        ]
        while True:
            sizes = len(self._used), len(self._used_parts)
            for body, call, part, keys in parts:
                names = {(key, name) for key in keys for name in self._parameters(body, key, call, part)}
                if not self._is_optional(body, part, keys) or not self._used.isdisjoint(names):
                    self._used_parts.add(id(part))
                    self._used |= names
            self._used |= {(key, name) for key, name, around in reads if around <= self._used_parts}
            if sizes == (len(self._used), len(self._used_parts)):
                return

    def _is_optional(self, body: Body, part: Part, keys: AbstractSet[Key]) -> bool:
        """Return whether an argument may be left out if nothing reads it."""
        if body.key not in self._texts and (not isinstance(part, ast.keyword) or part.arg is None):
            return False
        value = part.value if isinstance(part, ast.keyword) else part
        if isinstance(part, ast.keyword) and part.arg is None:
            names = self._names(body, part)
            return not names or (bool(keys) and _ANY not in names)
        return bool(keys) and not isinstance(value, ast.Starred) and is_pure(value)

    def _around(self, body: Body, node: ast.AST) -> set[int]:
        """The arguments of calls of the package around a node, by their ``id``."""
        around = set[int]()
        empty = {id(statement) for statement in self.empty_assignments(body)}
        while (parent := body.parents.get(id(node))) is not None:
            if isinstance(parent, ast.Call) and node is not parent.func:
                around.add(id(node))
            node = parent
        return around | {id(node)} if id(node) in empty else around

    # ---- parameters --------------------------------------------------------------------------------------------------

    def _named(self, key: Key) -> list[str]:
        arguments = self.bodies[key].tree.args
        stars = [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
        named = [argument.arg for argument in arguments.kwonlyargs]
        return [*positional(arguments, bool(key[0])), *named, *stars]

    def _parameters(self, body: Body, key: Key, call: ast.Call, part: Part) -> set[str]:
        """The parameters of a function to which an argument of a call in a body may go."""
        arguments = self.bodies[key].tree.args
        names = positional(arguments, bool(key[0]))
        if isinstance(part, ast.keyword):
            named = {*names, *(argument.arg for argument in arguments.kwonlyargs)}
            stars = {arguments.kwarg.arg} if arguments.kwarg is not None else set()
            passed = self._names(body, part)
            return {*named, *stars} if _ANY in passed else passed & named | (stars if passed - named else set())
        at = next(at for at, argument in enumerate(call.args) if argument is part)
        star = next((at for at, argument in enumerate(call.args) if isinstance(argument, ast.Starred)), at + 1)
        stars = {arguments.vararg.arg} if arguments.vararg is not None else set()
        return {*names[star:], *stars} if at >= star else set(names[at : at + 1]) or stars


def _parts(call: ast.Call) -> list[Part]:
    return [*call.args, *call.keywords]


def _loads(body: Body) -> Iterator[ast.Name]:
    return (node for node in body.nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store))


def _is_splat(body: Body, node: ast.AST) -> bool:
    parent = body.parents.get(id(node))
    return isinstance(parent, ast.keyword) and parent.arg is None


def _default_is_none(arguments: ast.arguments, name: str) -> bool:
    named = [*arguments.posonlyargs, *arguments.args]
    pairs: Iterable[tuple[ast.arg, ast.expr | None]] = zip(
        [*named[len(named) - len(arguments.defaults) :], *arguments.kwonlyargs],
        [*arguments.defaults, *arguments.kw_defaults],
        strict=True,
    )
    return any(
        argument.arg == name and isinstance(default, ast.Constant) and default.value is None
        for argument, default in pairs
    )
