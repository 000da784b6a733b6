"""What runs took beside what was predicted: the correction of a hardware profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

SMALLEST, LARGEST = 0.01, 100.0
"""A profile whose predictions are further off is none of that device. ``hardware.schema.json`` has the same."""


@dataclass(frozen=True)
class MeasuredRatio:
    """What F, I and W took on the device, as multiples of what the figures of its profile come to."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0

    def of(self, times: tuple[float, float, float]) -> tuple[float, float, float]:
        """Times of F, I and W, corrected."""
        forward, of_inputs, of_weights = times
        return forward * self.forward, of_inputs * self.input_grad, of_weights * self.weight_grad

    def to_json(self) -> dict[str, float] | None:
        """The fields by name; None where nothing is corrected."""
        return None if self == UNCORRECTED else asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, float] | None) -> MeasuredRatio:
        """Read what `to_json` gives."""
        return UNCORRECTED if found is None else cls(**found)


UNCORRECTED: Final = MeasuredRatio()
