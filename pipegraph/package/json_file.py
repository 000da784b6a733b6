"""Read JSON files into typed structures: manifests, plans, hardware profiles, indices of weights.

A structure is a frozen `msgspec.Struct`. Whatever is wrong with a file becomes one error:
*file: path.in.the.file: what is wrong and what it must be, and the nearest key*.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import Meta, inspect

from pipegraph.errors import PipegraphError, nearest, one_line, path_from_here
from pipegraph.regular_file import read_regular_file

_LINE: Final = 140
_SIGNS: Final[Mapping[str, frozenset[str]]] = {
    "a manifest": frozenset({"generator", "stages", "values"}),
    "a plan": frozenset({"inputs", "points"}),
    "a hardware profile": frozenset({"memory_bandwidth", "peak_flops"}),
    "an index of safetensors": frozenset({"weight_map"}),
    "a Hugging Face configuration": frozenset({"model_type"}),
    "a trace": frozenset({"traceEvents"}),
}
"""Kinds of files → keys by which one is recognised where another kind was expected."""

Count = Annotated[int, Meta(ge=0, le=10**18)]
Figure = Annotated[float, Meta(ge=0, le=1e30)]
Text = Annotated[str, Meta(max_length=4096)]
LongText = Annotated[str, Meta(max_length=10**7)]
Name = Annotated[str, Meta(min_length=1, max_length=4096)]

Structure = TypeVar("Structure")


def choice_of(*choices: str) -> Meta:
    """Restrict a string to these choices."""
    return Meta(pattern=f"^({'|'.join(choices)})$")


KEY: Final = "(key)"
"""What a file would call the field that holds the key of a structure. `FileKind.prepare` puts it there. No file has it:
messages do not list it."""

Place = list[str | int]
"""The way from the whole of a file to a part of it: keys of objects, and positions in lists."""

_CLIP: Final = 60
_LONG_WORD: Final = re.compile(rf"\S{{{_CLIP + 20},}}")
_LONGEST: Final = 800
_TYPES: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}
_LIMITS: Final = {">=": "{} or more", "<=": "{} or less", ">": "more than {}", "<": "less than {}"}


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A structure of a file: frozen, and without other keys than its own."""


@dataclass(frozen=True)
class FileKind(Generic[Structure]):
    """A kind of JSON file.

    Attributes:
        structure: what it is read into.
        name: what messages call it: ``"a hardware profile"``.
        error: the class of every error.
        advice: the last line of a message.
        version: the newest ``schema_version`` that can be read; None for files without one.
        prepare: changes the content of a file, perhaps of an older version, to what `structure` takes. Only the version
            has been checked by then, so it leaves alone whatever it does not understand.
    """

    structure: type[Structure]
    name: str
    error: type[PipegraphError]
    advice: str
    version: int | None = None
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda content: content

    def read(self, file: Path) -> Structure:
        """Read a file. Raises ``error`` for whatever is not a sound file of this kind."""
        try:
            data = read_regular_file(file)
        except (OSError, ValueError) as problem:
            raise self.problem(path_from_here(file), getattr(problem, "strerror", None) or str(problem)) from None
        return self.decode(data, path_from_here(file))

    def decode(self, text: str | bytes, where: str) -> Structure:
        """Read the content of a file; ``where`` opens the message of every error."""
        content: Any = None
        try:
            content = self.prepare(self._checked(_parse(text)))
            return msgspec.convert(content, self.structure)
        except msgspec.ValidationError as problem:
            message = explain(problem, content, self.structure)
        except RecursionError:
            message = "the file is nested too deeply"
        except PipegraphError as error:  # of a structure
            message = error.problem
        except ValueError as error:  # of `_parse` and `_checked`
            message = str(error)
        raise self.problem(where, message)

    def problem(self, where: str, message: str) -> PipegraphError:
        """Return the error for something that is wrong with a file."""
        return self.error(f"{one_line(where)}: {one_line(message).rstrip('.')}.\n{self.advice}")

    def _checked(self, content: Any) -> dict[str, Any]:
        """The content, if it is an object of a version that can be read."""
        if not isinstance(content, dict):
            raise ValueError(f"the whole is {as_json(content)}: {self.name} must be an object")
        other_kind = _other_kind(self.name, content)
        if other_kind is not None:
            raise ValueError(f"it is {other_kind}, and must be {self.name}")
        if self.version is not None:
            version = content.get("schema_version")
            if type(version) is not int:
                raise ValueError(f"it has no schema_version, and is not {self.name} of pipegraph")
            if not 1 <= version <= self.version:
                raise ValueError(
                    f"schema_version: it is {as_json(version)}, and this pipegraph reads 1 to {self.version}. A newer "
                    f"pipegraph may read the file, if it is {self.name} at all"
                )
        return content


def json_text(content: Any, indent: str = "") -> str:
    """Return JSON for people: whatever fits on a line of 140 characters is on one line."""
    line = json.dumps(content, ensure_ascii=False)
    if not content or not isinstance(content, (dict, list, tuple)) or len(indent) + len(line) <= _LINE:
        return line
    if isinstance(content, dict):
        inner = [f"{json.dumps(key, ensure_ascii=False)}: {json_text(content[key], indent + ' ')}" for key in content]
    else:
        inner = [json_text(member, indent + " ") for member in content]
    opening, closing = "{}" if isinstance(content, dict) else "[]"
    return f"{opening}\n{indent} " + f",\n{indent} ".join(inner) + f"\n{indent}{closing}"


def _parse(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError with the line, and RecursionError for JSON that is nested too deeply."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError) as problem:
        byte = re.search(r"\(byte (\d+)\)", str(problem))
        data = text.encode(errors="replace") if isinstance(text, str) else text
        line = f" at line {data[: int(byte[1])].count(10) + 1}" if byte else ""
        raise ValueError(f"the file is not JSON, or truncated: {problem}{line}") from None


def _other_kind(name: str, content: dict[str, Any]) -> str | None:
    """Return the kind of file that has these keys, if it is not the one that is called ``name``."""
    expected_keys = _SIGNS.get(name)
    if expected_keys is not None and expected_keys <= content.keys():
        return None
    return next((kind for kind, keys in _SIGNS.items() if keys <= content.keys()), None)


# ---- errors ----------------------------------------------------------------------------------------------------------
# What is wrong with a file that does not fit its structure, in words and with the place in the file.


class FieldError(PipegraphError, ValueError):
    """The error of a structure with a wrong field.

    Attributes:
        place: the field, below the structure, as `place_text` gives it.
        reason: what is wrong with it.
    """

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.place, self.reason = place, reason


def place_text(place: Sequence[str | int]) -> str:
    """Return a place in a file as text.

    >>> place_text(["values", "h", "shape", 0])
    'values.h.shape[0]'
    """
    parts = (f"[{part}]" if isinstance(part, int) else f".{clipped(one_line(part))}" for part in place)
    return "".join(parts).removeprefix(".")


def as_json(value: Any) -> str:
    """Return a value as JSON, on one line and not long.

    >>> as_json("a"), as_json([1]), as_json(None)
    ('"a"', 'a list', 'null')
    """
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return clipped(one_line(json.dumps(value, ensure_ascii=False)))


def clipped(text: str) -> str:
    """Return at most 60 characters of a text."""
    return text if len(text) <= _CLIP else f"{text[: _CLIP - 1]}…"


def shortened(message: str) -> str:
    """Return a message with its long words clipped, and clipped itself: names in a file may be very long."""
    text = _LONG_WORD.sub(lambda match: clipped(match[0]), message)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def explain(error: msgspec.ValidationError, content: Any, structure: type) -> str:
    """Say what msgspec found wrong: the place, what is there and what must be there.

    Args:
        error: what `msgspec.convert` raised for the content and the structure.
        content: the content of the file, of which entries are removed here.
        structure: what the content does not fit.
    """
    message, _, path = str(error).partition(" - at ")
    is_key = path.startswith("`key` in ")
    parts = re.findall(r"\w+|\.\.\.", path.partition("$")[2]) + ["..."] * is_key
    place, spec = _locate(parts, content, structure, str(error))
    key = place.pop() if is_key else None
    prefix, value = (f"{place_text(place)}: " if place else ""), _at(content, place)
    if isinstance(error.__cause__, FieldError):
        below = error.__cause__.place
        dot = "." if place and below and not below.startswith("[") else ""
        return f"{place_text(place)}{dot}{below}: {error.__cause__.reason}".removeprefix(": ")
    if is_key:
        return f"{prefix}the key {as_json(key)} {_must(message, key)}"
    if match := re.fullmatch(r"Object missing required field `(.*)`", message):
        return f"{prefix}it lacks {match[1]}"
    if message.startswith("Object contains unknown field"):
        fields = spec.fields if isinstance(spec, inspect.StructType) else ()
        keys = [field.encode_name for field in fields if field.encode_name != KEY]
        unknown = next(name for name in value if name not in keys and name != KEY)
        return f"{prefix}{as_json(unknown)} is not a key here.{nearest(unknown, keys)} There are: {', '.join(keys)}"
    if isinstance(spec, inspect.LiteralType):
        choices = [str(choice) for choice in spec.values]
        return f"{prefix}{as_json(value)} must be one of {', '.join(choices)}.{nearest(str(value), choices)}"
    return f"{prefix}{as_json(value)} {_must(message, value)}"


def _must(message: str, value: Any) -> str:
    """Return what msgspec expected of a value, in words."""
    if match := re.match(r"Expected `([^`]*)`(?:, got|$)", message):
        return f"must be {' or '.join(_TYPES.get(name, name) for name in match[1].split(' | '))}"
    if match := re.match(r"Expected `\w+` (<=?|>=?) (\S+)", message):
        limit = f"{float(match[2]):g}" if "." in match[2] or "e" in match[2] else match[2]
        return f"must be {_LIMITS[match[1]].format(limit)}"
    if match := re.match(r"Expected `(\w+)` of length (>=|<=) (\d+)", message):
        unit = "characters" if match[1] == "str" else "entries"
        return f"must have {match[3]} or {'more' if match[2] == '>=' else 'fewer'} {unit}"
    if match := re.fullmatch(r"Expected `str` matching regex '\^\((.*)\)\$'", message):
        choices = match[1].split("|")
        return f"must be one of {', '.join(choices)}.{nearest(str(value), choices)}"
    return f"does not fit: {shortened(message)}"


def _locate(parts: Sequence[str], content: Any, structure: type, message: str) -> tuple[Place, inspect.Type | None]:
    """Follow a path of msgspec, and find the keys of objects that it leaves out (``...``).

    A key is found by halving: of an object, the half of the entries with which the same error comes stays.

    Returns:
        the place, and the type that msgspec expects there.
    """
    place: Place = []
    spec: inspect.Type | None = inspect.type_info(structure)
    for part in parts:
        container = _at(content, place)
        spec = _member(spec, container)
        while part == "..." and len(container) > 1:
            entries = list(container.items())
            half = dict(entries[: len(entries) // 2])
            container.clear()
            container.update(half)
            if not _fails(content, structure, message):
                container.clear()
                container.update(entries[len(half) :])
        place.append(int(part) if part.isdigit() else next(iter(container)) if part == "..." else part)
        spec = _below(spec, place[-1])
    return place, _member(spec, _at(content, place))


def _fails(content: Any, structure: type, message: str) -> bool:
    try:
        msgspec.convert(content, structure)
    except (msgspec.ValidationError, PipegraphError) as error:
        return str(error) == message
    return False


def _at(content: Any, place: Place) -> Any:
    for part in place:
        content = content[part]
    return content


def _below(spec: inspect.Type | None, part: str | int) -> inspect.Type | None:
    """The type of a field, an entry or an item."""
    match spec:
        case inspect.StructType(fields=fields):
            return next((field.type for field in fields if field.encode_name == part), None)
        case inspect.DictType(value_type=below) | inspect.VarTupleType(item_type=below):
            return below
    return None


def _member(spec: inspect.Type | None, value: Any) -> inspect.Type | None:
    """The member of a union that takes such a value."""
    if not isinstance(spec, inspect.UnionType):
        return spec
    expected_types: Any = inspect.LiteralType if isinstance(value, str) else inspect.VarTupleType
    if isinstance(value, dict):
        expected_types = (inspect.StructType, inspect.DictType)
    return next((member for member in spec.types if isinstance(member, expected_types)), None)
