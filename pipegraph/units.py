"""Times for people: all figures of one report in one unit."""

from __future__ import annotations

import math
from dataclasses import dataclass

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True)
class TimeUnit:
    """Seconds are shown divided by ``size``. A time that is no seconds has no name."""

    size: float = 1.0
    name: str = ""

    def number(self, time: float) -> str:
        """Four figures, without the unit.

        >>> TimeUnit().number(33.0), TimeUnit(1e-3, "ms").number(0.0185223), TimeUnit().number(12345.6)
        ('33', '18.52', '12346')
        """
        value = time / self.size
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"

    def text(self, time: float) -> str:
        """Four figures and the unit.

        >>> TimeUnit().text(33.0), TimeUnit(1e-3, "ms").text(0.0185223)
        ('33', '18.52 ms')
        """
        return f"{self.number(time)} {self.name}".rstrip()


def unit_of(seconds: float) -> TimeUnit:
    """The unit in which so many seconds are a number from 1 on.

    >>> unit_of(0.25)
    TimeUnit(size=0.001, name='ms')
    """
    return TimeUnit(*next((unit for unit in _UNITS if seconds >= unit[0]), _UNITS[-1]))


def ticks(end: float, most: int) -> list[float]:
    """Round times from 0 to ``end``, at most ``most`` of them (2 or more), equally far apart: 1, 2 or 5 times a power
    of ten.

    >>> ticks(33.0, 6)
    [0.0, 10.0, 20.0, 30.0]
    """
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / max(most - 1, 1)))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if end // (power * factor) < most)
    return [index * step for index in range(int(end / step) + 1)]


def percent(part: float) -> str:
    """A part of 1, with one decimal and without a negative zero.

    >>> percent(0.2727)
    '27.3 %'
    """
    return f"{part * 100:.1f} %".replace("-0.0", "0.0")


def rough(factor: float) -> str:
    """How many times, with two figures.

    >>> rough(2.6412), rough(0.419), rough(12345.6)
    ('2.6', '0.42', '12000')
    """
    return f"{float(f'{factor:.2g}'):g}"
