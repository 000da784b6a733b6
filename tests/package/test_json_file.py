"""Files that are read into structures: whatever is wrong with one is one error, with its place, at once."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz_files import Kind, kinds
from pipegraph.cost.hardware import Hardware
from pipegraph.errors import PackageError, PipegraphError, SourceError
from pipegraph.package import MANIFEST, Package
from pipegraph.planner.plan_file import PlanFile
from pipegraph.regular_file import LIMIT
from tests.messages import refused

READERS: dict[str, tuple[Callable[[Path], object], type[PipegraphError]]] = {
    "manifest": (lambda file: Package.open(file.parent), PackageError),
    "plan": (PlanFile.read, SourceError),
    "profile": (Hardware.load, PipegraphError),
}


HANG_SECONDS = 10.0  # of a core: a file that takes more would take any time


@pytest.fixture(scope="module")
def sound() -> dict[str, Kind]:
    return kinds()


def message_of(kind: str, file: Path) -> str:
    """The message of the error that a file ends in, without a hang."""
    read, error = READERS[kind]
    started = time.process_time()
    with refused(error, str(file)) as raised:
        read(file)
    assert time.process_time() - started < HANG_SECONDS
    message = str(raised.value)
    assert message.startswith(str(file)) and raised.value.advice and len(message) < 1000
    assert message.replace("\n", "").isprintable()
    return message


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not JSON, or truncated"),
        (b"\xef\xbb\xbf{}", "is not JSON, .* at line 1"),
        ("{}".encode("utf-16"), "is not JSON"),
        (b'{"a": "\xff"}', "is not JSON, .*0xff"),
        (b'{"schema_version": 1,', "is not JSON, or truncated"),
        (b'{"schema_version": 1,\n"x": NaN}', "is not JSON, .* at line 2"),
        (b"[" * 5000 + b"]" * 5000, "is nested too deeply|is a list"),
        (b'{"a":' * 200_000, "is nested too deeply"),
        (b"1" * 5000, "is not JSON, .*out of range"),
        (b'{"schema_version": 1, "x": ["\\udc9b"]}', "is not JSON, .* surrogate"),
        (b"null", "the whole is null"),
        (b'{"schema_version": true}', "no schema_version"),
        (b'{"schema_version": -1}', "schema_version: it is -1"),
        (b'{"schema_version": 1, "\x1b[31m\\u001b[31m": 1}', "not JSON|lacks"),
    ],
)
def test_hostile_content(kind: str, data: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / MANIFEST
    file.write_bytes(data)
    message = message_of(kind, file)
    assert re.search(said, message), message


@pytest.mark.parametrize("kind", READERS)
def test_what_is_no_regular_file_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    file = tmp_path / MANIFEST
    os.mkfifo(file)
    assert "named pipe" in message_of(kind, file)
    file.unlink()
    file.symlink_to("/dev/zero")
    assert "device" in message_of(kind, file)
    file.unlink()
    file.mkdir()
    assert "folder, not" in message_of(kind, file)


def test_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).symlink_to(MANIFEST)
    assert "symbolic links" in message_of("manifest", tmp_path / MANIFEST)
    (tmp_path / "folder").symlink_to("folder")
    assert "symbolic links" in message_of("manifest", tmp_path / "folder" / MANIFEST)
    assert "symbolic links" in message_of("plan", tmp_path / MANIFEST)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("other", READERS)
def test_a_file_of_another_kind_is_called_what_it_is(
    kind: str, other: str, sound: dict[str, Kind], tmp_path: Path
) -> None:
    if kind == other:
        return
    file = tmp_path / MANIFEST
    file.write_text(sound[other].text)
    names = {"manifest": "a manifest", "plan": "a plan", "profile": "a hardware profile"}
    message = message_of(kind, file)
    assert f"is {names[other]}" in message and f"be {names[kind]}" in message and "newer" not in message


@pytest.mark.parametrize("kind", READERS)
def test_a_file_without_end(kind: str, tmp_path: Path) -> None:
    file = tmp_path / MANIFEST
    with file.open("wb") as opened:
        opened.truncate(2**30)  # a hole, which takes no space
    message = message_of(kind, file)
    assert f"{2**30} bytes" in message and str(LIMIT) in message


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-1, "-1 must be"),
        (10**400, "must be|out of range"),
        ("1", '"1" must be a (whole )?number'),
        (True, "true must be a (whole )?number"),
        (None, "null must be"),
        ([1], "a list must be"),
    ],
)
def test_figures(kind: str, value: Any, said: str, sound: dict[str, Kind], tmp_path: Path) -> None:
    place = {
        "manifest": ["plan", "prediction", "microbatches"],
        "plan": ["costs", 1, "forward"],
        "profile": ["links", "intra_node", "latency"],
    }[kind]
    message = changed(kind, place, value, sound, tmp_path)
    assert {"plan": "costs[1].forward: "}.get(kind, ".".join(map(str, place))) in message
    assert re.search(said, message), message


@pytest.mark.parametrize("kind", READERS)
def test_a_name_of_5000_characters(kind: str, sound: dict[str, Kind], tmp_path: Path) -> None:
    place = {"manifest": ["tied", 0, 0], "plan": ["inputs", 0, "name"], "profile": ["sources", "links"]}[kind]
    assert "4096 or fewer" in changed(kind, place, "a" * 5000, sound, tmp_path)


@pytest.mark.parametrize("kind", READERS)
def test_an_unknown_key_is_named_with_the_nearest(kind: str, sound: dict[str, Kind], tmp_path: Path) -> None:
    place, near = {
        "manifest": (["values", "tokens", "requires_gradient"], "requires_grad"),
        "plan": (["cuts", 0, "boundary_byte"], "boundary_bytes"),
        "profile": (["links", "intra_nodes"], "intra_node"),
    }[kind]
    message = changed(kind, place, 1, sound, tmp_path)
    assert f'"{place[-1]}"' in message and f'"{near}"?' in message


def changed(kind: str, place: list[Any], value: Any, sound: dict[str, Kind], folder: Path) -> str:
    """The message of the error for a sound file with one value changed."""
    content = part = json.loads(sound[kind].text)
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (folder / MANIFEST).write_text(json.dumps(content))
    return message_of(kind, folder / MANIFEST)
