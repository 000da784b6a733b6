"""How messages name arguments for who called a function and for who typed a command, and what their types may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import pipegraph
from pipegraph.arguments import argument, asked_by_command, for_asker, require_type
from pipegraph.errors import ArgumentError, PipegraphError, ScheduleError
from pipegraph.planner import solve
from tests.captures import captured
from tests.runtime.packages import write
from tests.runtime.sketches import chain


@pytest.mark.parametrize(
    ("name", "values", "python", "command"),
    [
        ("stages", [2], "stages=2", "--stages 2"),
        ("points", [["layers.4", "norm"]], 'points=["layers.4", "norm"]', "--points layers.4,norm"),
        ("balance", ["time"], 'balance="time"', "--balance time"),
        ("memory_bytes", ["80GiB"], 'memory_bytes="80GiB"', "--memory 80GiB"),
        ("overwrite", [True], "overwrite=True", "--overwrite"),
        ("weights", [False], "weights=False", "--no-weights"),
        ("allow_derivative", [True], "allow_derivative=True", "--allow-derivative"),
        ("out", [], "out", "-o"),
    ],
)
def test_an_argument_is_named_for_who_asked(name: str, values: list[Any], python: str, command: str) -> None:
    assert argument(name, *values) == python
    with asked_by_command():
        assert argument(name, *values) == command
        assert for_asker("python", "command") == "command"
    assert argument(name, *values) == python


def test_a_type_at_the_door_says_what_was_given() -> None:
    require_type(3, int, "This takes a number")
    for value, described in [(True, "True"), (None, "None"), ("x", "'x'"), (nn.Linear, "the class Linear")]:
        with pytest.raises(ArgumentError, match=f"^This takes a number; this is {described}.\nTry: n=3.$"):
            require_type(value, int, "This takes a number", "n=3")
    with pytest.raises(ScheduleError, match=r"; this is an Identity\.$"):
        require_type(nn.Identity(), int, "This takes a number", error=ScheduleError)


def _refused(call: Callable[[], object]) -> str:
    with pytest.raises(PipegraphError) as caught:
        call()
    return str(caught.value)


MODEL = nn.Sequential(nn.Linear(2, 2))
PLAN_ARGUMENTS: list[dict[str, Any]] = [
    {"points": 2}, {"points": [2]}, {"stages": "2"}, {"schedule": 3}, {"schedule": Path("a.csv")},
    {"microbatches": "8"}, {"hardware": 3}, {"loss": max}, {"loss": (1, 2)}, {"state_factor": "4"}, {"effort": "x"},
    {"setting": 3}, {"cache": 3}, {"ranks": 2.0}, {"memory_bytes": [3]}, {"balance": 3}, {"recompute": True},
]  # fmt: skip


@pytest.mark.parametrize("wrong", PLAN_ARGUMENTS, ids=str)
def test_plan_checks_types(wrong: dict[str, Any]) -> None:
    message = _refused(lambda: pipegraph.plan(captured("tests/models/chain.py"), **{"stages": 2} | wrong))
    name = "points" if "points" in wrong else next(iter(wrong))
    named = {"schedule": "schedule", "balance": "balanced by"}.get(name, name)
    assert named in message or "split points" in message
    assert " --" not in message


def test_plan_takes_what_capture_returns() -> None:
    message = _refused(lambda: pipegraph.plan(MODEL, stages=2))  # type: ignore[arg-type]
    assert message.startswith("plan() takes what pipegraph.capture returns; this is a Sequential.\nTry: captured = ")


@pytest.mark.parametrize("kwargs", [["mask"], {1: None}], ids=str)
def test_capture_checks_keyword_arguments(kwargs: Any) -> None:
    assert _refused(lambda: pipegraph.capture(MODEL, (), kwargs)).startswith("kwargs must be a dict from names")


def test_write_package_checks_types(tmp_path: Path) -> None:
    plan, write, out = (
        pipegraph.plan(captured("tests/models/chain.py"), ["layers.2"]),
        pipegraph.write_package,
        tmp_path,
    )
    calls: list[tuple[str, Callable[[], object]]] = [
        ("write_package() takes what pipegraph.plan returns; this is a Captured", lambda: write(plan.captured, out)),  # type: ignore[arg-type]
        ("out is a folder; this is 3", lambda: write(plan, 3)),  # type: ignore[arg-type]
        ("weights is True, False or a folder; this is 3", lambda: write(plan, out, weights=3)),  # type: ignore[arg-type]
        ("overwrite is True or False; this is 'no'", lambda: write(plan, out, overwrite="no")),  # type: ignore[arg-type]
        ("source is a ModelSource; this is 3", lambda: write(plan, out, source=3)),  # type: ignore[arg-type]
    ]
    for message, call in calls:
        assert _refused(call).startswith(message)
    assert not [*out.iterdir()]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"package": MODEL}, "A package is given by its folder; this is a Sequential."),
        ({"schedule": 3}, "schedule is a name, a Schedule or a CSV file; this is 3."),
        ({"loss_fn": 3}, "loss_fn is a function of output and target; this is 3."),
        ({"device": 3.5}, "device is a name or a torch.device; this is 3.5."),
        ({"kernels": 3}, "kernels is a name, or a function that makes them; this is 3."),
        ({"group": 3}, "group is a process group; this is 3."),
        ({"parallelize_fn": 3}, "parallelize_fn is a function of a stage; this is 3."),
        ({"weights": 3}, "A checkpoint is given by its folder; this is 3."),
        ({"max_variants": "3"}, "max_variants is a whole number from 1 on; this is '3'."),
    ],
    ids=lambda parameter: next(iter(parameter)) if isinstance(parameter, dict) else "",
)
def test_pipeline_checks_types(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"package": None, "kernels": "eager"} | wrong
    if arguments["package"] is None:
        arguments["package"] = write(chain(2), tmp_path / "package")
    assert _refused(lambda: pipegraph.Pipeline(**arguments)).startswith(message)


def test_schedules_and_solve_check_types() -> None:
    from pipegraph.cost import SegmentCost

    schedules: Any = pipegraph.schedule
    schedule = schedules.build("1f1b", 2, 2)
    number: Any = 3
    calls: list[tuple[str, Callable[[], object]]] = [
        ("lower() takes a Schedule", lambda: schedules.lower(3)),
        ("Edges are pairs of stages", lambda: schedules.lower(schedule, edges=3)),
        ("check() takes a Schedule", lambda: schedules.check(3)),
        ("simulate() takes a Schedule", lambda: schedules.simulate(3, 3)),
        ("simulate() takes the Times of stages", lambda: schedules.simulate(schedule, 3)),
        ("search() takes the Times of stages", lambda: schedules.search(3, 2, 2)),
        ("lower_bound() takes the Times of stages", lambda: schedules.lower_bound(3, (0, 1), 2)),
        ("to_csv() takes a Schedule", lambda: schedules.to_csv(3)),
        ("from_csv() takes the text of a CSV file", lambda: schedules.from_csv(3)),
        ("read_csv() takes the path of a file", lambda: schedules.read_csv(3)),
        ("read_times() takes the path of a file", lambda: schedules.read_times(3)),
        ("lifetimes() takes a Schedule", lambda: schedules.lifetimes(3)),
        ("peak_activations() takes a Schedule", lambda: schedules.peak_activations(3)),
        ("solve() takes a SegmentCost for each segment", lambda: solve(number, 2)),
        ("names has a name for each segment", lambda: solve([SegmentCost(1, 1, 1)] * 4, 2, names=number)),
        ("link is a latency and a bandwidth", lambda: solve([SegmentCost(1, 1, 1)] * 4, 2, link=number)),
    ]
    for message, call in calls:
        assert _refused(call).startswith(message)


def test_profile_checks_types(tmp_path: Path) -> None:
    model: Any = MODEL
    assert _refused(lambda: pipegraph.profile(model, tmp_path)).startswith("profile() takes a pipegraph.Pipeline")
