"""The survey in print: a line for each model on the terminal, or Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.survey.examination import CHECKS, CheckResult, Report, Verdict

_WORDS = {
    Verdict.NOT_TAKEN: "–",
    Verdict.REFUSED: "refused",
    Verdict.FAILED: "fails",
    Verdict.DIFFERENT: "differs",
    Verdict.WARNED: "warned",
}
COUNTS = ("lines", "numbered", "torch.ops", "constants", "literals", "seconds")


def cell(outcome: CheckResult) -> str:
    """``=`` for equal, bit for bit; else the difference, in bold if it is more than rounding."""
    if outcome.verdict is not Verdict.COMPARED:
        return _WORDS[outcome.verdict]
    text = f"{outcome.difference:.0e}" if outcome.difference else "="
    return f"**{text}**" if outcome.is_silent_error else text


def report_lines(report: Report) -> Iterator[str]:
    """The results for one model: its cells, and their messages."""
    yield f"{report.case.name}  ({report.case.origin})"
    if report.error:
        yield f"  not split: {report.error}"
        return
    yield "  " + "  ".join(f"{name} {cell(outcome)}" for name, outcome in report.outcomes.items())
    yield "  " + "  ".join(f"{name} {text}" for name, text in zip(COUNTS, _counts(report), strict=True))
    if report.proof is not None:
        yield f"  compared with the captured graph in {report.proof.seconds:.2f} s"
        yield from (f"    {name} is written {form}" for name, form in report.proof.plainer.items())
    for name, outcome in report.outcomes.items():
        if outcome.verdict in (Verdict.REFUSED, Verdict.FAILED):
            yield f"    {name}: {outcome.message}"


def markdown_lines(reports: Sequence[Report]) -> Iterator[str]:
    """The table of what was compared, and that of the source."""
    yield from _table(("model", *CHECKS), ([report.case.name, *_cells(report)] for report in reports))
    yield ""
    split = [report for report in reports if not report.error]
    counted = ([report.case.name, report.case.origin, *_counts(report)] for report in split)
    yield from _table(("model", "from", *COUNTS), counted)


def summary(reports: Sequence[Report]) -> str:
    """What was found in all."""
    split = [report for report in reports if not report.error]
    outcomes = [outcome for report in split for outcome in report.outcomes.values()]
    compared = [outcome for outcome in outcomes if outcome.verdict is Verdict.COMPARED]
    tally = {verdict: sum(outcome.verdict is verdict for outcome in outcomes) for verdict in Verdict}
    counts = [report.counts for report in split if report.counts is not None]
    proofs = [report.proof for report in split if report.proof is not None]
    half = [report.outcomes["bfloat16"] for report in split]
    close = sum(outcome.verdict is Verdict.COMPARED and outcome.difference <= 1e-6 for outcome in half)
    return "\n".join(
        [
            f"{len(split)} of {len(reports)} models split; {len(compared)} comparisons, of which "
            f"{sum(outcome.difference == 0 for outcome in compared)} equal bit for bit; "
            f"{sum(outcome.is_silent_error for outcome in compared)} silent errors, {tally[Verdict.WARNED]} warned of, "
            f"{tally[Verdict.REFUSED]} refused, {tally[Verdict.FAILED]} failed",
            f"{sum(len(proof.plainer) for proof in proofs)} classes in a plainer form; comparing with the captured "
            f"graphs took {sum(proof.seconds for proof in proofs):.1f} of {sum(case.seconds for case in split):.1f} s",
            f"bfloat16 within 1e-6: {close} of {sum(outcome.verdict is not Verdict.NOT_TAKEN for outcome in half)}",
            f"numbered classes {sum(code.numbered for code in counts)}, torch.ops "
            f"{sum(code.operators for code in counts)}, constants {sum(code.constants for code in counts)}, literal "
            f"sizes {sum(report.literals for report in split)}",
        ]
    )


def _cells(report: Report) -> list[str]:
    return ["not split"] * len(CHECKS) if report.error else [*map(cell, report.outcomes.values())]


def _counts(report: Report) -> list[str]:
    counts = report.counts
    assert counts is not None, "it was split"
    figures = (counts.lines, counts.numbered, counts.operators, counts.constants, report.literals)
    return [*map(str, figures), f"{report.seconds:.1f}"]


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    aligned = ["---" if header in ("model", "from") else "---:" for header in headers]
    for row in (headers, aligned, *rows):
        yield f"| {' | '.join(row)} |"
