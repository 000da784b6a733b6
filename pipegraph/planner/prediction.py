"""What a plan is expected to take, as data that a manifest and a plan's file hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipegraph.cost.hardware import UNCORRECTED, MeasuredRatio
from pipegraph.units import format_bytes, format_count, format_percent, format_seconds

_DIGITS = 6


@dataclass(frozen=True)
class StagePrediction:
    """One stage and one microbatch: F, I and W in the prediction's unit, and bytes.

    ``weight_saved_bytes`` is None in plans that were written before it was known.
    """

    forward: float
    input_grad: float
    weight_grad: float
    saved_bytes: int
    parameter_bytes: int
    weight_saved_bytes: int | None = None

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class Neighbour:
    """The next place for a cut on one side, and the value of the plan if it lay there: infinite where a rank's memory
    does not do."""

    point: str
    value: float


@dataclass(frozen=True)
class Cut:
    """A cut: the point that starts a stage, what crosses there for one microbatch, and what the next places would do.

    A neighbour is None where the cut there would leave a stage empty.
    """

    point: str
    boundary_bytes: int
    earlier: Neighbour | None
    later: Neighbour | None


@dataclass(frozen=True)
class Prediction:
    """What a plan is expected to take.

    Attributes:
        balance, recompute, hardware: how it was priced.
        unit: of times and ``value``: s, or what is balanced instead.
        schedule, placement, microbatches: of a step; ``placement`` gives the rank of each stage.
        value: of a step or, for a unit other than seconds, of the largest stage.
        places: how many there are to cut at, of which all were looked at.
        lower_bound: no other cuts at these places have less, as far as segments add up to stages; None where the cuts
            were given.
        memory: bytes that each rank needs between actions; what a kernel needs while it runs comes on top.
        stages, cuts: the parts.
        measured_ratio: of the hardware, as it was when this was priced.
    """

    balance: str
    recompute: str
    hardware: str
    unit: str
    schedule: str
    placement: tuple[int, ...]
    microbatches: int
    value: float
    places: int
    lower_bound: float | None
    memory: tuple[int, ...]
    stages: tuple[StagePrediction, ...]
    cuts: tuple[Cut, ...]
    measured_ratio: MeasuredRatio = UNCORRECTED

    @property
    def in_seconds(self) -> bool:
        return self.unit == "s"

    @property
    def has_backward(self) -> bool:
        """Whether the schedule trains."""
        return self.schedule != "forward"

    @property
    def ranks(self) -> int:
        return len(self.memory)

    @property
    def peak(self) -> int:
        """Bytes that the fullest rank needs."""
        return max(self.memory)

    @property
    def per_microbatch(self) -> float:
        """Seconds of a step for each of its microbatches."""
        return self.value / self.microbatches

    @property
    def gap(self) -> float | None:
        """The part of the value by which other cuts can be better at most; None where that is not known."""
        if self.lower_bound is None:
            return None
        return 1 - self.lower_bound / self.value if self.value > 0 else 0.0

    def reason(self, number: int) -> str:
        """Why a cut is where it is, in words: ``stages 0 and 1 take 3.1 ms and 3.2 ms; 2 MiB cross; …``."""
        cut, before, behind = self.cuts[number], self.stages[number], self.stages[number + 1]
        words = [
            f"stages {number} and {number + 1} take {self.amount(before.total)} and {self.amount(behind.total)}",
            f"{format_bytes(cut.boundary_bytes)} cross",
        ]
        for side, neighbour in (("earlier", cut.earlier), ("later", cut.later)):
            if neighbour is not None:
                words.append(f"one segment {side}, at {neighbour.point}, {self.change(neighbour)}")
        return "; ".join(words)

    def change(self, neighbour: Neighbour) -> str:
        """What the plan would be with a cut there instead."""
        if math.isinf(neighbour.value):
            return "does not fit"
        part = neighbour.value / self.value - 1 if self.value else 0.0
        if abs(part) < 5e-5:
            return "no change"
        return format_percent(part, signed=True, decimals=2)

    def amount(self, value: float) -> str:
        """A value with its unit: ``3.12 ms``, ``51.3 GFLOP``."""
        if self.in_seconds:
            return format_seconds(value)
        return format_bytes(value) if self.unit == "bytes" else format_count(value, self.unit)

    def to_json(self) -> dict[str, Any]:
        """As plain values. An infinite value is None; a ratio that corrects nothing is left out."""
        ratio = self.measured_ratio.to_json()
        return {
            "balance": self.balance,
            "recompute": self.recompute,
            "hardware": self.hardware,
            **({} if ratio is None else {"measured_ratio": ratio}),
            "unit": self.unit,
            "schedule": self.schedule,
            "placement": list(self.placement),
            "microbatches": self.microbatches,
            "value": self.value,
            "places": self.places,
            "lower_bound": self.lower_bound,
            "gap": None if self.gap is None else round(self.gap, _DIGITS),
            "memory": list(self.memory),
            "costs": [asdict(stage) for stage in self.stages],
            "cuts": [
                {
                    "point": cut.point,
                    "boundary_bytes": cut.boundary_bytes,
                    "earlier": _neighbour(cut.earlier),
                    "later": _neighbour(cut.later),
                    "reason": self.reason(number),
                }
                for number, cut in enumerate(self.cuts)
            ],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Prediction:
        """Read what `to_json` gives. Raises KeyError, TypeError or ValueError for anything else."""
        plain = {name: found[name] for name in ("balance", "recompute", "hardware", "unit", "schedule")}
        bound = found["lower_bound"]
        return cls(
            **{name: str(value) for name, value in plain.items()},
            placement=tuple(map(int, found["placement"])),
            microbatches=int(found["microbatches"]),
            value=float(found["value"]),
            places=int(found["places"]),
            lower_bound=None if bound is None else float(bound),
            memory=tuple(map(int, found["memory"])),
            stages=tuple(StagePrediction(**stage) for stage in found["costs"]),
            cuts=tuple(
                Cut(str(cut["point"]), int(cut["boundary_bytes"]), _read(cut["earlier"]), _read(cut["later"]))
                for cut in found["cuts"]
            ),
            measured_ratio=MeasuredRatio.from_json(found.get("measured_ratio")),
        )


def rounded(figure: float) -> float:
    """A predicted figure to six digits: what comes behind depends on the order of additions."""
    return float(f"{figure:.{_DIGITS}g}")


def _neighbour(found: Neighbour | None) -> dict[str, Any] | None:
    return None if found is None else {"point": found.point, "value": None if math.isinf(found.value) else found.value}


def _read(found: Mapping[str, Any] | None) -> Neighbour | None:
    if found is None:
        return None
    value = found["value"]
    return Neighbour(str(found["point"]), math.inf if value is None else float(value))
