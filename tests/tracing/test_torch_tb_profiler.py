"""A real TensorBoard with torch-tb-profiler, asked over HTTP what it shows of a run that two processes recorded."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from tests.runtime import ranks
from tests.runtime.packages import write
from tests.runtime.sketches import chain
from tests.tensorboard_server import PATIENCE, tensorboard
from tests.tracing.loops import record

pytest.importorskip("tensorboard", reason="pip install pipegraph[tensorboard]")
pytest.importorskip("torch_tb_profiler", reason="pip install pipegraph[tensorboard]")

pytestmark = pytest.mark.slow  # tests/report/test_tensorboard.py has TensorBoard itself

Ask = Callable[..., Any]
WORKERS = ["rank_00", "rank_01"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two processes over gloo, two windows of two steps."""
    package = write(chain(2, width=16), tmp_path_factory.mktemp("package") / "chain")
    runs = tmp_path_factory.mktemp("runs")
    first, last = ranks.run(record, 2, str(package), str(runs), 6, {"active": 2, "repeat": 2})
    assert first[0] == last[0]
    return Path(first[0])


@pytest.fixture(scope="module")
def ask(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """`ask("views", run=…)`: what the plugin answers, once it has loaded the run. Port 0 lets the system choose one."""
    log = tmp_path_factory.mktemp("tensorboard") / "log"
    with tensorboard(run.parent, log) as address:

        def ask(route: str, **query: str) -> Any:
            with urlopen(
                f"{address}data/plugin/pytorch_profiler/{route}?{urlencode(query)}", timeout=PATIENCE
            ) as answer:
                body = answer.read()
                packed = answer.headers.get("Content-Encoding") == "gzip"
            return json.loads(gzip.decompress(body) if packed else body)

        deadline = time.monotonic() + PATIENCE
        while (state := ask("runs"))["loading"] or not state["runs"]:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield ask
        assert "intersect" not in log.read_text()  # its word for spans of one thread that do not nest


def test_the_run_its_views_and_its_workers(ask: Ask, run: Path) -> None:
    assert ask("runs")["runs"] == [run.name]
    assert ask("views", run=run.name) == ["Overview", "Operator", "Trace", "Distributed"]
    for view in ("Overview", "Operator", "Trace"):
        assert ask("workers", run=run.name, view=view) == WORKERS
    assert ask("workers", run=run.name, view="Distributed") == ["All"]
    assert ask("spans", run=run.name, worker="rank_01") == ["1", "2"]


def test_the_operator_view_lists_actions(ask: Ask, run: Path) -> None:
    table = ask("operation/table", run=run.name, worker="rank_01", span="1", group_by="Operation")["data"]
    rows = {row["name"]: row for row in table}
    assert rows["F stage 1 microbatch 3"]["calls"] == 2
    assert rows["RECV_F stage 1 microbatch 3 from stage 0"]["calls"] == 2
    assert not any(" stage 0 microbatch" in name for name in rows)


def test_the_trace_view_shows_actions(ask: Ask, run: Path) -> None:
    trace = ask("trace", run=run.name, worker="rank_01", span="2")
    events = [event for event in trace["traceEvents"] if event["name"] == "F stage 1 microbatch 3"]
    assert sorted((event["cat"], event["args"]["step"]) for event in events) == [
        ("cpu_op", 4),
        ("cpu_op", 5),
        ("user_annotation", 4),
        ("user_annotation", 5),
    ]


def test_the_overview_has_the_steps(ask: Ask, run: Path) -> None:
    for worker in WORKERS:
        steps = ask("overview", run=run.name, worker=worker, span="2")["steps"]
        assert [row[0] for row in steps["rows"]] == ["4", "5"]


def test_the_distributed_view_compares_the_ranks(ask: Ask, run: Path) -> None:
    tables = ask("distributed/commops", run=run.name, worker="All", span="1", view="Distributed")["data"]
    assert {worker: [row[:2] for row in table["rows"]] for worker, table in tables.items()} == {
        worker: [["gloo:all_reduce", 2]] for worker in WORKERS
    }
    waits = ask("distributed/waittime", run=run.name, worker="All", span="1", view="Distributed")["data"]
    assert set(waits) == {"all", "1", "2"} and all(sorted(workers) == WORKERS for workers in waits.values())
