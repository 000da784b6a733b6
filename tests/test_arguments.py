"""How messages name arguments for who called a function and for who typed a command, and what their types may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import pipegraph
from pipegraph.arguments import argument, asked_by_command, for_asker, require_type
from pipegraph.errors import ArgumentError, CaptureError, PackageError, PipegraphError, PlanError, ScheduleError
from pipegraph.planner import solve
from tests.captures import captured
from tests.messages import refused
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
        with refused(ArgumentError, f"This takes a number; this is {described}.", advice="n=3"):
            require_type(value, int, "This takes a number", "n=3")
    with refused(ScheduleError, "this is an Identity"):
        require_type(nn.Identity(), int, "This takes a number", error=ScheduleError)


MODEL = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("wrong", "kind", "parts", "advice"),
    [
        ({"points": 2, "stages": None}, ArgumentError, ["points", "2"], "points="),
        ({"points": [2], "stages": None}, ArgumentError, ["points", "2"], "points="),
        ({"stages": "2"}, ArgumentError, ["stages", "'2'"], "stages=2"),
        ({"schedule": 3}, ArgumentError, ["schedule", "3"], "read_csv"),
        ({"schedule": Path("a.csv")}, ArgumentError, ["schedule", "PosixPath"], "read_csv"),
        ({"microbatches": "8"}, ArgumentError, ["microbatches", "'8'"], "microbatches=8"),
        ({"hardware": 3}, ArgumentError, ["hardware", "3"], 'hardware="h100"'),
        ({"loss": max}, ArgumentError, ["loss", "builtin_function"], "loss=(loss_fn, target)"),
        ({"loss": (1, 2)}, ArgumentError, ["loss", "2 values"], "loss=(loss_fn, target)"),
        ({"optimizer_bytes": "4"}, ArgumentError, ["optimizer_bytes", "'4'"], "optimizer_bytes=8"),
        ({"optimizer": "adam"}, ArgumentError, ["optimizer", "'adam'", "sgd"], "adamw"),
        ({"precision": "bf17"}, ArgumentError, ["precision", "'bf17'", "bf16-master"], "bf16"),
        ({"precision": "fp8"}, ArgumentError, ["cpu", "float8", "bfloat16"], "h100"),
        ({"effort": "x"}, PlanError, ["effort", "'x'"], ""),
        ({"setting": 3}, ArgumentError, ["setting", "3"], "setting="),
        ({"cache": 3}, ArgumentError, ["cache", "3"], "cache=None"),
        ({"ranks": 2.0}, ArgumentError, ["ranks", "2.0"], "ranks=4"),
        ({"memory_bytes": [3]}, PlanError, ["layers.0.0.weight", "3 B"], "memory_bytes="),
        ({"balance": 3}, ArgumentError, ["balanced", '"3"'], "balance"),
        ({"recompute": True}, ArgumentError, ["recompute", '"True"'], '"block"'),
    ],
    ids=str,
)
def test_plan_checks_types(wrong: dict[str, Any], kind: type[PlanError], parts: list[str], advice: str) -> None:
    with refused(kind, *parts, advice=advice) as caught:
        pipegraph.plan(captured("tests/models/chain.py"), **{"stages": 2} | wrong)
    assert " --" not in str(caught.value)


def test_plan_takes_what_capture_returns() -> None:
    with refused(ArgumentError, "plan()", "pipegraph.capture", "a Sequential", advice="captured = "):
        pipegraph.plan(MODEL, stages=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("kwargs", [["mask"], {1: None}], ids=str)
def test_capture_checks_keyword_arguments(kwargs: Any) -> None:
    with refused(CaptureError, "kwargs", "dict", advice="kwargs="):
        pipegraph.capture(MODEL, (), kwargs)


def test_write_package_checks_types(tmp_path: Path) -> None:
    plan, write, out = (
        pipegraph.plan(captured("tests/models/chain.py"), ["layers.2"]),
        pipegraph.write_package,
        tmp_path,
    )
    calls: list[tuple[str, str, str, Callable[[], object]]] = [
        ("write_package()", "a Captured", "pipegraph.plan(", lambda: write(plan.captured, out)),  # type: ignore[arg-type]
        ("out", "3", "out=", lambda: write(plan, 3)),  # type: ignore[arg-type]
        ("weights", "3", "weights=", lambda: write(plan, out, weights=3)),  # type: ignore[arg-type]
        ("overwrite", "'no'", "overwrite=", lambda: write(plan, out, overwrite="no")),  # type: ignore[arg-type]
        ("source", "3", "source=", lambda: write(plan, out, source=3)),  # type: ignore[arg-type]
    ]
    for name, value, advice, call in calls:
        with refused(ArgumentError, name, f"this is {value}", advice=advice):
            call()
    assert not [*out.iterdir()]


@pytest.mark.parametrize(
    ("wrong", "kind", "advice"),
    [
        ({"package": MODEL}, PackageError, "pipegraph.write_package("),
        ({"schedule": 3}, ScheduleError, 'schedule="1f1b"'),
        ({"loss_fn": 3}, ArgumentError, "loss_fn="),
        ({"device": 3.5}, ArgumentError, 'device="cpu"'),
        ({"kernels": 3}, ArgumentError, 'kernels="inductor"'),
        ({"group": 3}, ArgumentError, "torch.distributed.new_group("),
        ({"parallelize_fn": 3}, ArgumentError, "parallelize_fn="),
        ({"weights": 3}, PackageError, "save_pretrained"),
        ({"max_variants": "3"}, ArgumentError, "max_variants=8"),
    ],
    ids=lambda parameter: next(iter(parameter)) if isinstance(parameter, dict) else "",
)
def test_pipeline_checks_types(wrong: dict[str, Any], kind: type[PipegraphError], advice: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"package": None, "kernels": "eager"} | wrong
    if arguments["package"] is None:
        arguments["package"] = write(chain(2), tmp_path / "package")
    ((name, value),) = wrong.items()
    named = {"package": "package", "weights": "checkpoint"}.get(name, name)
    described = "a Sequential" if value is MODEL else repr(value)
    with refused(kind, named, f"this is {described}", advice=advice):
        pipegraph.Pipeline(**arguments)


def test_schedules_and_solve_check_types() -> None:
    from pipegraph.cost import SegmentCost

    schedules: Any = pipegraph.schedule
    schedule = schedules.build("1f1b", 2, 2)
    number: Any = 3
    calls: list[tuple[type[PipegraphError], str, str, Callable[[], object]]] = [
        (ScheduleError, "lower()", "from_csv(text)", lambda: schedules.lower(3)),
        (ScheduleError, "Edges", "edges=", lambda: schedules.lower(schedule, edges=3)),
        (ScheduleError, "check()", "from_csv(text)", lambda: schedules.check(3)),
        (ScheduleError, "simulate()", "from_csv(text)", lambda: schedules.simulate(3, 3)),
        (ScheduleError, "simulate() takes the Times", "Times.equal(", lambda: schedules.simulate(schedule, 3)),
        (ScheduleError, "search()", "Times.equal(", lambda: schedules.search(3, 2, 2)),
        (ScheduleError, "lower_bound()", "Times.equal(", lambda: schedules.lower_bound(3, (0, 1), 2)),
        (ScheduleError, "to_csv()", "from_csv(text)", lambda: schedules.to_csv(3)),
        (ScheduleError, "from_csv()", "read_csv(path)", lambda: schedules.from_csv(3)),
        (ScheduleError, "read_csv()", "from_csv(text)", lambda: schedules.read_csv(3)),
        (ScheduleError, "read_times()", "Times.from_json(text)", lambda: schedules.read_times(3)),
        (ScheduleError, "lifetimes()", "from_csv(text)", lambda: schedules.lifetimes(3)),
        (ScheduleError, "peak_activations()", "from_csv(text)", lambda: schedules.peak_activations(3)),
        (PlanError, "solve()", "pipegraph.cost.price", lambda: solve(number, 2)),
        (PlanError, "names", "", lambda: solve([SegmentCost(1, 1, 1)] * 4, 2, names=number)),
        (PlanError, "link", "link=", lambda: solve([SegmentCost(1, 1, 1)] * 4, 2, link=number)),
    ]
    for kind, name, advice, call in calls:
        with refused(kind, name, "this is 3", advice=advice):
            call()


def test_profile_checks_types(tmp_path: Path) -> None:
    model: Any = MODEL
    with refused(ArgumentError, "profile()", "pipegraph.Pipeline", "a Sequential", advice="pipegraph.profile(pipe"):
        pipegraph.profile(model, tmp_path)
