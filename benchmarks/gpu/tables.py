"""The figures of `benchmarks.gpu` as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.gpu.blocks import BlockError
from benchmarks.gpu.kernels import COMPILED, SavedMemory
from benchmarks.gpu.steps import MICROBATCHES, StepTimes
from benchmarks.gpu.stopwatch import Timing
from pipegraph.units import UNKNOWN, format_bytes, format_percent


def kernels(timings: Mapping[str, Timing]) -> str:
    """A microbatch of the stage, beside torch.compile."""
    rows = [[name, _milliseconds(each.seconds), _ratio(each)] for name, each in timings.items()]
    return _section("A microbatch of the stage", ["", "ms", f"÷ {COMPILED} (quartiles)"], rows)


def memory(found: SavedMemory) -> str:
    """What F keeps."""
    allocated = UNKNOWN if found.allocated is None else format_bytes(found.allocated)
    error = format_percent(found.predicted / found.counted - 1) if found.counted else UNKNOWN
    row = [format_bytes(found.predicted), format_bytes(found.counted), allocated, error]
    return _section("What F keeps", ["predicted", "counted", "allocated", "predicted ÷ counted − 1"], [row])


def steps(found: Mapping[str, StepTimes]) -> str:
    """Whole steps on the device, by what is computed again."""
    rows = [
        [
            name,
            _milliseconds(each.seconds),
            _milliseconds(each.seconds - each.actions),
            format_bytes(each.saved),
            UNKNOWN if each.reserved is None else format_bytes(each.reserved),
        ]
        for name, each in found.items()
    ]
    title = f"A step of zb-h1, three stages on the device, {MICROBATCHES} microbatches"
    return _section(title, ["recompute", "ms", "between actions, ms", "kept at most", "reserved"], rows)


def blocks(profile: str, found: Sequence[BlockError]) -> str:
    """The roofline's error for each block."""
    rows = [
        [
            each.name,
            " / ".join(map(_milliseconds, each.predicted)),
            " / ".join(map(_milliseconds, each.measured)),
            format_percent(each.error),
        ]
        for each in found
    ]
    headers = ["from", "F / I / W predicted, ms", "measured, ms", "predicted ÷ measured − 1"]
    return _section(f"Distinct blocks, priced by the roofline of {profile}", headers, rows)


def graphs(found: Mapping[int, Mapping[str, Timing] | None]) -> str:
    """F, I and W as CUDA graphs."""
    title = "F, I and W as CUDA graphs"
    known = {length: timings for length, timings in found.items() if timings is not None}
    if not known:
        return f"### {title}\n\nNot measured: this device has none."
    first, *others = next(iter(known.values()))
    rows = [
        [
            str(length),
            *(_milliseconds(each.seconds) for each in timings.values()),
            *(_ratio(timings[name]) for name in others),
        ]
        for length, timings in known.items()
    ]
    headers = ["tokens of a row", *(f"{name}, ms" for name in (first, *others))]
    headers += [f"{name} ÷ {first} (quartiles)" for name in others]
    return _section(title, headers, rows)


def _section(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join([f"### {title}", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"


def _ratio(timing: Timing) -> str:
    low, middle, high = timing.ratio
    return f"{middle:.3f} ({low:.3f} – {high:.3f})"
