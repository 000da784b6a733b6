"""Predicted and measured figures of a run, from fixed numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from pipegraph.cost.hardware import Hardware, Link, Links
from pipegraph.package import Manifest, ModelEntry, PlanEntry, StageCost, StageEntry, Value
from pipegraph.package.prediction import RankMemory
from pipegraph.planner.run_comparison import compare_run
from pipegraph.report.text.run_report import render_run_comparison, run_comparison_dict
from pipegraph.runtime.measurements import MeasuredCollective, MeasuredRun, MeasuredState, Message
from pipegraph.schedule import CollectiveKind, Kind, build, lower, without_transfers
from tests.package.predictions import prediction

MIB = 2**20


def cost(*times: float) -> StageCost:
    figures = dict(zip(("forward", "input_grad", "weight_grad"), times, strict=True)) if times else {}
    return StageCost(saved_bytes=3 * MIB, parameter_bytes=MIB, **figures)  # type: ignore[arg-type]


def manifest(*costs: StageCost, **plan: Any) -> Manifest:
    placed = {"ranks": 2, "microbatches": 2, "value": 0.05} | plan
    return Manifest(
        generator="test",
        model=ModelEntry("", "Chain"),
        args=("x",),
        kwargs={},
        outputs="y",
        values={
            "x": Value("x", "float32", (2,), -1, (0,)),
            "h": Value("h", "float32", (2,), 0, (1,), requires_grad=True),
            "y": Value("y", "float32", (2,), 1, ()),
        },
        stages=(
            StageEntry(0, "stage_0", "Stage0", ("x",), ("h",), cost=costs[0]),
            StageEntry(1, "stage_1", "Stage1", ("h",), ("y",), cost=costs[1]),
        ),
        plan=PlanEntry(prediction=prediction(2, **placed)),
    )


PRICED = manifest(cost(0.004, 0.0, 0.008), cost(0.005, 0.005, 0.005))
MACHINE = structs.replace(Hardware.load("h100"), name="here", links=Links(8, Link(0.001, 1e9)))
MEASURED = MeasuredRun(
    steps=3,
    times={(0, Kind.F): 0.005, (0, Kind.B): 0.008, (1, Kind.F): 0.005, (1, Kind.B): 0.012},
    step=0.04,
    state=(MeasuredState(MIB, MIB, 2 * MIB, 0),) * 2,
    saved=(6 * MIB, 2 * MIB),
    allocated=(),
    processes=2,
    kernels="inductor",
    bubble=0.15,
)
GPIPE = "The plan was 1f1b with 2 microbatches on 2 ranks, and this was gpipe with 2 microbatches on 2 ranks. Try: "
PLANNED = "without --schedule, --microbatches and --nproc"


def test_tables() -> None:
    assert render_run_comparison(compare_run(PRICED, build("1f1b", 2, 2), MEASURED)).splitlines() == [
        "predicted (time on here); measured: medians of 3 steps, without the first; times of stages in ms",
        "",
        "stage  rank  F predicted  measured    error  B predicted  measured    error",
        "    0     0         4.00      5.00  −20.0 %         8.00      8.00   +0.0 %",
        "    1     1         5.00      5.00   +0.0 %        10.00     12.00  −16.7 %",
        "error: predicted ÷ measured − 1",
        "",
        "        predicted  measured    error",
        "step     50.00 ms  40.00 ms  +25.0 %",
        "bubble   46.0 %    15.0 %",
        "",
        "memory           rank 0 predicted  rank 0 measured  rank 1 predicted  rank 1 measured",
        "parameters                1.0 MiB          1.0 MiB           1.0 MiB          1.0 MiB",
        "gradients                 1.0 MiB          1.0 MiB           1.0 MiB          1.0 MiB",
        "optimizer state           2.0 MiB          2.0 MiB           2.0 MiB          2.0 MiB",
        "activations               6.0 MiB          6.0 MiB           3.0 MiB          2.0 MiB",
        "receive buffers           2.0 MiB          —                 2.0 MiB          —",
        "together                 12.0 MiB          —                 9.0 MiB          —",
    ]


def test_another_schedule_is_simulated_with_the_links() -> None:
    schedule = build("gpipe", 2, 2)
    without = compare_run(PRICED, schedule, MEASURED)
    assert without.hints == (
        GPIPE + PLANNED,
        "The links of here are not known here and were left out. Try: --hardware with the profile's file",
    )
    comparison = compare_run(PRICED, schedule, MEASURED, MACHINE)
    assert comparison.hints == (GPIPE + PLANNED,)
    # The first forward, 2 of 15 ms on the other rank, and the last backward; between them 1 MiB crosses and returns.
    assert without.step.predicted == pytest.approx(0.004 + 0.030 + 0.008)
    assert comparison.step.predicted == pytest.approx(0.042 + 2 * (0.001 + MIB / 1e9))


def test_named_links_hold_for_the_planned_step_too() -> None:
    """In all of them ranks compute for 27 ms, the mean of 24 and 30."""
    schedule = build("1f1b", 2, 2)
    planned, linked = compare_run(PRICED, schedule, MEASURED), compare_run(PRICED, schedule, MEASURED, MACHINE)
    slow = structs.replace(MACHINE, links=Links(8, Link(1.0, 1e9)))
    slower = compare_run(PRICED, schedule, MEASURED, slow)
    assert planned.step.predicted == 0.05
    assert linked.step.predicted == pytest.approx(0.042 + 2 * (0.001 + MIB / 1e9))
    assert slower.step.predicted == pytest.approx(0.042 + 2 * (1.0 + MIB / 1e9))
    for comparison in (planned, linked, slower):
        assert comparison.bubble is not None
        assert comparison.step.predicted is not None
        assert comparison.bubble.predicted == pytest.approx(1 - 0.027 / comparison.step.predicted)
        assert comparison.hints == ()


@pytest.mark.parametrize(
    ("schedule", "microbatches", "plan", "said"),
    [
        ("1f1b", 4, {}, f"The plan was 1f1b with 2 microbatches on 2 ranks, and this was 1f1b with 4 .* {PLANNED}"),
        ("1f1b", 2, {"schedule": "mine"}, "The plan was mine with 2 .* Try: --schedule with the plan's CSV file"),
        (
            "1f1b",
            1,
            {"placement": (0, 0), "ranks": 1},
            "The plan was 1f1b with 2 microbatches on 1 rank, .* 1 microbatch on 2 ranks",
        ),
    ],
)
def test_what_runs_differs_from_the_plan(schedule: str, microbatches: int, plan: dict[str, Any], said: str) -> None:
    costs = (cost(0.004, 0.0, 0.008), cost(0.005, 0.005, 0.005))
    comparison = compare_run(manifest(*costs, **plan), build(schedule, 2, microbatches), MEASURED, MACHINE)
    assert re.match(said, comparison.hints[0])


@pytest.mark.parametrize(("factor", "said"), [(1.2, ""), (2.6, "2.6"), (0.5, "0.5"), (1300.0, "1300")])
def test_a_prediction_far_off_says_what_to_do(factor: float, said: str) -> None:
    times = {(0, Kind.F): 0.004, (0, Kind.B): 0.008, (1, Kind.F): 0.005, (1, Kind.B): 0.01}
    took = replace(MEASURED, times={key: factor * seconds for key, seconds in times.items()})
    hints = compare_run(PRICED, build("1f1b", 2, 2), took).hints
    assert hints == (() if not said else (
        f"Stages took {said} times what was predicted. Try, while nothing else runs: pipegraph calibrate -o "
        "hardware.json and pipegraph split … --hardware hardware.json, or pipegraph run … --recalibrate corrected.json",
    ))  # fmt: skip
    eager = compare_run(PRICED, build("1f1b", 2, 2), replace(took, kernels="eager")).hints
    assert eager == ("Times and bytes were predicted for compiled kernels, and this run used --kernels eager.",)
    half = compare_run(PRICED, build("1f1b", 2, 2), replace(took, precision="bf16")).hints
    assert half == ("Times and bytes were predicted for the package's own dtypes, and this run used --precision bf16.",)
    by_runs = manifest(cost(0.004, 0.0, 0.008), cost(0.005, 0.005, 0.005), balance="measured")
    hints = compare_run(by_runs, build("1f1b", 2, 2), took).hints
    assert ["was nothing else running" in hint for hint in hints] == [True] * bool(said)


@pytest.mark.parametrize(("planned_bytes", "said"), [(2 * MIB, False), (MIB, True), (0, True)])
def test_an_optimizer_that_holds_more_than_planned(planned_bytes: int, said: bool) -> None:
    memory = (RankMemory(MIB, MIB, planned_bytes, 0, 0, 0, 0),) * 2
    costs = cost(0.004, 0.0, 0.008), cost(0.005, 0.005, 0.005)
    sizes = {"memory": tuple(rank.total for rank in memory), "memory_parts": memory}
    planned = manifest(*costs, **sizes, optimizer="muon", zero1=True)
    hints = compare_run(planned, build("1f1b", 2, 2), MEASURED).hints
    assert any("2.0 MiB on rank 0" in hint and "muon with ZeRO-1" in hint for hint in hints) == said


def test_kinds_are_those_of_the_schedule() -> None:
    times = {(0, Kind.F): 0.004, (0, Kind.I): 1e-6, (0, Kind.W): 0.004, (1, Kind.F): 0.005, (1, Kind.I): 0.005}
    comparison = compare_run(PRICED, build("zb-h1", 2, 4), replace(MEASURED, times=times), MACHINE)
    assert [list(stage) for stage in comparison.stages] == [[Kind.F, Kind.I, Kind.W]] * 2
    assert (comparison.stages[0][Kind.I].predicted, comparison.stages[0][Kind.I].error) == (0.0, None)
    assert (comparison.stages[1][Kind.W].measured, comparison.stages[1][Kind.W].predicted) == (None, 0.005)


def test_ranks_in_one_process_take_turns() -> None:
    comparison = compare_run(PRICED, build("1f1b", 2, 4), replace(MEASURED, processes=1))
    assert comparison.step.predicted == pytest.approx(4 * (0.012 + 0.015))
    assert comparison.bubble is None
    assert comparison.hints == (
        "The plan was 1f1b with 2 microbatches on 2 ranks, and this was 1f1b with 4 microbatches on 2 ranks. Try: "
        + PLANNED,
    )
    assert "step, 2 ranks in turn   108.0 ms   40.0 ms  +170.0 %" in render_run_comparison(comparison)
    assert "bubble" not in render_run_comparison(comparison)


def test_a_package_without_prices() -> None:
    bare = structs.replace(manifest(StageCost(parameter_bytes=MIB), StageCost(parameter_bytes=MIB)), plan=PlanEntry())
    assert render_run_comparison(compare_run(bare, build("1f1b", 2, 2), MEASURED)).splitlines() == [
        "nothing was predicted; measured: medians of 3 steps, without the first; times of stages in ms",
        "",
        "stage  rank  F predicted  measured  error  B predicted  measured  error",
        "    0     0            —      5.00                   —      8.00",
        "    1     1            —      5.00                   —     12.00",
        "",
        "        predicted  measured  error",
        "step            —  40.00 ms",
        "bubble          —  15.0 %",
        "",
        "memory           rank 0 measured  rank 1 measured",
        "parameters               1.0 MiB          1.0 MiB",
        "gradients                1.0 MiB          1.0 MiB",
        "optimizer state          2.0 MiB          2.0 MiB",
        "activations              6.0 MiB          2.0 MiB",
        "",
        "The package has no predicted times. Try: pipegraph split … --balance time",
    ]


def test_bytes_are_compared_if_only_they_were_priced() -> None:
    comparison = compare_run(manifest(cost(), cost(), balance="parameters"), build("1f1b", 2, 2), MEASURED)
    assert (comparison.basis, comparison.step.predicted) == ("", None)
    assert [rank["activations"].predicted for rank in comparison.memory] == [6 * MIB, 3 * MIB]


def test_a_single_step_has_no_times() -> None:
    measured = replace(MEASURED, steps=0, times={}, step=None)
    text = render_run_comparison(compare_run(PRICED, build("1f1b", 2, 2), measured))
    assert text.splitlines()[0] == "predicted (time on here); memory as measured"
    assert "step " not in text.splitlines()[2]
    assert text.endswith("Times are measured from the second step on, because the first one compiles. Try: --steps 5")


@pytest.mark.parametrize("steps", [0, 3])
def test_other_kernels_than_those_predicted(steps: int) -> None:
    took = replace(MEASURED, steps=steps, kernels="eager")
    hint = "Times and bytes were predicted for compiled kernels, and this run used --kernels eager."
    assert compare_run(PRICED, build("1f1b", 2, 2), took).hints[-1] == hint
    weighed = manifest(cost(), cost(), balance="parameters")
    assert compare_run(weighed, build("1f1b", 2, 2), took).hints[-1] == hint.replace("Times and bytes", "Bytes")


def test_gpus_tell_what_torch_allocated() -> None:
    schedule = build("1f1b", 2, 2)
    two = render_run_comparison(compare_run(PRICED, schedule, replace(MEASURED, allocated=(12 * MIB, 10 * MIB))))
    (together,) = [line for line in two.splitlines() if line.startswith("together  ")]
    assert together.split()[1:] == ["12.0", "MiB", "12.0", "MiB", "9.0", "MiB", "10.0", "MiB"]
    single = render_run_comparison(compare_run(PRICED, schedule, replace(MEASURED, allocated=(22 * MIB,), processes=1)))
    assert "allocated on the GPU by all ranks together, at the most: 22.0 MiB" in single


def test_data() -> None:
    comparison = run_comparison_dict(compare_run(PRICED, build("1f1b", 2, 2), MEASURED))
    assert comparison["stages"][1] == {
        "stage": 1,
        "rank": 1,
        "F": {"predicted": 0.005, "measured": 0.005},
        "B": {"predicted": 0.01, "measured": 0.012},
    }
    assert (comparison["priced_by"], comparison["measured_steps"], comparison["processes"]) == ("time on here", 3, 2)
    assert (comparison["step"], comparison["allocated"]) == ({"predicted": 0.05, "measured": 0.04}, None)
    assert (comparison["bubble"]["measured"], comparison["hints"]) == (0.15, [])
    assert comparison["memory"][0]["activations"] == {"predicted": 6 * MIB, "measured": 6 * MIB}
    assert comparison["memory"][0]["together"] == {"predicted": 12 * MIB, "measured": None}


def test_collectives_are_priced_by_their_messages() -> None:
    """Two ranks share each stage; a link takes 1 ms and 1 GB/s within a node of 8."""
    plain = build("1f1b", 2, 2)
    collectives = without_transfers(lower(plain, sharded=range(2))).collectives
    gather, reduce = Message("gather", MIB, (0, 1)), Message("all_reduce", MIB, (0, 1))
    measured_collectives = {
        (0, CollectiveKind.UNSHARD): MeasuredCollective(0.004, (gather, gather)),
        (0, CollectiveKind.REDUCE_GRAD): MeasuredCollective(0.001, (reduce,)),
        (0, CollectiveKind.RESHARD): MeasuredCollective(0.0, ()),
    }
    measured = replace(MEASURED, collectives=measured_collectives, parts=(0.5, 0.5))
    shared = compare_run(PRICED, plain.changed(collectives=collectives), measured, MACHINE)
    half = 0.001 + MIB / 2 / 1e9
    (first, second) = shared.collectives
    assert first[CollectiveKind.UNSHARD].predicted == pytest.approx(2 * half)
    assert first[CollectiveKind.REDUCE_GRAD].predicted == pytest.approx(2 * half)
    assert CollectiveKind.RESHARD not in first and second == {}
    unshared = compare_run(PRICED, plain, MEASURED, MACHINE)
    assert (shared.step.predicted or 0) > (unshared.step.predicted or 0)  # it waits for the first gather
    for kind in ("parameters", "gradients", "optimizer state"):
        for rank, whole in zip(shared.memory, unshared.memory, strict=True):
            assert 2 * (rank[kind].predicted or 0) == whole[kind].predicted
    text = render_run_comparison(shared)
    assert "collectives, in ms" in text
    row = next(line.split() for line in text.splitlines() if line.split()[-2:] == ["+204.9", "%"])
    assert row == ["0", "0", "3.049", "4.000", "−23.8", "%", "3.049", "1.000", "+204.9", "%"]
    assert "collectives" not in render_run_comparison(unshared)
