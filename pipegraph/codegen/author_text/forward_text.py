"""The text of a ``forward``, or of a method, of which some statements are written from the graph."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from pipegraph.codegen.author_text.constructors import Constructor
from pipegraph.codegen.author_text.cut import TextLine, UnwritableError
from pipegraph.codegen.author_text.names import AbsentPart, GraphPart, MixedMethod, ReadNames, TextPart
from pipegraph.codegen.author_text.variables import CallVariables
from pipegraph.codegen.forward.items import FunctionStep, ModuleCall, Step
from pipegraph.codegen.names.identifiers import unused, variable
from pipegraph.codegen.syntax.expressions import Collection, Expression, Name, literal
from pipegraph.codegen.syntax.line_breaks import LINE_LENGTH
from pipegraph.codegen.syntax.statements import Assign, Return, Statement, lines
from pipegraph.graph.calls import CallValues, result_place

_INDENT, _CLASS_INDENT = 4, 4

Write = Callable[[Sequence[Step], Mapping[fx.Node, str], Mapping[fx.Node, str]], tuple[Statement, ...]]
"""(steps, values that they may read → how the text has them, results → their names) → the statements, the last of which
returns the results."""


@dataclass
class _Written:
    """What a part that is written from the graph has.

    Attributes:
        steps: its operations and calls.
        inputs: the values that it reads → how the text has them.
        outputs: the variables that later parts read → their values.
    """

    steps: list[Step] = field(default_factory=list)
    inputs: dict[fx.Node, str] = field(default_factory=dict)
    outputs: dict[str, fx.Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """What a ``forward`` returns.

    Attributes:
        nodes: the values that are read after the call.
        form: what the author's returns: ``...`` for a tensor, a tuple, None for anything else. None if it is no
            nest of tuples.
        paths: the indices of the values in that form.
    """

    nodes: Sequence[fx.Node]
    form: object
    paths: Sequence[tuple[int, ...]]

    def expressions(self, values: Sequence[Expression]) -> tuple[Expression, ...]:
        """The values in the form of the author, with None for those that nothing reads."""
        if self.form is None:
            return tuple(values)
        by_path = dict(zip(self.paths, values, strict=True))

        def nested(form: object, path: tuple[int, ...]) -> Expression:
            if isinstance(form, tuple) and any(place[: len(path)] == path for place in by_path):
                return Collection(tuple(nested(part, (*path, index)) for index, part in enumerate(form)), "()")
            return by_path.get(path, literal(None))

        if isinstance(self.form, tuple) and len(self.form) > 1:
            return tuple(nested(part, (index,)) for index, part in enumerate(self.form))
        return (nested(self.form, ()),)


def results_of(called: CallValues) -> Results:
    """What a call returns."""
    places = [result_place(node, called.tree.call) for node in called.makes]
    paths = [place.path for place in places if place is not None and place.path is not None]
    form = places[0].form if len(paths) == len(places) and places and places[0] is not None else None
    return Results(called.makes, form, paths)


class MixedText:
    """Writes the text of a ``forward``, or of a method that it calls once.

    Args:
        function: its statements.
        variables: the variables of a call of it.
        results: what it returns, if its ``return`` may be written from the graph.
        name_of: returns a name for a value that has no variable.
        parameters: the values that a part of a ``forward`` takes → their names; None for all of it.
    """

    def __init__(
        self,
        function: ReadNames | MixedMethod,
        variables: CallVariables,
        results: Results,
        name_of: Callable[[fx.Node], str],
        parameters: Mapping[fx.Node, str] | None = None,
    ) -> None:
        self._header, self._parts = function.header, function.parts
        self._variables, self._results, self._name_of = variables, results, name_of
        self._parameters = parameters
        self._written = {at: _Written() for at, part in enumerate(self._parts) if isinstance(part, GraphPart)}

    @property
    def is_mixed(self) -> bool:
        """Whether some of its statements are written from the graph."""
        return bool(self._written)

    @property
    def has_author_results(self) -> bool:
        """Whether it returns what the author's ``forward`` does."""
        returns = isinstance(self._parts[-1], GraphPart) and self._parts[-1].returns
        return not returns or self._results.form is not None

    def add_steps(self, steps: Iterable[tuple[Step, int]]) -> dict[str, Constructor]:
        """Add the operations and calls, each with its line.

        Returns:
            the modules that are called in the statements from the graph.

        Raises:
            UnwritableError: a step is in none of the statements, or all of them are written from the graph.
        """
        part_of = {number: at for at, part in enumerate(self._parts) for number in part.numbers}
        has_text, called = False, dict[str, Constructor]()
        for step, line in steps:
            if line not in part_of:
                raise UnwritableError(f"it runs {step.nodes[0]} on none of its lines")
            if part_of[line] in self._written:
                self._written[part_of[line]].steps.append(step)
                if isinstance(step, ModuleCall):
                    called[step.fqn] = step.constructor, step.modules
                has_text |= isinstance(step, FunctionStep)
            else:
                has_text = True
        if not has_text:
            raise UnwritableError("all of its operations would be written from the graph")
        return called

    def text(
        self, write: Write, first: Sequence[Statement] = (), attributes_set: Iterable[str] = ()
    ) -> tuple[list[TextLine], list[Statement]]:
        """Return the lines of the text, and the statements among them from the graph. Raises UnwritableError.

        Args:
            first: the statements with which it begins.
            attributes_set: the attributes that it deletes before it returns.
        """
        self._connect()
        statements: dict[int, tuple[Statement, ...]] = {}
        assigned: dict[str, int] = {}
        for at, part in enumerate(self._parts):
            if isinstance(part, GraphPart):
                statements[at] = self._statements(at, part, assigned, write)
            assigned |= dict.fromkeys(part.assigns, at)
        text: list[TextLine] = []
        used: set[str] = set()
        for at, part in reversed(list(enumerate(self._parts))):
            part_lines: tuple[TextLine, ...] = ()
            if isinstance(part, TextPart):
                part_lines = part.without_unused(used)
                used |= part.reads if part_lines else set()
            elif isinstance(part, GraphPart):
                new_lines = _text_lines(statements[at])
                part_lines = (*part.comments, *new_lines) if statements[at] else ()
                read, stored = _names_of(statements[at])
                used = (used - stored) | read
            text[:0] = part_lines
        body = _without_gaps(text)
        if attributes_set:
            body = _without_attributes(list(body), sorted(attributes_set))
        text = [*self._header, *_text_lines(first), *body]
        return text, [*first, *(statement for group in statements.values() for statement in group)]

    # ---- connections -------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Find the variables by which the parts pass values to each other."""
        makers = {node: at for at, written in self._written.items() for step in written.steps for node in step.nodes}
        assigned: dict[str, int] = {}
        assigned_before: dict[int, dict[str, int]] = {}
        for at, part in enumerate(self._parts):
            if isinstance(part, TextPart):
                for name in sorted(part.reads):
                    maker = assigned.get(name, -1)
                    maker_part = self._parts[maker]
                    if maker not in self._written or not isinstance(maker_part, GraphPart):
                        continue
                    value = self._variables.value(name, maker_part.numbers)
                    if value is None:
                        continue
                    self._written[maker].outputs[name] = value
                    if makers.get(value) != maker and value.op != "get_attr":  # it assigns what another part made
                        try:
                            variable_text = self._input(value, assigned_before[maker], makers)
                        except UnwritableError:
                            if self._parameters is None:
                                raise
                            del self._written[maker].outputs[name]  # a child takes it that does not read it
                        else:
                            self._written[maker].inputs[value] = variable_text
            elif isinstance(part, GraphPart):
                assigned_before[at] = dict(assigned)
                for node in self._values_read(at, part):
                    self._written[at].inputs[node] = self._input(node, assigned, makers)
            assigned |= dict.fromkeys(part.assigns, at)

    def _values_read(self, at: int, part: GraphPart) -> list[fx.Node]:
        """The values from outside that a part reads, and those that it returns."""
        steps = self._written[at].steps
        inside = {node for step in steps for node in step.nodes}
        read = [node for step in steps for node in step.reads if node.op != "get_attr"]
        returned = list(self._results.nodes) if part.returns else []
        return [node for node in dict.fromkeys((*read, *returned)) if node not in inside]

    def _input(self, node: fx.Node, assigned: Mapping[str, int], makers: Mapping[fx.Node, int]) -> str:
        """How the text has a value before a part. Raises UnwritableError if it does not."""
        names = {text: maker for text, value, maker in self._available(assigned) if value is node}
        of_text = [text for text, maker in names.items() if maker not in self._written]
        if of_text:
            return of_text[-1]
        for text, maker in reversed(names.items()):
            self._written[maker].outputs[text] = node
            return text
        if (maker := makers.get(node, -1)) < 0:
            raise UnwritableError(f"no variable has {node}")
        outputs = self._written[maker].outputs
        for text, value in outputs.items():
            if value is node and assigned.get(text, maker) == maker:
                return text
        name = unused(variable(self._name_of(node), "x"), self._all_variables().union(outputs))
        outputs[name] = node
        return name

    def _available(self, assigned: Mapping[str, int]) -> Iterable[tuple[str, fx.Node, int]]:
        """The variables that the text has at a place: the text, the value, and the part that assigns it.

        Args:
            assigned: the last part before that place that assigns each variable.
        """
        yield from ((name, node, -1) for node, name in (self._parameters or {}).items() if name not in assigned)
        for maker in (-1, *sorted(set(assigned.values()))):
            part = self._parts[maker] if maker >= 0 else None
            parameters = self._parameters if part is None or isinstance(part, AbsentPart) else None
            for (name, path), node in self._variables.values_before(max(part.numbers) + 1 if part else 1).items():
                if assigned.get(name, -1) != maker or (
                    parameters is not None and (path or parameters.get(node) != name)
                ):
                    continue
                if not path or not isinstance(part, GraphPart):
                    yield name + "".join(f"[{index}]" for index in path), node, maker

    def _all_variables(self) -> set[str]:
        return {name for part in self._parts for name in part.assigns} | {
            name for part in self._parts if isinstance(part, TextPart) for name in part.reads
        }

    # ---- statements --------------------------------------------------------------------------------------------------

    def _statements(self, at: int, part: GraphPart, assigned: Mapping[str, int], write: Write) -> tuple[Statement, ...]:
        written = self._written[at]
        inputs = dict(written.inputs)
        for text, node, maker in self._available(assigned):
            if maker not in self._written or text in self._written[maker].outputs:
                inputs.setdefault(node, text)  # an operation may name one of its sizes
        names = {node: name for name, node in written.outputs.items()}
        outputs = {node: self._name_of(node) for node in self._results.nodes} if part.returns else names
        if not written.steps and not outputs:
            return ()
        *statements, result = write(written.steps, inputs, outputs)
        assert isinstance(result, Return)
        if result.count is None:
            raise UnwritableError("a statement returns a list")
        if part.returns:
            return (*statements, Return(self._results.expressions(result.values)))
        values = dict(zip(outputs, result.values, strict=True))
        for name, node in written.outputs.items():
            if values[node] != Name(name):
                statements.append(Assign((Name(name),), values[node]))
        self._check_names(at, statements, assigned)
        return tuple(statements)

    def _check_names(self, at: int, statements: Sequence[Statement], assigned: Mapping[str, int]) -> None:
        """Raise UnwritableError if a statement assigns a variable that a later statement reads as it was before."""
        stored = {
            target.text
            for statement in statements
            for node in statement.walk()
            if isinstance(node, Assign)
            for target in node.targets
        } - self._written[at].outputs.keys()
        for part in self._parts[at + 1 :]:
            if isinstance(part, TextPart) and (lost := stored & part.reads):
                raise UnwritableError(f"{min(lost)} would be something else")
            stored -= part.assigns


def _text_lines(statements: Sequence[Statement]) -> Iterator[TextLine]:
    """Statements as lines of a method that is not in its class yet."""
    in_class = lines(statements, _INDENT + _CLASS_INDENT)
    return (TextLine(line[_CLASS_INDENT:], 0) for line in in_class)


def _without_attributes(text: Sequence[TextLine], names: Sequence[str]) -> Iterator[TextLine]:
    """A body that deletes the attributes that it set before it returns.

    Otherwise the module would hold the activations of its last call, and kernels could not be traced from it: a graph
    would not set the attributes.
    """
    margin = " " * _INDENT
    begin = max(at for at, line in enumerate(text) if line.text.startswith(f"{margin}return"))
    first, *after_first = text[begin:]
    reads_module = any(re.search(r"\bself\b", line.text) for line in (first, *after_first))
    yield from text[:begin]
    if reads_module:
        yield first._replace(text=first.text.replace("return ", "outputs = ", 1))
        yield from after_first
    yield TextLine(f"{margin}# A stage holds no tensors between calls.", 0)
    width = LINE_LENGTH - _CLASS_INDENT - len(f"{margin}del ")
    for targets in textwrap.wrap(", ".join(f"self.{name}" for name in names), width, break_long_words=False):
        yield TextLine(f"{margin}del {targets.removesuffix(',')}", 0)
    if reads_module:
        yield TextLine(f"{margin}return outputs", 0)
    else:
        yield from (first, *after_first)


def _without_gaps(text: Iterable[TextLine]) -> Iterator[TextLine]:
    """Lines without empty ones at the beginning, and after another."""
    is_empty = True
    for line in text:
        if line.text or not is_empty:
            yield line
        is_empty = not line.text


def _names_of(statements: Iterable[Statement]) -> tuple[set[str], set[str]]:
    """The variables that statements read as they were before, and those that they assign."""
    read, stored = set[str](), set[str]()
    for statement in statements:
        parts = [statement.value] if isinstance(statement, Assign) else [statement]
        names = (node.name for part in parts for node in part.walk() if isinstance(node, Name))
        read |= {re.split(r"\W", name)[0] for name in names} - stored
        stored |= {target.text for target in statement.targets} if isinstance(statement, Assign) else set()
    return read, stored
