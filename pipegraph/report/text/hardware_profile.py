"""A hardware profile as text: what the device attains, its links, and the sources of the figures."""

from __future__ import annotations

from collections.abc import Iterator

from pipegraph.cost.hardware import Hardware
from pipegraph.cost.size_table import SizeTable
from pipegraph.errors import one_line
from pipegraph.package.prediction import UNCORRECTED
from pipegraph.report.text import table, wrap
from pipegraph.units import format_bytes, format_count, format_seconds


def render_hardware(hardware: Hardware, width: int | None = None) -> str:
    """Return the device, a line for each kind of figure, and the sources of the figures."""
    links = hardware.links
    rows = [
        *_flops(hardware),
        ("memory bandwidth", _span(hardware.attained_bandwidth, hardware.memory_bandwidth, "B/s")),
        ("memory", format_bytes(hardware.memory_bytes)),
        ("kernel, at least", format_seconds(hardware.kernel_floor)),
    ]
    ends = [("in a node", links.intra_node), ("between nodes", links.inter_node)]
    if links.measured is not None:
        ends = [
            (f"rank {rank} to rank {peer}", links.between(rank, peer))
            for rank in range(links.measured.ranks)
            for peer in range(links.measured.ranks)
            if rank != peer
        ]
    for where, link in ends:
        if link is not None:
            figures = f"{format_seconds(link.latency)}, {format_count(link.bandwidth, 'B/s')}"
            rows.append((f"link {where}", f"{figures} ({link.name})"))
    for where, link in (("in a node", links.intra_node), ("between nodes", links.inter_node)):
        for operation in ("gather", "reduce", "all_reduce", "all_gather"):
            measured = getattr(link, operation, None)
            if measured is not None:
                rows.append((f"{operation.replace('_', '-')} {where}", _span(measured, 1.0, "B/s")))
    if hardware.host_link is not None:
        figures = f"{format_seconds(hardware.host_link.latency)}, {format_count(hardware.host_link.bandwidth, 'B/s')}"
        rows.append(("link to CPU memory", f"{figures} ({hardware.host_link.name})"))
    ratio = hardware.measured_ratio
    if ratio != UNCORRECTED:
        factors = zip("FIW", (ratio.forward, ratio.input_grad, ratio.weight_grad), strict=True)
        rows.append(("measured ÷ predicted", ", ".join(f"{kind} {factor:.3g}" for kind, factor in factors)))
    longest = max((len(place) for place in hardware.sources), default=0)
    sources = [f"{place:<{longest}}  {one_line(source)}" for place, source in hardware.sources.items()]
    return "\n\n".join(
        [
            f"{hardware.name}: {one_line(hardware.device)}",
            table(["what", "attained"], rows, width),
            wrap("\n".join([f"{'figure':<{longest}}  source", *sources]), width),
        ]
    )


def _flops(hardware: Hardware) -> Iterator[tuple[str, str]]:
    for kind, by_dtype in hardware.attained_flops.items():
        for dtype, attained in by_dtype.items():
            peak = hardware.peak_flops.get(dtype)
            if peak is not None:
                yield f"{kind.replace('_', ' ')}, {dtype}", _span(attained, peak, "FLOP/s")


def _span(part: SizeTable, peak: float, unit: str) -> str:
    low, high = part.smallest * peak, part.largest * peak
    return format_count(high, unit) if low == high else f"{format_count(low, unit)} to {format_count(high, unit)}"
