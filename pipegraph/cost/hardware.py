"""What a device attains, and what the links between devices do: named profiles, and files that `calibrate` wrote."""

from __future__ import annotations

import bisect
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, structs

from pipegraph.arguments import require_path
from pipegraph.errors import PipegraphError, nearest
from pipegraph.package.json_file import Entry, FieldError, FileKind, Name, Text, choice_of, json_text
from pipegraph.package.prediction import UNCORRECTED, MeasuredRatio

# ---- size tables -----------------------------------------------------------------------------------------------------
# Figures that depend on sizes, as they were measured at some of them.


Values = float | tuple["Values", ...]
"""A figure, or one for each size along the first axis."""

Sizes = Annotated[tuple[Annotated[float, Meta(gt=0, le=1e30)], ...], Meta(min_length=1)]


class SizeTable(Entry, frozen=True):
    """Positive figures over sizes such as m, n and k: ``values[i][j]`` belongs to the i-th size along the first axis.

    Between its sizes it is interpolated, logarithm over logarithm: what hardware attains follows powers of sizes, and
    they span decades. Outside of them it is constant. Without axes it is one figure.
    """

    axes: dict[str, Sizes]
    values: Any  # Values, for which msgspec has no type

    def __post_init__(self) -> None:
        for name, sizes in self.axes.items():
            if sizes[0] <= 0 or any(low >= high for low, high in itertools.pairwise(sizes)):
                raise FieldError(f"axes.{name}", f"sizes must be positive and ascend, unlike {list(sizes)[:8]}")
        axes = [(name, len(sizes)) for name, sizes in self.axes.items()]
        structs.force_setattr(self, "values", _checked(self.values, axes, "values" if axes else ""))

    def at(self, **sizes: float) -> float:
        """The figure at these sizes, one for each axis; others are ignored."""
        places = [_place(along, sizes[name]) for name, along in self.axes.items()]
        return math.exp(_interpolate(self.values, places))

    def map(self, change: Callable[[float], float]) -> SizeTable:
        """The same table of other figures."""
        return SizeTable(self.axes, _mapped(self.values, change))

    @property
    def largest(self) -> float:
        """The largest figure."""
        return max(_flat_figures(self.values))

    @property
    def smallest(self) -> float:
        """The smallest figure."""
        return min(_flat_figures(self.values))

    @classmethod
    def stacked(cls, axis: str, tables: Mapping[float, SizeTable]) -> SizeTable:
        """Stack tables over the same sizes along another axis, in which each has a size. One table stays as it is."""
        if len(tables) == 1:
            return next(iter(tables.values()))
        inner = next(iter(tables.values())).axes
        return cls({axis: tuple(tables), **inner}, tuple(table.values for table in tables.values()))


def _place(along: Sequence[float], size: float) -> tuple[int, float]:
    """(index, how far from there to the next one, 0 to 1)."""
    if size <= along[0]:
        return 0, 0.0
    if size >= along[-1]:
        return len(along) - 1, 0.0
    index = bisect.bisect_right(along, size) - 1
    return index, math.log(size / along[index]) / math.log(along[index + 1] / along[index])


def _interpolate(values: Values, places: Sequence[tuple[int, float]]) -> float:
    """The logarithm of the figure."""
    if not isinstance(values, tuple):
        return math.log(values)
    (index, part), *inner_places = places
    low = _interpolate(values[index], inner_places)
    return low + part * (_interpolate(values[index + 1], inner_places) - low) if part else low


def _checked(values: Any, axes: Sequence[tuple[str, int]], place: str) -> Values:
    """The figures as nested tuples, if they are as many as the sizes. Raises FieldError."""
    if not axes:
        if isinstance(values, bool) or not isinstance(values, (int, float)) or not 0 < values <= 1e30:
            description = values if isinstance(values, (int, float, str)) else f"a {type(values).__name__}"
            raise FieldError(place, f"{str(description)[:40]!r} must be one positive number")
        return float(values)
    (name, length), *inner_axes = axes
    count = len(values) if isinstance(values, (list, tuple)) else 0
    if count != length:
        raise FieldError(place, f"it has {count} entries, and there are {length} sizes along {name}")
    return tuple(_checked(value, inner_axes, f"{place}[{index}]") for index, value in enumerate(values))


def _mapped(values: Values, change: Callable[[float], float]) -> Values:
    return tuple(_mapped(value, change) for value in values) if isinstance(values, tuple) else change(values)


def _flat_figures(values: Values) -> Iterator[float]:
    if not isinstance(values, tuple):
        yield values
        return
    for value in values:
        yield from _flat_figures(value)


# ---- profiles --------------------------------------------------------------------------------------------------------


Rate = Annotated[float, Meta(ge=1e6, le=1e21)]
"""Bytes, elements or floating-point operations per second."""

Seconds = Annotated[float, Meta(ge=0, le=0.1)]

SCHEMA_VERSION: Final = 1
GATHER, REDUCE, ALL_REDUCE, ALL_GATHER = COLLECTIVES = "gather", "reduce", "all_reduce", "all_gather"
"""The collectives of ranks along dp_shard, those of their replicas, and of ranks along tp."""
ANY: Final = "any"
"""The dtype of an attained part that holds for every dtype without its own."""
OTHER_OPERATIONS: Final = "other"
"""The element rate of operations that have none of their own."""

_PROFILES = files("pipegraph.cost") / "profiles"
_MEASURE = "Try: pipegraph calibrate -o hardware.json, which measures this machine."
_DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "int8", "complex64", "complex128")
_OF_MATRICES = ("m", "n", "k", "flops", "footprint")
_OF_ATTENTION = ("length", "head_dim", "flops", "footprint")
_AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "matmul": _OF_MATRICES,
    "batched_matmul": _OF_MATRICES,
    "convolution": _OF_MATRICES,
    "convolution_backward": _OF_MATRICES,
    "attention": _OF_ATTENTION,
    "attention_backward": _OF_ATTENTION,
}
"""Kind of kernel → the sizes that its table may be over. A convolution is the product of matrices that it is."""

Dtype = Annotated[str, choice_of(*_DTYPES)]
AttainedDtype = Annotated[str, choice_of(*_DTYPES, ANY)]
KernelKind = Annotated[str, choice_of(*_AXES)]


class Link(Entry, frozen=True):
    """One way from a rank to another: a message of b bytes takes ``latency + b / bandwidth`` seconds.

    Attributes:
        gather, reduce, all_reduce: bytes per second over the bytes of the whole and the number of ranks, of collectives
            between ranks that such links connect: what each rank has a part of is gathered; each rank gets its part of
            a sum; every rank gets the sum. None for what was not measured.
        all_gather: of torch's own, by which tensor parallelism gathers; None if it is as fast as ``gather``.
    """

    latency: Seconds
    bandwidth: Rate
    name: Text = ""
    gather: SizeTable | None = None
    reduce: SizeTable | None = None
    all_reduce: SizeTable | None = None
    all_gather: SizeTable | None = None

    def seconds(self, size: float) -> float:
        """Return the seconds that a message of ``size`` bytes takes."""
        return self.latency + size / self.bandwidth

    def collective_seconds(self, kind: str, size: float, ranks: int) -> float:
        """Return the seconds that ``ranks`` ranks take for a collective of a tensor of ``size`` bytes.

        What was not measured is that of a ring: n ranks pass parts of ``size / n`` bytes on n − 1 times to gather or to
        scatter them, and twice as often to reduce all (Patarasuk and Yuan, 2009).

        Args:
            kind: one of `COLLECTIVES`.
        """
        if ranks == 1:
            return 0.0
        measured: SizeTable | None = getattr(self, kind)
        if kind == ALL_GATHER and measured is None:
            measured = self.gather
        if measured is not None:
            size = max(size, measured.axes.get("bytes", (1.0,))[0])  # fewer bytes than were measured take as long
            return size / measured.at(bytes=size, ranks=ranks)
        rounds = (2 if kind == ALL_REDUCE else 1) * (ranks - 1)
        return rounds * self.seconds(size / ranks)


class MeasuredLinks(Entry, frozen=True):
    """Seconds and bytes per second from each rank (row) to each other one (column), None on the diagonal."""

    latency: Annotated[tuple[tuple[Seconds | None, ...], ...], Meta(min_length=2)]
    bandwidth: Annotated[tuple[tuple[Rate | None, ...], ...], Meta(min_length=2)]
    name: Text = ""

    def __post_init__(self) -> None:
        for matrix_name, rows in (("latency", self.latency), ("bandwidth", self.bandwidth)):
            for rank, row in enumerate(rows):
                if len(rows) != self.ranks or len(row) != self.ranks:
                    raise FieldError(
                        matrix_name,
                        f"it has {len(row)} figures for rank {rank} and {len(rows)} rows; latency and bandwidth have "
                        f"one row and one column for each of the {self.ranks} ranks",
                    )
                for other_rank, figure in enumerate(row):
                    if (figure is None) != (rank == other_rank):
                        must = "null on the diagonal" if rank == other_rank else "a number: from one rank to another"
                        raise FieldError(f"{matrix_name}[{rank}][{other_rank}]", f"it is {figure}, and must be {must}")

    @property
    def ranks(self) -> int:
        return len(self.latency)


class Links(Entry, frozen=True):
    """The links between ranks, of which ``ranks_per_node`` after one another stand in one node.

    If ``measured`` has the pair of ranks it goes first. ``inter_node`` is None for hardware of one node, for which
    `between` takes ``intra_node`` for all.
    """

    ranks_per_node: Annotated[int, Meta(ge=1, le=65536)]
    intra_node: Link
    inter_node: Link | None = None
    measured: MeasuredLinks | None = None

    def between(self, rank: int, other_rank: int) -> Link:
        """The link from a rank to another."""
        table = self.measured
        if table is not None and max(rank, other_rank) < table.ranks:
            latency, bandwidth = table.latency[rank][other_rank], table.bandwidth[rank][other_rank]
            if latency is not None and bandwidth is not None:
                return Link(latency, bandwidth, table.name)
        return self.among((rank, other_rank))

    def among(self, ranks: Iterable[int]) -> Link:
        """The usual link between ranks that do a collective together: between nodes if they are in several."""
        is_one_node = len({rank // self.ranks_per_node for rank in ranks}) == 1
        return self.intra_node if is_one_node or self.inter_node is None else self.inter_node

    def collective_seconds(self, kind: str, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of a collective (`Link.collective_seconds`) between ranks that are numbered ``stride``
        apart."""
        if ranks == 1 or not size:
            return 0.0
        return self.among(rank * stride for rank in range(ranks)).collective_seconds(kind, size, ranks)


class Hardware(Entry, frozen=True, kw_only=True):
    """A device: seconds, bytes, and floating-point operations or elements per second.

    Attributes:
        name, device: the name of the profile, and the device that it describes.
        memory_bytes: of one device.
        peak_flops: dense, by dtype; tfloat32 is float32 if torch is allowed less precision.
        attained_flops: kind of kernel → dtype → part of that peak, over the sizes of the kernel.
        memory_bandwidth: the peak, and
        attained_bandwidth: the part of it attained, over the bytes that a kernel reads and writes.
        kernel_floor: the least seconds of a kernel: its launch.
        kernel_overhead: the seconds that each kernel adds if its launch does not overlap with the kernel before.
        element_rates: of operations that take time inside a fused kernel, beyond its bytes; by ATen name.
        first_touch: how fast new memory comes from the operating system, over its bytes; None if it stays with the
            process.
        links: between ranks.
        host_link: from a device to pinned memory of its host, and back; None if that is not known.
        tp_overlap: the part of an exchange between ranks along tp that runs during the products before and after it, as
            in asynchronous tensor parallelism; 0 if kernels wait for it.
        measured_ratio: the measured seconds of stages, as multiples of those that the other figures predict.
        sources: where the figures are from, by their place.
    """

    schema_version: int = SCHEMA_VERSION
    name: Name
    device: Name
    memory_bytes: Annotated[int, Meta(ge=2**20, le=10**15)]
    peak_flops: Annotated[dict[Dtype, Rate], Meta(min_length=1)]
    attained_flops: dict[KernelKind, Annotated[dict[AttainedDtype, SizeTable], Meta(min_length=1)]]
    memory_bandwidth: Rate
    attained_bandwidth: SizeTable
    kernel_floor: Seconds
    kernel_overhead: Seconds = 0.0
    element_rates: dict[Name, Rate] = msgspec.field(default_factory=dict)
    first_touch: SizeTable | None = None
    links: Links
    host_link: Link | None = None
    tp_overlap: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    measured_ratio: MeasuredRatio = UNCORRECTED
    sources: dict[Name, Text] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if "matmul" not in self.attained_flops:
            raise FieldError("attained_flops", "it lacks matmul, which other kinds of kernels fall back on")
        for kind, by_dtype in self.attained_flops.items():
            for dtype, table in by_dtype.items():
                _check(table, f"attained_flops.{kind}.{dtype}", _AXES[kind], 0.0, 1.0)
        _check(self.attained_bandwidth, "attained_bandwidth", ("bytes", "footprint"), 0.0, 1.0)
        if self.first_touch is not None:
            _check(self.first_touch, "first_touch", ("bytes",), 1e6, 1e21)
        for place, link in (("intra_node", self.links.intra_node), ("inter_node", self.links.inter_node)):
            for name in COLLECTIVES:
                if (measured := getattr(link, name, None)) is not None:
                    _check(measured, f"links.{place}.{name}", ("bytes", "ranks"), 1.0, 1e21)

    def flops_per_second(self, kind: str, dtype: str, footprint: float = math.inf, **sizes: float) -> float:
        """Return what a kernel of this kind attains. A kind without figures counts as a product of matrices.

        ``footprint`` is how many bytes have gone through the caches since the kernel's own data did.
        A dtype that the profile does not have runs at the lowest of its peaks.
        """
        if dtype == "tfloat32" and dtype not in self.peak_flops:
            dtype = "float32"
        by_dtype = self.attained_flops.get(kind) or self.attained_flops["matmul"]
        table = by_dtype.get(dtype) or by_dtype.get(ANY) or next(iter(by_dtype.values()))
        return self.peak_flops.get(dtype, min(self.peak_flops.values())) * table.at(footprint=footprint, **sizes)

    def bytes_per_second(self, size: float, footprint: float = math.inf) -> float:
        """Return the bandwidth of a kernel that reads and writes ``size`` bytes."""
        return self.memory_bandwidth * self.attained_bandwidth.at(bytes=max(size, 1), footprint=footprint)

    def exposed_exchange(self, seconds: float, products: float) -> float:
        """Return the seconds of an exchange between ranks along tp that are not hidden.

        Args:
            seconds: of the exchange.
            products: of the products during which it may run: no more than these are hidden.
        """
        return seconds - min(self.tp_overlap * seconds, products)

    def new_memory_seconds(self, size: int) -> float:
        """Return the seconds that the system takes to provide the memory of a new tensor of ``size`` bytes."""
        return 0.0 if self.first_touch is None or not size else size / self.first_touch.at(bytes=size)

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a CPU: new memory comes from the operating system, and is CPU memory."""
        return self.first_touch is not None

    @property
    def figures(self) -> Hardware:
        """The profile without its name, sources and correction: equal for one device as it was measured once."""
        return structs.replace(self, name="", measured_ratio=UNCORRECTED, sources={})

    def link(self, rank: int, other_rank: int) -> Link:
        """The link from a rank to another."""
        return self.links.between(rank, other_rank)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of the profiles that pipegraph has."""
        return tuple(sorted(file.name.removesuffix(".json") for file in _PROFILES.iterdir()))

    @classmethod
    def load(cls, name: str | Path) -> Hardware:
        """A profile by name, or the one in a JSON file.

        Raises PipegraphError that names what is missing or absurd, and where it stands.
        """
        if str(name) in cls.names():
            return _KIND.decode((_PROFILES / f"{name}.json").read_bytes(), f"{name}")
        file = require_path(name, "hardware is the name of a profile, or its file", error=PipegraphError)
        if not str(name) or not os.path.exists(file):
            raise PipegraphError(_no_profile(str(name), cls.names()))
        spec = _KIND.read(file)
        if spec.name in cls.names() and spec.figures != cls.load(spec.name).figures:
            raise PipegraphError(
                f'{file} calls its profile "{spec.name}", as pipegraph calls another profile with other figures: a '
                f"package would not tell which of them priced it.",
                f'another "name" in it, such as "{spec.name}-here".',
            )
        return spec

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "this profile") -> Hardware:
        """Read the text of a profile; ``where`` names it in errors."""
        return _KIND.decode(text, where)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a profile's file."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        if self.measured_ratio == UNCORRECTED:
            del content["measured_ratio"]
        if not self.tp_overlap:
            del content["tp_overlap"]
        links = {name: value for name, value in content["links"].items() if value is not None}
        for holder, name in ((links, "intra_node"), (links, "inter_node"), (content, "host_link")):
            if holder.get(name) is not None:
                holder[name] = {key: value for key, value in holder[name].items() if value is not None}
        return _figures({name: value for name, value in content.items() if value is not None} | {"links": links})

    def to_json(self) -> str:
        """The text of a profile's file; a table of figures is compact."""
        return json_text(self.to_dict()) + "\n"


def known_peak(device: str, dtype: str) -> float | None:
    """Return the peak of a GPU in floating-point operations per second, of products in a dtype; None if no profile of
    pipegraph is of the device.

    Args:
        device: its name, as torch has it: ``NVIDIA H100 80GB HBM3``.
    """
    words = re.split(r"[^a-z0-9]+", device.lower())
    profile = next((Hardware.load(name) for name in Hardware.names() if name in words and name != "cpu"), None)
    return None if profile is None else profile.peak_flops.get(dtype)


def check_new(file: Path) -> None:
    """Refuse a new file if its profile, which has the name of the file, would have the name of one of pipegraph."""
    if file.stem in Hardware.names():
        raise PipegraphError(
            f'A profile has the name of its file, and pipegraph already has a profile "{file.stem}".',
            f"{file.with_stem(f'{file.stem}-here')}.",
        )


def _check(table: SizeTable, place: str, axes: tuple[str, ...], least: float, most: float) -> None:
    for axis in table.axes:
        if axis not in axes:
            near = nearest(axis, axes)
            raise FieldError(f"{place}.axes", f'"{axis}" is not a size.{near} There are: {", ".join(axes)}')
    for figure in (table.smallest, table.largest):
        if not least < figure <= most:
            raise FieldError(place, f"{figure:g} must be more than {least:g}, and {most:g} or less")


def _no_profile(name: str, names: tuple[str, ...]) -> str:
    """Return the message for a name that is neither a profile nor a file."""
    file = Path(name)
    if file.suffix == ".json":
        paths = [str(path) for path in file.parent.glob("*.json")] if os.path.isdir(file.parent) else []
        problem = f"There is no hardware profile {file}.{nearest(str(file), [*paths, *names])}"
    else:
        problem = f'No hardware profile is called "{name}".{nearest(name, names)}'
    return f"{problem} There are: {', '.join(names)}; or give a JSON file.\n{_MEASURE}"


def _figures(part: Any) -> Any:
    """Plain values with tables without axes as the one figure that they are."""
    if not isinstance(part, dict):
        return part
    if part.keys() == {"axes", "values"} and not part["axes"]:
        return part["values"]
    return {name: _figures(value) for name, value in part.items()}


def _prepare(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a file with a table, without axes, for each figure that may be one."""
    attained, links = content.get("attained_flops"), content.get("links")
    tables: list[tuple[dict[str, Any], tuple[str, ...]]] = [(content, ("attained_bandwidth", "first_touch"))]
    tables += [(rates, tuple(rates)) for rates in _objects(attained, *(attained if isinstance(attained, dict) else ()))]
    tables += [(link, COLLECTIVES) for link in _objects(links, "intra_node", "inter_node")]
    for holder, names in tables:
        for name in names:
            if not isinstance(holder.get(name), dict | None):
                holder[name] = {"axes": {}, "values": holder[name]}
    return content


def _objects(content: Any, *names: str) -> list[dict[str, Any]]:
    """Those entries of an object that are objects."""
    return [content[name] for name in names if isinstance(content, dict) and isinstance(content.get(name), dict)]


_KIND: Final = FileKind(Hardware, "a hardware profile", PipegraphError, _MEASURE, SCHEMA_VERSION, _prepare)
