"""``pipegraph calibrate``: what this machine attains, measured, as a hardware profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipegraph.cli.options import DebugOption, JsonOption
from pipegraph.cli.output import print_json, write_whole
from pipegraph.cli.progress import progress
from pipegraph.errors import PipegraphError


def calibrate(
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", show_default=False, help="Write the profile here, as JSON."),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="What to measure; with cuda, a GPU per rank.")
    ] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Threads of a rank. [default: as `pipegraph run` starts them: OMP_NUM_THREADS, or cores ÷ ranks]",
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(metavar="N", min=2, help="Processes whose links are measured.")] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure this machine, in about a minute: products of matrices, convolutions, attention, memory, links.

    The profile is what `--hardware` takes elsewhere. A machine that does other work at the time is measured slower.
    """
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda.", param_hint="--device")
    _check_out(out, overwrite)
    import torch

    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise typer.BadParameter(
            f"{ranks} ranks need a GPU each, and there are {torch.cuda.device_count()} here. Try --device cpu.",
            param_hint="--device",
        )
    with progress("measuring this machine"):
        from pipegraph.cost.calibrate import calibrate as measure
        from pipegraph.report.hardware import described

        hardware = measure(device, threads, ranks, name=out.stem if out is not None else "here")
        text = hardware.to_json()
    if out is not None:
        write_whole([(out, text)])
    if json:
        print_json({key: value for key, value in hardware.as_dict().items() if key != "schema_version"})
        return
    print(described(hardware))
    if out is not None:
        print(f"\nwrote {out}")


def _check_out(out: Path | None, overwrite: bool) -> None:
    """Refuse before a minute of measuring, not behind it."""
    if out is None:
        return
    if not out.absolute().parent.is_dir():
        raise PipegraphError(f"{out} cannot be written: there is no folder {out.parent}.")
    if out.exists() and not overwrite:
        raise PipegraphError(f"{out} exists already.\nTry: --overwrite, or another name for -o.")
