"""Values of options, read and checked: devices, sizes of memory, lists."""

from __future__ import annotations

import typer

from pipegraph.errors import nearest
from pipegraph.units import parse_bytes

_DEVICES = "cpu", "cuda"
_ALSO = {"gpu": "cuda", "nvidia": "cuda"}


def check_device(device: str, count: int = 1, users: str = "ranks") -> None:
    """Raise typer.BadParameter if the device is unknown, or if there are fewer GPUs than users."""
    if device not in _DEVICES:
        near = nearest(_ALSO.get(device.casefold(), device), _DEVICES)
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda.{near}", param_hint="--device")
    if device == "cpu":
        return
    import torch

    present = torch.cuda.device_count()
    if present < count:
        need = f"{count} {users} need a GPU each, and there are {present} here" if count > 1 else "there is no GPU here"
        raise typer.BadParameter(f"{need}. Try --device cpu.", param_hint="--device")


def parse_memory(text: str) -> int:
    """Read a size as `pipegraph.units.parse_bytes` does. Raises typer.BadParameter."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_names(text: str, option: str) -> list[str]:
    """Read ``1f1b,zb-v``, the value of an option. Raises typer.BadParameter for an empty name."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise typer.BadParameter(f"{text!r} has an empty name between its commas.", param_hint=option)
    return names


def parse_numbers(text: str, option: str) -> list[int]:
    """Read ``8,16``, the value of an option. Raises typer.BadParameter for anything but whole numbers from 1 on."""
    names = parse_names(text, option)
    if not all(name.isdecimal() and int(name) > 0 for name in names):
        raise typer.BadParameter(f"{text!r} are no whole numbers from 1 on: write 8 or 8,16.", param_hint=option)
    return [int(name) for name in names]
