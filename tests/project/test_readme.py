"""Every command and every line of Python in README does what README shows."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipegraph.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
IMAGES = ROOT / "docs" / "images"
# What differs from machine to machine and run to run: times, and the last digits of losses and differences.
VARIES = re.compile(r"\d+\.\d+ s|loss \d+\.\d+|\d\.\de-\d\d|0\.0e\+00")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """(command, expected output) of every console block, in order."""
    found = [block.removeprefix("$ ").partition("\n") for block in blocks("console")]
    return [(command, output) for command, _, output in found]


def test_nothing_is_left_to_fill_in() -> None:
    assert re.findall(r"@[A-Z_]+@|\b(?:TODO|FIXME|TBD|XXX)\b", README) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of what README's commands use, so that they leave nothing in the checkout."""
    copy = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", copy / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    yield copy
    shutil.rmtree(copy)


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    scripts = Path(sys.executable).parent
    path = os.pathsep.join([str(ROOT), str(folder)])
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str, str]]:
    """(exit code, stdout, stderr) of a command; of ``pipegraph`` in this process, which has imported torch already."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))

    def run_or_call(command: str) -> tuple[int, str, str]:
        words = shlex.split(command)
        if words[0] != "pipegraph":
            done = run(words, folder)
            return done.returncode, done.stdout, done.stderr
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(words[1:])
        return int(ended.value.code or 0), *capfd.readouterr()

    return run_or_call


@pytest.mark.timeout(600)
def test_commands(folder: Path, call: Callable[[str], tuple[int, str, str]]) -> None:
    shown = [(command, output) for command, output in commands() if not re.match(r"make|tensorboard", command)]
    shown = [(command, output) for command, output in shown if not needs_a_run(command)]
    assert len(shown) >= 5
    for command, output in shown:
        if command.endswith(" --steps 3"):  # of a training one step, which takes seconds of each process
            command, output = command.removesuffix("3") + "1", output.splitlines(keepends=True)[0]
        code, printed, said = call(command)
        assert code == 0, f"{command}\n{said}"
        printed = printed.splitlines(keepends=True)[0] if command.endswith(" --steps 1") else printed
        if output.endswith("\n…\n"):
            output = output.removesuffix("…\n")
            printed = printed[: len(output)]
        assert VARIES.sub("…", printed) == VARIES.sub("…", output), command
    stage = (folder / "build/transformer/stage_1.py").read_text()
    assert blocks("python")[0] in stage


def needs_a_run(command: str) -> bool:
    """Whether it records a run, or looks at one."""
    return " --profile " in command or command.startswith("pipegraph trace ")


def without_figures(text: str) -> list[str]:
    """The lines that no figure is in; where it stands in a line, and of which unit, varies with the figures."""
    lines = (re.sub(r"\bin [mµ]?s\b", "in …", " ".join(line.split())) for line in text.splitlines())
    return [line for line in lines if line not in ("", "…") and not re.search(r"\d", line)]


@pytest.mark.timeout(400)
def test_commands_of_a_recorded_run(folder: Path, call: Callable[[str], tuple[int, str, str]]) -> None:
    pytest.importorskip("tensorboard", reason="pip install pipegraph[tensorboard]")
    call(commands()[1][0])  # which splits the model that is run
    shown = [(command, output) for command, output in commands() if needs_a_run(command)]
    assert [command.split()[1:3] for command, _ in shown] == [
        ["run", "build/transformer"],
        ["trace", "report"],
        ["trace", "merge"],
    ]
    for command, output in shown:
        shorter = " --microbatches 2 --steps 2 --kernels eager" if " --profile " in command else ""
        code, printed, said = call(command.replace(" --microbatches 8", "") + shorter)
        assert code == 0, f"{command}\n{said}"
        found = without_figures(printed)
        assert [line for line in without_figures(output) if line not in found] == [], f"{command}\n{printed}"
    for name in ("report.html", "trace.json.gz"):
        assert (folder / "build" / name).stat().st_size > 0


def test_the_pictures_are_there_and_say_nothing_of_a_machine() -> None:
    shown = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", README)
    assert {ROOT / path for _, path in shown} == set(IMAGES.iterdir())
    for _, path in shown:
        data = (ROOT / path).read_bytes()
        assert len(data) < 200_000
        assert not re.search(rb"/(?:home|root|tmp|Users)/", data)


def test_make_demo_runs_what_is_shown() -> None:
    done = subprocess.run(
        ["make", "--always-make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for verb in ("split", "verify"):
        (shown,) = (
            each
            for each, _ in commands()
            if each.startswith(f"pipegraph {verb} examples/tr") or f"{verb} build" in each
        )
        assert f".venv/bin/{shown}" in done.stdout


def test_the_model_file_can_be_split(folder: Path) -> None:
    (folder / "mine.py").write_text(blocks("python")[1])
    done = run(["pipegraph", "split", "mine.py", "--points", "2"], folder)
    assert done.stdout == "stage 0: 0 – 1\nstage 1: 2 – 3\nwrote build/mine\n", done.stderr


@pytest.mark.timeout(400)  # the pipeline in it is compiled
def test_python(folder: Path) -> None:
    names = ("write.py", "train.py", "stages.py", "weights.py", "plan.py", "solve.py", "schedules.py", "profiled.py")
    for name, code in zip(names, blocks("python")[2:], strict=True):
        (folder / name).write_text(code)
    if importlib.util.find_spec("tensorboard") is None:
        names = names[:-1]
    in_turn = "import runpy, sys; [runpy.run_path(name) for name in sys.argv[1:]]"
    done = run([sys.executable, "-W", "error", "-c", in_turn, *names], folder)
    assert done.returncode == 0, done.stderr
    # The same lines under torchrun. They are compiled above, and a compiled pipeline runs under torchrun in a command.
    train = (folder / "train.py").read_text()
    uncompiled = train.replace('schedule="1f1b"', 'schedule="1f1b", kernels="autograd"')
    assert uncompiled != train
    (folder / "ranks.py").write_text(uncompiled)
    done = run(["torchrun", "--standalone", "--nproc-per-node", "3", "ranks.py"], folder)
    assert done.returncode == 0, done.stderr
