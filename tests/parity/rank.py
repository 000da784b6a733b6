"""``torchrun -m tests.parity.rank FOLDER STAGES OUT``: one rank of every case under every schedule, one after another.

Leaves a file for each in OUT. A case that fails says so there, and the next one is run all the same.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.parity.cases import CASES, SCHEDULES
from tests.parity.training import Found, train


def main(folder: Path, stages: str, out: Path) -> None:
    rank = os.environ["RANK"]
    dist.init_process_group("gloo")
    for name, case in CASES.items():
        reference = torch.load(folder / case.model / f"{name}.pt", mmap=True)
        for schedule in SCHEDULES:
            try:
                found: Found = train(folder / case.model / stages, name, schedule, reference)
            except Exception:
                found = {"error": traceback.format_exc()}
            (out / f"{name} {schedule} {rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
