"""The variables of one call of a ``forward``, as they were recorded while the model was exported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from pipegraph.graph.calls import CallValues, VariablePlace, result_place


class Variable(NamedTuple):
    """A variable, and the value that it had after a line."""

    place: VariablePlace
    node: fx.Node


def variables_by_call(nodes: Iterable[fx.Node]) -> dict[str, list[Variable]]:
    """Return the variables of each call of a module, by the name of the call."""
    by_call: dict[str, list[Variable]] = {}
    for node in dict.fromkeys(value for reader in nodes for value in (*reader.all_input_nodes, reader)):
        for call, places in node.meta.get("variables", {}).items():
            by_call.setdefault(call, []).extend(Variable(place, node) for place in places)
    return by_call


def first_line(function: Callable[..., object]) -> int:
    """The line on which a function begins; 0 if it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return 0 if code is None else int(code.co_firstlineno)


class CallVariables:
    """The variables of one call of a ``forward``.

    Args:
        variables: of all methods that the call ran.
        function: the first line of the ``forward``.
        none_variables: name and line → whether that variable was None whenever the line had run.
    """

    def __init__(
        self, variables: Iterable[Variable], function: int, none_variables: Mapping[tuple[str, int], bool]
    ) -> None:
        self._none_variables = none_variables
        self._variables = sorted(
            (variable for variable in variables if variable.place.function == function),
            key=lambda variable: (variable.place.order, not variable.place.is_end),
        )

    def is_none(self, name: str, lines: frozenset[int]) -> bool:
        """Return whether a variable is None after these lines have run."""
        are_none = [
            is_none for (variable, line), is_none in self._none_variables.items() if variable == name and line in lines
        ]
        return bool(are_none) and all(are_none)

    def value(self, name: str, lines: frozenset[int]) -> fx.Node | None:
        """The tensor in a variable after these lines have run; None without one."""
        return self.values_before(max(lines) + 1).get((name, ()))

    def are_tensors(self, name: str, values: Sequence[fx.Node]) -> bool:
        """Return whether a parameter is one of these values, or has some of them in tuples."""
        return any(
            node in values for place, node in self._variables if place.name == name and not (place.line or place.is_end)
        )

    def name_of(self, value: fx.Node, lines: frozenset[int]) -> str:
        """The last variable that one of these lines assigns a value; empty without one."""
        places = (place for place, node in self._variables if node is value and not place.is_end and not place.path)
        names = [place.name for place in places if place.line in lines]
        return names[-1] if names else ""

    def values_before(self, line: int) -> dict[tuple[str, tuple[int, ...]], fx.Node]:
        """The values of all variables, and of their parts, before a line of the text: by name and indices."""
        values: dict[tuple[str, tuple[int, ...]], fx.Node] = {}
        for place, node in self._variables:
            if place.line >= line:
                continue
            if place.is_end:
                values.pop((place.name, place.path), None)
            else:
                values[place.name, place.path] = node
        return values


def unread_parameters(called: CallValues, variables: CallVariables) -> frozenset[str]:
    """The parameters of a call that were neither plain values nor tensors that an operation of the call reads."""
    places = (result_place(node, called.tree.call) for node in called.makes)
    recorded = next((place.arguments for place in places if place is not None), ())
    objects = (name for name, value in recorded if value is ... or isinstance(value, tuple))
    return frozenset(name for name in objects if not variables.are_tensors(name, called.reads))
