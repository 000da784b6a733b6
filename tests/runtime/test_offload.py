"""Saved values that wait for their backward in CPU memory: only the place of the values changes."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pipegraph.errors import RuntimeFault
from pipegraph.package import Package
from pipegraph.runtime.executor import HostMemory
from pipegraph.runtime.measurements import SavedBytes
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.schedule import Action, Kind, build, names
from pipegraph.schedule.lifetimes import offload_windows
from pipegraph.schedule.recipes import trains
from tests.messages import refused
from tests.runtime.packages import loss, write
from tests.runtime.sketches import chain
from tests.slow import LIKE_OTHERS, cases

STAGES, WIDTH, MICROBATCHES = 4, 64, 8
TRAINING = [name for name in names() if trains(name)]

pytestmark = pytest.mark.filterwarnings("ignore:recompute=.offload. is emulated on a CPU")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return Package.open(write(chain(STAGES, WIDTH), tmp_path_factory.mktemp("offload") / "chain"))


def step(package: Package, schedule: str, recompute: str) -> tuple[list[Tensor], list[int | None], Pipeline]:
    """The loss and gradients of a step, and the most bytes that each rank held for backwards."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator), torch.zeros(2 * MICROBATCHES)
    pipe = Pipeline(package, schedule, MICROBATCHES, loss, kernels="eager", recompute=recompute)
    saved_bytes = SavedBytes([*pipe.parameters(), x])
    with pipe.observe(saved_bytes):
        result = pipe.step(x, target=target)
    assert result.loss is not None
    tensors = [result.loss, *(parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)]
    return tensors, [saved_bytes.peak(rank) for rank in range(pipe.schedule.ranks)], pipe


@pytest.mark.parametrize("schedule", cases(TRAINING, slow=LIKE_OTHERS))
def test_every_schedule_gives_exactly_the_same_gradients(schedule: str, package: Package) -> None:
    resident, resident_peaks, _ = step(package, schedule, "min-cut")
    offloaded, offload_peaks, pipe = step(package, schedule, "offload")
    assert len(resident) == len(offloaded) == 1 + 2 * STAGES
    assert all(torch.equal(expected, actual) for expected, actual in zip(resident, offloaded, strict=True))
    away = [len(offload_windows(row)) for row in pipe.schedule.actions]
    for rank, count in enumerate(away):
        assert (offload_peaks[rank] or 0) <= (resident_peaks[rank] or 0)
        assert count or offload_peaks[rank] == resident_peaks[rank]
    assert sum(away), "something is offloaded"


def test_warm_up_of_1f1b_holds_as_much_as_its_end(package: Package) -> None:
    """Four microbatches are in flight on the first rank. One that was just made, and one that is next, are there."""
    _, resident_peaks, _ = step(package, "1f1b", "min-cut")
    _, offload_peaks, _ = step(package, "1f1b", "offload")
    row = 2 * WIDTH * 4  # what tanh returned for a microbatch
    assert resident_peaks[0] == 4 * row and offload_peaks[0] is not None and offload_peaks[0] < resident_peaks[0]


def test_a_copy_has_an_action_to_hide_behind() -> None:
    """0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3; and of the last stage of 1f1b, whose backward follows F, nothing leaves."""
    spans = [(span.microbatch, span.departure, span.back) for span in offload_windows(build("gpipe", 2, 4).actions[0])]
    assert spans == [(0, 1, 3), (1, 2, 4), (2, 3, 5), (3, 4, 6)]
    assert not offload_windows(build("1f1b", 2, 4).actions[1])


class Offloading:
    """Saved values that may all be elsewhere."""

    def take_offloaded(self, device: torch.device) -> dict[str, Tensor]:
        return {"x": torch.ones(1)}

    def put_back(self, values: dict[str, Tensor]) -> None:
        pass


def test_memory_of_a_gpu_is_not_used_while_a_step_that_failed_writes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory belongs to the stream that it was made in, and copies come in another one."""
    awaited: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=awaited.append))
    monkeypatch.setattr(HostMemory, "_sent", lambda memory, values: SimpleNamespace(copied="copied", device=values))
    monkeypatch.setattr(HostMemory, "_brought", lambda memory, away: ({}, "arrived"))
    actions = build("gpipe", 1, 4).actions[0]
    memory, saved = HostMemory(actions, torch.device("cuda")), {(0, index): Offloading() for index in range(4)}
    for action in actions[:4]:  # the forwards; the first values come back before the last of them
        memory.before_action(action, saved)
        memory.after_action(action, saved)
    assert awaited.count("arrived") == 0
    memory.clear()
    assert awaited.count("arrived") == 1


def test_what_is_away_is_freed_when_a_step_fails(package: Package) -> None:
    pipe = Pipeline(package, "gpipe", MICROBATCHES, loss, kernels="eager", recompute="offload")
    x, target = torch.randn(2 * MICROBATCHES, WIDTH), torch.zeros(2 * MICROBATCHES)
    pipe.step(x, target=target)
    initial_copies = copies_alive()

    class Failing:
        def begin(self, rank: int, action: Action) -> None:
            assert action.kind is not Kind.B, "on purpose"

        def end(self, rank: int, action: Action, saved: object) -> None:
            pass

    with pipe.observe(Failing()), refused(RuntimeFault, "action 3B0", "on purpose"):
        pipe.step(x, target=target)
    assert copies_alive() == initial_copies
    pipe.step(x, target=target)


def copies_alive() -> int:
    """How many tensors of bytes there are."""
    gc.collect()
    return sum(isinstance(candidate, Tensor) and candidate.dtype is torch.uint8 for candidate in gc.get_objects())


def test_it_is_told_that_a_cpu_emulates_it(package: Package) -> None:
    with pytest.warns(UserWarning, match="emulated on a CPU"):
        step(package, "gpipe", "offload")
