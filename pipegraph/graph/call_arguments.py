"""The places of a value in the calls of modules that took it as an argument or returned it.

``export/torch_export.py`` records it while a model is exported: ``meta["argument_of"]`` and ``meta["result_of"]`` of a
node hold call → place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from pipegraph.graph.internals import call_name


@dataclass(frozen=True)
class ArgumentPlace:
    """The place of an argument among all tensors that a call took.

    Attributes:
        order: its position among them.
        name: the parameter of ``forward``; None for a part of a tuple, which has no name.
        other_names: further parameters that took the same value: ``attention(x, x, x)``.
        other_orders: its further positions.
    """

    order: int
    name: str | None
    other_names: tuple[str, ...] = ()
    other_orders: tuple[int, ...] = ()

    @property
    def orders(self) -> tuple[int, ...]:
        """All positions of the value."""
        return (self.order, *self.other_orders)

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters that took the value."""
        return self.other_names if self.name is None else (self.name, *self.other_names)

    def joined(self, other: ArgumentPlace) -> ArgumentPlace:
        """This place, with the names and positions of another place of the same value in the same call."""
        names = (name for name in other.names if name not in self.names)
        orders = (order for order in other.orders if order not in self.orders)
        return replace(self, other_names=(*self.other_names, *names), other_orders=(*self.other_orders, *orders))


@dataclass(frozen=True)
class ResultPlace:
    """The place of a result among all tensors that a call returned.

    Attributes:
        order: its position among them.
        index: if ``forward`` returned a tuple of ``count`` values, its index there; None for a part of a part.
        count: how many values ``forward`` returned.
        arguments: the arguments of the call by parameter. Numbers, texts and None stand as they are, a tuple of ``...``
            for one of tensors, and ``...`` for all else.
    """

    order: int
    index: int | None
    count: int
    arguments: tuple[tuple[str, object], ...] = ()


def argument_place(node: fx.Node, call: str) -> ArgumentPlace | None:
    """The place of a value among the arguments of a call; None if it was no argument, or the call is unknown."""
    place: ArgumentPlace | None = node.meta.get("argument_of", {}).get(call_name(call))
    return place


def result_place(node: fx.Node, call: str) -> ResultPlace | None:
    """The place of a value in what a call returned; None if it was not returned, or the call is unknown."""
    place: ResultPlace | None = node.meta.get("result_of", {}).get(call_name(call))
    return place


def parameter_names(node: fx.Node) -> Iterator[tuple[str, str]]:
    """(FQN of the module, name of the parameter) for each call that took a value, in the order of the calls."""
    for call, place in node.meta.get("argument_of", {}).items():
        if place.name:
            yield call.partition("@")[0], place.name


def sorted_by_place(
    values: Sequence[fx.Node], places: Iterable[ArgumentPlace | ResultPlace | None]
) -> tuple[fx.Node, ...]:
    """Values in the order of their places; values without one come last, in their own order."""
    known = [
        (sys.maxsize if place is None else place.order, value) for value, place in zip(values, places, strict=True)
    ]
    return tuple(value for _, value in sorted(known, key=lambda each: each[0]))


def copy_places(source: fx.Node, target: fx.Node) -> None:
    """Give ``target``, which replaces or copies ``source``, the places of ``source`` as well."""
    for key in ("argument_of", "result_of"):
        places = {**source.meta.get(key, {}), **target.meta.get(key, {})}
        for call, place in source.meta.get(key, {}).items():
            if isinstance(place, ArgumentPlace):
                places[call] = places[call].joined(place)
        if places:
            target.meta[key] = places
