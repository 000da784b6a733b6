"""Offload to CPU memory as a choice: where its copies hide, and what it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

import pipegraph
from pipegraph.cost.hardware import Hardware, Link
from pipegraph.planner.plan_options import PlanOptions
from pipegraph.planner.recompute_options import RecomputeOptions
from pipegraph.planner.solver.solve import MemoryShortage
from pipegraph.planner.step_prediction import predict_step, stage_times, step_seconds
from pipegraph.recompute import OFFLOAD
from pipegraph.runtime.measurements import SavedBytes
from pipegraph.schedule import Times, build, simulate

A100 = Hardware.load("a100")
ROWS, WIDTH, LAYERS, MICROBATCHES = 64, 64, 4, 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Residual(Layer):
    """What goes into it is kept too: it is what another layer made."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Model(nn.Module):
    def __init__(self, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def captured() -> Any:
    torch.manual_seed(0)
    return pipegraph.capture(Model(), (torch.randn(ROWS, WIDTH),))


def profile(bandwidth: float | None) -> Hardware:
    """An A100 with such a link to the memory of its host."""
    return structs.replace(A100, host_link=None if bandwidth is None else Link(0.0, bandwidth))


def planned(captured: Any, hardware: Hardware, memory: int | None = None, recompute: Any = "auto") -> Any:
    sizes = {"stages": 2, "microbatches": MICROBATCHES, "memory_bytes": memory}
    return pipegraph.plan(captured, schedule="gpipe", hardware=hardware, recompute=recompute, **sizes).prediction


def test_it_is_chosen_where_its_copies_hide_and_memory_is_short(captured: Any) -> None:
    none, fast, slow = profile(None), profile(1e15), profile(1e6)
    least = planned(captured, none, recompute="min-cut").peak
    away = planned(captured, fast, recompute=OFFLOAD)
    assert away.peak < least
    memory = (away.peak + least) // 2
    chosen = planned(captured, fast, memory)
    assert OFFLOAD in chosen.recompute and chosen.peak <= memory
    for hardware in (none, slow):
        try:
            assert OFFLOAD not in planned(captured, hardware, memory).recompute
        except MemoryShortage:
            continue
    assert OFFLOAD not in planned(captured, fast).recompute, "nothing is short of memory"


def test_auto_never_offloads_on_a_cpu_which_only_emulates_it(captured: Any) -> None:
    cpu = structs.replace(Hardware.load("cpu"), host_link=Link(0.0, 1e15))
    chosen = {
        host.device: [str(choice) for choice in RecomputeOptions.price(captured, PlanOptions(hardware=host)).recompute]
        for host in (cpu, structs.replace(cpu, device="a GPU", first_touch=None))
    }
    assert f"layers.*={OFFLOAD}" in chosen["a GPU"]
    assert not any(OFFLOAD in choice for choice in chosen[cpu.device])


def test_asked_for_by_name_it_takes_the_time_of_its_link(captured: Any) -> None:
    unknown, fast, slow = (planned(captured, profile(rate), recompute=OFFLOAD) for rate in (None, 1e15, 1e8))
    assert unknown.value == pytest.approx(fast.value) and slow.value > 1.2 * fast.value
    assert unknown.memory == fast.memory


def test_a_rank_waits_for_copies_that_do_not_hide() -> None:
    """0F0 … 0F3, 0B0 … 0B3 on one rank: the copies of F0 and F1 overlap with F1 and F2 if they take the same time."""
    schedule = build("gpipe", 1, 4)
    hidden, waited = (simulate(schedule, Times([1.0], [1.0], [1.0], offload=offload)) for offload in (1.0, 1.5))
    assert hidden.makespan == 12.0
    # Each F but the first ends half a unit later. A B is long enough for any copy.
    assert waited.makespan == 12.0 + 3 * 0.5


@pytest.mark.filterwarnings("ignore:recompute=.offload. is emulated on a CPU")
@pytest.mark.parametrize("layer", [Layer, Residual])
def test_what_is_measured_is_what_was_predicted(layer: type[Layer], tmp_path: Path) -> None:
    """Of what each rank keeps, as a rank in one process counts it."""
    captured = pipegraph.capture(Model(layer), (torch.randn(ROWS, WIDTH),))
    plan = pipegraph.plan(captured, stages=4, microbatches=MICROBATCHES, hardware=A100, recompute=OFFLOAD)
    assert plan.prediction is not None
    package = pipegraph.write_package(plan, tmp_path / "package")
    assert package.manifest.stages[0].cost.offloaded_bytes
    target = torch.zeros(MICROBATCHES * ROWS, WIDTH)
    peaks = {}
    for recompute in ("min-cut", OFFLOAD):
        pipe = pipegraph.Pipeline(package, "1f1b", MICROBATCHES, nn.MSELoss(), kernels="eager", recompute=recompute)
        x = torch.randn(MICROBATCHES * ROWS, WIDTH)
        saved_bytes = SavedBytes([*pipe.parameters(), x, target])
        with pipe.observe(saved_bytes):
            pipe.step(x, target=target)
        peaks[recompute] = [saved_bytes.peak(rank) for rank in range(4)]
    memory = predict_step(package.manifest, build("1f1b", 4, MICROBATCHES)).memory
    assert memory is not None
    assert peaks[OFFLOAD] == [pytest.approx(rank.activations, rel=0.05) for rank in memory]
    assert peaks[OFFLOAD][0] < peaks["min-cut"][0]


def test_steps_without_offload_are_as_before() -> None:
    costs = [pipegraph.cost.SegmentCost(1.0, 1.0, 1.0, saved_bytes=8)] * 2
    schedule = build("1f1b", 2, 4)
    assert step_seconds(costs, schedule, None, Link(0.0, 1e6)) == step_seconds(costs, schedule)
    assert not any(stage_times(costs, schedule, None, Link(0.0, 1e6)).offload)  # type: ignore[arg-type]
