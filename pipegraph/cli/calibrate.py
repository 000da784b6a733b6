"""``pipegraph calibrate``: what this machine attains, measured, as a hardware profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipegraph.cli.options import Command, check_device
from pipegraph.cli.output import check_target, print_json, print_text, write_target
from pipegraph.cli.progress_bar import progress


@dataclass(frozen=True, kw_only=True)
class CalibrateCommand(Command):
    """Measure this machine into a profile.

    This takes about a minute: products of matrices, convolutions, attention, memory, links. Other commands take the
    profile with --hardware. A machine that does other work meanwhile measures slower.

    \b
    Example:
      pipegraph calibrate -o hardware.json
    """

    out: Path | None = None
    device: str = "cpu"
    threads: int | None = None
    ranks: int | None = None
    overwrite: bool = False
    wide: bool = False

    def run(self) -> None:
        check_device(self.device, self.ranks or 1)
        check_target(self.out, self.overwrite)
        with progress("measuring this machine"):
            from pipegraph.cost.calibrate import calibrate
            from pipegraph.cost.hardware import check_new
            from pipegraph.report.text.package_tables import render_hardware

            if self.out is not None:
                check_new(self.out)
            ranks, name = self.ranks or _usual_ranks(self.device), "here" if self.out is None else self.out.stem
            hardware = calibrate(self.device, self.threads, ranks, name=name)
        if self.json:
            print_json({key: value for key, value in hardware.to_dict().items() if key != "schema_version"})
        else:
            print_text(lambda width: render_hardware(hardware, width), self.wide)
        write_target(self.out, hardware.to_json())  # after the table, which a full disk must not prevent
        if self.out is not None and not self.json:
            print(f"\nwrote {self.out}")


def _usual_ranks(device: str) -> int:
    import torch

    return 2 if device == "cpu" else min(2, torch.cuda.device_count())
