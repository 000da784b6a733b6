"""What a device attains, and what the links between devices do: named profiles, and files that `calibrate` wrote."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from msgspec import structs

from pipegraph.cost.hardware.links import Link, Links
from pipegraph.cost.hardware.size_table import SizeTable
from pipegraph.cost.schema import SchemaError, check_schema, parse
from pipegraph.errors import PipegraphError, nearest
from pipegraph.package.prediction import UNCORRECTED, MeasuredRatio

SCHEMA_VERSION = 1
ANY = "any"
"""The dtype of an attained part that holds for every dtype without its own."""
OTHER = "other"
"""The element rate of operations that have none of their own."""

_PROFILES = files("pipegraph.cost.hardware") / "profiles"


@dataclass(frozen=True)
class Hardware:
    """A device: seconds, bytes, and floating-point operations or elements per second.

    Attributes:
        name, device: what the profile is called, and of what it is.
        memory_bytes: of one device.
        peak_flops: dense, by dtype.
        attained_flops: kind of kernel → dtype → part of that peak, over the sizes of the kernel.
        memory_bandwidth: the peak, and
        attained_bandwidth: the part of it attained, over the bytes that a kernel reads and writes.
        kernel_floor: no kernel takes less: its launch.
        kernel_overhead: what each kernel adds where launches are not hidden behind the kernel before.
        links: between ranks.
        element_rates: of operations that take time inside a fused kernel, beyond its bytes; by ATen name.
        first_touch: how fast new memory comes from the operating system, over its bytes; None where it stays with the
            process.
        measured_ratio: what stages took when they ran, as multiples of what the other figures come to.
        sources: where the figures are from, by their place.
    """

    name: str
    device: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    attained_flops: Mapping[str, Mapping[str, SizeTable]]
    memory_bandwidth: float
    attained_bandwidth: SizeTable
    kernel_floor: float
    links: Links
    kernel_overhead: float = 0.0
    element_rates: Mapping[str, float] = field(default_factory=dict)
    first_touch: SizeTable | None = None
    measured_ratio: MeasuredRatio = UNCORRECTED
    sources: Mapping[str, str] = field(default_factory=dict)

    def flops_per_second(self, kind: str, dtype: str, footprint: float = math.inf, **sizes: float) -> float:
        """What a kernel of this kind attains. A kind without figures is taken for a product of matrices.

        ``footprint`` says how many bytes have gone through the caches since what it reads and writes did.
        A dtype that the profile does not have runs at the lowest of its peaks.
        """
        if dtype == "tfloat32" and dtype not in self.peak_flops:
            dtype = "float32"
        by_dtype = self.attained_flops.get(kind) or self.attained_flops["matmul"]
        table = by_dtype.get(dtype) or by_dtype.get(ANY) or next(iter(by_dtype.values()))
        return self.peak_flops.get(dtype, min(self.peak_flops.values())) * table.at(footprint=footprint, **sizes)

    def bytes_per_second(self, size: float, footprint: float = math.inf) -> float:
        """What a kernel that reads and writes so many bytes attains."""
        return self.memory_bandwidth * self.attained_bandwidth.at(bytes=max(size, 1), footprint=footprint)

    def new_memory_seconds(self, size: int) -> float:
        """What the system takes to provide the memory of a new tensor of so many bytes."""
        return 0.0 if self.first_touch is None or not size else size / self.first_touch.at(bytes=size)

    @property
    def figures(self) -> Hardware:
        """The profile without its name, sources and correction: equal for one device as it was measured once."""
        return replace(self, name="", measured_ratio=UNCORRECTED, sources={})

    def link(self, rank: int, other: int) -> Link:
        """The link from a rank to another."""
        return self.links.between(rank, other)

    @staticmethod
    def names() -> tuple[str, ...]:
        """The profiles that pipegraph has."""
        return tuple(sorted(file.name.removesuffix(".json") for file in _PROFILES.iterdir()))

    @classmethod
    def load(cls, name: str | Path) -> Hardware:
        """A profile by name, or the one in a JSON file.

        Raises PipegraphError that names what is missing or absurd, and where it stands.
        """
        if str(name) in cls.names():
            return cls.from_json((_PROFILES / f"{name}.json").read_text(encoding="utf-8"), where=f"{name}")
        file = Path(name)
        if not file.is_file():
            raise PipegraphError(_no_profile(file, cls.names()))
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise PipegraphError(f"the hardware profile {file} cannot be read: {why}.") from None
        found = cls.from_json(text, where=str(file))
        if found.name in cls.names() and found.figures != cls.load(found.name).figures:
            raise PipegraphError(
                f'{file} calls its profile "{found.name}", as pipegraph calls one of its own, and has other figures: a '
                f'package would not tell which of them priced it.\nTry: another "name" in it, such as '
                f'"{found.name}-here".'
            )
        return found

    @classmethod
    def from_json(cls, text: str, where: str = "this profile") -> Hardware:
        """Read a profile, and check it against ``hardware.schema.json``. ``where`` names it in errors."""
        try:
            found = parse(text)
        except ValueError as error:
            raise PipegraphError(f"{where} is no hardware profile: it is no JSON: {error}.") from None
        check(found, where)
        try:
            return cls(
                name=found["name"],
                device=found["device"],
                memory_bytes=found["memory_bytes"],
                peak_flops=found["peak_flops"],
                attained_flops={
                    kind: {dtype: _table(table, f"attained_flops.{kind}.{dtype}") for dtype, table in tables.items()}
                    for kind, tables in found["attained_flops"].items()
                },
                memory_bandwidth=found["memory_bandwidth"],
                attained_bandwidth=_table(found["attained_bandwidth"], "attained_bandwidth"),
                kernel_floor=found["kernel_floor"],
                links=Links.from_json(found["links"]),
                kernel_overhead=found.get("kernel_overhead", 0.0),
                element_rates=found.get("element_rates", {}),
                first_touch=_table(found["first_touch"], "first_touch") if "first_touch" in found else None,
                measured_ratio=MeasuredRatio(**found.get("measured_ratio", {})),
                sources=found["sources"],
            )
        except PipegraphError as error:
            raise PipegraphError(f"{where}: {error}.\n{_TRY}") from None

    def as_dict(self) -> dict[str, Any]:
        """What stands in a profile's file."""
        tables = {
            kind: {dtype: table.to_json() for dtype, table in by_dtype.items()}
            for kind, by_dtype in self.attained_flops.items()
        }
        found = {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "device": self.device,
            "memory_bytes": self.memory_bytes,
            "peak_flops": dict(self.peak_flops),
            "attained_flops": tables,
            "memory_bandwidth": self.memory_bandwidth,
            "attained_bandwidth": self.attained_bandwidth.to_json(),
            "kernel_floor": self.kernel_floor,
            "kernel_overhead": self.kernel_overhead,
            "element_rates": dict(self.element_rates),
            "first_touch": None if self.first_touch is None else self.first_touch.to_json(),
            "links": self.links.to_json(),
            "measured_ratio": None if self.measured_ratio == UNCORRECTED else structs.asdict(self.measured_ratio),
            "sources": dict(self.sources),
        }
        return {name: value for name, value in found.items() if value is not None}

    def to_json(self) -> str:
        """What `from_json` reads; a row of figures stands in one line."""
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False)
        return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text) + "\n"


def check_new(file: Path) -> None:
    """Refuse a new file whose profile, which is called as the file, would have the name of one that pipegraph has."""
    if file.stem in Hardware.names():
        raise PipegraphError(
            f'A profile is called as its file, and pipegraph has a profile "{file.stem}" of its own.\n'
            f"Try: {file.with_stem(f'{file.stem}-here')}."
        )


_MEASURE = "Try: pipegraph calibrate -o hardware.json, which measures this machine."
_TRY = "Try: pipegraph calibrate -o hardware.json, which writes a whole profile."


def check(found: Any, where: str) -> None:
    """PipegraphError that names the figure of a profile which is missing, misplaced or absurd, and the nearest name."""
    try:
        check_schema(found, "pipegraph.cost.hardware", "hardware.schema.json", "a profile")
    except SchemaError as error:
        raise PipegraphError(f"{where}: {error}.\n{_TRY}") from None


def _no_profile(file: Path, names: Sequence[str]) -> str:
    """What to say of a profile that is none, and no file."""
    if file.is_dir():
        what = f"The hardware profile {file} is a folder, not a file."
    elif file.suffix == ".json":
        beside = [str(each) for each in file.parent.glob("*.json")] if file.parent.is_dir() else []
        what = f"There is no hardware profile {file}.{nearest(str(file), [*beside, *names])}"
    else:
        what = f'No hardware profile is called "{file}".{nearest(str(file), names)}'
    return f"{what} There are: {', '.join(names)}; or give a JSON file.\n{_MEASURE}"


def _table(found: Any, place: str) -> SizeTable:
    try:
        return SizeTable.from_json(found)
    except PipegraphError as error:
        raise PipegraphError(f"{place}: {error}") from None
