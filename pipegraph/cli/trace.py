"""``pipegraph trace merge|report DIR`` and ``compare DIR DIR``: what recorded runs show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipegraph.cli.options import Command
from pipegraph.cli.output import check_target, print_json, print_text, write_target
from pipegraph.cli.progress_bar import progress


@dataclass(frozen=True, kw_only=True)
class TraceMergeCommand(Command):
    """Write one trace of all ranks for Perfetto.

    Open it at ui.perfetto.dev or in chrome://tracing. It shows measured and predicted actions.

    \b
    Example:
      pipegraph trace merge runs -o trace.json.gz
    """

    folder: Path
    out: Path
    operations: bool = False
    overwrite: bool = False

    def run(self) -> None:
        check_target(self.out, self.overwrite)
        with progress(f"reading {self.folder}"):
            from pipegraph.report.text.run_report import merge_dict, render_merge
            from pipegraph.tracing.merged_trace import merge_traces
            from pipegraph.tracing.read_run import read_pipelines

            runs = read_pipelines(self.folder)
            expected = runs[0].prediction.timeline if runs[0].prediction else None
            written = merge_traces(runs, self.out, expected, self.operations)
        if self.json:
            print_json(merge_dict(runs, self.out, written, expected))
        else:
            print_text(lambda width: render_merge(runs, self.out, written, expected, width))


@dataclass(frozen=True, kw_only=True)
class TraceReportCommand(Command):
    """Say why ranks are idle and what to change.

    Predicted times are printed next to measured ones. --html draws the run over time.

    \b
    Example:
      pipegraph trace report runs --html report.html
    """

    folder: Path
    html: Path | None = None
    overwrite: bool = False
    pipeline: int = 0
    wide: bool = False

    def run(self) -> None:
        check_target(self.html, self.overwrite, option="--html")
        with progress(f"reading {self.folder}"):
            from pipegraph.report.text.run_report import render_trace_report, trace_report_dict
            from pipegraph.tracing.analysis.run_analysis import analyse_run
            from pipegraph.tracing.read_run import read_run

            analysis = analyse_run(read_run(self.folder, self.pipeline))
            if self.html is not None:
                from pipegraph.report.html_pages import trace_page

                write_target(self.html, trace_page(analysis))
        if self.json:
            print_json(trace_report_dict(analysis))
            return
        print_text(lambda width: render_trace_report(analysis, width), self.wide)
        if self.html is not None:
            print(f"\nwrote {self.html}", flush=True)


@dataclass(frozen=True, kw_only=True)
class TraceCompareCommand(Command):
    """Show two runs side by side.

    Their steps, what ranks do in a step of each, and the times of their stages: of two schedules, two sets of cuts, or
    before and after a change.

    \b
    Example:
      pipegraph trace compare runs/before runs/after
    """

    folder: Path
    other_folder: Path
    pipeline: int = 0
    wide: bool = False

    def run(self) -> None:
        from pipegraph.report.text.two_runs import render_two_runs, two_runs_dict
        from pipegraph.tracing.analysis.run_analysis import analyse_run
        from pipegraph.tracing.read_run import read_run

        with progress(f"reading {self.folder}"):
            first = analyse_run(read_run(self.folder, self.pipeline))
        with progress(f"reading {self.other_folder}"):
            second = analyse_run(read_run(self.other_folder, self.pipeline))
        if self.json:
            print_json(two_runs_dict(first, second))
        else:
            print_text(lambda width: render_two_runs(first, second, width), self.wide)
