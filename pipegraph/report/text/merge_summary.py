"""What was merged into one trace: how many slices, how well the clocks agree, what is missing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipegraph.errors import one_line
from pipegraph.report.text.tables import table
from pipegraph.schedule import Timeline
from pipegraph.tracing.merged_trace import Merged, stages_of
from pipegraph.tracing.reading.recorded_run import RecordedRun
from pipegraph.units import format_seconds


def told_merge(run: RecordedRun, file: Path, merged: Merged, expected: Timeline | None) -> str:
    """The text of ``pipegraph trace merge``."""
    parts = [f"wrote {file}: {merged.slices} slices, {merged.flows} messages"]
    if expected is None:
        parts[0] += "; the package has no predicted times"
    rows = []
    for rank, trace in sorted(run.ranks.items()):
        clock = trace.clock
        error = "not known" if clock.error is None else f"± {format_seconds(clock.error)}"
        rows.append(
            [stages_of(run, rank), str(len(trace.spans)), format_seconds(clock.offset), "" if rank == 0 else error]
        )
    parts.append(table(["", "actions", "clock offset", "error"], rows))
    notes = [f"note: {note}" for note in run.notes]
    if merged.early:
        notes.append(f"problem: {merged.early} messages arrive before they were sent: the clocks are further off")
    if merged.left_out:
        notes.append(f"note: {merged.left_out} operations that begin in one slice and end in another were left out")
    notes += [f"problem: {problem}" for problem in run.problems]
    return "\n\n".join(filter(None, [*parts, "\n".join(map(one_line, notes))]))


def merged_dict(run: RecordedRun, file: Path, merged: Merged, expected: Timeline | None) -> dict[str, Any]:
    """The same as data, for ``--json``: seconds."""
    return {
        "file": str(file),
        "run": str(run.folder),
        **asdict(merged),
        "predicted": expected is not None,
        "clocks": [
            {"rank": rank, "offset": trace.clock.offset, "error": trace.clock.error}
            for rank, trace in sorted(run.ranks.items())
        ],
        "problems": list(run.problems),
        "notes": list(run.notes),
    }
