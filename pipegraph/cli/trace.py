"""``pipegraph trace merge|report DIR``: what a recorded run shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipegraph.cli.options import DebugOption, JsonOption, WideOption
from pipegraph.cli.output import check_target, print_json, print_text, write_target
from pipegraph.cli.progress_bar import progress

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", show_default=False, help="A run's folder, or the one given to --profile: then its newest run."
    ),
]

trace = typer.Typer()


@trace.callback(invoke_without_command=True)
def show_help(context: typer.Context) -> None:
    """Show a run that --profile recorded.

    \b
    Example:
      pipegraph run build/transformer --profile runs
      pipegraph trace report runs
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@trace.command()
def merge(
    folder: RunArgument,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", show_default=False, help="The merged trace: trace.json.gz.")
    ],
    operations: Annotated[
        bool, typer.Option("--operations", help="Keep the operations and kernels below the actions.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write one trace of all ranks for Perfetto.

    Open it at ui.perfetto.dev or in chrome://tracing. It shows measured and predicted actions.

    \b
    Example:
      pipegraph trace merge runs -o trace.json.gz
    """
    check_target(out, overwrite)
    with progress(f"reading {folder}"):
        from pipegraph.report.text.trace_report import merge_dict, render_merge
        from pipegraph.tracing.merged_trace import merge_traces
        from pipegraph.tracing.read_run import read_pipelines

        runs = read_pipelines(folder)
        expected = runs[0].prediction.timeline if runs[0].prediction else None
        written = merge_traces(runs, out, expected, operations)
    if json:
        print_json(merge_dict(runs, out, written, expected))
    else:
        print_text(lambda width: render_merge(runs, out, written, expected, width))


@trace.command()
def report(
    folder: RunArgument,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Write a page with the timeline, for any browser."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page if it exists.")] = False,
    pipeline: Annotated[int, typer.Option(metavar="N", help="Which pipeline of a mesh, from 0 on.")] = 0,
    wide: WideOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Say why ranks are idle and what to change.

    Predicted times are printed next to measured ones. --html draws the run over time.

    \b
    Example:
      pipegraph trace report runs --html report.html
    """
    check_target(html, overwrite, option="--html")
    with progress(f"reading {folder}"):
        from pipegraph.report.text.trace_report import render_trace_report, trace_report_dict
        from pipegraph.tracing.analysis.run_analysis import analyse_run
        from pipegraph.tracing.read_run import read_run

        analysis = analyse_run(read_run(folder, pipeline))
        if html is not None:
            from pipegraph.report.html_pages import trace_page

            write_target(html, trace_page(analysis))
    if json:
        print_json(trace_report_dict(analysis))
        return
    print_text(lambda width: render_trace_report(analysis, width), wide)
    if html is not None:
        print(f"\nwrote {html}", flush=True)
