"""The processes of ``pipegraph run``: the same command again, once for each rank."""

from __future__ import annotations

from pathlib import Path

import typer

from pipegraph.cli.progress_bar import progress


def launch_again(context: typer.Context, processes: int, debug: bool, grace: float, timeout: float | None) -> None:
    """Run the same command in a process for each rank."""
    from pipegraph.runtime.processes.group import TIMEOUT
    from pipegraph.runtime.processes.launch import launch
    from pipegraph.runtime.processes.progress_relay import relay_progress

    options = {name: value for name, value in context.params.items() if name not in ("out", "nproc")}
    defaults = {parameter.name: parameter.default for parameter in context.command.params}
    flags = [
        f"--{'' if value else 'no-'}{name.replace('_', '-')}"
        for name, value in options.items()
        if isinstance(value, bool) and value != defaults[name]
    ]
    flags += [
        f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
        if value is not None and not isinstance(value, bool)
    ]
    with progress(f"starting {processes} processes") as say, relay_progress(say) as environment:
        # -P: without the working folder on sys.path, as for the command that started this process.
        arguments = ["-P", "-m", "pipegraph", "run", str(context.params["out"]), *flags]
        folders = [str(Path(file).parent) for file in environment.values()]
        launch(arguments, processes, debug, environment, folders, grace, TIMEOUT if timeout is None else timeout)
