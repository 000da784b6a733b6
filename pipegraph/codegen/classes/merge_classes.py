"""Classes that differ in numbers only become one class, and the numbers arguments of its constructor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipegraph.codegen.classes.class_source import ClassSource
from pipegraph.codegen.classes.pieces import Hole, Options, Piece, call_texts, pieces, rename_calls
from pipegraph.codegen.names.identifiers import class_name, unused, unused_class, variable

# A class with more arguments than this says less than two copies of it do; each further copy is worth two more.
_MOST, _PER_COPY = 6, 2


def merge(blocks: Sequence[ClassSource], stages: Sequence[ClassSource]) -> tuple[list[ClassSource], list[ClassSource]]:
    """blocks, stages → fewer blocks, with arguments; stages that make them.

    ``Conv1D(nf=96, nx=32)`` and ``Conv1D(nf=32, nx=32)`` instead of a ``Conv1D`` and a ``Conv1D2``. Inner classes come
    first: classes that hold them differ in numbers only once they are merged.
    """
    classes, users = list(blocks), list(stages)
    while families := _families(classes):
        calls = {member.name: family.call(position) for family in families for position, member in family.numbered()}
        merged = {family.members[0].name: family.source() for family in families}
        gone = {member.name for family in families for member in family.members[1:]}
        classes = [
            _in_texts(merged.get(each.name, each), call_texts, calls) for each in classes if each.name not in gone
        ]
        users = [_in_texts(each, call_texts, calls) for each in users]
    names = _numbered_names(classes)
    classes = [_in_texts(replace(each, name=names[each.name]), rename_calls, names) for each in classes]
    return classes, [_in_texts(each, rename_calls, names) for each in users]


def _numbered_names(classes: Sequence[ClassSource]) -> dict[str, str]:
    """The names of classes, numbered anew where some are gone."""
    names: dict[str, str] = {}
    for each in classes:
        names[each.name] = unused_class(class_name(each.model_class), set(names.values()))
    return names


def _families(classes: Sequence[ClassSource]) -> list[_Family]:
    arguments = {each.name: each.arguments for each in classes}
    rows: dict[object, list[ClassSource]] = {}
    for each in classes:
        if not each.arguments:
            rows.setdefault(_template(each, arguments), []).append(each)
    found = [_Family(tuple(members), _varying(members, arguments), arguments) for members in rows.values()]
    return [
        family
        for family in found
        if len(family.members) > 1 and len(family.varying) <= _MOST + _PER_COPY * (len(family.members) - 2)
    ]


def _texts(source: ClassSource) -> list[str]:
    return [*source.assignments, *source.children, *(text for _, text in source.body)]


def _template(source: ClassSource, arguments: Mapping[str, tuple[str, ...]]) -> object:
    """What two classes of one family have in common: all but their numbers."""
    shape = (source.model_class, source.base, source.parameters, tuple(regions for regions, _ in source.body))
    texts = [pieces(text, arguments) for text in _texts(source)]
    return shape, tuple(
        tuple(piece if isinstance(piece, str) else (type(piece), piece.template) for piece in text) for text in texts
    )


def _holes(source: ClassSource, arguments: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str, Hole | Options]]:
    """(value, name that it has where it stands, piece) for every number, in an order that a family shares."""
    for text in _texts(source):
        for piece in pieces(text, arguments):
            if isinstance(piece, Hole):
                yield piece.value, piece.name, piece
            elif isinstance(piece, Options):
                yield from ((value, name, piece) for name, value in piece.everything().items())


def _varying(members: Sequence[ClassSource], arguments: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """The rows of numbers, one for each member, that are not equal throughout → the argument that each becomes."""
    columns = [list(_holes(member, arguments)) for member in members]
    attributes = {text.split(" = ")[0].removeprefix("self.") for text in members[0].assignments}
    taken = {*members[0].parameters, *attributes}
    found: dict[tuple[str, ...], str] = {}
    for row in zip(*columns, strict=True):
        values = tuple(value for value, _, _ in row)
        if len(set(values)) > 1 and values not in found:
            own = [name for name in members[0].numbers if _has(members, name, values)]
            name = row[0][1] if row[0][1] in own or not own else own[0]
            found[values] = unused(variable(name, "size"), {*taken, *found.values()})
    return found


def _has(members: Sequence[ClassSource], name: str, values: Sequence[str]) -> bool:
    return all(member.numbers.get(name) == value for member, value in zip(members, values, strict=True))


@dataclass(frozen=True)
class _Family:
    """Classes with one template; ``varying`` maps the numbers in which they differ to the names of arguments."""

    members: tuple[ClassSource, ...]
    varying: dict[tuple[str, ...], str]
    arguments: Mapping[str, tuple[str, ...]]

    def numbered(self) -> Iterator[tuple[int, ClassSource]]:
        return iter(enumerate(self.members))

    def call(self, position: int) -> str:
        """The constructor's call for one member."""
        named = [(name, values[position]) for values, name in self.varying.items()]
        short = len(named) <= 2 and all(value.isdigit() for _, value in named)
        inside = ", ".join(value if short else f"{name}={value}" for name, value in named)
        return f"{self.members[0].name}({inside})"

    def source(self) -> ClassSource:
        """The class of all members: that of the first, with arguments for numbers."""
        first = self.members[0]
        rows = zip(*([value for value, _, _ in _holes(member, self.arguments)] for member in self.members), strict=True)
        filled = iter([self.varying.get(tuple(row)) for row in rows])
        assignments = tuple(self._filled(text, filled, str) for text in first.assignments)
        children = tuple(self._filled(text, filled, str) for text in first.children)
        kept: dict[str, None] = {}

        def attribute(name: str) -> str:
            kept[name] = None
            return f"self.{name}"

        body = tuple((regions, self._filled(text, filled, attribute)) for regions, text in first.body)
        stored = tuple(f"self.{name} = {name}" for name in kept)
        return replace(
            first,
            arguments=tuple(self.varying.values()),
            assignments=(*stored, *assignments),
            children=children,
            body=body,
        )

    def _filled(self, text: str, filled: Iterator[str | None], reading: Callable[[str], str]) -> str:
        return "".join(self._piece(piece, filled, reading) for piece in pieces(text, self.arguments))

    def _piece(self, piece: Piece, filled: Iterator[str | None], reading: Callable[[str], str]) -> str:
        if isinstance(piece, str):
            return piece
        if isinstance(piece, Hole):
            name = next(filled)
            return piece.value if name is None else reading(name)
        names = {option: next(filled) for option in piece.everything()}
        return piece.text({option: reading(name) for option, name in names.items() if name is not None})


def _in_texts(
    source: ClassSource, change: Callable[[str, Mapping[str, str]], str], names: Mapping[str, str]
) -> ClassSource:
    """A class with a change made wherever it makes objects of other classes."""
    return replace(
        source,
        assignments=tuple(change(text, names) for text in source.assignments),
        children=tuple(change(text, names) for text in source.children),
    )
