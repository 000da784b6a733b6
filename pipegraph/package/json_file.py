"""Read JSON files into typed structures: manifests, plans, hardware profiles, indices of weights.

A structure is a frozen `msgspec.Struct`. Whatever is wrong with a file becomes one error:
*file: path.in.the.file: what is wrong and what it must be, and the nearest key*.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import Meta

from pipegraph.errors import PipegraphError, one_line, path_from_here
from pipegraph.package.json_errors import HIDDEN_KEY, FieldError, Place, as_json, clipped, explain, place_text
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
Name = Annotated[str, Meta(min_length=1, max_length=4096)]
KEY: Final = HIDDEN_KEY
"""What a file would call the field that holds the key of a structure. `FileKind.prepare` puts it there."""

Structure = TypeVar("Structure")


def choice_of(*choices: str) -> Meta:
    """Restrict a string to these choices."""
    return Meta(pattern=f"^({'|'.join(choices)})$")


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
            data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
            content = self.prepare(self._checked(_parse(data)))
            return msgspec.convert(content, self.structure)
        except msgspec.ValidationError as problem:
            message = explain(problem, content, self.structure)
        except RecursionError:
            message = "the file is nested too deeply"
        except PipegraphError as error:  # of a structure
            message = error.problem
        except ValueError as error:  # of `_parse`
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


def _other_kind(name: str, content: dict[str, Any]) -> str | None:
    """Return the kind of file that has these keys, if it is not the one that is called ``name``."""
    expected_keys = _SIGNS.get(name)
    if expected_keys is not None and expected_keys <= content.keys():
        return None
    return next((kind for kind, keys in _SIGNS.items() if keys <= content.keys()), None)


class _Repeated(dict[str, Any]):
    """An object of a file that has a key twice."""

    key = ""


def _parse(data: bytes) -> Any:
    """Parse JSON. Raises ValueError, and RecursionError for JSON that is nested too deeply."""
    if data.startswith(b"\xef\xbb\xbf"):
        raise ValueError("the file begins with a byte order mark: save it as UTF-8 without one")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the file is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None
    if not text.strip():
        raise ValueError("the file is empty")
    repeated: list[_Repeated] = []

    def gathered(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        json_object = dict(pairs)
        if len(json_object) < len(pairs):
            names = [key for key, _ in pairs]
            json_object = _Repeated(json_object)
            json_object.key = next(key for key in names if names.count(key) > 1)
            repeated.append(json_object)
        return json_object

    try:
        content = json.loads(text, object_pairs_hook=gathered)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"the file is not JSON, or truncated: {error.msg} at {place}") from None
    except ValueError:  # Python reads no more digits: sys.get_int_max_str_digits
        raise ValueError("the file has a number with thousands of digits") from None
    if repeated or re.search(r"\\u[dD][89a-fA-F]", text):
        for where, problem in _strange_parts(content):
            raise FieldError(place_text(where), problem)
    return content


def _strange_parts(content: Any) -> Iterator[tuple[Place, str]]:
    """Find objects that have a key twice, and text that is not Unicode."""
    pending: list[tuple[Place, Any]] = [([], content)]
    while pending:
        place, part = pending.pop()
        if isinstance(part, _Repeated):
            yield place, f'it has the key "{clipped(one_line(part.key))}" twice'
        for text in part if isinstance(part, dict) else [part] if isinstance(part, str) else []:
            if any("\ud800" <= character <= "\udfff" for character in text):
                yield place, f"{as_json(text)} has half a character: \\ud800 to \\udfff stand in pairs"
        if isinstance(part, (dict, list)):
            items = part.items() if isinstance(part, dict) else enumerate(part)
            pending += (([*place, key], item) for key, item in items)
