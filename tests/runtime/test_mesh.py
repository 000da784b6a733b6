"""Pipelines over meshes of processes train as the unsplit model on the whole batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pipegraph.package import Package
from tests.runtime import mesh_refusals, meshes, ranks
from tests.runtime.packages import Reference, write


def train(
    path: Path, shape: meshes.Shape, schedule: str, rows: tuple[int, ...], tied: bool = True, **options: Any
) -> list[Any]:
    stages = (4 if schedule in ("zb-v", "interleaved-1f1b") else 2) // (1 if shape.get("pp", 1) > 1 else 2)
    folder = str(write(meshes.perceptrons(max(stages, 1), tied), path / "perceptrons"))
    count = 1
    for length in shape.values():
        count *= length
    return ranks.run(meshes.train, count, folder, shape, schedule, rows, options, timeout=110)


@pytest.mark.parametrize(
    ("shape", "schedule", "rows", "tied"),
    [
        ({"pp": 2, "dp_replicate": 2}, "1f1b", (8, 8), True),
        ({"dp_replicate": 2, "pp": 2}, "zb-v", (9, 5), False),
        pytest.param({"pp": 2, "dp_replicate": 2}, "zb-v", (8, 8), True, marks=pytest.mark.slow),
        ({"pp": 1, "dp_replicate": 2}, "1f1b", (7, 3), True),
        pytest.param({"dp_replicate": 2}, "1f1b", (6, 6), False, marks=pytest.mark.slow),
    ],
)
def test_replicas(shape: meshes.Shape, schedule: str, rows: tuple[int, ...], tied: bool, tmp_path: Path) -> None:
    said = train(tmp_path, shape, schedule, rows, tied)
    assert said == [[]] * len(said), said[0]


def test_sums_add_up_over_replicas(tmp_path: Path) -> None:
    options = {"loss_fn": meshes.summed_loss, "loss_reduction": "sum", "kernels": "autograd"}
    said = train(tmp_path, {"pp": 2, "dp_replicate": 2}, "1f1b", (5, 3), **options)
    assert said == [[]] * 4


@pytest.mark.parametrize(("how", "error"), [("action", "ValueError: broken on purpose"), ("batch", "BatchError: ")])
def test_a_rank_that_fails_stops_all_pipelines_and_is_named_by_its_place(how: str, error: str, tmp_path: Path) -> None:
    folder, shape = str(write(meshes.perceptrons(2), tmp_path / "perceptrons")), {"pp": 2, "dp_replicate": 2}
    said = ranks.run(meshes.fail, 4, folder, shape, 1, how, {"kernels": "autograd"})
    for message, seconds in said:
        assert re.search(rf"rank 1 \(pp 0, dp_replicate 1\) failed.*{error}|^{error}", message), message
        assert seconds < 10


def assert_refused(path: Path, stages: int, count: int, attempt: str, cases: list[tuple[Any, str]]) -> None:
    """Every rank says what is wrong, with the class of the error."""
    folder = str(write(meshes.perceptrons(stages), path / "perceptrons"))
    for said in ranks.run(mesh_refusals.each_refused, count, folder, attempt, [case for case, _ in cases]):
        for message, (case, expected) in zip(said, cases, strict=True):
            assert re.search(expected, message), (case, message)


def test_a_mesh_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    cases = [
        ("unknown", '^ArgumentError: a mesh has no dimension "dp_shrad". Did you mean "dp_shard"?'),
        ("unnamed", "^ArgumentError: the dimensions of the mesh have no names"),
        ("type", "^ArgumentError: mesh is a torch DeviceMesh"),
        ("group", "^ArgumentError: mesh and group were both given"),
        ("wrapper", "^PipegraphError: parallelize_fn returned DistributedDataParallel"),
        (
            "calls",
            "is in a call for an evaluation, and this rank in one for a step|for a step, and .* for an evaluation",
        ),
        ("losses", "for no loss, and this rank in one for a loss|for a loss, and this rank in one for no loss"),
        ("lists", "^BatchError: data-parallel ranks were given lists of different numbers of microbatches"),
    ]
    assert_refused(tmp_path, 1, 2, "mesh", cases)


def test_replicas_start_equal_and_stay_so(tmp_path: Path) -> None:
    folder = str(write(meshes.perceptrons(1), tmp_path / "perceptrons"))
    (first, one), (second, other) = ranks.run(meshes.start_and_state, 2, folder)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert one["start"].item() == other["start"].item() == 1.0
    assert torch.equal(one["scale"], other["scale"]) and one["scale"].item() != 0
    assert one["flags"].tolist() == other["flags"].tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("shape", "schedule", "tied", "kernels"),
    [
        ({"pp": 2, "tp": 2}, "1f1b", False, "eager"),
        ({"tp": 2, "pp": 2}, "zb-v", True, "eager"),
        pytest.param({"dp_replicate": 2, "tp": 2}, "1f1b", True, "autograd", marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel(shape: meshes.Shape, schedule: str, tied: bool, kernels: str, tmp_path: Path) -> None:
    rows = (8, 6) if "dp_replicate" in shape else (8,)
    said = train(tmp_path, shape, schedule, rows, tied, tp_plan=meshes.TP_PLAN, kernels=kernels)
    assert said == [[]] * len(said), said[0]


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [
        pytest.param({"pp": 2, "tp": 2}, "zb-v", marks=pytest.mark.slow),
        ({"pp": 2, "dp_shard": 1, "tp": 2}, "1f1b"),
    ],
)
def test_sequence_parallel_boundaries(shape: meshes.Shape, schedule: str, tmp_path: Path) -> None:
    """Parts of the sequence cross between stages."""
    said = train(tmp_path, shape, schedule, (8,), tp_plan="sequence", strict=True)
    assert said == [[]] * len(said), said[0]


def test_parts_of_the_sequence_take_as_much_less_on_each_link(tmp_path: Path) -> None:
    """Two ranks divide the sequence, so that each sends half of a value, and of its gradient."""
    folder = str(write(meshes.perceptrons(2), tmp_path / "perceptrons"))
    for whole, part in ranks.run(meshes.sent_bytes, 4, folder):
        assert whole == 2 * part == 4 * 8 * meshes.LENGTH * meshes.WIDTH


def test_a_plan_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        ({"layer0.*.0": "colwise"}, r'style for layer0\.\*\.0, and the model has no such module.*"layers0'),
        ({"layers*.*.0": "columnwise"}, 'the style "columnwise", which there is not. Did you mean "colwise"'),
        ({"layers*.*.0": "mla_kv_a_proj"}, 'the style "mla_kv_a_proj", which is not supported: the part of its output'),
        ({"norms*.*": "packed_colwise"}, "of the class LayerNorm, a style not for it: packed_colwise is for linear"),
        ({"embed.weight": "moe_tp_experts"}, "embed.weight the style 'moe_tp_experts', which is for modules"),
        ({"norms1.*": "colwise"}, "norms1.0, of the class LayerNorm, a style not for it"),
        (["colwise"], "tp_plan has a style for each pattern"),
        (None, "nothing says how they divide the model"),
        ({"layers1.*.0": "colwise"}, "stage 1 does not run with its parameters divided along tp"),
        ({"head": "colwise"}, "stage 1 returns logits as .* on each of 2 ranks, and the whole is"),
    ]
    assert_refused(tmp_path, 2, 4, "plan", [(plan, f"^ArgumentError: .*{message}") for plan, message in cases])


def test_ranks_that_do_not_divide_a_layer_are_refused(tmp_path: Path) -> None:
    expected = r"^ArgumentError: .*divides the 16 outputs of layers0\.0\.0, in stage 0, and tp is 3"
    assert_refused(tmp_path, 2, 6, "plan", [(meshes.TP_PLAN, expected)])


def test_a_rank_that_fails_wakes_those_that_wait_in_a_collective_of_a_stage(tmp_path: Path) -> None:
    folder, shape = str(write(meshes.perceptrons(2), tmp_path / "perceptrons")), {"pp": 2, "tp": 2}
    options = {"tp_plan": meshes.TP_PLAN, "kernels": "autograd"}
    for message, seconds in ranks.run(meshes.fail, 4, folder, shape, 3, "action", options):
        assert "rank 3 (pp 1, tp 1) failed" in message and "ValueError: broken on purpose" in message
        assert seconds < 10


@pytest.mark.parametrize(
    ("shape", "schedule", "rows", "tied", "options"),
    [
        ({"pp": 2, "dp_shard": 2}, "1f1b", (8, 8), False, {}),
        ({"dp_shard": 2, "pp": 2}, "zb-v", (9, 5), True, {"resident": 1}),
        ({"dp_shard": 3}, "1f1b", (4, 3, 2), True, {"kernels": "autograd"}),
        ({"dp_shard": 2}, "1f1b", (4, 3), True, {"fsdp": {"shard_placement_fn": meshes.last_dimension}}),
        pytest.param({"dp_shard": 2, "dp_replicate": 2}, "1f1b", (8, 8, 6, 4), True, {}, marks=pytest.mark.slow),
        pytest.param(
            {"pp": 2, "dp_shard": 2}, "interleaved-1f1b", (8, 8), True, {"resident": 1}, marks=pytest.mark.slow
        ),
        pytest.param({"pp": 2, "dp_shard": 2}, "zb-h1", (8, 8), True, {}, marks=pytest.mark.slow),
    ],
)
def test_fully_sharded(
    shape: meshes.Shape, schedule: str, rows: tuple[int, ...], tied: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    said = train(tmp_path, shape, schedule, rows, tied, **options)
    assert said == [[]] * len(said), said[0]


@pytest.mark.parametrize(
    "shape",
    [
        {"dp_shard": 2, "tp": 2},
        pytest.param({"pp": 2, "dp_replicate": 2, "dp_shard": 1, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_shards_of_divided_parameters(shape: meshes.Shape, tmp_path: Path) -> None:
    options = {"tp_plan": meshes.TP_PLAN, "strict": True}
    said = train(tmp_path, shape, "1f1b", (8, 6), **options)
    assert said == [[]] * len(said), said[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("schedule", "kernels"), [("1f1b", "eager"), ("zb-v", "eager"), ("zb-v", "inductor")])
def test_all_dimensions(schedule: str, kernels: str, tmp_path: Path) -> None:
    shape = {"pp": 2, "dp_shard": 2, "tp": 2}
    options = {"tp_plan": meshes.TP_PLAN, "strict": True, "kernels": kernels, "timeout": 200}
    said = train(tmp_path, shape, schedule, (8, 8), **options)
    assert said == [[]] * 8, said[0]


@pytest.mark.parametrize(("resident", "gathers"), [(None, 2), pytest.param(1, None, marks=pytest.mark.slow)])
def test_messages_are_those_of_the_schedule_and_rest_takes_no_more_than_parts(
    resident: int | None, gathers: int | None, tmp_path: Path
) -> None:
    folder = str(write(meshes.perceptrons(4, tied=False), tmp_path / "perceptrons"))
    whole = sum(4 * parameter.numel() for parameter in Reference(Package.open(folder)).parameters.values())
    for messages, placed, whole_bytes, parts in ranks.run(meshes.count_messages, 4, folder, resident):
        assert messages["_allgather_base_"] == placed["UNSHARD"]
        assert messages["allreduce_"] == placed["REDUCE_GRAD"] == 6  # by which gloo reduces, of ours as of torch's
        assert messages.keys() == {"_allgather_base_", "allreduce_"}
        assert gathers is None or placed["UNSHARD"] == 3 * gathers
        assert whole_bytes == 0
        assert parts <= whole / 4 * 1.2  # half of half the stages; the first and the last one have more than others


def test_mixed_precision(tmp_path: Path) -> None:
    folder = str(write(meshes.perceptrons(2), tmp_path / "perceptrons"))
    assert ranks.run(meshes.mixed_precision, 4, folder) == ["near"] * 4


def test_sharding_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    cases = [
        ("option", "fully_shard has no option 'mp_polcy' for fsdp. Did you mean \"mp_policy\"\\?"),
        ("part", "reshard_after_forward=2 would keep a part"),
        ("type", "fsdp has the options of torch's fully_shard"),
        ("resident", "resident cannot be 0"),
        ("again", "parallelize_fn applied fully_shard to stage 0"),
    ]
    assert_refused(tmp_path, 1, 2, "sharding", [(how, f"^ArgumentError: {message}") for how, message in cases])


@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        ({"dp_shard": 2}, None),
        ({"tp": 2}, meshes.TP_PLAN),
        pytest.param({"dp_shard": 2, "tp": 2}, meshes.TP_PLAN, marks=pytest.mark.slow),
    ],
)
def test_states_are_those_of_the_model(shape: meshes.Shape, plan: Any, tmp_path: Path) -> None:
    folder = str(write(meshes.perceptrons(1), tmp_path / "perceptrons"))
    count = 2 ** len(shape)
    assert ranks.run(meshes.load_and_save, count, folder, shape, plan) == ["equal"] * count


def test_a_rank_that_fails_wakes_those_that_wait_for_its_parameters(tmp_path: Path) -> None:
    folder, shape = str(write(meshes.perceptrons(2), tmp_path / "perceptrons")), {"pp": 2, "dp_shard": 2}
    for message, seconds in ranks.run(meshes.fail, 4, folder, shape, 2, "action", {"kernels": "autograd"}):
        assert "rank 2 (pp 1, dp_shard 0) failed" in message and "ValueError: broken on purpose" in message
        assert seconds < 10


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize(
    "shape",
    [{"pp": 2, "dp_replicate": 2}, {"pp": 2, "dp_shard": 2}, {"pp": 2, "dp_replicate": 2, "dp_shard": 2}],
    ids=["dp_replicate", "dp_shard", "hsdp"],
)
def test_every_schedule(shape: meshes.Shape, schedule: str, tied: bool, tmp_path: Path) -> None:
    rows = (8, 6, 8, 10) if len(shape) == 3 else (8, 6)
    said = train(tmp_path, shape, schedule, rows, tied, timeout=200)
    assert said == [[]] * len(said), said[0]
