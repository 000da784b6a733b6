"""What sending between ranks costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipegraph.errors import PipegraphError

Matrix = tuple[tuple[float | None, ...], ...]
"""[rank][other rank], None on the diagonal."""


@dataclass(frozen=True)
class Link:
    """One way from a rank to another: a message of b bytes takes ``latency + b / bandwidth`` seconds."""

    latency: float
    bandwidth: float
    name: str = ""

    def seconds(self, size: float) -> float:
        """How long a message of so many bytes takes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class MeasuredLinks:
    """Seconds and bytes per second from each rank to each other one."""

    latency: Matrix
    bandwidth: Matrix
    name: str = ""

    def __post_init__(self) -> None:
        ranks = len(self.latency)
        for what, rows in (("latency", self.latency), ("bandwidth", self.bandwidth)):
            for rank, row in enumerate(rows):
                if len(rows) != ranks or len(row) != ranks:
                    raise PipegraphError(
                        f"links.measured.{what} has {len(row)} figures for rank {rank} and {len(rows)} rows; latency "
                        f"and bandwidth have one row and one column for each of the {ranks} ranks"
                    )
                for other, figure in enumerate(row):
                    if (figure is None) != (rank == other):
                        raise PipegraphError(
                            f"links.measured.{what} from rank {rank} to rank {other} is {figure}; it is a figure "
                            f"everywhere but on the diagonal, where it is null"
                        )

    @property
    def ranks(self) -> int:
        return len(self.latency)


@dataclass(frozen=True)
class Links:
    """The links between ranks, of which ``ranks_per_node`` after one another stand in one node.

    Where ``measured`` has the pair of ranks it goes first. ``inter_node`` is None for hardware of one node, where
    `link` takes ``intra_node`` for all.
    """

    ranks_per_node: int
    intra_node: Link
    inter_node: Link | None = None
    measured: MeasuredLinks | None = None

    def between(self, rank: int, other: int) -> Link:
        """The link from a rank to another."""
        table = self.measured
        if table is not None and max(rank, other) < table.ranks:
            latency, bandwidth = table.latency[rank][other], table.bandwidth[rank][other]
            if latency is not None and bandwidth is not None:
                return Link(latency, bandwidth, table.name)
        same = rank // self.ranks_per_node == other // self.ranks_per_node
        return self.intra_node if same or self.inter_node is None else self.inter_node

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Links:
        """Read what `to_json` gives, once the schema has been checked."""
        inter, table = found.get("inter_node"), found.get("measured")
        return cls(
            found["ranks_per_node"],
            Link(**found["intra_node"]),
            None if inter is None else Link(**inter),
            None
            if table is None
            else MeasuredLinks(_matrix(table["latency"]), _matrix(table["bandwidth"]), table["name"]),
        )

    def to_json(self) -> dict[str, Any]:
        """The fields by name, without those that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _matrix(rows: Any) -> Matrix:
    return tuple(map(tuple, rows))
