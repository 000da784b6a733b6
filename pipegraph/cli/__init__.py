"""The command line: one file per verb; each parses, calls and prints."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

import typer

from pipegraph.arguments import asked_by_command
from pipegraph.cli.calibrate import calibrate
from pipegraph.cli.plan import plan
from pipegraph.cli.progress_bar import print_warning
from pipegraph.cli.run import run
from pipegraph.cli.schedule import schedule
from pipegraph.cli.show import show
from pipegraph.cli.split import split
from pipegraph.cli.trace import trace
from pipegraph.cli.verify import verify
from pipegraph.errors import PipegraphError, RuntimeFault, printable

app = typer.Typer(
    help="Turn a PyTorch model into a pipeline of readable stages, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (split, plan, verify, show, run, schedule, calibrate):
    app.command()(verb)
app.add_typer(trace, name="trace")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process.

    Exit codes: 0 done; 1 a check found a difference; 2 usage or input; 3 the model cannot be captured or split; 4 a run
    failed, or an error of pipegraph's own.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with asked_by_command(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app(arguments, prog_name="pipegraph")
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
        # One write, because the ranks of torchrun share one stderr.
        sys.stderr.write(f"error: {printable(_message(error))}\n")
        sys.exit(error.exit_code if isinstance(error, PipegraphError) else RuntimeFault.exit_code)
    sys.exit(0)


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    print_warning(f"warning: {printable(str(message))}")


def _message(error: Exception) -> str:
    if isinstance(error, PipegraphError):
        return str(error)
    return f"{type(error).__name__}: {error}\nThis was not expected.\nTry: --debug, which shows where it happened."
