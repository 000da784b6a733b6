"""What the command line says of itself: help, version, completion; and that its examples can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from pipegraph.cli import app
from pipegraph.version import __version__
from tests.cli.command import ROOT, Command, program

COMMAND: Any = typer.main.get_command(app)
PROGRAMS = ("pipegraph ", "torchrun --nproc-per-node 2 -m pipegraph ")


def verbs(command: Any = COMMAND, path: tuple[str, ...] = ()) -> Iterator[Any]:
    for name, verb in command.commands.items():
        if hasattr(verb, "commands"):
            yield from verbs(verb, (*path, name))
        else:
            yield pytest.param((*path, name), verb, id=" ".join((*path, name)))


def examples(help_text: str) -> list[str]:
    return [line.strip() for line in help_text.partition("Example:\n")[2].splitlines() if line.strip()]


@pytest.mark.parametrize(("path", "verb"), list(verbs()))
def test_every_verb_has_examples_that_can_be_typed(path: tuple[str, ...], verb: Any) -> None:
    lines = examples(verb.help)
    assert any(line.startswith(f"pipegraph {' '.join(path)} ") for line in lines)
    for line in lines:
        start = next(prefix for prefix in PROGRAMS if line.startswith(prefix))
        words = shlex.split(line.removeprefix(start))
        called = COMMAND
        while hasattr(called, "commands"):
            called = called.commands[words.pop(0)]
        called.make_context("pipegraph", words)
        for file in re.findall(r"examples/\S+", line):
            assert (ROOT / file).is_file()


@pytest.mark.parametrize("arguments", [(), ("trace",), ("--help",), ("split", "--help")])
def test_help_fits_a_narrow_terminal(
    pipegraph: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = pipegraph(*arguments)
    assert (done.code, done.err) == (0, "")
    summaries = done.out.partition("Commands:\n")[2].splitlines()
    assert all(line.endswith(".") and not line.endswith("...") and len(line) <= 60 for line in summaries)


def test_many_options_stand_in_groups(pipegraph: Command) -> None:
    titles = {}
    for verb in ("run", "plan", "split", "verify"):
        lines = f"Arguments:{pipegraph(verb, '--help').out.partition('Arguments:')[2]}".splitlines()
        titles[verb] = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
        shown = [line.split()[0] for line in lines if line.startswith("  -")]
        assert len(shown) == len(set(shown))
        for name in ("--json", "--debug"):
            assert name in shown
    assert titles["verify"] == ["Arguments", "Options"]
    for verb in ("run", "plan", "split"):
        assert titles[verb][:2] == ["Arguments", "Usual options"] and titles[verb][-1] == "Output"
    usual = pipegraph("run", "--help").out.partition("Usual options:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  (--\S+)", usual, re.MULTILINE) == [
        "--model", "--schedule", "--microbatches", "--nproc", "--steps", "--checkpoint", "--profile", "--precision",
        "--kernels", "--device",
    ]  # fmt: skip


def test_version(pipegraph: Command) -> None:
    assert re.fullmatch(rf"pipegraph {re.escape(__version__)}, torch \S+, Python \S+\n", pipegraph("--version").out)


def test_the_shell_completes_verbs_and_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        return program("-c", "from pipegraph.cli import main; main([])").out.split()

    monkeypatch.setenv("_PIPEGRAPH_COMPLETE", "complete_bash")
    assert completed("pipegraph sp") == ["split"]
    assert completed("pipegraph schedule zb-h") == ["zb-h1", "zb-h2"]
    assert completed("pipegraph run out --schedule gp") == ["gpipe"]


def test_the_end_of_a_command_looks_for_no_cycles() -> None:
    hook = "import atexit, gc; atexit.register(lambda: print(len(gc.get_objects()), gc.get_freeze_count() > 10_000))"
    assert program("-c", f"{hook}\nfrom pipegraph.cli import main; main(['--version'])").out.endswith("\n0 True\n")


@pytest.mark.parametrize(
    ("arguments", "said", "tried"),
    [
        (("splat",), "No such command 'splat'.", "pipegraph --help"),
        (("run",), "Missing argument 'OUT'.", "pipegraph run --help"),
        (("run", "out", "--stepz", 1), "No such option: --stepz", "pipegraph run --help"),
        (
            ("plan", "model.py", "--stages", 2),
            "No such option: --stages",
            "pipegraph plan --help or pipegraph split --stages",
        ),
        (("run", "out", "--steps", 0), "Invalid value for '--steps': ", "pipegraph run --help"),
        (("run", "out", "--profile", "runs", "--steps", 1), "1 step is too few", "--steps 4"),
        (("trace", "report"), "Missing argument 'DIR'.", "pipegraph trace report --help"),
    ],
)
def test_every_error_has_one_style(pipegraph: Command, arguments: tuple[object, ...], said: str, tried: str) -> None:
    failed = pipegraph(*arguments)
    assert (failed.code, failed.out) == (2, "")
    first, *_, last = failed.err.splitlines()
    assert first.startswith("error: ") and said in failed.err
    assert last == f"Try: {tried}"


def test_a_table_fits_the_terminal_unless_it_is_to_be_wide(
    pipegraph: Command, chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_table = pipegraph("show", chain).out
    monkeypatch.setenv("COLUMNS", "60")
    assert "left out: weights; --wide shows all" in pipegraph("show", chain).out
    assert max(map(len, pipegraph("show", chain).out.splitlines())) <= 60
    assert pipegraph("show", chain, "--wide").out == full_table


def test_a_terminal_without_the_characters_of_drawings_gets_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = program("-m", "pipegraph", "schedule", "1f1b", "--ranks", 2, "--microbatches", 2)
    assert done.code == 0 and "0F0 0F1" in done.out, done
