"""The command line: one file per verb; each parses, calls and prints."""

from __future__ import annotations

import atexit
import gc
import platform
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from pipegraph.arguments import asked_by_command
from pipegraph.cli.calibrate import CalibrateCommand
from pipegraph.cli.export import ExportCommand
from pipegraph.cli.options import Command, add_command
from pipegraph.cli.output import output_streams, wrapped
from pipegraph.cli.plan import PlanCommand
from pipegraph.cli.progress_bar import print_warning
from pipegraph.cli.run import RunCommand
from pipegraph.cli.schedule import ScheduleCommand
from pipegraph.cli.show import ShowCommand
from pipegraph.cli.split import SplitCommand
from pipegraph.cli.trace import TraceCompareCommand, TraceMergeCommand, TraceReportCommand
from pipegraph.cli.verify import VerifyCommand
from pipegraph.errors import ClosedOutput, PipegraphError, RuntimeFault, printable, user_line
from pipegraph.version import __version__

_UsageError: Any = typer.BadParameter.__base__  # click's, or of the copy of click that newer typer holds

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, type[Command]] = {
    "split": SplitCommand,
    "plan": PlanCommand,
    "verify": VerifyCommand,
    "show": ShowCommand,
    "run": RunCommand,
    "export": ExportCommand,
    "schedule": ScheduleCommand,
    "calibrate": CalibrateCommand,
}
for name, command in _COMMANDS.items():
    add_command(app, name, command)
trace = typer.Typer()
add_command(trace, "merge", TraceMergeCommand)
add_command(trace, "report", TraceReportCommand)
add_command(trace, "compare", TraceCompareCommand)
app.add_typer(trace, name="trace")


@trace.callback(invoke_without_command=True)
def show_trace_help(context: typer.Context) -> None:
    """Show a run that --profile recorded.

    \b
    Example:
      pipegraph run build/transformer --profile runs
      pipegraph trace report runs
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def _print_version(requested: bool) -> None:
    if requested:
        print(f"pipegraph {__version__}, torch {version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def pipegraph(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Turn a PyTorch model into a pipeline of readable stages, and run it.

    \b
    Example:
      pipegraph split examples/transformer.py --stages 2
      pipegraph show build/transformer
      pipegraph run build/transformer
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process.

    Exit codes: 0 done; 1 a check found a difference; 2 usage or input; 3 the model cannot be captured or split; 4 a run
    failed, or an error of pipegraph's own; 128 and the number of a signal, as shells count: 130 for Ctrl-C, 141 for an
    output that was closed.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # When Python exits, it looks for cycles among all objects of torch, which takes up to a second. A rank that is
    # stopped meanwhile keeps torchrun waiting, and torchrun has no time limit.
    atexit.register(gc.freeze)
    try:
        with output_streams(), asked_by_command(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app(arguments, prog_name="pipegraph", standalone_mode=False)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
            raise  # of a signal; any other SystemExit comes from the user's source, which pipegraph called
        if "--debug" in arguments:
            traceback.print_exc()
        if not isinstance(error, ClosedOutput):  # as `| head` does: its reader needs no message
            with suppress(OSError):
                # One write, because the ranks of torchrun share one stderr.
                sys.stderr.write(f"{wrapped(f'error: {printable(_message(error))}', sys.stderr)}\n")
        sys.exit(error.exit_code if isinstance(error, (PipegraphError, _UsageError)) else RuntimeFault.exit_code)
    sys.exit(code or 0)  # a verb that is done returns nothing


def _show_warning(message: Warning | str, *where: object, **options: object) -> None:
    print_warning(wrapped(f"warning: {printable(str(message))}", sys.stderr))


def _verbs_with(option: str, context: Any) -> list[str]:
    """The verbs that have an option which another verb does not have: ``pipegraph split --stages``."""
    group = context.parent.command if context is not None and context.parent is not None else None
    verbs = getattr(group, "commands", {}).items() if option else ()
    return [
        f"{context.parent.command_path} {name} {option}"
        for name, verb in verbs
        if any(option in parameter.opts for parameter in verb.params)
    ]


def _message(error: Exception | SystemExit) -> str:
    if isinstance(error, SystemExit):
        where = user_line(error)
        return (
            f"the process was ended by SystemExit: {error.code}{f', at {where}' if where else ''}.\n"
            "Try: leave it out; what pipegraph calls has to return."
        )
    if isinstance(error, PipegraphError):
        return str(error) if error.advice else f"{error}\nTry: --debug, which shows where it happened."
    if isinstance(error, _UsageError):
        message = error.format_message()
        verb = error.ctx.command_path if error.ctx is not None else "pipegraph"
        attempts = [f"{verb} --help", *_verbs_with(getattr(error, "option_name", ""), error.ctx)]
        return message if "\nTry: " in message else f"{message}\nTry: {' or '.join(attempts)}"
    return f"{type(error).__name__}: {error}\nThis was not expected.\nTry: --debug, which shows where it happened."
