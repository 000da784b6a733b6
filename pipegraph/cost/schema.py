"""JSON files checked against a schema, with errors that say what stands where and what should."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, NoReturn

from pipegraph.errors import PipegraphError, nearest

_TYPES = {
    "number": "a number",
    "integer": "a whole number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


class SchemaError(PipegraphError):
    """What is wrong in a file, without its name: ``kernel_floor is "fast": it must be a number``."""


def parse(text: str) -> Any:
    """JSON without NaN and Infinity, which are no figures. Raises ValueError."""
    return json.loads(text, parse_constant=_no_number)


def check_schema(found: Any, package: str, schema: str, what: str) -> None:
    """Check what was read against the schema of this name in a package; ``what`` names such a file.

    Raises SchemaError that names the part which is missing, misplaced or absurd, and the nearest name.
    """
    from fastjsonschema import JsonSchemaValueException

    try:
        _validator(package, schema)(found)
    except JsonSchemaValueException as error:
        place = ".".join(map(str, error.path[1:]))
        inside = f" in {place}" if place else ""
        rule, limit, value = error.rule, error.rule_definition, error.value
        if rule == "required":
            missing = ", ".join(name for name in limit if name not in value)
            raise SchemaError(f"it lacks {missing}{inside}") from None
        if rule == "additionalProperties":
            known = error.definition["properties"]
            unknown = next(name for name in value if name not in known)
            near = nearest(unknown, known)
            raise SchemaError(
                f'it has "{unknown}"{inside}, which is no part of {what}.{near} There are: {", ".join(known)}'
            ) from None
        must = _must(rule, limit) or error.message.removeprefix(error.name or "").strip()
        raise SchemaError(f"{place or 'the whole'} is {_short(value)}: it {must}") from None


def _must(rule: str | None, limit: Any) -> str:
    """What a rule of the schema asks for, in words; empty for a rule without any."""
    if rule == "type":
        kinds = [limit] if isinstance(limit, str) else limit
        return f"must be {' or '.join(_TYPES[kind] for kind in kinds)}"
    if rule in ("enum", "const"):
        choices = [limit] if rule == "const" else limit
        return f"must be {' or '.join(map(json.dumps, choices))}"
    words = {
        "minimum": f"must be {limit} or more",
        "exclusiveMinimum": f"must be more than {limit}",
        "maximum": f"must be {limit} or less",
        "minItems": f"must have {limit} or more entries",
        "minProperties": f"must have {limit} or more entries",
        "minLength": "must not be empty",
    }
    return words.get(rule or "", "")


@cache
def _validator(package: str, schema: str) -> Any:
    import fastjsonschema

    return fastjsonschema.compile(json.loads((files(package) / schema).read_text(encoding="utf-8")))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no figure")
