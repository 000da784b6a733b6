"""The regions of a graph: which of its operations recompute together, and by which choice."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch import fx, nn

from pipegraph.recompute import Recompute, Region
from pipegraph.torch_private.partitioner import graph_so_far

_PLACE = "place"


@contextmanager
def placed(place: Any) -> Iterator[None]:
    """Mark the operations that are traced meanwhile with their place, unless a context inside has marked them."""
    graph = graph_so_far()
    last = None if graph is None else next(iter(reversed(graph.nodes)), None)
    try:
        yield
    finally:
        for node in () if graph is None else reversed(graph.nodes):
            if node is last:
                break
            node.meta.setdefault(_PLACE, place)


def place_of(node: fx.Node) -> Any:
    """Return the place of an operation; None if it has none."""
    return node.meta.get(_PLACE)


def inherit_places(forward: Sequence[fx.Node], backward: Sequence[fx.Node], tangents: Collection[fx.Node]) -> None:
    """Mark operations of the backward with the place of the operation that they are the backward of.

    Those that depend on no gradient, such as where a relu was active, count as a part of the forward. Of what they and
    their neighbours read, an operation's own results come last: its inputs may be of another place, or of none. Those
    that depend on a gradient have the place of the first value that they read and that has one.
    """
    latest: dict[fx.Node, tuple[int, Any]] = {
        node: (-1 if node.op == "placeholder" else position, place_of(node)) for position, node in enumerate(forward)
    }
    dependent = {*tangents}
    apart: list[fx.Node] = []
    for node in backward:
        if dependent.isdisjoint(node.all_input_nodes):
            apart.append(node)
            read = (latest[source] for source in node.all_input_nodes if source in latest)
            latest[node] = max(read, key=itemgetter(0), default=(-1, None))
        else:
            dependent.add(node)
    for node in reversed(apart):
        readers = (latest[user] for user in node.users if user in latest)
        latest[node] = max((latest[node], *readers), key=itemgetter(0))
        if latest[node][1] is not None:
            node.meta.setdefault(_PLACE, latest[node][1])
    for node in backward:
        places = (source.meta[_PLACE] for source in node.all_input_nodes if _PLACE in source.meta)
        if node in dependent and (place := next(places, None)) is not None:
            node.meta.setdefault(_PLACE, place)


@dataclass(frozen=True)
class Regions:
    """The regions of a graph by the places of its operations; ``default`` is that of a place without its own."""

    default: Region
    places: Mapping[Any, Region] = field(default_factory=dict)

    @property
    def signature(self) -> tuple[Region, tuple[tuple[Any, Region], ...]]:
        """Equal for equal regions."""
        return self.default, tuple(self.places.items())

    def region_of(self, node: fx.Node) -> Region:
        """Return the region of an operation."""
        return self.places.get(place_of(node), self.default)


class ModuleRegions:
    """The regions of a module and of all modules inside, by their names in it.

    Equal layers have equal regions: a block is traced for one of them, and knows them by the names inside the layer.
    """

    def __init__(self, default: Region, inside: Mapping[str, Region]) -> None:
        """``inside`` has those of modules whose region is another one than the default."""
        self._default, self._inside = default, dict(inside)

    @classmethod
    def of_stage(cls, stage: nn.Module, recompute: Recompute) -> ModuleRegions:
        """Return those of a stage, whose modules are called as the model calls them."""
        inside: dict[str, Region] = {}
        default = recompute.region(())

        def visit(module: nn.Module, name: str, path: tuple[str, ...]) -> None:
            if name and type(module).forward is not nn.Module.forward:  # a list of modules is not called
                path = (*path, name)
                region = recompute.region(path)
                if region != default:
                    inside[name] = region
            for key, child in module.named_children():
                visit(child, f"{name}.{key}" if name else key, path)

        if recompute.rules:
            visit(stage, "", ())
        return cls(default, inside)

    def region_of(self, name: str) -> Region:
        """Return the region of a module."""
        return self._inside.get(name, self._default)

    def around(self, name: str) -> Region | None:
        """Return the outermost region around a module that is computed again from what goes into it; None without."""
        parts = name.split(".")
        regions = (self.region_of(".".join(parts[: length + 1])) for length in range(len(parts)))
        again = (region for region in regions if region.choice == "block" or callable(region.choice))
        return next((region for region in again if region.module not in ("", name)), None)

    def within(self, name: str) -> ModuleRegions:
        """Return those of a module inside, as if it stood alone."""
        start = f"{name}."

        def alone(region: Region) -> Region:
            return Region(region.module.removeprefix(start) if region.module.startswith(start) else "", region.choice)

        # What lies inside a region that began further out, and has no own one, has the module's.
        default = alone(self.region_of(name))
        regions = {
            inner.removeprefix(start): alone(outer) for inner, outer in self._inside.items() if inner.startswith(start)
        }
        return ModuleRegions(default, {inner: region for inner, region in regions.items() if region != default})

    @property
    def names(self) -> list[str]:
        """The names of modules whose region is another one than the default."""
        return list(self._inside)

    @property
    def signature(self) -> object:
        """Equal for equal regions."""
        return self._default, tuple(self._inside.items())

    @property
    def of_graph(self) -> Regions:
        """Those of a graph whose places are regions."""
        return Regions(self._default, {region: region for region in self._inside.values()})
