"""Names that no package could hold are refused before anything takes time; names that every module has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import nn

from pipegraph.errors import CaptureError, one_line

MODULE_ATTRIBUTES: Final = frozenset(dir(nn.Module()))
"""What every module has, such as ``half`` and ``training``: a buffer or an argument of that name would hide it."""

_LONGEST: Final = 4000  # characters; a manifest takes a few more
_SHOWN: Final = 40


def check_module_names(model: nn.Module) -> None:
    """Check the names of modules, parameters and buffers. Raises CaptureError."""
    for name, _ in model.named_modules(remove_duplicate=False):
        _check("module", name)
    for name, _ in model.named_parameters(remove_duplicate=False):
        _check("parameter", name)
    for name, _ in model.named_buffers(remove_duplicate=False):
        _check("buffer", name)


def check_keys(kind: str, structure: Any) -> None:
    """Check the keys of nested arguments or outputs; ``kind`` is what messages call them. Raises CaptureError."""
    for key in _keys(structure):
        _check(kind, key)


def _keys(structure: Any) -> Iterator[str]:
    if isinstance(structure, Mapping):
        yield from (key for key in structure if isinstance(key, str))
        structure = tuple(structure.values())
    if isinstance(structure, (list, tuple)):
        for item in structure:
            yield from _keys(item)


def _check(kind: str, name: str) -> None:
    shown = one_line(name[:_SHOWN]) + ("…" if len(name) > _SHOWN else "")
    if len(name) > _LONGEST:
        problem = f"has {len(name)} characters, and {_LONGEST} at most can be written"
    elif any("\ud800" <= character <= "\udfff" for character in name):
        problem = "holds half a character, which cannot be written: \\ud800 to \\udfff stand in pairs"
    else:
        return
    raise CaptureError(f'The name of the {kind} "{shown}" {problem}.\nTry: rename it in the model.')
