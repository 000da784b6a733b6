"""Two directives that take their content from the command line itself.

{verb} split                                          the usage, arguments and options of `pipegraph split`
{timeline} zb-v --ranks 4 --microbatches 8            the picture that `pipegraph schedule … --svg` draws
"""

from __future__ import annotations

import contextlib
import io
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import typer.main
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from pipegraph.cli import app, main

COMMAND = typer.main.get_command(app)


class Verb(Directive):
    """The help of one verb, as `--help` prints it, in a list."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        words = self.arguments[0].split()
        command: Any = COMMAND
        context: Any = command.make_context("pipegraph", [], resilient_parsing=True)
        for word in words:
            command = command.commands[word]
            context = command.make_context(word, [], parent=context, resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        entries = nodes.definition_list()
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record and parameter.name not in ("help", "debug"):
                entries += _entry(*record)
        return [nodes.literal_block(text=f"pipegraph {' '.join(words)} {usage}"), entries]


def _entry(names: str, text: str) -> nodes.definition_list_item:
    term = nodes.term("", "", nodes.literal(text=names))
    return nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", *_inline(text))))


def _inline(text: str) -> Iterator[nodes.Node]:
    """What stands between backticks is code."""
    for number, part in enumerate(text.split("`")):
        if part:
            yield nodes.literal(text=part) if number % 2 else nodes.Text(part)


class Timeline(Directive):
    """A schedule drawn over time."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar = {}

    def run(self) -> list[nodes.Node]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "timeline.svg"
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                main(["schedule", *shlex.split(self.arguments[0]), "--svg", str(file)])
            picture = file.read_text()
        return [nodes.raw("", f'<div class="timeline">{picture}</div>', format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("verb", Verb)
    app.add_directive("timeline", Timeline)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
