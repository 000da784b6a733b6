"""The comparison of plans over schedules, microbatches and recompute, and the file of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pipegraph
from pipegraph.errors import PlanError, ScheduleError, SourceError
from pipegraph.planner.comparison import PlanCandidate, PlanComparison, candidates, compare_model
from pipegraph.planner.plan import plan_of
from pipegraph.planner.plan_file import PlanFile
from pipegraph.planner.plan_options import PlanOptions
from pipegraph.planner.solver.solve import MemoryShortage
from pipegraph.schedule import names
from pipegraph.schedule.recipes import trains
from tests.messages import refused
from tests.planner.machine import MACHINE, linears

MODEL = linears(*[64] * 7, 320)


def compared(memory: float | None = None, **grid: object) -> PlanComparison:
    plans = candidates(2, **grid)  # type: ignore[arg-type]
    return compare_model(MODEL, PlanOptions(hardware=MACHINE, ranks=2, memory_bytes=memory), 2, plans)


def test_what_is_compared() -> None:
    assert candidates(4, ["1F1B", "zb-v"], [8], recompute=["none"]) == (
        PlanCandidate("1f1b", 1, 8, "none"),
        PlanCandidate("zb-v", 2, 8, "none"),
    )
    assert {plan.microbatches for plan in candidates(4)} == {8, 16}
    assert {plan.recompute for plan in candidates(4)} == {"none", "min-cut", "block"}
    assert {plan.chunks for plan in candidates(4, ["interleaved-1f1b"])} == {2, 4}
    assert {plan.chunks for plan in candidates(16, ["interleaved-1f1b"])} == {2}
    in_a_v = {"zb-v", "v-half", "v-min", "dualpipe-v"}
    assert {plan.schedule for plan in candidates(4, chunks=[1])} == {*filter(trains, names())} - in_a_v
    with refused(ScheduleError, '"zb-vv"', '"zb-v"', advice="zb-v"):
        candidates(4, ["zb-vv"])


def test_no_choice_is_worse_than_another() -> None:
    model = linears(*[64] * 7, 320, rows=1024)  # of which activations take more than parameters
    choices = compare_model(model, PlanOptions(hardware=MACHINE, ranks=2), 2, candidates(2)).choices
    assert len(choices) > 1
    times, memory = [choice.per_microbatch for choice in choices], [choice.peak for choice in choices]
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)


def test_of_equal_plans_the_simplest_is_the_best() -> None:
    plans = candidates(1, ["zb-h1", "1f1b"], [2])
    alone = compare_model(MODEL, PlanOptions(hardware=MACHINE, ranks=1), 1, plans).best
    assert alone.schedule.name == "1f1b"
    best = compared(schedules=["1f1b", "gpipe"], microbatches=[1], recompute=["none"]).best
    assert best.schedule.name == "gpipe"  # with one microbatch they are the same


def test_without_a_backward_nothing_is_computed_again() -> None:
    assert candidates(2, ["forward"], [4]) == (PlanCandidate("forward", 1, 4, "none"),)


def test_the_best_is_as_good_as_any_plan_made_alone() -> None:
    grid = {"schedules": ["1f1b", "zb-h1", "zb-v"], "microbatches": [6], "recompute": ["min-cut"]}
    best = compared(**grid).best
    for schedule, stages in (("1f1b", 2), ("zb-h1", 2), ("zb-v", 4)):
        alone = pipegraph.plan(MODEL, stages=stages, schedule=schedule, microbatches=6, hardware=MACHINE).prediction
        assert alone is not None
        assert best.value <= alone.value * 1.0021


def test_choices_fit_the_memory() -> None:
    free = compared(microbatches=[6]).choices
    limit = (free[0].peak + free[-1].peak) / 2
    limited = compared(limit, microbatches=[6]).choices
    assert all(choice.peak <= limit for choice in limited)
    assert limited[0].per_microbatch >= free[0].per_microbatch


def test_nothing_fits() -> None:
    with refused(MemoryShortage, "330.0 KiB on each rank", "closest", advice="memory_bytes=") as caught:
        compared(330 * 1024, microbatches=[6])
    assert compared(caught.value.peak * 1.01, microbatches=[6]).choices


def test_what_no_schedule_can_have_is_left_out_and_told() -> None:
    (reason,) = compared(schedules=["1f1b", "zb-v"], microbatches=[2], recompute=["none"]).refused
    assert all(part in reason for part in ("zb-v", "2 microbatches", "2 ranks"))
    with refused(PlanError, "zb-v", "2 microbatches", "2 ranks", advice="microbatches"):
        compared(schedules=["zb-v"], microbatches=[2])
    with refused(PlanError, "2 segments", "zb-v", "4 stages", advice="ranks=1"):
        compare_model(linears(64, 64), PlanOptions(hardware=MACHINE, ranks=2), 2, candidates(2, ["zb-v"]))


def test_the_file_of_a_plan(tmp_path: Path) -> None:
    plan = plan_of(MODEL, compared(schedules=["zb-h1"], microbatches=[6]).best)
    file = tmp_path / "plan.json"
    file.write_text(PlanFile.from_plan(plan).to_json())
    again = PlanFile.read(file).apply(MODEL)
    assert again.points == plan.points
    assert PlanFile.from_plan(again).to_json() == file.read_text()
    with refused(PlanError, "49,152", "8,192", advice="pipegraph plan"):
        PlanFile.read(file).apply(linears(64, 64))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{", ["not JSON"]),
        ("[]", ["a list", "an object"]),
        ('{"schema_version": 1}', ["lacks balance"]),
        ('{"schema_version": 2, "points": []}', ["schema_version", "2", "1 to 1"]),
    ],
)
def test_what_is_no_plan(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with refused(SourceError, str(file), *parts, advice="pipegraph plan MODEL"):
        PlanFile.read(file)
    with refused(SourceError, "none.json: No such file", advice="pipegraph plan MODEL"):
        PlanFile.read(tmp_path / "none.json")


def test_a_plan_with_a_point_too_few(tmp_path: Path) -> None:
    plan_file = PlanFile.from_plan(pipegraph.plan(MODEL, stages=2, hardware=MACHINE))
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_file.to_dict() | {"points": []}))
    with refused(SourceError, str(file), "costs", "2 stages", "0 points", advice="pipegraph plan MODEL"):
        PlanFile.read(file)
