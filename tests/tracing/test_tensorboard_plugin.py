"""What is changed in a trace of torch for torch-tb-profiler."""

from __future__ import annotations

from typing import Any

import pytest

from pipegraph.tracing.recording.tensorboard_plugin import (
    LOSS_SPAN,
    adapt_events,
    count_collectives,
    events_by_rank,
    events_until,
    match_collectives,
)
from tests.tracing.events import Event, arguments, complete, gpu_steps


def names(events: list[Event], **having: Any) -> list[str]:
    return [event["name"] for event in events if all(event.get(key) == value for key, value in having.items())]


def test_an_action_has_both_categories_and_its_arguments() -> None:
    step = complete("user_annotation", "ProfilerStep#5", 0.0, 10.0, External_id=1)
    span = complete("user_annotation", "F stage 1 microbatch 3", 2.0, 3.0, External_id=2)
    args = {"External id": 2, "stage": 1, "kind": "F", "microbatch": 3, "rank": 1, "step": 5}
    assert adapt_events([step, span], arguments) == [
        step,
        {**span, "args": args},
        {**span, "args": args, "cat": "cpu_op"},
    ]


def test_an_action_of_a_gpu_has_the_same_arguments() -> None:
    events = [event for event in adapt_events(gpu_steps(), arguments) if event["cat"] == "gpu_user_annotation"]
    assert [(event["args"]["step"], event["args"]["rank"]) for event in events] == [(1, 1), (2, 1)]


def test_every_event_gets_a_name_and_every_complete_one_a_category() -> None:
    nameless = {"ph": "i", "pid": 1, "tid": 1, "ts": 3.0}
    events = adapt_events([complete(None, "strange", 1.0, 2.0), nameless], arguments)
    assert [(event["name"], event.get("cat")) for event in events] == [("strange", "uncategorized"), ("unnamed", None)]


def test_receives_posted_ahead_become_asynchronous() -> None:
    first = complete("user_annotation", "gloo:recv", 1.0, 5.5, External_id=7)
    second = complete("user_annotation", "gloo:recv", 2.0, 9.0, External_id=8)
    events = adapt_events([first, second], arguments)
    assert [(event["ph"], event["id"], event["ts"]) for event in events] == [
        ("b", "10.7", 1.0),
        ("e", "10.7", 6.5),
        ("b", "10.8", 2.0),
        ("e", "10.8", 11.0),
    ]


def test_the_step_that_torch_has_begun_behind_the_last_one_is_left_out() -> None:
    events = [complete("user_annotation", f"ProfilerStep#{step}", 10.0 * step, 9.0) for step in (1, 2, 3)]
    events += [complete("cpu_op", "aten::mm", 25.0, 1.0), complete("cpu_op", "aten::add", 31.0, 1.0)]
    assert names(events_until(events, 2)) == ["ProfilerStep#1", "ProfilerStep#2", "aten::mm"]
    assert events_until(events, 3) == events


def test_what_a_gpu_did_is_given_to_the_rank_that_launched_it() -> None:
    rank_events = events_by_rank(adapt_events(gpu_steps(), arguments), [0, 1])
    assert names(rank_events[1], cat="kernel") == ["gemm", "fused"] * 2
    assert names(rank_events[0]) == ["ProfilerStep#1", "ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#2"]


def a_step(*also: str) -> list[Event]:
    """The mark of a step with its collective, and other collectives of this process before it."""
    collectives = [complete("user_annotation", name, 1.0 + index, 0.5) for index, name in enumerate(also)]
    mark = complete("user_annotation", LOSS_SPAN, 50.0, 9.0)
    return [*collectives, mark, complete("user_annotation", "gloo:all_reduce", 51.0, 7.0, 2)]


@pytest.mark.parametrize(
    ("processes", "remain"),
    [
        ([["gloo:broadcast"], ["gloo:broadcast"]], ["gloo:broadcast", "gloo:all_reduce"]),
        ([["gloo:all_reduce"], []], ["gloo:all_reduce"]),  # of a tied weight, say
        ([["nccl:all_reduce"], ["nccl:all_reduce"]], ["nccl:all_reduce"]),  # the plugin shows no two libraries
        ([["nccl:all_reduce"], []], ["gloo:all_reduce"]),
    ],
    ids=["alike", "of some", "two libraries", "two libraries, of some"],
)
def test_all_ranks_show_equally_many_collectives(processes: list[list[str]], remain: list[str]) -> None:
    events = [a_step(*process) for process in processes]
    counts = [count_collectives(process) for process in events]
    for trace in events:
        labels = [name for name in names(match_collectives(trace, counts)) if ":" in name and "some ranks" not in name]
        assert labels == remain
