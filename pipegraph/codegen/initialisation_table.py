"""The table of initial values in ``weights.py``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pipegraph.codegen.expressions.torch_modules import module_constructor
from pipegraph.codegen.syntax.expressions import literal, string
from pipegraph.codegen.syntax.line_breaks import wrap
from pipegraph.graph.captured import Captured, StateEntry
from pipegraph.graph.initialisation import Initialisation

# For a parameter of which nothing is known.
_GUESS = Initialisation.of("normal_", std=0.02)


def initialisation_lines(captured: Captured) -> list[str]:
    """Return the entries of ``INITIALISATION``: the name of a parameter → a function of ``torch.nn.init``.

    ``*`` stands for every number in a name if all parameters that it fits are initialised alike. Left out are
    parameters that their module initialises so in any case, or that are made with their value.
    """
    listed = dict(_listed(captured))
    alike: dict[str, set[object]] = {}
    for entry in captured.state.values():
        if entry.kind == "parameter" and entry.canonical == entry.fqn:
            alike.setdefault(_pattern(entry.fqn), set()).add(listed.get(entry.fqn))
    entries: dict[str, Initialisation] = {}
    for name, values in listed.items():
        pattern = _pattern(name)
        entries.setdefault(pattern if len(alike[pattern]) == 1 else name, values)
    return [line for name, values in entries.items() for line in wrap(f"{string(name).text}: {_text(values)},", 4)]


def _listed(captured: Captured) -> Iterator[tuple[str, Initialisation]]:
    for entry in captured.state.values():
        if entry.kind != "parameter" or entry.canonical != entry.fqn or not entry.dtype.is_floating_point:
            continue
        values = entry.initialisation
        if _is_made_by_torch(captured, entry):
            if values is not None and not values.is_usual:
                yield entry.fqn, values
        elif values is None or values.constant is None:
            yield entry.fqn, values or _GUESS


def _is_made_by_torch(captured: Captured, entry: StateEntry) -> bool:
    """Return whether the stages make the module of a parameter by a constructor of torch."""
    owner = entry.fqn.rpartition(".")[0]
    module: nn.Module = captured.modules[owner].module
    return module_constructor(module) is not None


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _text(values: Initialisation) -> str:
    function = f"nn.init.{values.function}"
    if not values.arguments:
        return function
    return f"partial({function}, {', '.join(f'{name}={literal(value).text}' for name, value in values.arguments)})"
