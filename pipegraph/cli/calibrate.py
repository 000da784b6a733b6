"""``pipegraph calibrate``: what this machine attains, measured, as a hardware profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipegraph.cli.options import DebugOption, JsonOption, WideOption, check_device
from pipegraph.cli.output import check_target, print_json, print_text, write_target
from pipegraph.cli.progress_bar import progress


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
            max=1024,
            show_default=False,
            help="Threads of a rank. [default: as `pipegraph run` starts them: OMP_NUM_THREADS, or cores ÷ ranks]",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1024,
            show_default=False,
            help="Processes whose links are measured; 1 assumes links through the host. [default: 2; 1 with one GPU]",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    wide: WideOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure this machine into a profile.

    This takes about a minute: products of matrices, convolutions, attention, memory, links. Other commands take the
    profile with --hardware. A machine that does other work meanwhile measures slower.

    \b
    Example:
      pipegraph calibrate -o hardware.json
    """
    check_device(device, ranks or 1)
    check_target(out, overwrite)
    with progress("measuring this machine"):
        from pipegraph.cost.calibrate import calibrate as measure
        from pipegraph.cost.hardware import check_new
        from pipegraph.report.text.package_tables import render_hardware

        if out is not None:
            check_new(out)
        hardware = measure(device, threads, ranks or _usual_ranks(device), name=out.stem if out is not None else "here")
    if json:
        print_json({key: value for key, value in hardware.to_dict().items() if key != "schema_version"})
    else:
        print_text(lambda width: render_hardware(hardware, width), wide)
    write_target(out, hardware.to_json())  # after the table, which a full disk must not prevent
    if out is not None and not json:
        print(f"\nwrote {out}")


def _usual_ranks(device: str) -> int:
    import torch

    return 2 if device == "cpu" else min(2, torch.cuda.device_count())
