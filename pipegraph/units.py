"""Formatting and reading bytes, counts, times and percentages: the one place that does.

A single figure has the largest unit in which it is 1 or more. Times of one column share a unit and have equally many
decimals (`TimeFormat.of_column`), but for those that are too short to be read in it, which name their own; bytes and
counts have one decimal and a unit each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

UNKNOWN = "—"
"""Written for a figure that is not known."""

_SI = ("", "k", "M", "G", "T", "P", "E")
_PLAIN = ("", "k", "M", "B", "T")  # of things that are counted: a model of 8 billion parameters is an 8 B model
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_FIGURES = 4  # significant ones of a time

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_FACTORS = {"": 1, "b": 1} | {
    f"{prefix}{unit}".casefold(): base**power
    for power, prefix in enumerate("kMGT", 1)
    for unit, base in (("B", 1000), ("iB", 1024))
}
_LEAST, _MOST = 2**20, 2**50


def format_count(number: float, unit: str = "") -> str:
    """Format a count with one decimal and a decimal prefix; with SI's prefixes if ``unit`` is one, such as ``FLOP``.

    >>> format_count(12_584_960), format_count(8_030_261_248), format_count(7)
    ('12.6 M', '8.0 B', '7')
    >>> format_count(51_300_000_000, "FLOP"), format_count(8_030_261_248, "parameters")
    ('51.3 GFLOP', '8.0 B parameters')
    """
    is_word = not unit or unit.islower()
    scaled, prefix = _scaled(number, 1000, _PLAIN if is_word else _SI)
    return f"{scaled} {prefix}{' ' if is_word and prefix else ''}{unit}".rstrip()


def format_bytes(number: float | None, decimals: int = 1) -> str:
    """Format bytes with a binary prefix.

    >>> format_bytes(2 * 2**20), format_bytes(100), format_bytes(None)
    ('2.0 MiB', '100 B', '—')
    """
    if number is None:
        return UNKNOWN
    return " ".join(_scaled(number, 1024, _BINARY, decimals))


def bytes_option(number: int) -> str:
    """Format bytes as `parse_bytes` reads them, rounded up to four digits.

    >>> bytes_option(85_047_905_485)
    '79.21GiB'
    """
    unit, name, count = 2**20, "MiB", max(number, _LEAST)
    if count >= 2**30:
        unit, name = 2**30, "GiB"
    step = 10 ** max(0, 4 - len(str(count // unit)))
    return f"{-(-count * step // unit) / step:.10g}{name}"


def parse_bytes(text: str) -> int:
    """Read ``80GiB`` (1024³), ``16GB`` (1000³), ``500MB``, or plain bytes: the memory of a device.

    Raises ValueError for anything else, and for less than 1 MiB or more than 1 PiB.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None or match[2].casefold() not in _FACTORS:
        raise ValueError(f"{text!r} is not an amount of memory: write 80GiB, 16GB, 500MB or plain bytes.")
    number = float(match[1]) * _FACTORS[match[2].casefold()]
    if not _LEAST <= number <= _MOST:
        raise ValueError(f"{text!r} is too little or too much: give 1MiB to 1PiB, such as 80GiB.")
    return int(number)


def parse_rank_bytes(text: str) -> int | tuple[int, ...]:
    """Read ``80GiB`` for every rank, or ``80GiB*4,40GiB*4``: four ranks of each.

    Raises ValueError as `parse_bytes` does, and for a number of ranks that is not a whole number from 1 on.
    """
    if not set("*,") & set(text):
        return parse_bytes(text)
    of_ranks: list[int] = []
    for part in text.split(","):
        size, star, number = (word.strip() for word in part.partition("*"))
        if star and not (number.isdecimal() and int(number)):
            raise ValueError(f"{part.strip()!r} does not end with a number of ranks: write 80GiB*4,40GiB*4.")
        of_ranks += [parse_bytes(size)] * (int(number) if star else 1)
    return tuple(of_ranks)


def format_percent(part: float | None, signed: bool = False, decimals: int = 1) -> str:
    """Format a part of 1, with its sign if it is a difference.

    >>> format_percent(0.2727), format_percent(-0.1234, signed=True), format_percent(-1e-9), format_percent(None)
    ('27.3 %', '−12.3 %', '0.0 %', '—')
    """
    if part is None:
        return UNKNOWN
    rounded = round(part * 100, decimals) + 0.0  # no negative zero
    return f"{rounded:{'+' if signed else ''}.{decimals}f} %".replace("-", "−")


def format_factor(factor: float) -> str:
    """Format how many times something is, with two figures.

    >>> format_factor(2.6412), format_factor(0.419), format_factor(12345.6)
    ('2.6', '0.42', '12000')
    """
    return f"{float(f'{factor:.2g}'):g}"


def format_number_of(noun: str, *numbers: int) -> str:
    """Format a number of things, or several numbers to choose from.

    >>> format_number_of("rank", 1), format_number_of("process", 8), format_number_of("microbatch", 8, 12)
    ('1 rank', '8 processes', '8 or 12 microbatches')
    """
    plural = "" if numbers == (1,) else "es" if noun.endswith(("h", "s")) else "s"
    return f"{' or '.join(map(str, numbers))} {noun}{plural}"


def format_seconds(seconds: float | None) -> str:
    """Format a time alone: four figures and a unit.

    >>> format_seconds(0.0185223), format_seconds(7200.0), format_seconds(-2e-6), format_seconds(0.0)
    ('18.52 ms', '7200 s', '−2 µs', '0 s')
    """
    return TimeFormat.for_seconds(seconds or 0.0).text(seconds)


def format_duration(seconds: float) -> str:
    """Format how long something lasts, for which the larger two units are enough.

    >>> format_duration(45.2), format_duration(754), format_duration(7_500), format_duration(190_000)
    ('45 s', '12 min', '2 h 5 min', '2 d 4 h')
    """
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    minutes, hours, days = whole_seconds // 60, whole_seconds // 3600, whole_seconds // 86400
    if not hours:
        return f"{minutes} min"
    return f"{days} d {hours % 24} h" if days else f"{hours} h {minutes % 60} min"


@dataclass(frozen=True)
class TimeFormat:
    """How times are shown: in one unit, and in a column with a fixed number of ``decimals``.

    ``size`` is the unit in seconds. A time that does not count seconds has no ``unit``.
    """

    size: float = 1.0
    unit: str = ""
    decimals: int | None = None

    @classmethod
    def for_seconds(cls, seconds: float) -> TimeFormat:
        """Return the format in which this time is a number from 1 on.

        >>> TimeFormat.for_seconds(0.25)
        TimeFormat(size=0.001, unit='ms', decimals=None)
        """
        if not seconds:
            return cls(*_TIMES[0])
        return cls(*next((unit for unit in _TIMES if abs(seconds) >= unit[0]), _TIMES[-1]))

    @classmethod
    def of_column(cls, times: Iterable[float | None]) -> TimeFormat:
        """Return one format for many times: the largest has four figures, and all have the same number of decimals.

        A time that would have at most one figure has a different unit.

        >>> column = TimeFormat.of_column([0.0185223, 0.0005, 0.000033, None])
        >>> column.unit, [column.number(time) for time in (0.0185223, 0.0005, 0.000033, None)]
        ('ms', ['18.52', '0.50', '33 µs', '—'])
        """
        largest = max((abs(time) for time in times if time), default=0.0)
        time_format = cls.for_seconds(largest)
        digits = math.floor(math.log10(largest / time_format.size)) + 1 if largest else 1
        return cls(time_format.size, time_format.unit, max(0, _FIGURES - max(digits, 1)))

    def number(self, time: float | None) -> str:
        """Format a time without its unit, or in a column with another one if it is far shorter than the longest.

        >>> TimeFormat().number(33.0), TimeFormat(1e-3, "ms").number(0.0185223), TimeFormat().number(12345.6)
        ('33', '18.52', '12346')
        """
        if time is None:
            return UNKNOWN
        value = time / self.size
        if self.decimals is not None:
            if self._is_too_large_for(time):
                return format_seconds(time)
            return f"{value:.{self.decimals}f}".replace("-", "−")
        text = f"{value:.0f}" if abs(value) >= 10 ** (_FIGURES - 1) else f"{value:.{_FIGURES}g}"
        return text.replace("-", "−")

    def text(self, time: float | None) -> str:
        """Format a time with its unit.

        >>> TimeFormat().text(33.0), TimeFormat(1e-3, "ms").text(0.0185223)
        ('33', '18.52 ms')
        """
        if time is None or self._is_too_large_for(time):
            return self.number(time)
        return f"{self.number(time)} {self.unit}".rstrip()

    def _is_too_large_for(self, time: float) -> bool:
        """Return whether the time would have one figure or none, and more of them in a smaller unit."""
        if self.decimals is None or not self.unit or not time:
            return False
        return abs(time) / self.size < 10.0 ** (1 - self.decimals) and self.for_seconds(time).size < self.size


def tick_marks(end: float, largest_number: int) -> list[float]:
    """Return round figures from 0 to ``end`` for an axis, equally far apart: 1, 2 or 5 times a power of ten.

    There are ``largest_number`` of them at most, which is 2 or more.

    >>> tick_marks(33.0, 6)
    [0.0, 10.0, 20.0, 30.0]
    """
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / max(largest_number - 1, 1)))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if end // (power * factor) < largest_number)
    return [index * step for index in range(int(end / step) + 1)]


def _scaled(number: float, base: int, prefixes: tuple[str, ...], decimals: int = 1) -> tuple[str, str]:
    """Return the number in the largest prefix in which it is 1 or more, and that prefix. The lowest has no decimals."""
    power, scaled = 0, float(number)
    while round(scaled, decimals if power else 0) >= base and power < len(prefixes) - 1:
        power, scaled = power + 1, scaled / base
    return f"{scaled:.{decimals if power else 0}f}", prefixes[power]
