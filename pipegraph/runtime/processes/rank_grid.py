"""Where the ranks of a mesh are: their coordinates, and which of them lie in one line.

          dp_shard 0   dp_shard 1
pp 0      rank 0 ───── rank 1        ─ the ranks that share a stage: gradients are reduced between them
            │            │
pp 1      rank 2 ───── rank 3        │ a pipeline: tensors are sent along it
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from pipegraph.arguments import argument, require_type
from pipegraph.errors import ArgumentError, nearest

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

PIPELINE: Final = "pp"
REPLICATE: Final = "dp_replicate"
SHARD: Final = "dp_shard"
TENSOR: Final = "tp"

DIMENSIONS: Final = (PIPELINE, REPLICATE, SHARD, TENSOR)
"""The names that a dimension of a mesh may have, which are torchtitan's."""

DATA: Final = (REPLICATE, SHARD)
"""The dimensions along which ranks take different shares of a batch."""


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a pipeline, or of several that train one model, numbered from 0 on, the last dimension fastest.

    Attributes:
        names: of the dimensions, each one of `DIMENSIONS`.
        shape: how many ranks there are along each dimension.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.shape)

    def length(self, *names: str) -> int:
        """How many ranks there are along dimensions. Along one that the grid does not have there is 1."""
        return math.prod(self.shape[self.names.index(name)] for name in names if name in self.names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along each dimension."""
        places = {}
        for name, length in zip(reversed(self.names), reversed(self.shape), strict=True):
            rank, places[name] = divmod(rank, length)
        return dict(reversed(places.items()))

    def line(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks, ascending, whose coordinates differ from this one's along these dimensions alone."""
        fixed_places = self._elsewhere(rank, names)
        return tuple(candidate for candidate in range(self.size) if self._elsewhere(candidate, names) == fixed_places)

    def lines(self, *names: str) -> list[tuple[int, ...]]:
        """All lines along these dimensions, in the order of their first ranks."""
        ranks_by_place: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            ranks_by_place.setdefault(tuple(self._elsewhere(rank, names)), []).append(rank)
        return list(map(tuple, ranks_by_place.values()))

    def first(self, place: int) -> int:
        """The first rank at a place along `pp`."""
        return next(rank for rank in range(self.size) if self._all_coordinates[rank].get(PIPELINE, 0) == place)

    def crosses_nodes(self, name: str, per_node: int) -> bool:
        """Whether ranks of one line along a dimension are on several nodes, each of `per_node` consecutive ranks."""
        return any(len({member // per_node for member in self.line(rank, name)}) > 1 for rank in range(self.size))

    def text(self, rank: int) -> str:
        """How messages name a rank: ``rank 5 (pp 1, dp_shard 0, tp 1)``."""
        if len(self.names) == 1 or not 0 <= rank < self.size:
            return f"rank {rank}"
        return f"rank {rank} ({', '.join(f'{name} {place}' for name, place in self.coordinates(rank).items())})"

    @cached_property
    def _all_coordinates(self) -> list[dict[str, int]]:
        return [self.coordinates(rank) for rank in range(self.size)]

    def _elsewhere(self, rank: int, names: Collection[str]) -> list[int]:
        return [place for name, place in self._all_coordinates[rank].items() if name not in names]


def grid_of(ranks: int, lengths: Mapping[str, int], order: Sequence[str] = DIMENSIONS) -> RankGrid:
    """Return the grid with `ranks` along `pp`, and with `lengths` along the other dimensions.

    Args:
        order: all of `DIMENSIONS`, from the outermost to the innermost.

    Raises:
        ArgumentError: the order lacks a dimension, or has an unknown one.
    """
    check_dimensions(order)
    if sorted(order) != sorted(DIMENSIONS):
        order_text = argument("mesh_order", ",".join(order))
        missing = [name for name in DIMENSIONS if name not in order]
        raise ArgumentError(
            f"{order_text} has to name {', '.join(DIMENSIONS)} once each.",
            f"{argument('mesh_order', ','.join([*dict.fromkeys(order), *missing]))}.",
        )
    return RankGrid(tuple(order), tuple(ranks if name == PIPELINE else lengths.get(name, 1) for name in order))


def single(size: int) -> RankGrid:
    """Return the grid of one pipeline of `size` ranks."""
    return RankGrid((PIPELINE,), (size,))


def check_mesh(mesh: DeviceMesh, group: ProcessGroup | None) -> RankGrid:
    """The grid of a mesh.

    Raises:
        ArgumentError: a dimension has another name than those in `DIMENSIONS`, or this process is not in the mesh, or
            there is a group as well.
    """
    from torch.distributed import DeviceMesh

    example = 'mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp_shard"))'
    require_type(mesh, DeviceMesh, "mesh is a torch DeviceMesh", example)
    if group is not None:
        raise ArgumentError(
            "mesh and group were both given, and each says which processes the pipeline has.",
            "the mesh alone, whose dimension pp is the pipeline.",
        )
    names: tuple[str, ...] = tuple(mesh.mesh_dim_names or ())
    if not names:
        raise ArgumentError("the dimensions of the mesh have no names.", f"{example}.")
    check_dimensions(names)
    shape = tuple(mesh.shape)
    coordinate: Any = mesh.get_coordinate()
    if coordinate is None:
        raise ArgumentError(
            f"this process is not in the mesh of {' × '.join(map(str, shape))} ranks.",
            "make the Pipeline on the ranks of the mesh alone.",
        )
    return RankGrid(names, shape)


def check_dimensions(names: Sequence[str]) -> None:
    """Raise ArgumentError for a name that is not in `DIMENSIONS`."""
    for name in names:
        if name not in DIMENSIONS:
            raise ArgumentError(
                f'a mesh has no dimension "{name}".{nearest(name, DIMENSIONS)}',
                f"one of {', '.join(DIMENSIONS)} for each.",
            )
