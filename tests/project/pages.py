"""README and the pages of docs/, divided into blocks and run.

A reader gets the output that a page shows: its blocks run in order, in one separate folder that holds a copy of
examples/. The language of a block says what happens to it.

- `console`: lines that begin with `$ ` are commands, the lines below them their output. A line `…` stands for any
  lines. If the output begins with `error:`, the command has to fail, and prints it to stderr. `pipegraph` and
  `python` run in this process; anything else is a separate process. For `make` the target only has to exist. A block of
  several `pipegraph` commands that shows no output at all leaves it out.
- `python`: runs; the blocks of a page share their names.
- `python` with a first line such as `# model.py`: the content of that file. If the file exists, it has to hold these
  lines (each part between lines of `…`); if not, it is written.
- `text`, `json`: shown, not run.

A block whose first line is `# needs …` (a GPU, several machines) is shown, not run; `NOT_RUN` in test_pages.py lists
them. Runs are made quicker: see `quicker`.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from pipegraph.cli import main

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
LANGUAGES = {"console", "python", "text", "json"}

_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (?P<path>[\w./-]+\.\w+)\n")
_NEEDS = re.compile(r"# needs (?P<what>.+)\n")
# Commands that measure. Every figure they print varies, and with it the width of columns.
_MEASURES = re.compile(r"pipegraph (run|trace|calibrate)\b|torchrun\b|time\b")
# What varies in the other commands: times, the last digits of losses and differences.
_VARIES = re.compile(r"\d+\.\d+ s\b|loss \d+\.\d+|\d\.\de-\d\d|0\.0e\+00")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int

    @property
    def needs(self) -> str | None:
        """What the block needs that a test has not; None if the block runs."""
        match = _NEEDS.match(self.text)
        return match["what"] if match else None

    @property
    def file(self) -> str | None:
        """The file of which the block is the content, or a part."""
        match = _FILE.match(self.text) if self.language == "python" else None
        return match["path"] if match else None

    @property
    def leaves_output_out(self) -> bool:
        """Whether it is several commands of pipegraph, and shows the output of none."""
        commands = self.commands
        of_pipegraph = all(command.startswith("pipegraph ") for command, _ in commands)
        return len(commands) > 1 and of_pipegraph and not any(output for _, output in commands)

    @property
    def commands(self) -> list[tuple[str, str]]:
        """(command, expected output) of each line of a console block that begins with `$ `."""
        parts = re.split(r"^\$ ", _NEEDS.sub("", self.text), flags=re.MULTILINE)
        assert parts[0] == "", f"line {self.line}: a console block begins with $"
        return [(command, output) for command, _, output in (part.partition("\n") for part in parts[1:])]


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks of code, without directives of Sphinx (`{…}`)."""
        return tuple(
            Block(match["language"].strip(), match["text"], self.text[: match.start("text")].count("\n") + 1)
            for match in _FENCE.finditer(self.text)
            if not match["language"].startswith("{")
        )

    def renew(self, command: str, expected: str, printed: str) -> None:
        """Write into the file what a command printed now."""
        self.path.write_text(self.path.read_text().replace(f"$ {command}\n{expected}", f"$ {command}\n{printed}"))


class Runner:
    """Runs the blocks of one page in one folder."""

    def __init__(self, page: Page, folder: Path, printed: Callable[[], tuple[str, str]]) -> None:
        self.page = page
        self.folder = folder
        self._printed = printed  # what stdout and stderr got since the last call
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> Iterator[tuple[str, str, str]]:
        """Run a block; yield (command, expected output, output) for each command in it."""
        if block.needs:
            return
        if block.file:
            self._hold(block, self.folder / block.file)
        elif block.language == "python":
            # The empty lines in front make an error name the line of the page.
            code = compile("\n" * (block.line - 1) + quicker(block.text), str(self.page.path), "exec")
            exec(code, self._names)
        elif block.language == "console":
            for command, expected in block.commands:
                yield command, expected, self._call(quicker(command), expected.startswith("error:"))

    def _hold(self, block: Block, file: Path) -> None:
        text = block.text.partition("\n")[2]
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.lstrip("\n"))
            return
        written = _dedented(file.read_text())
        for part in re.split(r"^ *…\n", text, flags=re.MULTILINE):
            assert _dedented(part).strip("\n") in written, f"{self.page.name}:{block.line}: not in {file}"

    def _call(self, command: str, fails: bool) -> str:
        """What a command prints: to stdout, or if it fails, as it should, to stderr."""
        words = shlex.split(command)
        if words[0] == "make":
            code, *printed = self._process([*words, "--dry-run", "--directory", str(ROOT)])
            return "" if code == 0 else printed[1]
        code, *printed = self._run_in_process(words) if words[0] in ("pipegraph", "python") else self._process(words)
        assert bool(code) == fails, f"{command}\n{''.join(printed)}"
        return printed[fails]

    def _run_in_process(self, words: list[str]) -> tuple[int, str, str]:
        self._printed()
        code: Any = 0
        try:
            if words[0] == "pipegraph":
                main(words[1:])
            else:
                runpy.run_path(words[1], run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
        return code, *self._printed()

    def _process(self, words: list[str]) -> tuple[int, str, str]:
        scripts = Path(sys.executable).parent
        path = os.pathsep.join([str(ROOT), str(self.folder)])
        environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path}
        for script in self.folder.glob("*.py"):
            script.write_text(quicker(script.read_text()))
        done = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        return done.returncode, done.stdout, done.stderr


def quicker(text: str) -> str:
    """A command, or Python, without tracing and compiling, and with the example transformer 16 times narrower."""
    text = re.sub(r"(split examples/transformer\.py)( --points)", r"\1:build_tiny_model\2", text)
    if "kernels" in text:
        return text
    text = re.sub(r"^pipegraph run .*", r"\g<0> --kernels autograd", text)
    text = re.sub(r"--microbatches 8( --profile .*)", r"--microbatches 2 --steps 2\1", text)
    return re.sub(r"(pipegraph\.Pipeline\([^,()]+,)", r'\1 kernels="autograd",', text)


def agree(command: str, expected: str, printed: str) -> bool:
    """Whether a command printed what the page shows, but for what varies from machine to machine and run to run."""
    if not expected or not printed:
        return expected == printed
    if _MEASURES.match(command):
        lines = iter(_without_figures(printed))
        return all(line in lines for line in _without_figures(expected))  # in this order, perhaps with others between
    pattern = re.escape(_VARIES.sub("#", expected)).replace("…\\\n", "(?:.*\n)*")
    return re.fullmatch(pattern, _VARIES.sub("#", printed)) is not None


def _without_figures(text: str) -> list[str]:
    """The lines that hold no figure. The unit of a column varies with its figures."""
    lines = (re.sub(r"\bin [mµ]?s\b", "in …", " ".join(line.split())) for line in text.splitlines())
    return [line for line in lines if line not in ("", "…") and not re.search(r"\d", line)]


def _dedented(text: str) -> str:
    """Without the margin, so that a method of a class can be shown by itself."""
    return re.sub(r"^[ \t]+", "", text, flags=re.MULTILINE)


def read_pages() -> list[Any]:
    return [pytest.param(Page(path), id=path.relative_to(ROOT).as_posix()) for path in PAGES]
