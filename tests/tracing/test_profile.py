"""What a recorded loop writes: all ranks in one process, and two processes over gloo."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pipegraph
from pipegraph import PipegraphError
from pipegraph.schedule import Action, lower, read_csv
from pipegraph.tracing import action_name
from tests.messages import refused, warned
from tests.runtime import ranks
from tests.tracing.loops import ONE_WINDOW, STATIC, WIDTH, Loop, actions, names, observed, read, record

pytest.importorskip("tensorboard", reason="pip install pipegraph[tensorboard]")

FIRST_RANK = """
F stage 0 microbatch 0
SEND_F stage 0 microbatch 0 to stage 1
F stage 0 microbatch 1
SEND_F stage 0 microbatch 1 to stage 1
RECV_B stage 0 microbatch 0 from stage 1
B stage 0 microbatch 0
F stage 0 microbatch 2
SEND_F stage 0 microbatch 2 to stage 1
RECV_B stage 0 microbatch 1 from stage 1
B stage 0 microbatch 1
F stage 0 microbatch 3
SEND_F stage 0 microbatch 3 to stage 1
RECV_B stage 0 microbatch 2 from stage 1
B stage 0 microbatch 2
RECV_B stage 0 microbatch 3 from stage 1
B stage 0 microbatch 3
"""


def traces(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [read(file) for file in sorted(folder.glob(f"rank_{rank:02d}.*"))]


def steps(trace: dict[str, Any]) -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep")]


def assert_nested(trace: dict[str, Any]) -> None:
    """Complete events of one thread lie in each other, or apart: what Chrome's format asks for."""
    threads: dict[Any, list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)  # whole nanoseconds
            span = start, -start - round(event["dur"] * 1000)
            threads.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in threads.values():
        within: list[int] = []
        for start, end in sorted(spans):
            while within and -within[-1] <= start:
                within.pop()
            assert not within or -end <= -within[-1] + 2  # as a float of microseconds counts no finer
            within.append(end)


def test_a_loop_of_all_ranks_in_one_process(loop: Loop, tmp_path: Path) -> None:
    looked_at, losses = [], []
    with pipegraph.profile(loop.pipe, tmp_path / "runs", wait=1, warmup=1, active=2, repeat=2) as profiler:
        for _ in range(10):
            looked_at.append(observed(loop.pipe))
            result = loop.step()
            losses.append(float(result.loss))
            profiler.step(result)
    assert looked_at == [False, True, True, True] * 2 + [False, False]
    folder = profiler.folder
    assert folder.parent == tmp_path / "runs"
    assert re.fullmatch(r"1f1b_m\d+_\w+_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder.name)
    files = [f"rank_{rank:02d}.{window}.pt.trace.json.gz" for rank in (0, 1) for window in (0, 1)]
    assert names(folder) == sorted([*files, *STATIC])
    manifest = loop.pipe.package.manifest
    assert (folder / "pipeline.json").read_text() == manifest.to_json()
    assert read_csv(folder / "schedule.csv").actions == loop.pipe.schedule.actions
    run = json.loads((folder / "run.json").read_text())
    digits = [window["digits"] for window in run["windows"]]
    assert run["windows"] == [
        {"digits": digits[0], "steps": [2, 3], "losses": losses[2:4]},
        {"digits": digits[1], "steps": [6, 7], "losses": losses[6:8]},
    ]
    about = {"schedule": "1f1b", "ranks": 2, "microbatches": 4, "placement": [0, 1], "processes": 1, "device": "cpu"}
    origin = {"package": "chain", "kernels": "eager", "torch": torch.__version__, "generator": "pipegraph 0.1.0"}
    assert run.items() >= {"schema_version": 1, **about, **origin}.items()
    lowered = lower(loop.pipe.schedule, manifest.edges(), manifest.gradient_edges())
    for rank in (0, 1):
        first, second = traces(folder, rank)
        assert steps(first) == ["ProfilerStep#2", "ProfilerStep#3"] and steps(second) == [
            "ProfilerStep#6",
            "ProfilerStep#7",
        ]
        info = {"run": run["run"], "rank": rank, "ranks": 2, "digits": digits[0], "mesh": {"pp": 2}, "messages": {}}
        assert first["pipegraph"] == {**info, "clock": {"offset_ns": 0, "error_ns": 0}}
        assert list(first)[-1] == "traceEvents"  # at its last bracket the plugin adds the events of a GPU
        event_names = sorted(event["name"] for event in actions(first))
        assert event_names == sorted(2 * [action_name(action) for action in lowered.actions[rank]])


def test_a_rank_s_file(loop: Loop, tmp_path: Path) -> None:
    with pipegraph.profile(loop.pipe, tmp_path, active=1) as profiler:
        for _ in range(2):
            began = time.time_ns()
            loop.step()
            ended = time.time_ns()
            profiler.step()
    (trace,) = traces(profiler.folder, 0)
    spans = actions(trace)
    assert [span["name"] for span in spans] == FIRST_RANK.split("\n")[1:-1]
    assert actions(trace, "cpu_op") == [{**span, "cat": "cpu_op"} for span in spans]
    args = [{key: span["args"][key] for key in span["args"] if " " not in key} for span in spans]
    assert args[0] == {"stage": 0, "kind": "F", "microbatch": 0, "rank": 0, "step": 1}
    transfer = {"peer": 1, "peer_rank": 1, "bytes": 2 * WIDTH * 4}
    assert args[1] == {"stage": 0, "kind": "SEND_F", "microbatch": 0, "rank": 0, "step": 1, **transfer}
    assert args[4] == {"stage": 0, "kind": "RECV_B", "microbatch": 0, "rank": 0, "step": 1, **transfer}
    ends = [span["ts"] + span["dur"] for span in spans]
    assert all(end <= span["ts"] for end, span in zip(ends, spans[1:], strict=False))
    base, patience = trace["baseTimeNanoseconds"], 5_000_000
    assert began - patience < base + 1000 * spans[0]["ts"] and base + 1000 * ends[-1] < ended + patience
    (window,) = json.loads((profiler.folder / "run.json").read_text())["windows"]
    assert window["losses"] == [None]


def test_events_are_given_to_the_rank_whose_action_they_lie_in(loop: Loop, tmp_path: Path) -> None:
    with pipegraph.profile(loop.pipe, tmp_path, active=1) as profiler:
        for _ in range(2):
            profiler.step(loop.step())
    for rank in (0, 1):
        (trace,) = traces(profiler.folder, rank)
        spans = [(span["ts"], span["ts"] + span["dur"]) for span in actions(trace)]
        products = [event["ts"] for event in trace["traceEvents"] if event["name"] == "aten::addmm"]
        assert len(products) == 4 and all(any(start < at < end for start, end in spans) for at in products)
        optimizers = [event for event in trace["traceEvents"] if event["name"].startswith("Optimizer.step")]
        assert len(optimizers) == (1 if rank == 0 else 0)


def test_for_ever(loop: Loop, tmp_path: Path) -> None:
    with pipegraph.profile(loop.pipe, tmp_path, active=1, repeat=0) as profiler:
        for _ in range(6):
            profiler.step(loop.step())
    assert [steps(trace) for trace in traces(profiler.folder, 1)] == [[f"ProfilerStep#{step}"] for step in (1, 3, 5)]


def test_a_loop_that_ends_early_writes_what_it_has(loop: Loop, tmp_path: Path) -> None:
    with pipegraph.profile(loop.pipe, tmp_path, active=3) as profiler:
        for _ in range(3):
            profiler.step(loop.step())
        loop.step()  # which is not said to be done
    assert not observed(loop.pipe)
    (trace,) = traces(profiler.folder, 1)
    assert steps(trace) == ["ProfilerStep#1", "ProfilerStep#2"]
    assert {span["args"]["step"] for span in actions(trace)} == {1, 2}
    assert json.loads((profiler.folder / "run.json").read_text())["windows"][0]["steps"] == [1, 2]


def test_a_loop_that_is_too_short_says_so_and_leaves_nothing(loop: Loop, tmp_path: Path) -> None:
    with (
        warned("1 steps", "nothing was written"),
        pipegraph.profile(loop.pipe, tmp_path) as profiler,
    ):
        profiler.step(loop.step())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")  # torch's warning at warmup=0
def test_other_observers_continue(loop: Loop, tmp_path: Path) -> None:
    class Count:
        begun = 0

        def begin(self, rank: int, action: Action) -> None:
            self.begun += 1

        def end(self, rank: int, action: Action, saved: Any) -> None:
            pass

    count = Count()
    counting = loop.pipe.observe(count)
    loop.step()
    of_a_step = count.begun
    with pipegraph.profile(loop.pipe, tmp_path, warmup=0, active=1) as profiler:
        loop.step()
        profiler.step()
        counting.remove()
        loop.step()
    assert count.begun == 2 * of_a_step > 0
    assert len(actions(traces(profiler.folder, 0)[0])) == 16


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")  # torch's warning at warmup=0
def test_an_eval_in_a_recorded_step_is_no_part_of_it(loop: Loop, tmp_path: Path) -> None:
    with pipegraph.profile(loop.pipe, tmp_path, warmup=0, active=1) as profiler:
        loop.pipe.evaluate(loop.inputs)
        result = loop.step()
        loop.pipe.evaluate(loop.inputs)
        profiler.step(result)
    assert [span["name"] for span in actions(traces(profiler.folder, 0)[0])] == FIRST_RANK.split("\n")[1:-1]


def test_numbers_that_record_nothing(loop: Loop, tmp_path: Path) -> None:
    with refused(PipegraphError, "active is 0", advice="active=3"):
        pipegraph.profile(loop.pipe, tmp_path, active=0)
    with refused(PipegraphError, "wait is -1", advice="profile(pipe, folder"):
        pipegraph.profile(loop.pipe, tmp_path, wait=-1)


def test_every_run_has_a_folder_of_its_own(loop: Loop, tmp_path: Path) -> None:
    folders = []
    for _ in range(3):
        with pipegraph.profile(loop.pipe, tmp_path, warmup=1, active=1) as profiler:
            for _ in range(2):
                profiler.step(loop.step())
        folders.append(profiler.folder)
    assert len(set(folders)) == 3
    assert len({json.loads((folder / "run.json").read_text())["run"] for folder in folders}) == 3


def test_two_processes(package: Path, tmp_path: Path) -> None:
    runs = str(tmp_path / "deep" / "runs")
    first, last = ranks.run(record, 2, str(package), runs, 4, {"active": 3})
    assert first[:2] == last[:2]
    assert len(last[1]) == 4
    folder = Path(first[0])
    assert names(folder) == ONE_WINDOW
    run = json.loads((folder / "run.json").read_text())
    assert run["processes"] == 2
    assert [window["steps"] for window in run["windows"]] == [[1, 3]]
    assert run["windows"][0]["losses"] == last[1][1:]
    clocks = []
    for rank, (_, _, began, ended) in enumerate((first, last)):
        (trace,) = traces(folder, rank)
        assert {span["args"]["rank"] for span in actions(trace)} == {rank}
        assert steps(trace) == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
        info = trace["distributedInfo"]
        assert (info["rank"], info["world_size"], info["backend"]) == (rank, 2, "gloo")
        base = trace["baseTimeNanoseconds"]
        assert all(began < base + 1000 * span["ts"] < ended for span in actions(trace))
        compared = [event["name"] for event in trace["traceEvents"] if event["name"] == "gloo:all_reduce"]
        assert len(compared) == 3
        assert {event["ph"] for event in trace["traceEvents"] if event["name"] == "gloo:recv"} == {"b", "e"}
        assert_nested(trace)
        clocks.append(trace["pipegraph"]["clock"])
    assert clocks[0] == {"offset_ns": 0, "error_ns": 0}
    assert abs(clocks[1]["offset_ns"]) <= clocks[1]["error_ns"] < 100_000_000  # they are one machine's
