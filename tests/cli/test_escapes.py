"""No terminal escape that stands in a file reaches the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipegraph.cost.hardware import Hardware
from tests.cli.command import ROOT, Command, Result

CHAIN = ROOT / "tests/models/chain.py"
ESCAPE = "\x1b[31m\x9b0m\u202e"


def unsafe(result: Result) -> list[str]:
    """The printed lines with more than text on them."""
    return [line for line in (result.out + result.err).split("\n") if not line.isprintable()]


def strings(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of strings."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, str):
            yield (*place, key)
        elif isinstance(value, (dict, list)):
            yield from strings(value, (*place, key))


def with_escapes(text: str, *excluded_keys: str) -> str:
    """A file with an escape at the end of every string, but for those under some keys."""
    content = json.loads(text)
    for place in strings(content):
        if not {*place} & {*excluded_keys}:
            _escape(content, place)
    return json.dumps(content)


def one_by_one(text: str) -> Iterator[str]:
    """A file with an escape at the end of one string, for each string."""
    for place in strings(json.loads(text)):
        content = json.loads(text)
        _escape(content, place)
        yield json.dumps(content)


def _escape(content: Any, place: tuple[Any, ...]) -> None:
    for key in place[:-1]:
        content = content[key]
    content[place[-1]] += ESCAPE


def test_a_package(pipegraph: Command, tmp_path: Path) -> None:
    copied = tmp_path / "out"
    assert pipegraph("split", CHAIN, "--stages", 2, "--hardware", "h100", "-o", copied).code == 0
    text = (copied / "pipeline.json").read_text()
    content = with_escapes(
        text,
        "files",
        "shards",
        "weights",
        "class",
        "module",
        "inputs",
        "outputs",
        "args",
        "recompute",
        "unit",
        "shape",
        "sizes",
        "batch",
        "role",
    )
    (copied / "pipeline.json").write_text(content)
    for arguments in (
        ["show", copied],
        ["show", copied, "--json"],
        ["run", copied, "--nproc", 1, "--kernels", "eager"],
    ):
        done = pipegraph(*arguments)
        assert unsafe(done) == [], arguments
    assert pipegraph("show", copied).code == 0
    for changed in one_by_one(text):
        (copied / "pipeline.json").write_text(changed)
        assert unsafe(pipegraph("show", copied)) == [], changed


def test_a_plan(pipegraph: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert pipegraph("plan", CHAIN, "--ranks", 2, "--microbatches", 4, "-o", file).code == 0
    text = file.read_text()
    for changed in one_by_one(text):
        file.write_text(changed)
        assert unsafe(pipegraph("split", CHAIN, "--plan", file, "--dry-run")) == [], changed


def test_a_profile(pipegraph: Command, tmp_path: Path) -> None:
    file = tmp_path / f"mine{ESCAPE}.json"
    file.write_text(with_escapes(Hardware.load("h100").to_json()))
    done = pipegraph("split", CHAIN, "--stages", 2, "--hardware", file, "--dry-run")
    assert (done.code, unsafe(done)) == (0, [])
    assert unsafe(pipegraph("split", CHAIN, "--stages", 2, "--hardware", file, "--dry-run", "--json")) == []
    file.write_text('{"schema_version": 1, "\\u001b[31m": 1}')
    done = pipegraph("split", CHAIN, "--stages", 2, "--hardware", file, "--dry-run")
    assert (done.code, unsafe(done)) == (2, [])
