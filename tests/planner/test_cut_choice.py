"""Plans that choose their cuts: the cuts, the prediction, and errors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import pipegraph
from pipegraph.codegen.package_files import generate
from pipegraph.errors import ArgumentError, PipegraphError, PlanError, ScheduleError
from pipegraph.package.prediction import Prediction
from pipegraph.planner.solver.solve import MemoryShortage
from pipegraph.schedule import Times, build, simulate
from tests.messages import refused
from tests.planner.machine import MACHINE, linears

HEAVY_HEAD = linears(*[64] * 6, 384)  # the last layer costs the same as the six before it
FLOP = 2 * 16 * 64 * 64  # of a layer and microbatch, forward


def about(layers: int) -> Any:
    """The seconds of the matrix products of this number of layers."""
    return pytest.approx(layers * FLOP / 1e12, rel=1e-5)


def plan(**options: Any) -> Any:
    return pipegraph.plan(HEAVY_HEAD, hardware=MACHINE, **options)


@pytest.mark.parametrize(
    ("options", "points"),
    [
        ({}, ["6"]),
        ({"balance": "flops"}, ["6"]),
        ({"balance": "parameters"}, ["6"]),
        ({"balance": "memory"}, ["6"]),
        ({"balance": "uniform"}, ["4"]),
        ({"balance": "type:^linear$"}, ["4"]),
    ],
)
def test_two_stages(options: dict[str, Any], points: list[str]) -> None:
    assert [str(point) for point in plan(stages=2, **options).points] == points


def test_a_step_is_predicted_as_it_is_simulated() -> None:
    prediction = plan(stages=3, schedule="zb-h1", microbatches=5).prediction
    assert prediction is not None
    times = Times(
        [stage.forward for stage in prediction.stages],
        [stage.input_grad for stage in prediction.stages],
        [stage.weight_grad for stage in prediction.stages],
    )
    assert prediction.value == pytest.approx(simulate(build("zb-h1", 3, 5), times).makespan, rel=1e-5)
    assert prediction.lower_bound == prediction.value
    assert prediction.gap == 0


def test_times_and_bytes_of_stages() -> None:
    cut_plan = plan(stages=2)
    first, last = cut_plan.prediction.stages
    assert first.forward == about(6)
    assert (first.input_grad, first.weight_grad) == (0.0, about(11))  # none for the model's input
    assert (last.forward, last.input_grad, last.weight_grad) == (about(6), about(6), about(6))
    assert (first.parameter_bytes, last.parameter_bytes) == (6 * 64 * 64 * 4, 64 * 384 * 4)
    cost = cut_plan.costs[1].to_dict()
    assert cost["forward"] == pytest.approx(last.forward)
    assert cost["saved_bytes"] == last.saved_bytes


def test_given_points_are_predicted_where_that_is_asked_for() -> None:
    assert pipegraph.plan(HEAVY_HEAD, points=["3"]).prediction is None
    prediction, best = plan(points=["3"]).prediction, plan(stages=2).prediction
    assert prediction is not None and best is not None
    assert prediction.lower_bound is None and prediction.gap is None
    assert prediction.value > best.value
    (cut,) = prediction.cuts
    assert cut.later is not None and (cut.later.point, cut.later.value < prediction.value) == ("4", True)
    with refused(ArgumentError, 'balance="flops"', advice="stages=2"):
        plan(points=["3"], balance="flops")


@pytest.mark.parametrize("option", [{"schedule": "gpipe"}, {"microbatches": 4}, {"recompute": "none"}])
def test_any_option_of_a_step_asks_for_a_prediction(option: dict[str, Any]) -> None:
    assert pipegraph.plan(HEAVY_HEAD, points=["3"], **option).prediction is not None
    assert pipegraph.plan(HEAVY_HEAD, stages=2, balance="uniform").prediction is None
    estimate = pipegraph.plan(HEAVY_HEAD, stages=2, balance="uniform", **option).prediction
    assert estimate is not None and (estimate.balance, estimate.unit, estimate.cuts[0].point) == ("uniform", "s", "4")


def test_of_equal_weights_the_most_even_are_taken() -> None:
    class Wide(nn.Linear):
        pass

    def layers(*wide: int) -> nn.Module:
        return nn.Sequential(*(Wide(16, 16) if is_wide else nn.Linear(16, 16) for is_wide in wide))

    captured = pipegraph.capture(layers(0, 0, 1, 1, 0, 1, 1, 0), (torch.ones(4, 16),))
    cut_plan = pipegraph.plan(captured, stages=3, balance="type:Wide", hardware=MACHINE)
    assert [stage.forward for stage in cut_plan.prediction.stages] == [1, 1, 2]  # type: ignore[union-attr]
    assert [str(point) for point in cut_plan.points] == ["3", "5"]  # 3, 2 and 3 layers


def test_what_equal_segments_lack() -> None:
    assert plan(stages=2, memory_bytes="80GiB").prediction == plan(stages=2, memory_bytes=80 * 2**30).prediction
    with refused(MemoryShortage, "rank 1", "410.16 KiB", advice='balance="time"'):
        plan(stages=2, balance="uniform", memory_bytes=420_000)
    with refused(PlanError, "ReLU", "1 segment", "2 stages", advice="stages=1"):
        pipegraph.plan(pipegraph.capture(nn.ReLU(), (torch.ones(2),)), stages=2, balance="uniform")


def test_each_cut_has_a_reason() -> None:
    prediction = plan(stages=2).prediction
    assert prediction is not None
    (cut,) = prediction.cuts
    assert (cut.point, cut.boundary_bytes, cut.later) == ("6", 16 * 64 * 4, None)  # no stage after the last layer
    assert cut.earlier is not None and cut.earlier.value > prediction.value
    assert prediction.cuts[0].reason == (
        "stages 0 and 1 take 2.228 µs and 2.359 µs; 4.0 KiB cross; one segment earlier, at 5, "
        f"{prediction.change(cut.earlier)}"
    )


def test_a_tied_weight_counts_in_both_stages() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.middle = nn.Embedding(1000, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, 1000, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.middle(self.embed(tokens)))

    captured = pipegraph.capture(Tied(), (torch.zeros(2, 4, dtype=torch.long),))
    prediction = pipegraph.plan(captured, stages=2, hardware=MACHINE).prediction
    assert prediction is not None
    assert all(stage.parameter_bytes >= 1000 * 16 * 4 for stage in prediction.stages)
    with pytest.raises(MemoryShortage) as caught:  # which a weight that counts once would hide
        pipegraph.plan(captured, stages=2, hardware=MACHINE, memory_bytes=1.05 * 4 * 1000 * 16 * 4)
    required_bytes = caught.value.peak
    assert required_bytes > 1.05 * 4 * 1000 * 16 * 4
    tight_prediction = pipegraph.plan(captured, stages=2, hardware=MACHINE, memory_bytes=required_bytes).prediction
    assert tight_prediction is not None and tight_prediction.peak == required_bytes
    with refused(MemoryShortage, "several stages", "rank ", advice="memory_bytes=") as caught:
        pipegraph.plan(captured, stages=2, hardware=MACHINE, memory_bytes=required_bytes - 1)
    assert caught.value.peak == required_bytes


def test_a_frozen_parameter_needs_no_more_than_itself() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8), nn.Linear(8, 8))
    captured = pipegraph.capture(model.requires_grad_(False), (torch.randn(2, 256),))
    layer = 4 * (256 * 256 + 256)
    prediction = pipegraph.plan(captured, stages=2, hardware=MACHINE, memory_bytes=1.2 * layer).prediction
    assert prediction is not None and layer <= prediction.memory[0] < 1.2 * layer
    with refused(PlanError, "0.weight", "256.0 KiB", "100.0 KiB", advice="memory_bytes="):
        pipegraph.plan(captured, stages=2, hardware=MACHINE, memory_bytes=100 * 2**10)


def test_memory_moves_the_cut() -> None:
    free = plan(stages=2, microbatches=2).prediction
    assert free is not None
    limited = plan(stages=2, microbatches=2, memory_bytes=[free.memory[0] - 1, 2**30]).prediction
    assert limited is not None
    assert limited.memory[0] < free.memory[0]
    assert limited.value > free.value


def test_nothing_fits() -> None:
    with refused(MemoryShortage, "410.2 KiB on each rank", "no less") as caught:
        plan(stages=2, memory_bytes=420_000)
    assert 'recompute="block"' in str(caught.value)
    assert caught.value.peak > 420_000
    fitting = plan(stages=2, memory_bytes=caught.value.peak).prediction
    assert fitting is not None and fitting.peak <= caught.value.peak


def test_the_largest_parameter_does_not_fit() -> None:
    with refused(PlanError, "6.weight", "384.0 KiB", "300.0 KiB", advice="memory_bytes="):
        plan(stages=2, memory_bytes=300 * 1024)


@pytest.mark.parametrize(
    ("options", "kind", "parts", "advice"),
    [
        ({"balance": "tyme"}, ArgumentError, ['"tyme"', '"time"'], "time"),
        ({"balance": "type:Conv"}, PlanError, ["type:Conv", "Sequential"], "Linear"),
        ({"stages": 9}, PlanError, ["7 segments", "9 stages"], "stages=7"),
        ({"recompute": "blocks"}, ArgumentError, ['"blocks"', '"block"'], '"block"'),
        ({"schedule": "zb-w"}, ScheduleError, ['"zb-w"'], "zb-v"),
        ({"schedule": "zb-v", "stages": 3}, ScheduleError, ["2 stages on each rank", "3 stages"], "2 or 4 stages"),
        ({"schedule": "zb-v", "microbatches": 1, "stages": 4}, ScheduleError, ["1 microbatch"], "3 microbatches"),
        ({"hardware": "h10"}, PipegraphError, ['"h10"', '"h100"'], "pipegraph calibrate"),
        ({"memory_bytes": [2**30]}, ArgumentError, ["memory_bytes", "each rank: 2", "1 "], ""),
        ({"memory_bytes": []}, ArgumentError, ["memory_bytes", "empty"], 'memory_bytes="80GiB"'),
        ({"memory_bytes": -1}, ArgumentError, ["memory_bytes", "-1"], "memory_bytes="),
        ({"memory_bytes": "80XB"}, ArgumentError, ["'80XB'", "80GiB"], ""),
        ({"stages": "2"}, ArgumentError, ["stages", "'2'"], "stages=2"),
        ({"stages": 2.0}, ArgumentError, ["stages", "2.0"], "stages=2"),
        ({"stages": 0, "balance": "uniform"}, ArgumentError, ["stages", "0"], "stages=2"),
        ({"microbatches": 0, "balance": "uniform"}, ArgumentError, ["microbatches", "0"], "microbatches=8"),
        ({"stages": None, "points": ["3"], "recompute": "blocks"}, ArgumentError, ['"blocks"'], '"block"'),
        ({"stages": None, "points": ["3"], "schedule": "zb-w"}, ScheduleError, ['"zb-w"'], "zb-v"),
    ],
)
def test_refusals(options: dict[str, Any], kind: type[PipegraphError], parts: list[str], advice: str) -> None:
    with refused(kind, *parts, advice=advice):
        pipegraph.plan(HEAVY_HEAD, **{"stages": 2, "hardware": MACHINE, **options})


def test_a_schedule_is_refused_before_anything_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipegraph.planner.plan_options.price", None)
    with pytest.raises(ScheduleError):
        plan(stages=2, schedule="no schedule")


def test_the_manifest_tells_why() -> None:
    cut_plan = plan(stages=3)
    manifest = generate(cut_plan).manifest
    assert manifest.plan.points == tuple(str(point) for point in cut_plan.points)
    assert cut_plan.prediction is not None and manifest.prediction is not None
    entry = manifest.prediction.to_dict()
    expected = {"balance": "time", "schedule": "1f1b", "microbatches": 8, "hardware": "machine", "recompute": "min-cut"}
    assert entry | expected == entry
    assert entry["value"] == cut_plan.prediction.value
    assert entry["gap"] == 0
    assert manifest.prediction.cuts == cut_plan.prediction.cuts
    assert manifest.stages[0].cost.times is not None and manifest.stages[0].cost.saved_bytes
    assert generate(plan(stages=3)).manifest.to_json() == manifest.to_json()


def test_a_prediction_is_read_as_it_was_written() -> None:
    prediction = plan(stages=3, memory_bytes=2**30).prediction
    assert prediction is not None
    fields = prediction.to_dict()
    assert fields.pop("gap") == 0
    assert msgspec.convert(fields, Prediction) == prediction
