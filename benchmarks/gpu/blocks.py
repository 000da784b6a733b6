"""The roofline of a hardware profile, compared with the times of each distinct block of the model on the device."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.setting import Setting
from pipegraph.cost import SegmentCost
from pipegraph.cost.block_times import MeasureOptions
from pipegraph.cost.price import PricedModel, price

Times = tuple[float, float, float]


@dataclass(frozen=True)
class BlockError:
    """Seconds of F, I and W of a block, of a microbatch.

    Attributes:
        name: where its first piece begins.
    """

    name: str
    predicted: Times
    measured: Times

    @property
    def error(self) -> float:
        """Predicted ÷ measured − 1 of all three together."""
        return sum(self.predicted) / sum(self.measured) - 1


def block_errors(setting: Setting, seconds: float) -> dict[str, list[BlockError]]:
    """Measure the distinct blocks, for `seconds` in all. Returns the errors of each profile, by its name."""
    options = MeasureOptions(device=str(setting.device), seconds=seconds)
    measured = price(setting.captured, "measured", setting.hardware, setting=options)
    return {profile.name: _errors(price(setting.captured, "time", profile), measured) for profile in setting.profiles}


def _errors(predicted: PricedModel, measured: PricedModel) -> list[BlockError]:
    errors: dict[str, BlockError] = {}
    for index, part in enumerate(predicted.parts.segments):
        point = predicted.chain.segments[index].point
        name = "the model's start" if point is None else str(point)
        times = _times(predicted.costs[index]), _times(measured.costs[index])
        if part.block.key not in errors and sum(times[1]) > 0:
            errors[part.block.key] = BlockError(name, *times)
    return list(errors.values())


def _times(cost: SegmentCost) -> Times:
    return cost.forward, cost.input_grad, cost.weight_grad
