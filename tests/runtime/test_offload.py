"""Saved values that wait for their backward in the memory of the host: what changes is only where they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipegraph.package import Package
from pipegraph.runtime.measurements import SavedBytes
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.schedule import build, names
from pipegraph.schedule.absences import absences
from pipegraph.schedule.recipes import trains
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
    held = SavedBytes([*pipe.parameters(), x])
    with pipe.observe(held):
        result = pipe.step(x, target=target)
    assert result.loss is not None
    found = [result.loss, *(each.grad for each in pipe.parameters() if each.grad is not None)]
    return found, [held.peak(rank) for rank in range(pipe.schedule.ranks)], pipe


@pytest.mark.parametrize("schedule", cases(TRAINING, slow=LIKE_OTHERS))
def test_every_schedule_gives_exactly_the_same_gradients(schedule: str, package: Package) -> None:
    kept, before, _ = step(package, schedule, "min-cut")
    offloaded, after, pipe = step(package, schedule, "offload")
    assert len(kept) == len(offloaded) == 1 + 2 * STAGES
    assert all(torch.equal(one, other) for one, other in zip(kept, offloaded, strict=True))
    away = [len(absences(row)) for row in pipe.schedule.actions]
    for rank, count in enumerate(away):
        assert (after[rank] or 0) <= (before[rank] or 0)
        assert count or after[rank] == before[rank]
    assert sum(away), "something is offloaded"


def test_warm_up_of_1f1b_holds_as_much_as_its_end(package: Package) -> None:
    """Four microbatches are in flight on the first rank. One that was just made, and one that is next, are there."""
    _, before, _ = step(package, "1f1b", "min-cut")
    _, after, _ = step(package, "1f1b", "offload")
    row = 2 * WIDTH * 4  # what tanh returned for a microbatch
    assert before[0] == 4 * row and after[0] is not None and after[0] < before[0]


def test_a_copy_has_an_action_to_hide_behind() -> None:
    """0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3; and of the last stage of 1f1b, whose backward follows F, nothing leaves."""
    found = [(each.microbatch, each.left, each.back) for each in absences(build("gpipe", 2, 4).actions[0])]
    assert found == [(0, 1, 3), (1, 2, 4), (2, 3, 5), (3, 4, 6)]
    assert not absences(build("1f1b", 2, 4).actions[1])


def test_it_is_told_that_a_cpu_emulates_it(package: Package) -> None:
    with pytest.warns(UserWarning, match="emulated on a CPU"):
        step(package, "gpipe", "offload")
