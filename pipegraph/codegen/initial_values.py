"""The tables of initial values in ``weights.py``: what is known of the model, and what is guessed.

Modules that the stages make by a constructor of torch are initialised there. What the classes of a package make with
``torch.empty`` has no values before ``initialise`` runs: all of it has an entry, be it a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from pipegraph.codegen.syntax.expressions import literal, string
from pipegraph.codegen.syntax.line_breaks import wrap
from pipegraph.graph.captured import Captured
from pipegraph.graph.initialisation import Initialisation, guess_of


class InitialValues(NamedTuple):
    """How parameters start without weights: their names, with ``*`` for any number → a function of ``torch.nn.init``.

    Attributes:
        initialisation: as the model does it.
        guessed: of parameters of which that is not known.
    """

    initialisation: dict[str, Initialisation]
    guessed: dict[str, Initialisation]

    @property
    def known_lines(self) -> list[str]:
        """The entries of ``INITIALISATION``."""
        return _lines(self.initialisation)

    @property
    def has_zero_rows(self) -> bool:
        """Whether a row of some parameter is set to zero."""
        return any(values.zero_row is not None for values in self.initialisation.values())

    @property
    def guessed_lines(self) -> list[str]:
        """The entries of ``GUESSES``."""
        return _lines(self.guessed)


def initial_values(captured: Captured, empty_names: AbstractSet[str]) -> InitialValues:
    """Return how the parameters of stages are initialised.

    ``*`` stands for every number in a name if all parameters that it fits are initialised alike. Left out are
    parameters that their module initialises so in any case, or that are made with their value.

    Args:
        empty_names: the first names of the parameters that classes of the package make, and no constructor of torch.
    """
    entries = dict(_entries(captured, empty_names))
    entries_by_pattern: dict[str, set[object]] = {}
    for entry in captured.state.values():
        if entry.kind == "parameter" and entry.canonical == entry.fqn:
            entries_by_pattern.setdefault(_pattern(entry.fqn), set()).add(entries.get(entry.fqn))
    tables = InitialValues({}, {})
    for name, (values, is_guess) in entries.items():
        pattern = _pattern(name)
        table = tables.guessed if is_guess else tables.initialisation
        table.setdefault(pattern if len(entries_by_pattern[pattern]) == 1 else name, values)
    return tables


def patterns_of(names: Sequence[str]) -> list[str]:
    """Names with ``*`` for each number, each once."""
    return list(dict.fromkeys(map(_pattern, names)))


def _entries(captured: Captured, empty_names: AbstractSet[str]) -> Iterator[tuple[str, tuple[Initialisation, bool]]]:
    """The parameters that have an entry: name → their values, and whether these are a guess."""
    for entry in captured.state.values():
        if entry.kind != "parameter" or entry.canonical != entry.fqn:
            continue
        values, is_tied = entry.initialisation, len(captured.names_of[entry.fqn]) > 1
        if values is None:
            if entry.fqn in empty_names or is_tied:  # each module would initialise a tied one in its own way
                yield entry.fqn, (guess_of(captured.tensors[entry.fqn]), True)
        elif is_tied or (values.constant is None if entry.fqn in empty_names else not values.is_usual):
            yield entry.fqn, (values, False)


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _lines(table: dict[str, Initialisation]) -> list[str]:
    entries = (f"{string(name).text}: {_function_text(values)}," for name, values in table.items())
    return [line for entry in entries for line in wrap(entry, 4)]


def _function_text(values: Initialisation) -> str:
    text = f"nn.init.{values.function}"
    if values.arguments:
        arguments = (f"{name}={literal(value).text}" for name, value in values.arguments)
        text = f"partial({text}, {', '.join(arguments)})"
    return text if values.zero_row is None else f"with_zero_row({text}, {values.zero_row})"
