"""Folders of runs as a recording writes them, from schedules that are simulated."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from pipegraph.package import Manifest, ModelEntry, PlanEntry, StageCost, StageEntry, Value
from pipegraph.package.prediction import Cut
from pipegraph.schedule import Action, CollectiveEvent, Event, Kind, Schedule, Times, build, lower, simulate, to_csv
from pipegraph.tracing import COLLECTIVE_EVENT, collective_name
from tests.package.predictions import prediction

BASE = 1_700_000_000_000_000_000
RUN = "run-1"
DIGITS = 1_700_000_000_123_456_789


def manifest(
    stages: int,
    times: Times | None = None,
    layers: int = 2,
    plan: Mapping[str, Any] | None = None,
    name: str = "layers",
) -> Manifest:
    """A chain of stages with ``layers`` layers each, priced if times are given."""
    values = {"x": Value("x", "float32", (2, 4), -1, (0,))}
    values |= {f"h{n}": Value(f"h{n}", "float32", (2, 4), n, (n + 1,), True) for n in range(stages - 1)}
    values["y"] = Value("y", "float32", (2, 4), stages - 1, ())
    entries = []
    for n in range(stages):
        cost = StageCost(parameter_bytes=1024, parameters=256)
        if times is not None:
            forward, input_grad, weight_grad = (row[n] for row in _rows(times))
            cost = structs.replace(
                cost, saved_bytes=64, forward=forward, input_grad=input_grad, weight_grad=weight_grad
            )
        entries.append(
            StageEntry(
                n,
                f"stage_{n}",
                f"Stage{n}",
                ("x" if n == 0 else f"h{n - 1}",),
                ("y" if n == stages - 1 else f"h{n}",),
                tuple(f"{name}.{n * layers + k}.{part}" for k in range(layers) for part in ("weight", "bias")),
                cost=cost,
            )
        )
    cuts = tuple(Cut(f"{name}.{n * layers}", 32, None, None) for n in range(1, stages))
    return Manifest(
        generator="pipegraph",
        model=ModelEntry("model.py", "Chain"),
        args=("x",),
        kwargs={},
        outputs="y",
        values=values,
        stages=tuple(entries),
        plan=PlanEntry(prediction=prediction(stages, **{"cuts": cuts, **(plan or {})})),
    )


def _rows(times: Times) -> tuple[Sequence[float], ...]:
    return times.forward, times.input_grad, times.weight_grad


def rows_of(schedule: Schedule, times: Times, noise: float = 0.0, seed: int = 0) -> list[list[Event]]:
    """A step of a schedule with its transfers: a RECV lasts from when its rank is free to when its message is there."""
    chance = random.Random(seed)
    lowered = lower(schedule)
    timeline = simulate(schedule, times)
    starts = {event.action: event for row in timeline.events for event in row}
    rows = []
    for actions in lowered.actions:
        row, free = [], 0.0
        for position, action in enumerate(actions):
            if action.kind.is_transfer:
                if action.sends:
                    row.append(Event(action, free, free))
                continue
            begin = starts[action].start
            due = [transfer for transfer in actions[:position] if transfer.kind.is_transfer and not transfer.sends]
            for receive in due:
                target = (receive.stage, receive.microbatch, receive.kind is Kind.RECV_B)
                if target == (action.stage, action.microbatch, action.kind is not Kind.F) and action.kind is not Kind.W:
                    row.append(Event(receive, free, begin))
            end = starts[action].end
            end -= noise * chance.random() * (end - begin)
            row.append(Event(action, begin, end))
            free = end
        rows.append(row)
    return rows


def write_run(
    folder: Path,
    schedule: Schedule,
    steps: Mapping[int, Sequence[Sequence[Event]]],
    package_manifest: Manifest | None = None,
    *,
    gap: float = 0.01,
    processes: int | None = None,
    offsets: Sequence[float] | None = None,
    error: float = 2e-6,
    extra: Sequence[dict[str, Any]] = (),
    run: str = RUN,
    spans: Sequence[Sequence[CollectiveEvent]] = (),
    mesh: Mapping[str, int] | None = None,
    line: Sequence[int] | None = None,
    begin: float = 1.0,
    messages: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write ``steps`` (number → events of each rank) one after the other. ``offsets``: rank 0's clock − the rank's.

    ``spans``: the collectives of each rank, in each step; ``messages``: what each rank sends for them. ``line``: the
    numbers of the ranks in a ``mesh``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = schedule.ranks
    line = range(ranks) if line is None else line
    of_mesh: dict[str, Any] = {} if mesh is None else {"mesh": dict(mesh)}
    offsets = [0.0] * ranks if offsets is None else offsets
    info = {
        "schema_version": 1,
        "generator": "pipegraph",
        "run": run,
        "package": "out",
        "schedule": schedule.name,
        "ranks": ranks,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "processes": ranks if processes is None else processes,
        "device": "cpu",
        "torch": "2.13.0",
        "kernels": "eager",
        "windows": [{"digits": DIGITS, "steps": [min(steps), max(steps)]}],
        **of_mesh,
    }
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "schedule.csv").write_text(to_csv(schedule))
    if package_manifest is not None:
        (folder / "pipeline.json").write_text(package_manifest.to_json())
    for rank in range(ranks):
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}
        ]
        start = begin - offsets[rank]
        for number, rows in steps.items():
            length = max(event.end for row in rows for event in row)
            events.append(
                _event("user_annotation", f"ProfilerStep#{number}", start - gap / 4, start + length + gap / 4, {})
            )
            for event in rows[rank]:
                events += _copies(event, line[rank], number, start, schedule)
            for collective_event in spans[rank] if spans else ():
                collective, *times = collective_event
                args = {"stage": collective.stage, "kind": collective.kind.value, "step": number}
                begun, ended = (start + time for time in times)
                events.append(_event(COLLECTIVE_EVENT, collective_name(collective), begun, ended, args))
            start += length + gap
        trace = {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": ranks, "backend": "gloo"},
            "traceName": "trace",
            "baseTimeNanoseconds": BASE,
            "pipegraph": {
                "run": run,
                "rank": line[rank],
                "ranks": ranks if mesh is None else math.prod(mesh.values()),
                "digits": DIGITS,
                **of_mesh,
                **({"messages": messages[rank]} if messages else {}),
                "clock": {"offset_ns": offsets[rank] * 1e9, "error_ns": error * 1e9 if line[rank] else 0},
            },
            "traceEvents": [*events, *extra],
        }
        file = folder / f"rank_{line[rank]:02d}.{DIGITS}.pt.trace.json.gz"
        file.write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))
    return folder


def _copies(event: Event, rank: int, step: int, start: float, schedule: Schedule) -> list[dict[str, Any]]:
    action = event.action
    args: dict[str, Any] = {"stage": action.stage, "kind": str(action.kind), "microbatch": action.microbatch}
    args |= {"rank": rank, "step": step}
    if action.peer is not None:
        args |= {"peer": action.peer, "peer_rank": schedule.placement[action.peer], "bytes": 65536}
    times = (start + event.start, start + event.end)
    return [_event(category, str(action), *times, args) for category in ("user_annotation", "cpu_op")]


def _event(category: str, name: str, start: float, end: float, args: Mapping[str, Any]) -> dict[str, Any]:
    times = {"ts": round(start * 1e9) / 1000, "dur": (round(end * 1e9) - round(start * 1e9)) / 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times, "args": dict(args)}


def plain(name: str, ranks: int, microbatches: int) -> Schedule:
    return build(name, ranks, microbatches)


def event(text: str, start: float, end: float) -> Event:
    return Event(Action.parse(text), start, end)
