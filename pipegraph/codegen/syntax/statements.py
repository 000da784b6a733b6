"""Python statements and classes as data, and their lines of source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pipegraph.codegen.names.author_arguments import AuthorArguments
from pipegraph.codegen.syntax.expressions import Argument, Binary, Expression, FunctionCall, Node, unary
from pipegraph.codegen.syntax.line_breaks import LINE_LENGTH, wrap

# Several results get brackets if they are longer than this.
_LONGEST_RESULTS = 96
_STEP = 4


APPLY = ".apply"
"""After the name of a ``torch.autograd.Function`` that is called."""


class Statement(Node):
    """A statement."""

    @property
    def text(self) -> str:
        """The statement on one line; the header of a statement with a body."""
        raise NotImplementedError

    def lines(self, indent: int) -> list[str]:
        """The lines of source at ``indent`` spaces, broken if they are too long."""
        return wrap(self.text, indent)


@dataclass(frozen=True)
class Assign(Statement):
    """``a, b = value``."""

    targets: tuple[Expression, ...]
    value: Expression

    @property
    def text(self) -> str:
        return f"{', '.join(target.text for target in self.targets)} = {self.value.text}"


@dataclass(frozen=True)
class Evaluate(Statement):
    """An expression for its effect."""

    value: Expression

    @property
    def text(self) -> str:
        return self.value.text


@dataclass(frozen=True)
class RegisterConstant(Evaluate):
    """``self.register_buffer(…)`` for a tensor that the model holds as a plain attribute.

    Attributes:
        tensor: what the tensor is called.
        dtype, bits: its dtype, which ``.to(dtype)`` must leave alone, and a dtype of whole numbers as wide as that.
    """

    tensor: Expression
    dtype: Expression
    bits: Expression


@dataclass(frozen=True)
class Return(Statement):
    """``return a, b``."""

    values: tuple[Expression, ...]

    @property
    def count(self) -> int | None:
        """How many values it returns; None if one of its expressions stands for several: ``*outputs``."""
        return None if any(value.text.startswith("*") for value in self.values) else len(self.values)

    @property
    def text(self) -> str:
        if len(self.values) == 1 and self.count is None:
            return f"return ({self.values[0].text},)"
        result = ", ".join(value.text for value in self.values)
        return f"return ({result})" if len(self.values) > 1 and len(result) > _LONGEST_RESULTS else f"return {result}"


@dataclass(frozen=True)
class Raise(Statement):
    """``raise error``."""

    value: Expression

    @property
    def text(self) -> str:
        return f"raise {self.value.text}"


@dataclass(frozen=True)
class SourceText(Statement):
    """Functions in the text of their author, at an indentation of 0.

    Attributes:
        functions: their texts.
        calls: the names of functions of the package that they call.
        constants: the names and values of constants of the package that they read.
        imports: the imports that they need.
        origin: the file that they are from, and its license if it names one: ``modeling_llama.py (Apache License)``.
        written: the statements in the text that are written from the graph.
        places: of each line of the functions, the file and the line that it is from; line 0 for one that is written
            from the graph.
        calls_functions: whether the statements from the graph call the author's functions.
    """

    functions: tuple[str, ...]
    calls: frozenset[str] = frozenset()
    constants: tuple[tuple[str, Expression], ...] = ()
    imports: frozenset[str] = frozenset()
    origin: str = ""
    written: tuple[Statement, ...] = ()
    places: tuple[tuple[str, int], ...] = ()
    calls_functions: bool = False

    @property
    def text(self) -> str:
        return self.functions[0]

    def lines(self, indent: int) -> list[str]:
        texts = [text.splitlines() for text in self.functions]
        separated = [line for number, text in enumerate(texts) for line in (*([""] if number else []), *text)]
        return [f"{' ' * indent}{line}" if line else "" for line in separated]


class CompoundStatement(Statement):
    """A statement with a header and a body."""

    body: tuple[Statement, ...]

    def lines(self, indent: int) -> list[str]:
        return [*wrap(self.text, indent), *lines(self.body, indent + _STEP)]


@dataclass(frozen=True)
class With(CompoundStatement):
    """``with context:``."""

    context: Expression
    body: tuple[Statement, ...]

    @property
    def text(self) -> str:
        return f"with {self.context.text}:"


@dataclass(frozen=True)
class For(CompoundStatement):
    """``for a, b in iterable:``."""

    variables: tuple[str, ...]
    iterable: Expression
    body: tuple[Statement, ...]

    @property
    def text(self) -> str:
        return f"for {', '.join(self.variables)} in {self.iterable.text}:"


@dataclass(frozen=True)
class If(CompoundStatement):
    """``if test: … else: …``."""

    test: Expression
    body: tuple[Statement, ...]
    orelse: tuple[Statement, ...] = ()

    @property
    def text(self) -> str:
        return f"if {self.test.text}:"

    def lines(self, indent: int) -> list[str]:
        inner = self.body[0]
        if not self.orelse and len(self.body) == 1 and isinstance(inner, If) and not inner.orelse:
            merged = If(Binary("and", self.test, inner.test), inner.body)
            if len(merged.text) <= LINE_LENGTH - indent:
                return merged.lines(indent)
        if isinstance(self.body[-1], Return):  # nothing of the body runs on into what follows
            return [*super().lines(indent), *lines(self.orelse, indent)]
        return self._chain(indent)

    def _chain(self, indent: int) -> list[str]:
        """``if … elif … else``."""
        if not self.orelse:
            return super().lines(indent)
        if len(self.orelse) == 1 and isinstance(self.orelse[0], If):
            first, *tail = self.orelse[0]._chain(indent)
            return [*super().lines(indent), f"{' ' * indent}el{first.lstrip()}", *tail]
        return [*super().lines(indent), f"{' ' * indent}else:", *lines(self.orelse, indent + _STEP)]


def lines(statements: Iterable[Statement], indent: int) -> list[str]:
    """The lines of statements, one after the other."""
    return [line for statement in statements for line in statement.lines(indent)]


@dataclass(frozen=True)
class Case:
    """One side of ``if test: … else: …`` around a statement.

    Attributes:
        test: what decides.
        holds: whether the statement runs if the test holds.
        number: of the ``if``; the two sides of one have the same.
    """

    test: Expression
    holds: bool
    number: int


Block = Expression | Case
"""What is around a statement: the context of a ``with``, or the side of an ``if``."""


def nested(statements: Sequence[tuple[tuple[Block, ...], Statement]]) -> tuple[Statement, ...]:
    """Statements inside ``with`` and ``if`` blocks.

    Args:
        statements: each with the blocks around it, outermost first. Neighbours share a block if they can.
    """
    body: list[Statement] = []
    for _, group in groupby(statements, key=_outermost):
        inside = [(blocks[:1], (blocks[1:], statement)) for blocks, statement in group]
        (block, _), *_ = inside
        if not block:
            body += [statement for _, (_, statement) in inside]
        elif isinstance(block[0], Case):
            sides = {
                holds: nested([entry for case, entry in inside if isinstance(case[0], Case) and case[0].holds == holds])
                for holds in (True, False)
            }
            test = block[0].test
            body.append(If(test, sides[True], sides[False]) if sides[True] else If(unary("not ", test), sides[False]))
        else:
            body.append(With(block[0], nested([entry for _, entry in inside])))
    return tuple(body)


def _outermost(entry: tuple[tuple[Block, ...], Statement]) -> object:
    """The outermost block around a statement; both sides of an ``if`` are one."""
    block = entry[0][:1]
    return (block[0].test, block[0].number) if block and isinstance(block[0], Case) else block


@dataclass(frozen=True)
class FunctionSource:
    """A function of the model, or the class of a ``torch.autograd.Function``, to be rendered.

    Attributes:
        name: of the function.
        author_text: all of it.
    """

    name: str
    author_text: SourceText

    def walk(self) -> Iterator[Node]:
        """All nodes of its source."""
        return self.author_text.walk()

    def uses(self) -> set[str]:
        """The names of the functions that it calls."""
        return functions_called(self.walk())


def functions_called(nodes: Iterable[Node]) -> set[str]:
    """The names of the functions and classes among the calls of source."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, FunctionCall):
            names.add(node.function.text.removesuffix(APPLY))
        elif isinstance(node, SourceText):
            names |= node.calls
    return names


@dataclass(frozen=True)
class ClassVariant:
    """A class in its author's text, with the branches that any module of the class runs.

    Attributes:
        init: the statements of ``__init__`` after ``super().__init__()``.
        text: its methods.
    """

    init: tuple[Statement, ...]
    text: SourceText


@dataclass(frozen=True)
class ClassSource:
    """A class to be rendered.

    Attributes:
        name, docstring: of the class.
        base: the class that it derives from.
        init_parameters: the parameters of ``__init__``.
        defaults: those after them, with the default of each.
        children: the arguments of ``super().__init__``.
        init: the statements of ``__init__`` after that.
        parameters: the parameters of ``forward``.
        forward: the statements of ``forward``.
        train: the statements of ``train`` after ``super().train(mode)``; empty without one.
        hooks: the lines of ``register_hooks``; empty without hooks.
        hook_libraries: the names of libraries in them.
        model_class: the model's own class.
        attributes: the numbers, texts and None that every module of that class holds, by the name of the attribute.
        part: "" for all of the model's class; "Start", "Middle" or "End" if stages begin inside.
        author_arguments: the names that the author's constructor has for the numbers in it.
        general: the class with the branches of others of its name, until they are merged or stay apart.
        is_general: whether it has them.
    """

    name: str
    docstring: str
    base: str = "nn.Module"
    init_parameters: tuple[str, ...] = ()
    defaults: Mapping[str, Expression] = field(default_factory=dict)
    children: tuple[Argument, ...] = ()
    init: tuple[Statement, ...] = ()
    parameters: tuple[str, ...] = ()
    forward: tuple[Statement, ...] = ()
    train: tuple[Statement, ...] = ()
    hooks: tuple[str, ...] = ()
    hook_libraries: frozenset[str] = frozenset()
    model_class: str = ""
    attributes: Mapping[str, Expression] = field(default_factory=dict)
    part: str = ""
    author_arguments: AuthorArguments | None = None
    general: ClassVariant | None = None
    is_general: bool = False

    @property
    def constructors(self) -> tuple[Node, ...]:
        """The code that makes the modules in it."""
        return *self.children, *self.init

    @property
    def author_text(self) -> SourceText | None:
        """Its methods, if they are the author's text; None if its ``forward`` is written from the graph."""
        first = self.forward[0] if self.forward else None
        return first if isinstance(first, SourceText) else None

    @property
    def calls_functions(self) -> bool:
        """Whether statements from the graph in an author's text call the author's functions."""
        return self.author_text is not None and self.author_text.calls_functions

    def walk(self) -> Iterator[Node]:
        """All nodes of its source."""
        for node in (*self.constructors, *self.forward):
            yield from node.walk()

    def uses(self) -> set[str]:
        """The names of the functions and classes that ``__init__`` calls."""
        inside = (node for part in self.constructors for node in part.walk())
        return {node.function.text for node in inside if isinstance(node, FunctionCall)}
