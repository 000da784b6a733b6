"""What is wrong with a JSON file that does not fit its structure, in words and with the place in the file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import inspect

from pipegraph.errors import PipegraphError, nearest, one_line

HIDDEN_KEY: Final = "(key)"
"""A field that no file has: messages do not list it."""

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
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a number with more than 30 digits"
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
        keys = [field.encode_name for field in fields if field.encode_name != HIDDEN_KEY]
        unknown = next(name for name in value if name not in keys and name != HIDDEN_KEY)
        return f"{prefix}{as_json(unknown)} is not a key here.{nearest(unknown, keys)} There are: {', '.join(keys)}"
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
    return f"does not fit: {message}"


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
    expected_types: Any = (inspect.StructType, inspect.DictType) if isinstance(value, dict) else inspect.VarTupleType
    return next((member for member in spec.types if isinstance(member, expected_types)), None)
