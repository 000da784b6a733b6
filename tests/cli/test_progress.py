"""Bars are shown on a terminal only. The tests use a pseudo terminal, and run the command in a separate process."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from pipegraph.cli import progress_bar
from pipegraph.kernels import compilers
from pipegraph.kernels.compilers import compile_graphs
from pipegraph.progress import listen, report_progress, track
from pipegraph.runtime.processes.launch import ProgressRelay, relay_progress
from tests.cli.command import ROOT, Command

AT_ONCE = """
import sys
import pipegraph.cli.progress_bar
pipegraph.cli.progress_bar._DELAY = 0.0
if __name__ == "__main__":
    pipegraph.cli.main(sys.argv[1:])
"""


def on_a_terminal(*arguments: object) -> tuple[int, list[str]]:
    """(exit code, what was on each line) of pipegraph with stdout and stderr on a terminal, without its controls."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", AT_ONCE, *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    chunks = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        with suppress(OSError):  # nobody holds the other end any more
            while data := os.read(controller, 65536):
                chunks.append(data)
    os.close(controller)
    return process.returncode, lines(b"".join(chunks).decode(errors="replace"))


def lines(text: str) -> list[str]:
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))


@pytest.mark.slow
def test_split_shows_capture_pricing_and_weights(tmp_path: Path) -> None:
    code, lines = on_a_terminal("split", "tests/models/chain.py", "--stages", 2, "-o", tmp_path / "out")
    assert code == 0
    assert f"wrote {tmp_path / 'out'}" in lines
    assert any(re.fullmatch(r"\S loading tests/models/chain.py … +0:\d\d *", line) for line in lines)
    assert any(re.fullmatch(r"\S capturing Chain +━[━╸╺]+ \d of 5 0:\d\d *", line) for line in lines)


@pytest.mark.slow
def test_run_shows_its_children_and_prints_their_lines_above(chain: Path) -> None:
    code, lines = on_a_terminal("run", chain, "--kernels", "autograd", "--steps", 40, "--nproc", 2)
    assert code == 0
    assert [line.split("   ")[0] for line in lines if line.startswith("step ")][:40] == [f"step {n}" for n in range(40)]
    assert any(line.startswith("optimizer state") for line in lines)
    assert any(re.fullmatch(r"\S starting 2 processes … +0:\d\d *", line) for line in lines)
    assert any(re.fullmatch(r"\S training steps(, \d+ s left)? +━[━╸╺]+ \d+ of 40 0:\d\d *", line) for line in lines)
    assert not any("━" in line and "step " in line.replace("training steps", "") for line in lines)


class Terminal(io.StringIO):
    """A stderr that says it is one."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, delay: float = 0.0) -> Terminal:
    """Replace stderr with a terminal. Call it in the test itself: pytest replaces stderr after every fixture."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(progress_bar, "_DELAY", delay)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def shown_until(terminal: Terminal, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in terminal.getvalue():
        assert time.monotonic() < deadline, f"{text!r} is not shown: {terminal.getvalue()!r}"
        time.sleep(0.01)


def test_lines_and_warnings_stand_above_the_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = on_terminal(monkeypatch)
    with progress_bar.progress("beginning") as say:
        shown_until(terminal, "beginning …")
        report_progress("counting", 3, 7)
        shown_until(terminal, "3 of 7")
        progress_bar.print_warning("warning: look out")
        say("a line")
        report_progress("counting", 4, 7)
        shown_until(terminal, "4 of 7")
    assert "warning: look out" in lines(terminal.getvalue())
    assert capsys.readouterr().out == "a line\n"
    so_far = terminal.getvalue()
    report_progress("counting", 5, 7)
    progress_bar.print_warning("warning: later")
    assert terminal.getvalue() == f"{so_far}warning: later\n"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_bar_is_one_line_of_any_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its line away when another one is printed. Of two lines it would take what stands above as well."""
    on_terminal(monkeypatch, delay=60.0)
    monkeypatch.setenv("COLUMNS", str(width))
    bar = progress_bar._TerminalBar("beginning")
    bar.update("training steps, 1 h 23 min left, of a run with a long name", 12345, 100000)
    (line,) = bar._console.render_lines(bar._render(), pad=False)
    text = "".join(segment.text for segment in line).rstrip()
    assert len(text) <= width
    assert re.search(r" \d+:\d\d$", text)
    assert "12345 of 100000" in text


def test_what_is_drawn_stays_when_there_is_more_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    on_terminal(monkeypatch, delay=60.0)
    bar, fractions = progress_bar._TerminalBar("beginning"), []
    for done, total in ((20, 21), (20, 26), (21, 26), (26, 26)):
        bar.update("plans", done, total)
        fractions.append(bar._fractions["plans"])
    assert fractions == [20 / 21, 20 / 21, 20 / 21, 1.0]


def test_a_bar_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another round of the same work continues from the one before; within a round a late report changes nothing."""
    bar, states = progress_bar._TerminalBar("beginning"), []
    rounds = [("one", 0, 2), ("one", 1, 2), ("one", 2, 2), ("two", 0, 3), ("one", 0, 2), ("one", 2, 2), ("one", 1, 2)]
    for work, done, total in [*rounds, ("one", 0, 4), ("one", 3, 4), ("one", 2, 4)]:
        bar.update(work, done, total)
        states.append((bar._task, bar._done, bar._total))
    assert [(done, total) for name, done, total in states if name == "one"] == [
        *((0, 2), (1, 2), (2, 2), (2, 4), (4, 4), (5, 6), (5, 9), (8, 9), (8, 9)),
    ]
    bars = [done for name, done, _ in states if name == "one"]
    assert bars == sorted(bars)


def test_ctrl_c_while_the_bar_is_drawn_anew_leaves_the_terminal_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, set_live = on_terminal(monkeypatch), Console.set_live

    def interrupted(console: Console, live: Live) -> object:
        signal.raise_signal(signal.SIGINT)
        return set_live(console, live)

    def interrupt() -> None:
        with progress_bar.progress("beginning") as say:
            shown_until(terminal, "beginning …")
            monkeypatch.setattr(Console, "set_live", interrupted)
            say("a line")

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    hidden, visible = "\x1b[?25l", "\x1b[?25h"
    assert terminal.getvalue().count(hidden) == terminal.getvalue().count(visible) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_short_work_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch, delay=1.0)
    with progress_bar.progress("beginning"):
        report_progress("counting", 3, 7)
    assert terminal.getvalue() == ""


def test_nothing_is_shown_without_a_terminal(pipegraph: Command, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_DELAY", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = pipegraph("run", chain, "--kernels", "eager", "--nproc", 1)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("step 0   loss ")
    assert "━" not in done.out


def test_kernels_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "compile_graph", lambda module: module)
    reports: list[tuple[str, int, int]] = []
    with listen(lambda *report: reports.append(report)):
        assert compile_graphs(["one", "two"]) == ["one", "two"]  # type: ignore[list-item, comparison-overlap]
    assert reports == [(work, done, 2) for work in ("writing kernels", "compiling kernels") for done in range(3)]


def test_a_listener_gets_reports() -> None:
    reports: list[tuple[str, int, int]] = []
    report_progress("nobody hears this")
    with listen(lambda *report: reports.append(report)):
        assert list(track("items", "ab")) == ["a", "b"]
        report_progress("something")
    report_progress("nobody hears this")
    assert reports == [("items", 0, 2), ("items", 1, 2), ("items", 2, 2), ("something", 0, 0)]


def relay_of(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> ProgressRelay | None:
    """What a child with this environment has."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return ProgressRelay.to_parent()


def test_what_a_child_says_arrives_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, also what was said right before the end."""
    heard: list[object] = []
    with listen(lambda *report: heard.append(report)), relay_progress(heard.append) as environment:
        child = relay_of(environment, monkeypatch)
        assert child is not None
        assert ProgressRelay.to_parent() is None  # children of the child do not have it
        for index in range(1000):
            child.report("steps", index, 1000)
            child.print(f"line {index}\nand more")
        child.close()
    pairs = ((("steps", index, 1000), f"line {index}\nand more") for index in range(1000))
    assert heard == [message for pair in pairs for message in pair]
    with relay_progress(heard.append) as environment:
        assert relay_of(environment, monkeypatch) is None  # nobody listens


NO_HANG_SECONDS = 30.0


def test_a_closed_stdout_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def say(line: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def run() -> None:
        with listen(lambda *report: None), relay_progress(say) as environment:
            child = relay_of(environment, monkeypatch)
            assert child is not None
            with closing(child):
                child.print("a line")
                time.sleep(2 * NO_HANG_SECONDS)

    began = time.monotonic()
    with pytest.raises(BrokenPipeError):
        run()
    assert time.monotonic() - began < NO_HANG_SECONDS


def test_a_quiet_rank_shows_and_relays_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIPEGRAPH_PROGRESS", str(tmp_path / "reports"))
    terminal = on_terminal(monkeypatch)
    with progress_bar.progress("beginning", quiet=True) as say:
        report_progress("counting", 3, 7)
        say("a line")
        assert "PIPEGRAPH_PROGRESS" not in os.environ
    assert terminal.getvalue() == ""
    assert not (tmp_path / "reports").exists()
    assert capsys.readouterr().out == "a line\n"
