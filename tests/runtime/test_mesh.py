"""Pipelines over meshes of processes train as the unsplit model on the whole batch."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pipegraph.schedule import build, names
from pipegraph.schedule.recipes import trains
from tests.runtime import mesh_refusals, meshes, ranks
from tests.runtime.packages import write

Case = tuple[meshes.Shape, str, tuple[int, ...], bool, dict[str, Any]]
"""(mesh, schedule, rows of each data-parallel rank, whether a weight is tied, options)"""


def assert_trained(path: Path, *cases: Case, seconds: float = 110) -> None:
    """Each case trains as the whole model. All cases use the same processes, which are started once."""
    arguments = []
    for shape, schedule, rows, tied, options in cases:
        stages = build(schedule, 2, 4).stages // (1 if shape.get("pp", 1) > 1 else 2)
        package = path / f"{stages}-{tied}"
        folder = str(package if package.exists() else write(meshes.perceptrons(max(stages, 1), tied), package))
        arguments.append((folder, shape, schedule, rows, options))
    (count,) = {math.prod(shape.values()) for shape, *_ in cases}
    messages = ranks.run(meshes.train_each, count, arguments, timeout=seconds)
    assert messages == [[]] * count, messages[0]


def test_replicas(tmp_path: Path) -> None:
    assert_trained(tmp_path, ({"pp": 2, "dp_replicate": 2}, "1f1b", (8, 8), True, {}))


@pytest.mark.slow  # another schedule, with other rows on each replica and the dimensions the other way round
def test_uneven_replicas(tmp_path: Path) -> None:
    assert_trained(tmp_path, ({"dp_replicate": 2, "pp": 2}, "zb-v", (9, 5), False, {}))


@pytest.mark.slow
def test_replicas_of_one_rank(tmp_path: Path) -> None:
    case: Case = ({"pp": 1, "dp_replicate": 2}, "1f1b", (7, 3), True, {})
    assert_trained(tmp_path, case, ({"dp_replicate": 2}, "1f1b", (6, 6), False, {}))


def test_sums_add_up_over_replicas(tmp_path: Path) -> None:
    options = {"loss_fn": meshes.summed_loss, "loss_reduction": "sum", "kernels": "autograd"}
    assert_trained(tmp_path, ({"dp_replicate": 2}, "1f1b", (5, 3), True, options))


@pytest.mark.parametrize(("how", "error"), [("action", "ValueError: broken on purpose"), ("batch", "BatchError: ")])
def test_a_rank_that_fails_stops_all_pipelines_and_is_named_by_its_place(how: str, error: str, tmp_path: Path) -> None:
    folder, shape = str(write(meshes.perceptrons(2), tmp_path / "perceptrons")), {"pp": 2, "dp_replicate": 2}
    outcomes = ranks.run(meshes.fail, 4, folder, shape, 1, how, {"kernels": "autograd"})
    for message, seconds in outcomes:
        assert re.search(rf"rank 1 \(pp 0, dp_replicate 1\) failed.*{error}|^{error}", message), message
        assert seconds < ranks.NO_HANG_SECONDS


def assert_refused(path: Path, stages: int, count: int, attempt: str, cases: list[tuple[Any, str]]) -> None:
    """Every rank says what is wrong, with the class of the error."""
    folder = str(write(meshes.perceptrons(stages), path / "perceptrons"))
    for messages in ranks.run(mesh_refusals.each_refused, count, folder, attempt, [case for case, _ in cases]):
        for message, (case, expected) in zip(messages, cases, strict=True):
            assert re.search(expected, message), (case, message)


def test_a_mesh_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    cases = [
        ("unknown", '^ArgumentError: a mesh has no dimension "dp_shrad". Did you mean "dp_shard"?'),
        ("unnamed", "^ArgumentError: the dimensions of the mesh have no names"),
        ("type", "^ArgumentError: mesh is a torch DeviceMesh"),
        ("group", "^ArgumentError: mesh and group were both given"),
        ("outside", "^ArgumentError: this process is not in the mesh of 1 × 1 ranks|^nothing$"),
        ("wrapper", "^PipegraphError: parallelize_fn returned DistributedDataParallel"),
        (
            "calls",
            r"ranks are in different calls: its call 1, a step, on rank 0 .*; its call 1, an evaluation, on rank 1",
        ),
        ("losses", r"ranks are in different calls: one for a loss on rank 0 .*; no loss on rank 1"),
        ("lists", "^BatchError: data-parallel ranks were given lists of different numbers of microbatches"),
    ]
    assert_refused(tmp_path, 1, 2, "mesh", cases)


def test_calls_that_differ_along_tp_are_refused_on_every_rank(tmp_path: Path) -> None:
    """Gloo would end the processes without a word where a collective meets one of another size."""
    step, prefix = r"4 microbatches of \[2, 2, 2, 2\] rows", "^RuntimeFault: ranks of one pipeline were "
    first, second = "on rank 0; ", r" on rank 1\.\nTry: "
    cases = [
        ("same", "^nothing$"),
        ("rows", f"{prefix}given batches of .*: {step} {first}4 microbatches of \\[3, 3, 3, 3\\] rows{second}"),
        ("microbatches", f"{prefix}asked for .*: 4 {first}2{second}"),
        ("calls", f"^RuntimeFault: .* in different calls: its call 1, a step, {first}.*, an evaluation,{second}"),
        ("evaluation", f"{prefix}given batches of .*4 microbatches .*{first}4 microbatches .*{second}"),
    ]
    assert_refused(tmp_path, 1, 2, "along tp", cases)


def test_what_one_rank_is_given_is_named_with_the_rank(tmp_path: Path) -> None:
    replicated, sharded, divided = ({"pp": 2, name: 2} for name in ("dp_replicate", "dp_shard", "tp"))
    part = dict(list(meshes.TP_PLAN.items())[:1])
    place = r"on rank 3 \(pp 1, \w+ 1\), and"
    cases = [
        ((replicated, {"loss_reduction": "sum"}), f'loss_reduction is "sum" {place} "mean" on rank 0'),
        ((replicated, {"seed": 5}), f"seed is 5 {place} None on rank 0"),
        ((replicated, {"microbatches": 2}), f"microbatches is 2 {place} 4 on rank 0"),
        ((sharded, {"precision": "bf16"}), f'precision is "bf16" {place} None on rank 0'),
        ((sharded, {"shard_by_hand": "dp_shard"}), "stage 1 after parallelize_fn is .* on rank [23]"),
        ((divided, {"tp_plan": part}), f"tp_plan is .* {place} .* on rank 0"),
        ((divided, {"kernels": "autograd"}), f'kernels is "autograd" {place} "eager" on rank 0'),
    ]
    start = "^(ArgumentError: |RuntimeFault: .* failed: ArgumentError: )"  # only ranks of one stage know of its layers
    assert_refused(tmp_path, 2, 4, "options", [(case, start + message) for case, message in cases])


def test_replicas_start_equal_and_stay_so(tmp_path: Path) -> None:
    folder = str(write(meshes.perceptrons(1), tmp_path / "perceptrons"))
    (first, first_buffers), (second, second_buffers) = ranks.run(meshes.start_and_state, 2, folder)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first_buffers["start"].item() == second_buffers["start"].item() == 1.0
    assert torch.equal(first_buffers["scale"], second_buffers["scale"]) and first_buffers["scale"].item() != 0
    assert first_buffers["flags"].tolist() == second_buffers["flags"].tolist() == [False, True, True]


def test_tensor_parallel(tmp_path: Path) -> None:
    """Also with parts of the sequence between stages."""
    plan = {"tp_plan": meshes.TP_PLAN}
    sequence = {"tp_plan": "sequence", "strict": True}
    assert_trained(
        tmp_path,
        ({"pp": 2, "tp": 2}, "1f1b", (8,), False, plan),
        ({"pp": 2, "dp_shard": 1, "tp": 2}, "zb-v", (8,), True, sequence),
    )


@pytest.mark.slow  # tensor parallel ranks with replicas, and with sharded parameters
def test_tensor_parallel_beside_other_dimensions(tmp_path: Path) -> None:
    plan = {"tp_plan": meshes.TP_PLAN}
    assert_trained(
        tmp_path,
        ({"dp_replicate": 2, "tp": 2}, "1f1b", (8, 6), True, {**plan, "kernels": "autograd"}),
        ({"dp_shard": 2, "tp": 2}, "1f1b", (8, 6), True, {**plan, "strict": True}),
    )


@pytest.mark.slow  # other tests have this order of dimensions with replicas and shards
def test_tensor_parallel_before_the_pipeline(tmp_path: Path) -> None:
    assert_trained(tmp_path, ({"tp": 2, "pp": 2}, "zb-v", (8,), True, {"tp_plan": meshes.TP_PLAN}))


def test_a_plan_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        ({"layer0.*.0": "colwise"}, r'style for layer0\.\*\.0, and the model has no such module.*"layers0'),
        ({"layers*.*.0": "columnwise"}, 'the style "columnwise", which does not exist. Did you mean "colwise"'),
        ({"layers*.*.0": "ep_router"}, 'the style "ep_router", which is not supported: it gives each rank some of'),
        ({"layers*.*.0": "mla_kv_a_proj"}, r"there is no linear layer layers\d\.0\.kv_b_proj in its stage"),
        ({"norms*.*": "packed_colwise"}, "of the class LayerNorm, a style not for it: packed_colwise is for linear"),
        ({"norms*.*": "packed_rowwise"}, 'norms0.0 the style "packed_rowwise", which is for parameters'),
        ({"embed.weight": "moe_tp_experts"}, "embed.weight the style 'moe_tp_experts', which is for modules"),
        (
            {"norms1.*": "embedding_rowwise"},
            "norms1.0, of the class LayerNorm, a style not for it: it is for embeddings",
        ),
        ({"norms1.*": "colwise"}, "norms1.0, of the class LayerNorm, a style not for it"),
        (["colwise"], "tp_plan has a style for each pattern"),
        (None, "nothing says how they divide the model"),
        ({"layers1.*.0": "colwise"}, r"stage 1 does not run with .* divided along tp, in layers1\.\d\.2: "),
        (
            {"norms1.*": "sequence_parallel"},
            r"norms1\.\d of stage 1 a style for a part of a tensor on each rank, and each rank gives it the whole",
        ),
        ({"head": "colwise"}, "stage 1 returns logits as .* on each of 2 ranks, and the whole is"),
        (
            {"embed": "embedding_colwise", "head": "colwise_gather_output"},
            r"embed.weight of stage 0 as S\(1\).*head.weight of stage 1, which is the same parameter, as S\(0\)",
        ),
    ]
    # A rank that hears of the error of another one before it comes to the same place quotes that one.
    quoted = r"^(RuntimeFault: rank \d .* failed: )?ArgumentError: .*"
    assert_refused(tmp_path, 2, 4, "plan", [(plan, f"{quoted}{message}") for plan, message in cases])


def test_ranks_that_do_not_divide_a_layer_are_refused(tmp_path: Path) -> None:
    expected = r"^ArgumentError: .*divides the 16 outputs of layers0\.0\.0, in stage 0, and tp is 3"
    assert_refused(tmp_path, 2, 6, "plan", [(meshes.TP_PLAN, expected)])


def test_a_rank_that_fails_wakes_those_that_wait_in_a_collective_of_a_stage(tmp_path: Path) -> None:
    folder, shape = str(write(meshes.perceptrons(2), tmp_path / "perceptrons")), {"pp": 2, "tp": 2}
    options = {"tp_plan": meshes.TP_PLAN, "kernels": "autograd"}
    for message, seconds in ranks.run(meshes.fail, 4, folder, shape, 3, "action", options):
        assert "rank 3 (pp 1, tp 1) failed" in message and "ValueError: broken on purpose" in message
        assert seconds < ranks.NO_HANG_SECONDS


def test_fully_sharded(tmp_path: Path) -> None:
    assert_trained(
        tmp_path,
        ({"dp_shard": 2, "pp": 2}, "zb-v", (9, 5), True, {"resident": 1}),
    )


@pytest.mark.slow  # the same without a tied weight, and with the dimensions the other way round
def test_fully_sharded_under_1f1b(tmp_path: Path) -> None:
    assert_trained(tmp_path, ({"pp": 2, "dp_shard": 2}, "1f1b", (8, 8), False, {}))


@pytest.mark.slow
def test_sharded_by_the_user(tmp_path: Path) -> None:
    """What parallelize_fn has divided is gathered and reduced as the schedule says, and computed with compiled."""
    by_hand = {"shard_by_hand": "dp_shard", "strict": True}
    assert_trained(
        tmp_path,
        ({"pp": 2, "dp_shard": 2}, "zb-v", (9, 5), False, {**by_hand, "resident": 1}),
        (
            {"dp_replicate": 2, "dp_shard": 2},
            "1f1b",
            (4, 3, 2, 5),
            True,
            {**by_hand, "shard_by_hand": ("dp_replicate", "dp_shard")},
        ),
    )


@pytest.mark.slow  # the tests above have both, one without the other
def test_sharded_by_the_user_what_is_divided_already(tmp_path: Path) -> None:
    options = {"shard_by_hand": "dp_shard", "strict": True, "tp_plan": meshes.TP_PLAN}
    assert_trained(tmp_path, ({"dp_shard": 2, "tp": 2}, "1f1b", (8, 6), True, options))


def test_shards_of_uneven_sizes_and_other_dimensions(tmp_path: Path) -> None:
    placed = {"fsdp": {"shard_placement_fn": meshes.last_dimension}}
    assert_trained(tmp_path, ({"dp_shard": 3}, "1f1b", (4, 3, 2), True, {"kernels": "autograd"}))
    assert_trained(tmp_path, ({"dp_shard": 2}, "1f1b", (4, 3), True, placed))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_in_all_dimensions(tmp_path: Path) -> None:
    options = {"tp_plan": meshes.TP_PLAN, "strict": True, "kernels": "inductor", "timeout": 500}
    assert_trained(tmp_path, ({"pp": 2, "dp_shard": 2, "tp": 2}, "zb-v", (8, 8), True, options), seconds=580)


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
        ("hooked", "parallelize_fn gave head.weight a hook, which would not be called: along dp_shard"),
        ("elsewhere", "parallelize_fn divides .* of stage 0 by fully_shard between other ranks than those along"),
    ]
    assert_refused(tmp_path, 1, 2, "sharding", [(how, f"^ArgumentError: {message}") for how, message in cases])


def test_fully_shard_over_other_ranks_than_those_along_dp_shard_is_refused(tmp_path: Path) -> None:
    cases = [
        (({"pp": 2, "dp_replicate": 2}, "dp_replicate"), 'dp_replicate. .*Try: "dp_shard" in place of "dp_replicate"'),
        (({"pp": 2, "dp_shard": 2}, "pp"), r'pp. .*Try: fully_shard\(module, mesh=mesh\["dp_shard"\]\)'),
        (({"pp": 2, "tp": 2}, "tp"), 'tp. .*Try: a mesh that has a dimension "dp_shard" as well'),
        (({"dp_shard": 2, "dp_replicate": 2}, ("dp_shard", "dp_replicate")), "dp_shard, dp_replicate. .*Try: fully"),
    ]
    expected = r"(?s)^ArgumentError: parallelize_fn applied fully_shard to \S+ of stage \d over the ranks along "
    assert_refused(tmp_path, 2, 4, "sharding over", [(case, expected + message) for case, message in cases])


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
        assert seconds < ranks.NO_HANG_SECONDS


ORDERS = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ({"pp": 2, "dp_replicate": 2}, (8, 6)),
        ({"pp": 2, "dp_shard": 2}, (8, 6)),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, (8, 6, 8, 10)),
    ],
    ids=["dp_replicate", "dp_shard", "hsdp"],
)
def test_copies_and_shards(shape: meshes.Shape, rows: tuple[int, ...], tmp_path: Path) -> None:
    cases: list[Case] = [
        (shape, schedule, rows, tied, {"timeout": 200}) for schedule in ORDERS for tied in (True, False)
    ]
    assert_trained(tmp_path, *cases, seconds=580)


TP = {"tp_plan": meshes.TP_PLAN, "strict": True, "timeout": 200}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("shape", "rows", "options"),
    [
        ({"pp": 2, "dp_shard": 2}, (8, 8), {"timeout": 200}),
        ({"pp": 2, "tp": 2}, (8,), TP),
        ({"dp_shard": 2, "tp": 2}, (8, 8), TP),
        ({"pp": 2, "dp_shard": 2, "tp": 2}, (8, 8), TP),
        ({"pp": 2, "dp_replicate": 2, "tp": 2}, (8, 8), TP),
    ],
    ids=lambda argument: "-".join(argument) if "tp_plan" not in argument and isinstance(argument, dict) else "",
)
def test_every_schedule(shape: meshes.Shape, rows: tuple[int, ...], options: dict[str, Any], tmp_path: Path) -> None:
    """As torch's own tests compose its schedules, with FSDP, with tensor parallelism and with both."""
    schedules = [name for name in names() if trains(name)] if "pp" in shape else ["1f1b", "interleaved-1f1b"]
    assert_trained(tmp_path, *((shape, schedule, rows, True, options) for schedule in schedules), seconds=880)


def test_ranks_with_gpus_and_gloo_have_pipelines_alone() -> None:
    ((pipeline, divided, sharded),) = ranks.run(mesh_refusals.with_gpus, 1)
    assert pipeline == "nothing"
    assert "on a GPU along tp." in divided and 'init_process_group("nccl")' in divided
    assert "along dp_shard, tp." in sharded
