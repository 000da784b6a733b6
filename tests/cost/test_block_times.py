"""Times that are measured here, each once."""

from __future__ import annotations

import json
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from pipegraph.cost import block_times as measuring
from pipegraph.cost.block_times import Cache, GpuQueueFiller, MeasureOptions, default_folder, measure
from pipegraph.cost.price import price
from pipegraph.cost.segments.chain import find_chain
from pipegraph.cost.segments.distinct_blocks import Block, BlockOptions, group_segments
from pipegraph.device import Device
from pipegraph.errors import PlanError
from pipegraph.progress import listen
from pipegraph.recompute import Recompute
from tests.cost.models import model
from tests.messages import refused

QUICK = MeasureOptions(kernels="eager", seconds=0.02)


@cache
def blocks(recompute: str = "min-cut") -> tuple[Block, ...]:
    return group_segments(
        find_chain(model("tests.models.chain")), BlockOptions(recompute=Recompute.parse(recompute))
    ).blocks()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each measurement has run."""
    counts: list[int] = []
    run = measuring._run

    def counted(blocks: Any, *arguments: Any) -> Any:
        counts.append(len(blocks))
        return run(blocks, *arguments)

    monkeypatch.setattr(measuring, "_run", counted)
    return counts


def test_what_was_measured_once_is_not_measured_again(runs: list[int], tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    every = blocks()
    with listen(lambda *report: reports.append(report)):
        first = measure(every, QUICK, Cache(tmp_path))
        assert reports[0][0].startswith(f"measuring {len(every)} distinct blocks on ")
        description, done, rounds = reports[-1]
        assert description.startswith(f"measuring {len(every)} distinct blocks, ") and done == rounds >= 5
        report_count = len(reports)
        assert measure(every, QUICK, Cache(tmp_path)) == first
    assert (runs, len(reports)) == ([len(every)], report_count)


def test_what_a_measurement_depends_on(runs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (*_, block) = blocks()
    measure([block], QUICK, Cache(tmp_path))
    measure([block], MeasureOptions(kernels="eager", seconds=0.05), Cache(tmp_path))  # for longer: the same
    assert len(runs) == 1
    (*_, again) = blocks("none")
    assert again.key == block.key
    measure([again], QUICK, Cache(tmp_path))
    measure([block], MeasureOptions(kernels="autograd", seconds=0.02), Cache(tmp_path))
    threads = torch.get_num_threads()
    measure([block], MeasureOptions(kernels="eager", seconds=0.02, threads=threads + 1), Cache(tmp_path))
    assert (len(runs), torch.get_num_threads()) == (4, threads)
    monkeypatch.setattr(Device, "name", "another machine")
    measure([block], QUICK, Cache(tmp_path))
    assert runs == [1] * 5


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "\x00\xff", '{"key": {}, "entry": {}}', "no numbers", "negative", "a figure less"],
)
def test_a_damaged_entry_is_measured_anew(damage: str, runs: list[int], tmp_path: Path) -> None:
    (*_, block) = blocks()
    measure([block], QUICK, Cache(tmp_path))
    (file,) = (tmp_path / "measured").iterdir()
    sound = json.loads(file.read_text())
    match damage:
        case "no numbers":
            sound["entry"]["forward"] = "fast"
        case "negative":
            sound["entry"]["forward"] = -1.0
        case "a figure less":
            del sound["entry"]["weight_grad"]
        case _:
            sound = None
    file.write_text(damage if sound is None else json.dumps(sound))
    measure([block], QUICK, Cache(tmp_path))
    assert runs == [1, 1]
    measure([block], QUICK, Cache(tmp_path))  # what was measured took the damaged entry's place
    assert runs == [1, 1]


def test_a_cache_that_cannot_be_written_loses_entries_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "measured").write_text("in the way")
    full = Cache(tmp_path)
    full.store({"block": "a"}, {"forward": 1.0})
    assert full.get({"block": "a"}) is None
    (*_, block) = blocks()
    assert measure([block], QUICK, full)[0].forward > 0


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "pipegraph"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == Path.home() / ".cache/pipegraph"


def test_a_block_takes_the_median_of_its_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a clock that continues by 1 ms at every look, and by 5 s at every thirteenth."""
    looks = count()
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: (look := next(looks)) * 1e-3 + look // 13 * 5.0)
    (*_, block) = blocks()
    (timing,) = measure([block], QUICK, Cache(tmp_path))
    assert timing.times == pytest.approx((1e-3, 1e-3, 1e-3))


def test_measured_segments(tmp_path: Path) -> None:
    priced = price(model("tests.models.chain"), "measured", setting=QUICK, cache=Cache(tmp_path))
    assert (priced.unit, priced.method) == ("s", "measured")
    total = priced.stage(0, len(priced.costs))
    assert 0 < total.forward < 1 and 0 < total.weight_grad < 1
    assert total.input_grad == 0  # the model's input has no gradient
    assert priced.costs[2].input_grad > 0
    assert priced.costs[1].forward == priced.costs[2].forward  # one block


def test_too_large_to_be_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Device, "free_bytes", 100)
    with refused(PlanError, "1 distinct blocks", "100 B", "cpu", advice='balance="time"'):
        measure(blocks()[-1:], QUICK, Cache(tmp_path))


def test_a_gpu_has_work_for_as_long_as_the_host_launches() -> None:
    assert GpuQueueFiller.products(0.0, 1e-3) == 0
    assert GpuQueueFiller.products(3e-3, 2e-3) * 2e-3 >= 3e-3
