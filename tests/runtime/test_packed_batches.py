"""Lists of microbatches that differ in every dynamic size: rows, lengths, offsets of documents, image patches."""

from __future__ import annotations

import pytest
import torch

from pipegraph.errors import BatchError
from pipegraph.schedule import names
from pipegraph.schedule.recipes import trains
from tests.messages import refused
from tests.runtime import packed_model, ranks
from tests.runtime.pipelines import pipeline
from tests.slow import LIKE_OTHERS, cases

TRAINING = [name for name in names() if trains(name)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return packed_model.build(tmp_path_factory.mktemp("packed"))


@pytest.mark.parametrize("schedule", cases(TRAINING, slow=LIKE_OTHERS))
def test_every_schedule_takes_microbatches_of_other_sizes(schedule: str, folder: str) -> None:
    pipe = pipeline(folder, schedule, "eager", microbatches=8, loss_fn=packed_model.loss)
    packed_model.assert_is_the_step_of_the_model(pipe)


@pytest.mark.parametrize(
    ("schedule", "kernels", "needed_only"),
    [("zb-v", "eager", False), ("interleaved-1f1b", "autograd", True)],
    ids=["every rank has all inputs", "a rank has the inputs of its stages"],
)
def test_receivers_know_the_shapes_of_all_messages(schedule: str, kernels: str, needed_only: bool, folder: str) -> None:
    """The sizes of 8 microbatches fit into the record of a rank."""
    assert ranks.run(packed_model.step, 2, folder, schedule, kernels, needed_only) == ["equal"] * 2


def test_sizes_that_do_not_fit_into_the_record_follow_it(folder: str) -> None:
    assert ranks.run(step_with_little_room, 2, folder) == ["equal"] * 2


def step_with_little_room(rank: int, folder: str) -> str:
    from pipegraph.runtime import step_agreement

    step_agreement.ROOM = 3  # type: ignore[misc]
    return packed_model.step(rank, folder, "zb-v", "autograd", rank == 1)


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [({"dp_replicate": 2}, "interleaved-1f1b"), ({"dp_shard": 2}, "interleaved-1f1b"), ({"tp": 2}, "interleaved-1f1b")],
    ids=["dp_replicate", "dp_shard", "tp"],
)
def test_ranks_of_a_mesh_take_microbatches_of_other_sizes(shape: dict[str, int], schedule: str, folder: str) -> None:
    for message in ranks.run(packed_model.step_on_a_mesh, 2, folder, shape, schedule):
        assert message == "equal", message


def test_a_list_is_needed_for_several_microbatches(folder: str) -> None:
    pipe = pipeline(folder, "1f1b", loss_fn=packed_model.loss)
    inputs, targets = packed_model.batch(1)
    microbatch = {name: value[0] if isinstance(value, list) else value for name, value in inputs.items()}
    pipe.step(**microbatch, target=targets[0], microbatches=1)
    with refused(BatchError, "patches has the role list", "2 microbatches", advice="a list"):
        pipe.step(**microbatch, target=targets[0], microbatches=2)


def test_a_whole_tensor_has_the_sizes_of_all_microbatches(folder: str) -> None:
    pipe = pipeline(folder, "1f1b", loss_fn=packed_model.loss)
    inputs, targets = packed_model.batch(2)
    with refused(BatchError, "offsets has the role list", "2 microbatches", advice="a list"):
        pipe.step(**{**inputs, "offsets": torch.tensor([0, 8])}, target=targets)
    with refused(BatchError, "scale has the shape [5]", "[4]", advice="that shape"):
        pipe.step(**{**inputs, "scale": torch.zeros(5)}, target=targets)
    with refused(BatchError, "target[1] has 2 rows", "microbatch 1 has ", advice="a target with"):
        pipe.step(**inputs, target=[targets[0], targets[0]])
