"""Sizes of memory and lists, as people write them in options."""

from __future__ import annotations

import re

import typer

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kMGT", 1)
    for unit, base in (("B", 1000), ("iB", 1024))
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")
_LEAST, _MOST = 2**20, 2**50


def parse_bytes(text: str) -> int:
    """``80GiB`` (1024³), ``16GB`` (1000³), ``500MB``, or plain bytes. Between 1 MiB and 1 PiB: anything else is a slip.

    Raises typer.BadParameter.
    """
    found = _FORM.fullmatch(text.strip())
    units = {unit.casefold(): size for unit, size in _UNITS.items()}
    if found is None or found[2].casefold() not in units:
        raise typer.BadParameter(f"{text!r} is no size of memory: write 80GiB, 16GB, 500MB or plain bytes.")
    size = float(found[1]) * units[found[2].casefold()]
    if not _LEAST <= size <= _MOST:
        raise typer.BadParameter(f"{text!r} is no rank's memory: give 1MiB to 1PiB, such as 80GiB.")
    return int(size)


def parse_names(text: str) -> list[str]:
    """``1f1b,zb-v``. Raises typer.BadParameter for an empty name."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise typer.BadParameter(f"{text!r} has an empty name between its commas.")
    return names


def parse_numbers(text: str) -> list[int]:
    """``8,16``. Raises typer.BadParameter for what is no whole number from 1 on."""
    names = parse_names(text)
    if not all(name.isdecimal() and int(name) > 0 for name in names):
        raise typer.BadParameter(f"{text!r} are no whole numbers from 1 on: write 8 or 8,16.")
    return [int(name) for name in names]
