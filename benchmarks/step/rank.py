"""One of the two processes."""

from __future__ import annotations

import os
import warnings
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step.account_steps import measure_account
from benchmarks.step.bench import Bench
from benchmarks.step.contenders import OwnPipeline
from benchmarks.step.cuts import RANKS, Candidate
from benchmarks.step.entries import Options
from pipegraph.schedule import Schedule, to_csv


def main(rank: int, options: Options, port: int, results: Any) -> None:
    """Run the process of a rank. Rank 0 puts the results into the queue."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS * options.shards), MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    if options.compiled:
        warnings.filterwarnings("error", message=".*(runs? uncompiled|left to autograd)")
    dist.init_process_group("gloo")
    measured = run(options)
    if rank == 0:
        results.put(measured)
    dist.barrier()
    dist.destroy_process_group()


def run(options: Options) -> dict[str, Any]:
    """Return everything that is measured, in every process of the default group."""
    bench = Bench(options)
    bench.prepare()
    return report(bench)


def report(bench: Bench) -> dict[str, Any]:
    """Run the rounds and, if it is asked for, make the account of pipegraph's fastest contender. Collective."""
    rounds = bench.measure()
    pipelines = {name: contender for name, contender in bench.contenders.items() if isinstance(contender, OwnPipeline)}
    watched = list(pipelines) if bench.options.account else []
    watched.sort(key=lambda name: median(figures["seconds"][name] for figures in rounds))
    return {
        "rounds": rounds,
        "cuts": {name: _cuts(candidate) for name, candidate in bench.chosen.items()},
        "wrong": bench.wrong,
        "accounts": {name: measure_account(bench, pipelines[name]) for name in watched[:1]},
    }


def _cuts(candidate: Candidate) -> dict[str, Any]:
    order = to_csv(candidate.schedule) if isinstance(candidate.schedule, Schedule) else candidate.schedule
    return {"at": candidate.cuts, "schedule": order, "found": candidate.found}
