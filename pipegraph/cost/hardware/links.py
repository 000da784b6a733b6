"""What sending between ranks costs."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pipegraph.package.json_errors import FieldError
from pipegraph.package.json_file import Entry, Text

Rate = Annotated[float, Meta(ge=1e6, le=1e21)]
"""Bytes, elements or floating-point operations per second."""

Seconds = Annotated[float, Meta(ge=0, le=0.1)]


class Link(Entry, frozen=True):
    """One way from a rank to another: a message of b bytes takes ``latency + b / bandwidth`` seconds."""

    latency: Seconds
    bandwidth: Rate
    name: Text = ""

    def seconds(self, size: float) -> float:
        """Return how long a message of so many bytes takes, in seconds."""
        return self.latency + size / self.bandwidth


class MeasuredLinks(Entry, frozen=True):
    """Seconds and bytes per second from each rank (row) to each other one (column), None on the diagonal."""

    latency: Annotated[tuple[tuple[Seconds | None, ...], ...], Meta(min_length=2)]
    bandwidth: Annotated[tuple[tuple[Rate | None, ...], ...], Meta(min_length=2)]
    name: Text = ""

    def __post_init__(self) -> None:
        for what, rows in (("latency", self.latency), ("bandwidth", self.bandwidth)):
            for rank, row in enumerate(rows):
                if len(rows) != self.ranks or len(row) != self.ranks:
                    raise FieldError(
                        what,
                        f"it has {len(row)} figures for rank {rank} and {len(rows)} rows; latency and bandwidth have "
                        f"one row and one column for each of the {self.ranks} ranks",
                    )
                for other, figure in enumerate(row):
                    if (figure is None) != (rank == other):
                        must = "null on the diagonal" if rank == other else "a number: from one rank to another"
                        raise FieldError(f"{what}[{rank}][{other}]", f"it is {figure}, and must be {must}")

    @property
    def ranks(self) -> int:
        return len(self.latency)


class Links(Entry, frozen=True):
    """The links between ranks, of which ``ranks_per_node`` after one another stand in one node.

    If ``measured`` has the pair of ranks it goes first. ``inter_node`` is None for hardware of one node, for which
    `between` takes ``intra_node`` for all.
    """

    ranks_per_node: Annotated[int, Meta(ge=1, le=65536)]
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
