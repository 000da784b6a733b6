"""What a recorded loop writes if something fails: whole windows or nothing; and no rank waits."""

from __future__ import annotations

import errno
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import pipegraph
from pipegraph import PipegraphError
from pipegraph.report.tensorboard import TensorBoardWriter
from pipegraph.tracing.recording.run_folder import RunFolder, make_run_folder
from tests.messages import refused
from tests.runtime import ranks
from tests.tracing.loops import ONE_WINDOW, Loop, enter, fail_in_step, fail_in_writing, make_pipeline, names, observed

pytest.importorskip("tensorboard", reason="pip install pipegraph[tensorboard]")


@pytest.mark.parametrize(("at", "left"), [(1, []), (4, ONE_WINDOW)])
def test_an_error_in_the_loop_leaves_whole_windows(loop: Loop, tmp_path: Path, at: int, left: list[str]) -> None:
    profiler = pipegraph.profile(loop.pipe, tmp_path, active=2, repeat=2)

    def run() -> None:
        with profiler:
            for number in range(6):
                if number == at:
                    raise ValueError("on purpose")
                profiler.step(loop.step())

    with pytest.raises(ValueError, match="on purpose"):
        run()
    assert not observed(loop.pipe)
    assert names(profiler.folder) == left
    with pipegraph.profile(loop.pipe, tmp_path, active=1) as profiler:  # and torch's profiler can be used again
        for _ in range(2):
            profiler.step(loop.step())
    assert names(profiler.folder) == ONE_WINDOW


def test_an_action_that_fails_leaves_torch_s_profiler_usable(package: Path, tmp_path: Path) -> None:
    loop = Loop(make_pipeline(package, kernels="autograd"))

    def run() -> None:
        with pipegraph.profile(loop.pipe, tmp_path / "runs" / "made", active=2) as profiler:
            profiler.step(loop.step())
            loop.pipe.stages[1].register_forward_pre_hook(lambda *_: 1 / 0)
            loop.step()

    with pytest.raises(pipegraph.RuntimeFault, match="ZeroDivisionError"):
        run()
    assert list(tmp_path.iterdir()) == []
    with torch.profiler.profile() as torch_profile:
        torch.ones(1) + 1
    assert {event.name for event in torch_profile.events()} >= {"aten::ones", "aten::add"}


def test_one_profile_at_a_time(loop: Loop, package: Path, tmp_path: Path) -> None:
    """Two at once would end the process by a crash of torch's profiler."""
    second_loop = Loop(make_pipeline(package))
    with pipegraph.profile(loop.pipe, tmp_path, active=1) as profiler:
        for pipe in (loop.pipe, second_loop.pipe):
            with (
                refused(PipegraphError, "profile", "this process", advice="torch.profiler.profile"),
                pipegraph.profile(pipe, tmp_path),
            ):
                raise AssertionError("it could be entered")
        for _ in range(2):
            profiler.step(loop.step())
    with (
        torch.profiler.profile(),
        refused(PipegraphError, "profile", "this process", advice="torch.profiler.profile"),
        pipegraph.profile(loop.pipe, tmp_path),
    ):
        raise AssertionError("it could be entered")
    assert [names(folder) for folder in tmp_path.iterdir()] == [ONE_WINDOW]
    with pipegraph.profile(second_loop.pipe, tmp_path, active=1) as profiler:
        for _ in range(2):
            profiler.step(second_loop.step())
    assert names(profiler.folder) == ONE_WINDOW


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")  # torch's warning at warmup=0
def test_a_disk_that_is_full_for_what_torch_writes(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(profiler: Any, file: str) -> None:
        Path(file).write_text('{"traceEvents": [{"ph":')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut)
    with (
        refused(PipegraphError, "no trace can be written", "torch's profiler", advice="room on that disk"),
        pipegraph.profile(loop.pipe, tmp_path, warmup=0, active=1) as profiler,
    ):
        profiler.step(loop.step())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_for_figures(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorBoardWriter, "step", full)
    with (
        refused(PipegraphError, "no trace can be written", "No space left", advice="room on that disk"),
        pipegraph.profile(loop.pipe, tmp_path, active=1) as profiler,
    ):
        profiler.step(loop.step())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_for_the_manifest(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it is written."""
    write_text = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        if path.name.startswith(".pipeline.json."):
            write_text(path, text[:100], **options)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with (
        refused(PipegraphError, "no trace can be written", "No space left", advice="room on that disk"),
        pipegraph.profile(loop.pipe, tmp_path, active=1),
    ):
        pass
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


@pytest.mark.parametrize("at", [1, 4])
def test_a_rank_that_fails_keeps_no_other_one_waiting(package: Path, tmp_path: Path, at: int) -> None:
    seconds = ranks.run(fail_in_step, 2, str(package), str(tmp_path), 1, at)
    assert max(seconds) < 20
    assert [names(folder) for folder in tmp_path.iterdir()] == ([] if at == 1 else [ONE_WINDOW])


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_report_a_full_disk(package: Path, tmp_path: Path, failing: int) -> None:
    errors = ranks.run(fail_in_writing, 2, str(package), str(tmp_path), failing)
    assert re.match(r"PipegraphError: no trace can be written to .*: No space left on device\.\nTry: ", errors[failing])
    assert errors[1 - failing] == errors[failing].replace("Error: ", f"Error: rank {failing}: ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_one_rank_cannot_make_fails_before_the_first_step(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = [str(tmp_path / "runs"), str(tmp_path / "file" / "runs")]
    errors = ranks.run(enter, 2, str(package), folders)
    problem = f"no trace can be written to {folders[1]}: Not a directory."
    assert errors[0].startswith(f"PipegraphError: rank 1: {problem}")
    assert errors[1].startswith(f"PipegraphError: {problem}")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_an_empty_folder_goes_though_the_first_process_was_killed(loop: Loop, tmp_path: Path) -> None:
    """Another process then removes it."""
    run = make_run_folder(loop.pipe, tmp_path / "runs")
    second_folder = RunFolder(run.path, "", types.SimpleNamespace(ranks=(1,), mesh_ranks=(0, 1)), {}, run.folder_count)  # type: ignore[arg-type]
    assert run.path.is_dir() and not second_folder.is_first
    second_folder.remove_if_empty()
    assert list(tmp_path.iterdir()) == []
