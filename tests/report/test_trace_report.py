"""What is reported of a recorded run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pipegraph.report.text.run_report import render_trace_report, trace_report_dict
from pipegraph.schedule import Times
from pipegraph.tracing.analysis.run_analysis import analyse_run
from pipegraph.tracing.read_run import read_run
from tests.tracing.recordings import DIGITS, manifest, write_run
from tests.tracing.test_idle_causes import FAR, SCHEDULE, UNEVEN

PREDICTED = Times.equal(2, 0.001, 0.0005, 0.001)


def test_the_whole_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SCHEDULE, {3: FAR, 4: UNEVEN, 5: FAR}, manifest(2, PREDICTED), gap=0.002)
    assert render_trace_report(analyse_run(read_run(folder))) == EXPECTED


EXPECTED = """\
run: 1f1b with 2 microbatches on 2 ranks; 2 processes on cpu, kernels: eager

a step took 10 ms from its first action to its last (median of 3 steps); predicted 7.5 ms; \
with data and optimizer 11 ms
bubble 40.0 %; predicted 33.3 %

a microbatch of each stage, in ms (medians)
stage  rank  F predicted  measured   error  B predicted  measured    error
    0     0        1.000     1.000  +0.0 %        1.500     2.000  −25.0 %
    1     1        1.000     1.000  +0.0 %        1.500     2.000  −25.0 %
error: predicted ÷ measured − 1

what each rank does in a step (mean), in ms, and why it is idle
rank  computes  idle  idle share  warm-up and drain  imbalance  transfers  overhead
   0      6.00  5.67      48.6 %               3.00       0.00       1.00      1.67
   1      8.00  3.67      31.4 %               3.00       0.00       0.67      0.00

critical path of step 3
  0F0 → 1F0 → 1B1 → 0B1: rank 1 60 %, rank 0 30 %, transfers and overhead 10 %

advice
  Run zb-h1 instead of 1f1b: step time −23.3 % (I and W taken as predicted shares of B).
    pipegraph run OUT --model model.py --schedule zb-h1 --microbatches 2

note: the ranks' clocks agree to ± 2 µs
note: the links of the profile that priced the package are not known: predicted messages take no time"""


def test_data_add_up(tmp_path: Path) -> None:
    report = trace_report_dict(
        analyse_run(read_run(write_run(tmp_path / "run", SCHEDULE, {3: FAR, 4: UNEVEN}, manifest(2, PREDICTED))))
    )
    assert json.loads(json.dumps(report)) == report
    causes = ("warmup_and_drain", "imbalance", "transfers", "overhead")
    for bubble in [*report["bubble"], *(rank_bubble for step in report["steps"] for rank_bubble in step["bubble"])]:
        assert abs(bubble["busy"] + sum(bubble[cause] for cause in causes) - bubble["makespan"]) < 1e-12
    assert report["advice"]["candidates"][0]["gain"] >= report["advice"]["candidates"][-1]["gain"]
    assert report["step"]["with_data_and_optimizer"] > report["step"]["measured"]


def test_ranks_in_turn_have_the_bubble_of_the_simulated_step(tmp_path: Path) -> None:
    analysis = analyse_run(read_run(write_run(tmp_path / "run", SCHEDULE, {3: FAR}, processes=1)))
    text = render_trace_report(analysis)
    assert "the ranks took turns in one process; a step with a process each" in text
    assert "what each rank does in the simulated step" in text
    assert trace_report_dict(analysis)["step"]["measured"] is None


def test_each_problem_has_a_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SCHEDULE, {3: FAR})
    (folder / f"rank_01.{DIGITS}.pt.trace.json.gz").unlink()
    lines = render_trace_report(analyse_run(read_run(folder))).splitlines()
    assert lines[-1] == "problem: rank 1 of 2 has no trace"
    assert re.match(r"problem: .*pipeline.json.*No such file", lines[-2])
