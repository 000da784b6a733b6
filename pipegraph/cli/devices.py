"""Where to run, and to measure."""

from __future__ import annotations

import typer

from pipegraph.errors import nearest

_DEVICES = "cpu", "cuda"
_ALSO = {"gpu": "cuda", "nvidia": "cuda"}


def check_device(device: str, count: int = 1, users: str = "ranks") -> None:
    """Raises typer.BadParameter for what is no device, and where there is no GPU for each of so many users."""
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
