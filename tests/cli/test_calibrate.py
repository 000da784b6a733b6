"""``pipegraph calibrate``: what it prints and writes. Measuring itself is tested in ``tests/cost``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipegraph.cost.hardware import Hardware
from tests.cli.command import Command


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was to be measured; an H100 is found instead."""
    calls: list[Any] = []

    def measure(device: str, threads: int | None, ranks: int, name: str) -> Hardware:
        calls.append((device, threads, ranks, name))
        return Hardware.load("h100")

    monkeypatch.setattr("pipegraph.cost.calibrate.calibrate", measure)
    return calls


def test_a_profile_is_written_and_printed(pipegraph: Command, calibrations: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    done = pipegraph("calibrate", "-o", out, "--threads", 2, "--ranks", 4)
    assert (done.code, done.err) == (0, "")
    assert calibrations == [("cpu", 2, 4, "mine")]
    assert Hardware.load(out) == Hardware.load("h100")
    lines = [re.sub(" {2,}", "  ", line) for line in done.out.splitlines()]
    assert lines[0] == "h100: NVIDIA H100 SXM5, 80 GB"
    assert "matmul, float8  14.1 TFLOP/s to 1.6 PFLOP/s" in lines
    assert "link between nodes  20 µs, 50.0 GB/s (InfiniBand NDR)" in lines
    assert "memory_bytes  NVIDIA H100 Tensor Core GPU data sheet" in lines
    assert lines[-1] == f"wrote {out}"


def test_a_file_is_replaced_only_when_asked(pipegraph: Command, calibrations: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    out.write_text("precious")
    done = pipegraph("calibrate", "-o", out)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {out} exists already.\nTry: --overwrite, or another name for -o.\n"
    assert (out.read_text(), calibrations) == ("precious", [])
    assert pipegraph("calibrate", "-o", out, "--overwrite").code == 0
    assert Hardware.load(out) == Hardware.load("h100")


def test_json(pipegraph: Command, calibrations: list[Any]) -> None:
    done = pipegraph("calibrate", "--json")
    assert done.code == 0
    assert json.loads(done.out) == json.loads(Hardware.load("h100").to_json())
    assert Hardware.from_json(done.out) == Hardware.load("h100")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "tpu"), "'tpu' is neither cpu nor cuda."),
        (("--device", "cuda", "--ranks", "64"), "64 ranks need a GPU each, and there are"),
        (("--ranks", "0"), "greater than or equal to 1"),
        (("-o", "/proc/mine.json"), "/proc/mine.json cannot be written: it is not a regular file"),
        (("-o", "h100.json"), "Try: h100-here.json"),
        (("-o", "README.md/mine.json"), "README.md is a file, not a folder"),
    ],
)
def test_bad_options(pipegraph: Command, calibrations: list[Any], options: tuple[str, ...], said: str) -> None:
    done = pipegraph("calibrate", *options)
    assert done.code == 2
    assert said in done.err
    assert calibrations == []
