"""How a cluster is divided: the lengths of the dimensions of its mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipegraph.cost.collectives import ALL_REDUCE, GATHER, REDUCE, collective_seconds
from pipegraph.cost.hardware import Hardware

_WHOLE_STATE = 4.0  # a parameter, its gradient and AdamW's two moments
_GATHERED = 2.0  # of a sharded stage, the whole parameters and the gradients that add up before they are reduced
_FEW_NUMBERS = 64.0  # bytes


@dataclass(frozen=True)
class Layout:
    """The mesh ``pp × dp_replicate × dp_shard × tp``; ranks along the last are neighbours."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def copies(self) -> int:
        """How many pipelines share the batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def stride(self) -> int:
        """How far apart the ranks of one pipeline are numbered."""
        return self.copies * self.tp

    @property
    def state_factor(self) -> float:
        """How many times a rank holds the parameters of its stages that have a gradient.

        Along dp_shard each rank keeps its part of parameters, gradients and moments; during a step it also holds the
        gathered parameters of its stages, and their gradients until these are reduced.
        """
        return _WHOLE_STATE if self.dp_shard == 1 else _GATHERED + _WHOLE_STATE / self.dp_shard

    def gather_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the seconds to gather the parameters of a stage, ``size`` bytes, and to copy them to their places."""
        if self.dp_shard == 1:
            return 0.0
        return collective_seconds(hardware.links, GATHER, size, self.dp_shard, self.tp) + _copied(hardware, size)

    def reduce_seconds(self, hardware: Hardware, size: float) -> float:
        """Return the seconds to reduce the gradients of a stage, ``size`` bytes, which are copied together first."""
        if self.copies == 1:
            return 0.0
        scatter = collective_seconds(hardware.links, REDUCE, size, self.dp_shard, self.tp)
        part, stride = size / self.dp_shard, self.dp_shard * self.tp
        reduction = collective_seconds(hardware.links, ALL_REDUCE, part, self.dp_replicate, stride)
        return _copied(hardware, size) + scatter + reduction

    def agreement_seconds(self, hardware: Hardware) -> float:
        """Return what the copies take to agree on the shares of a batch before a step, and to add up its loss after it:
        each time they reduce a few numbers."""
        return 2 * collective_seconds(hardware.links, ALL_REDUCE, _FEW_NUMBERS, self.copies, self.tp)

    def __str__(self) -> str:
        return f"pp {self.pp} × dp_replicate {self.dp_replicate} × dp_shard {self.dp_shard} × tp {self.tp}"


def layouts(devices: int, most_stages: int, most_tp: int) -> Iterator[Layout]:
    """Yield every layout of the devices with at most ``most_stages`` ranks along pp and ``most_tp`` ranks along tp."""
    for tp in _divisors(devices):
        for pp in _divisors(devices // tp):
            copies = devices // tp // pp
            if tp <= most_tp and pp <= most_stages:
                yield from (Layout(pp, copies // shard, shard, tp) for shard in _divisors(copies))


def _copied(hardware: Hardware, size: float) -> float:
    """Return the seconds to copy ``size`` bytes."""
    return 2 * size / hardware.bytes_per_second(2 * size)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
