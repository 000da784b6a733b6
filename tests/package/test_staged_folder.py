"""A folder that takes its place in one moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipegraph.errors import PackageError
from pipegraph.package import staged_folder as module
from pipegraph.package.staged_folder import staged_folder


def write(folder: Path, text: str, check: Callable[[], None] = lambda: None) -> None:
    with staged_folder(folder, check) as staging:
        for name in "ab":
            (staging / name).write_text(text)


def read(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.iterdir())]


def test_a_reader_finds_a_folder_at_any_moment(tmp_path: Path) -> None:
    folder, missed = tmp_path / "out", []
    write(folder, "0")
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            missed.extend([] if (folder / "a").exists() else ["missing"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(200):
        write(folder, str(number))
    ended.set()
    watcher.join()
    assert missed == []
    assert read(folder) == ["199", "199"]


@pytest.mark.parametrize("swaps", [True, False])
def test_of_many_writers_one_stays_whole(swaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file system cannot swap folders."""
    if not swaps:
        monkeypatch.setattr(module, "_swap", lambda first, second: False)
    folder = tmp_path / "out"
    writers = [threading.Thread(target=lambda text=str(number): [write(folder, text) for _ in range(10)])
               for number in range(4)]  # fmt: skip
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    first_text, second_text = read(folder)
    assert first_text == second_text
    assert list(tmp_path.iterdir()) == [folder]


def test_what_must_not_be_replaced_stays(tmp_path: Path) -> None:
    def refuse() -> None:
        raise PackageError("no")

    write(tmp_path / "out", "first")
    with pytest.raises(PackageError, match="no"):
        write(tmp_path / "out", "second", refuse)
    assert read(tmp_path / "out") == ["first", "first"]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
