"""The figures of `benchmarks.gpu` as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.gpu.blocks import BlockError
from benchmarks.gpu.kernels import COMPILED, SavedMemory
from benchmarks.gpu.steps import MICROBATCHES, StepTimes
from benchmarks.gpu.stopwatch import Timing
from pipegraph.units import UNKNOWN, format_bytes, format_percent


def kernels(timings: Mapping[str, Timing]) -> str:
    """A microbatch of the stage, compared with torch.compile."""
    rows = [[name, _milliseconds(timing.seconds), _ratio(timing)] for name, timing in timings.items()]
    return _section("A microbatch of the stage", ["", "ms", f"÷ {COMPILED} (quartiles)"], rows)


def memory(saved_memory: SavedMemory) -> str:
    """What F keeps."""
    allocated = UNKNOWN if saved_memory.allocated is None else format_bytes(saved_memory.allocated)
    error = format_percent(saved_memory.predicted / saved_memory.counted - 1) if saved_memory.counted else UNKNOWN
    row = [format_bytes(saved_memory.predicted), format_bytes(saved_memory.counted), allocated, error]
    return _section("What F keeps", ["predicted", "counted", "allocated", "predicted ÷ counted − 1"], [row])


def steps(step_times: Mapping[str, StepTimes]) -> str:
    """Whole steps on the device, by what is computed again."""
    rows = [
        [
            name,
            _milliseconds(times.seconds),
            _milliseconds(times.seconds - times.actions),
            format_bytes(times.saved),
            UNKNOWN if times.reserved is None else format_bytes(times.reserved),
        ]
        for name, times in step_times.items()
    ]
    title = f"A step of zb-h1, three stages on the device, {MICROBATCHES} microbatches"
    return _section(title, ["recompute", "ms", "between actions, ms", "kept at most", "reserved"], rows)


def blocks(profile: str, errors: Sequence[BlockError]) -> str:
    """The roofline's error for each block."""
    rows = [
        [
            error.name,
            " / ".join(map(_milliseconds, error.predicted)),
            " / ".join(map(_milliseconds, error.measured)),
            format_percent(error.error),
        ]
        for error in errors
    ]
    headers = ["from", "F / I / W predicted, ms", "measured, ms", "predicted ÷ measured − 1"]
    return _section(f"Distinct blocks, priced by the roofline of {profile}", headers, rows)


def graphs(timings_by_length: Mapping[int, Mapping[str, Timing] | None]) -> str:
    """F, I and W as CUDA graphs."""
    title = "F, I and W as CUDA graphs"
    measured = {length: timings for length, timings in timings_by_length.items() if timings is not None}
    if not measured:
        return f"### {title}\n\nNot measured: this device has none."
    first, *other_names = next(iter(measured.values()))
    rows = [
        [
            str(length),
            *(_milliseconds(timing.seconds) for timing in timings.values()),
            *(_ratio(timings[name]) for name in other_names),
        ]
        for length, timings in measured.items()
    ]
    headers = ["tokens of a row", *(f"{name}, ms" for name in (first, *other_names))]
    headers += [f"{name} ÷ {first} (quartiles)" for name in other_names]
    return _section(title, headers, rows)


def _section(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join([f"### {title}", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f}"


def _ratio(timing: Timing) -> str:
    low, middle, high = timing.ratio
    return f"{middle:.3f} ({low:.3f} – {high:.3f})"
