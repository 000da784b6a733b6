"""JSON files that are read into typed structures: manifests, plans, hardware profiles, indices of weights.

A structure is a frozen `msgspec.Struct`. Whatever is wrong with a file becomes one error:
*file: path.in.the.file: what is wrong and what it must be, and the nearest key*.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import Meta, inspect

from pipegraph.errors import PipegraphError, nearest, one_line

LIMIT: Final = 16 * 2**20
"""Bytes of the largest file that is read."""

_LINE: Final = 140
_CLIP: Final = 60
_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_WORDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}

_LIMITS: Final = {">=": "{} or more", "<=": "{} or less", ">": "more than {}", "<": "less than {}"}

Count = Annotated[int, Meta(ge=0, le=10**18)]
Figure = Annotated[float, Meta(ge=0, le=1e30)]
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(min_length=1, max_length=4096)]

KEY: Final = "(key)"
"""The name in a file of a field that holds the key under which the structure stands, which `prepare` puts there."""

Place = list[str | int]
"""The way from the whole of a file to a part of it: keys of objects, and positions in lists."""

Structure = TypeVar("Structure")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A structure of a file: frozen, and without other keys than its own."""


class FieldError(PipegraphError, ValueError):
    """What a structure raises for a field that cannot be.

    Attributes:
        place: the field, below the structure, as `place_text` gives it.
        problem: what is wrong with it.
    """

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}" if place else problem)
        self.place, self.problem = place, problem


@dataclass(frozen=True)
class FileKind(Generic[Structure]):
    """A kind of JSON file.

    Attributes:
        structure: what it is read into.
        name: what it is called in messages: ``"a hardware profile"``.
        error: the class of every error.
        advice: the last line of a message.
        version: the newest ``schema_version`` that can be read; None for files without one.
        prepare: changes the content of the file, of an older version perhaps, to what `structure` takes. It is called
            before anything but the version was checked, and leaves alone what it does not understand.
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
            data = _read_bytes(file)
        except (OSError, ValueError) as problem:
            raise self.problem(str(file), getattr(problem, "strerror", None) or str(problem)) from None
        return self.decode(data, str(file))

    def decode(self, text: str | bytes, where: str) -> Structure:
        """Read the content of a file; ``where`` opens the message of every error."""
        content: Any = None
        try:
            data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
            content = self.prepare(self._checked(_parse(data)))
            return msgspec.convert(content, self.structure)
        except msgspec.ValidationError as problem:
            said = _located(problem, content, self.structure)
        except RecursionError:
            said = "the file is nested too deeply"
        except (PipegraphError, ValueError) as problem:  # of a structure, or of `_parse`
            said = str(problem).partition("\nTry:")[0].replace("\n", " ")
        raise self.problem(where, said)

    def problem(self, where: str, said: str) -> PipegraphError:
        """The error for something that is wrong with a file."""
        return self.error(f"{one_line(where)}: {one_line(said).rstrip('.')}.\n{self.advice}")

    def _checked(self, content: Any) -> dict[str, Any]:
        if not isinstance(content, dict):
            raise FieldError("", f"the whole is {_short(content)}: {self.name} must be an object")
        if self.version is not None:
            found = content.get("schema_version")
            if type(found) is not int:
                raise FieldError("", f"it has no schema_version, and is not {self.name} of pipegraph")
            if not 1 <= found <= self.version:
                raise FieldError(
                    "schema_version",
                    f"it is {_short(found)}, and this pipegraph reads 1 to {self.version}. A newer pipegraph may "
                    "read the file",
                )
        return content


def one_of(*choices: str) -> Meta:
    """The choices that a string has."""
    return Meta(pattern=f"^({'|'.join(choices)})$")


def json_text(content: Any, indent: str = "") -> str:
    """JSON that people can read: what fits on a line of 140 characters stands on one."""
    line = json.dumps(content, ensure_ascii=False)
    if not content or not isinstance(content, (dict, list, tuple)) or len(indent) + len(line) <= _LINE:
        return line
    if isinstance(content, dict):
        inner = [f"{json.dumps(key, ensure_ascii=False)}: {json_text(content[key], indent + ' ')}" for key in content]
    else:
        inner = [json_text(each, indent + " ") for each in content]
    opening, closing = "{}" if isinstance(content, dict) else "[]"
    return f"{opening}\n{indent} " + f",\n{indent} ".join(inner) + f"\n{indent}{closing}"


def place_text(place: Sequence[str | int]) -> str:
    """A place in a file as text.

    >>> place_text(["values", "h", "shape", 0])
    'values.h.shape[0]'
    """
    parts = (f"[{part}]" if isinstance(part, int) else f".{_clip(one_line(part))}" for part in place)
    return "".join(parts).removeprefix(".")


def _read_bytes(file: Path) -> bytes:
    """The bytes of a regular file of at most `LIMIT` bytes. Raises OSError or ValueError; never waits."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something')}, not a regular file")
    with file.open("rb") as opened:
        data = opened.read(LIMIT + 1) if status.st_size <= LIMIT else b""
    if (not data and status.st_size) or len(data) > LIMIT:
        raise ValueError(f"it has {max(status.st_size, len(data))} bytes, and at most {LIMIT} are read")
    return data


class _Repeated(dict[str, Any]):
    """An object of a file that has a key twice."""

    key = ""


def _parse(data: bytes) -> Any:
    """The JSON of a file. Raises ValueError; RecursionError for JSON that is nested too deeply."""
    if data.startswith(b"\xef\xbb\xbf"):
        raise ValueError("the file begins with a byte order mark: save it as UTF-8 without one")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the file is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None
    if not text.strip():
        raise ValueError("the file is empty")
    strange = [re.search(r"\\u[dD][89a-fA-F]", text) is not None]

    def gathered(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        seen: set[str] = set()
        repeated = _Repeated(made)
        repeated.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        strange.append(True)
        return repeated

    try:
        content = json.loads(text, object_pairs_hook=gathered)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"the file is not JSON, or truncated: {error.msg} at {place}") from None
    except ValueError:  # Python reads no more digits: sys.get_int_max_str_digits
        raise ValueError("the file has a number with thousands of digits") from None
    if any(strange):
        for where, problem in _strange(content):
            raise FieldError(place_text(where), problem)
    return content


def _strange(content: Any) -> Iterator[tuple[Place, str]]:
    """Keys that stand twice in an object, and text that is not Unicode."""
    pending: list[tuple[Place, Any]] = [([], content)]
    while pending:
        place, part = pending.pop()
        if isinstance(part, _Repeated):
            yield place, f'it has the key "{_clip(one_line(part.key))}" twice'
        if isinstance(part, str) and _is_broken(part):
            yield place, f"{_short(part)} is half a character: \\ud800 to \\udfff stand in pairs"
        if isinstance(part, dict):
            for key in filter(_is_broken, part):
                yield place, f"the key {_short(key)} is half a character: \\ud800 to \\udfff stand in pairs"
            pending += (([*place, key], item) for key, item in part.items())
        elif isinstance(part, list):
            pending += (([*place, index], item) for index, item in enumerate(part))


def _is_broken(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _located(error: msgspec.ValidationError, content: Any, structure: type) -> str:
    """What msgspec says is wrong, with the place and what stands there."""
    said, _, path = str(error).partition(" - at ")
    is_key = path.startswith("`key` in ")
    parts = re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path.partition("$")[2])
    place = _exact([name or index for name, index in parts] + ["..."] * is_key, content, structure, str(error))
    key = place.pop() if is_key else None
    cause = error.__cause__
    if isinstance(cause, FieldError):
        below = f".{cause.place}" if cause.place and not cause.place.startswith("[") else cause.place
        return f"{place_text(place)}{below}: {cause.problem}".removeprefix(".").removeprefix(": ")
    there = f"{place_text(place)}: " if place else ""
    value = _at(content, place)
    if is_key:
        return f"{there}the key {_short(key)} {_must(said, key)}"
    if found := re.fullmatch(r"Object missing required field `(.*)`", said):
        return f"{there}it lacks {found[1]}"
    spec = _spec_at(inspect.type_info(structure), content, place)
    if found := re.fullmatch(r"Object contains unknown field `(.*)`", said, re.DOTALL):
        fields = spec.fields if isinstance(spec, inspect.StructType) else ()
        known = [field.encode_name for field in fields if field.encode_name != KEY]
        unknown = next((name for name in value if name not in known), found[1])
        return f"{there}{_short(unknown)} is not a key here.{nearest(unknown, known)} There are: {', '.join(known)}"
    return f"{there}{_short(value)} {_must(said, value)}"


def _must(said: str, value: Any) -> str:
    """What msgspec expected of a value, in words."""
    if found := re.match(r"Expected `([^`]*)`(?:, got|$)", said):
        return f"must be {' or '.join(_WORDS.get(each, each) for each in found[1].split(' | '))}"
    if found := re.match(r"Expected `\w+` (<=?|>=?) (\S+)", said):
        limit = f"{float(found[2]):g}" if "." in found[2] or "e" in found[2] else found[2]
        return f"must be {_LIMITS[found[1]].format(limit)}"
    if found := re.match(r"Expected `(\w+)` of length (>=|<=)? ?(\d+)", said):
        what = "characters" if found[1] == "str" else "entries"
        count = {">=": "or more ", "<=": "or fewer "}.get(found[2] or "", "")
        return f"must have {found[3]} {count}{what}"
    if found := re.fullmatch(r"Expected `str` matching regex '\^\((.*)\)\$'", said):
        choices = found[1].split("|")
        return f"must be one of {', '.join(choices)}.{nearest(str(value), choices)}"
    return f"does not fit: {said}"


def _exact(parts: Sequence[str], content: Any, structure: type, said: str) -> Place:
    """A path of msgspec with the keys that it leaves out (``[...]``).

    Each is found by halving: of an object, the half of the entries with which the same error comes stays. ``content``
    is left with less in it.
    """
    place: Place = []
    for part in parts:
        if part != "...":
            place.append(int(part) if part.isdigit() else part)
            continue
        held = _at(content, place)
        entries = list(held.items())
        while len(entries) > 1:
            half = dict(entries[: len(entries) // 2])
            held.clear()
            held.update(half)
            try:
                msgspec.convert(content, structure)
                fails = False
            except (msgspec.ValidationError, PipegraphError) as error:
                fails = str(error) == said
            entries = entries[: len(half)] if fails else entries[len(half) :]
        held.clear()
        held.update(entries)
        place.append(entries[0][0])
    return place


def _at(content: Any, place: Place) -> Any:
    for part in place:
        content = content[part]
    return content


def _spec_at(spec: inspect.Type, content: Any, place: Place) -> inspect.Type | None:
    """The type that msgspec expects at a place."""
    for part in place:
        spec = _branch(spec, content)
        content = content[part]
        if isinstance(spec, inspect.StructType):
            spec = next(field.type for field in spec.fields if field.encode_name == part)
        elif isinstance(spec, inspect.DictType):
            spec = spec.value_type
        elif isinstance(spec, (inspect.VarTupleType, inspect.ListType)):
            spec = spec.item_type
        else:
            return None
    return _branch(spec, content)


def _branch(spec: inspect.Type, value: Any) -> inspect.Type:
    """Of a union, the member for such a value."""
    if not isinstance(spec, inspect.UnionType):
        return spec
    if isinstance(value, Mapping):
        wanted: Any = (inspect.StructType, inspect.DictType)
    else:
        wanted = (inspect.VarTupleType, inspect.ListType)
    return next((each for each in spec.types if isinstance(each, wanted)), spec)


def _short(value: Any) -> str:
    """A value as JSON, on one line and not long."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a number with more than 30 digits"
    return _clip(one_line(json.dumps(value, ensure_ascii=False)))


def _clip(text: str) -> str:
    return text if len(text) <= _CLIP else f"{text[: _CLIP - 1]}…"
