"""The arguments of the model, in the structure that they had at capture: bound to the names of values, and filled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from pipegraph.errors import BatchError, closest, nearest
from pipegraph.package import Manifest, Value


def bind_arguments(manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the caller passed, by the names of values, without what is None or left out.

    Raises BatchError for an argument that the model did not have at capture, or of another structure.
    """
    positional, keyword = list(args), dict(kwargs)
    if len(positional) > len(manifest.args):
        raise BatchError(
            f"{len(positional)} positional arguments were passed; {_signature(manifest)}.\n"
            f"Try: {len(manifest.args)} of them, and target= for the loss."
        )
    by_place = [structure for structure in manifest.args[: len(positional)] if isinstance(structure, str)]
    for structure in manifest.args[len(positional) :]:  # a positional argument may be passed by its name
        positional.append(keyword.pop(structure, None) if isinstance(structure, str) else None)
    for name in keyword:
        if name in by_place:
            raise BatchError(f"{name} was passed twice, by its place and by its name.\nTry: one of the two.")
        if name not in manifest.kwargs:
            argument_names = [*manifest.kwargs, *(argument for argument in manifest.args if isinstance(argument, str))]
            raise BatchError(
                f"there is no argument {name!r}; {_signature(manifest)}.{nearest(name, argument_names)}\n"
                f"Try: {closest(name, argument_names) or ', '.join(argument_names)}."
            )
    passed = [
        (f"argument {i}", structure, item)
        for i, (structure, item) in enumerate(zip(manifest.args, positional, strict=True))
    ]
    passed += [(f"argument {name!r}", manifest.kwargs[name], item) for name, item in keyword.items()]
    by_name: dict[str, Any] = {}
    for where, structure, item in passed:
        for name, leaf in _leaves(where, structure, item):
            if manifest.values[name].is_constant:
                _check_constant(manifest.values[name], leaf)
            elif leaf is not None:
                by_name[name] = leaf
    return by_name


def fill_structure(structure: Any, leaves: Mapping[str, Any]) -> Any:
    """The nested structure with each name replaced by its leaf."""
    if isinstance(structure, Mapping):
        return {key: fill_structure(item, leaves) for key, item in structure.items()}
    if isinstance(structure, (list, tuple)):
        return type(structure)(fill_structure(item, leaves) for item in structure)
    return None if structure is None else leaves[structure]


def _leaves(where: str, structure: Any, passed: Any) -> Iterator[tuple[str, Any]]:
    """(name, what was passed) for every name in the structure."""
    if isinstance(structure, str):
        yield structure, passed
    elif structure is None:
        if passed is not None:
            raise BatchError(
                f"{where} was None when the model was captured.\nTry: leave it out, or capture the model with it."
            )
    elif isinstance(structure, Mapping):
        if is_dataclass(passed) and not isinstance(passed, (type, Mapping)):  # a ModelOutput has no keys for None
            passed = {entry.name: getattr(passed, entry.name) for entry in fields(passed)}
        if passed is not None and (not isinstance(passed, Mapping) or passed.keys() != structure.keys()):
            description = sorted(passed) if isinstance(passed, Mapping) else type(passed).__name__
            raise BatchError(
                f"{where} is {description}; it was a dict of {sorted(structure)} when the model was captured.\n"
                "Try: such a dict."
            )
        for key, item in structure.items():
            yield from _leaves(f"{where}[{key!r}]", item, None if passed is None else passed[key])
    else:
        if passed is not None and (not isinstance(passed, (tuple, list)) or len(passed) != len(structure)):
            description = f"{len(passed)} items" if isinstance(passed, (tuple, list)) else type(passed).__name__
            raise BatchError(
                f"{where} is {description}; it had {len(structure)} items when the model was captured.\n"
                "Try: the same number of items."
            )
        for i, item in enumerate(structure):
            yield from _leaves(f"{where}[{i}]", item, None if passed is None else passed[i])


def _check_constant(value: Value, passed: Any) -> None:
    if passed is not None and (type(passed) is not type(value.constant) or passed != value.constant):
        raise BatchError(
            f"{value.name} is {passed!r}; it was {value.constant!r} when the model was captured, and the stages were "
            f"written for that.\nTry: {value.constant!r}, or capture the model again with the other."
        )


def _signature(manifest: Manifest) -> str:
    names = [item if isinstance(item, str) else "…" for item in manifest.args] + [
        f"{name}=" for name in manifest.kwargs
    ]
    return f"the model was captured with ({', '.join(names)})"
