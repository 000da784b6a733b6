"""Turn names of a model into valid Python identifiers that clash with nothing."""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Container, Iterator
from itertools import accumulate

from pipegraph.graph.model_structure import MODULE_ATTRIBUTES

# Names that generated source uses; a local variable must not shadow them.
# What generated code imports, calls or reads.
_RESERVED = frozenset(
    {"torch", "nn", "F", "Tensor", "OrderedDict", "partial", "self", "super", "getattr", "setattr", "str", "float"}
    | {"int", "bool", "complex", "slice", "range", "enumerate", "zip", "reversed", "len", "min", "max", "tuple", "next"}
    | {"NotImplementedError", "frozenset", "math", "round", "set"}
)

# Names of the classes of stages. Their files import the other classes.
_STAGE = re.compile(r"Stage\d+")

# Letters that look like digits (pycodestyle's E741).
_AMBIGUOUS = frozenset({"l", "O", "I"})


def is_plain(name: str) -> bool:
    """Return whether ``self.<name>`` reads the attribute of that name.

    It does for an identifier that is not a keyword, if Python does not normalise it to another name, and if a class
    body does not mangle it (``__x``).
    """
    identifier = name.isidentifier() and unicodedata.normalize("NFKC", name) == name
    mangled = name.startswith("__") and not name.endswith("__")
    return identifier and not keyword.iskeyword(name) and not mangled


def variable(name: str, default: str) -> str:
    """A name for a local variable, made from any text; ``default`` if nothing of the text can be kept."""
    clean = re.sub(r"[^0-9a-zA-Z_]+", "_", name).strip("_")
    if not clean or not clean.isidentifier():
        clean = default
    avoided = keyword.iskeyword(clean) or keyword.issoftkeyword(clean) or clean in _RESERVED | _AMBIGUOUS
    return f"{clean}_" if avoided else clean


def attribute_variable(name: str, default: str) -> str:
    """A name for an argument of a constructor, which is kept as an attribute: not one that every module has."""
    clean = variable(name, default)
    return f"{clean}_" if clean in MODULE_ATTRIBUTES else clean


def class_name(name: str) -> str:
    """A name for a class, made from any text."""
    clean = re.sub(r"[^0-9a-zA-Z_]+", "_", name).strip("_")
    clean = clean if clean.isidentifier() and not keyword.iskeyword(clean) else "Block"
    return f"{clean}_" if clean in _RESERVED or _STAGE.fullmatch(clean) else clean


def unused(name: str, used_names: Container[str]) -> str:
    """``name``, or ``name_1``, ``name_2``, … until it is not taken."""
    if name not in used_names:
        return name
    count = 1
    while f"{name}_{count}" in used_names:
        count += 1
    return f"{name}_{count}"


def unused_class(name: str, used_names: Container[str]) -> str:
    """``Block``, or ``Block2``, ``Block3``, … until it is not taken."""
    if name not in used_names:
        return name
    stem, count = f"{name}_" if name[-1].isdigit() else name, 2
    while f"{stem}{count}" in used_names:
        count += 1
    return f"{stem}{count}"


def is_number(name: str) -> bool:
    """Return whether the name is ``str(i)`` of some ``i``; ``01`` and digits of other scripts are not."""
    return name.isdecimal() and str(int(name)) == name


def outer_names(name: str) -> Iterator[str]:
    """The names of the modules around a dotted name: ``a`` and ``a.b`` for ``a.b.c``."""
    return accumulate(name.split(".")[:-1], "{}.{}".format)


def relative(fqn: str, prefix: str) -> str:
    """A dotted name relative to ``prefix``, inside which it is."""
    return fqn.removeprefix(f"{prefix}.") if prefix else fqn
