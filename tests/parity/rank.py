"""What one rank of real processes does: every case, one after another."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import torch

from tests.parity.cases import CASES, schedule_of
from tests.parity.training import Report, train


def train_all(rank: int, folder: Path, stages: int, out: Path) -> str:
    """Leaves a file for each case in `out`. A case that fails says so there, and the next one is run all the same."""
    for name, case in CASES.items():
        reference = torch.load(folder / case.model / f"{name}.pt", mmap=True)
        try:
            schedule = schedule_of(name, stages)
            report: Report = train(folder / case.model / str(stages), name, schedule, reference)
        except Exception:
            report = {"error": traceback.format_exc()}
        (out / f"{name} {rank}.json").write_text(json.dumps(report))
    return "done"
