"""Measures what an account is made of: steps of a pipeline, the limit, and the kernels of each rank alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step.account import LimitMeasured, RankMeasured, accounts, median_cost
from benchmarks.step.bench import Bench, gathered
from benchmarks.step.contenders import Contender, Limit, OwnPipeline
from benchmarks.step.stopwatch import Cost, Stopwatch, cost_of, seconds_of_fault, total

MESSAGES = 50


def measure_account(bench: Bench, pipeline: OwnPipeline) -> dict[str, Any]:
    """Return where the time of a pipeline's steps goes beyond the limit: an account for each rank. Collective."""
    keeps = Stopwatch(pipeline.pipe, keeps=True)
    bench.costs(pipeline)
    keeps.detach()
    body = Limit(bench.case, bench.model, with_loss=False, compiled=bench.options.compiled)
    alone: list[tuple[Contender, Callable[[], Cost]]] = [
        (pipeline, lambda: keeps.alone(divided=True)),
        (pipeline, lambda: keeps.alone(divided=False)),
        (pipeline, lambda: keeps.alone(divided=False, with_loss=False)),
        (bench.limit, lambda: cost_of(lambda: bench.limit.step(*bench.batch))),
        (body, lambda: cost_of(lambda: body.step(*bench.batch))),
    ]
    for _, run in alone:
        run()  # compiles
    rounds: list[dict[str, Any]] = []
    for number in range(bench.options.rounds):
        bench.pin(number)
        limit_before = bench.costs(bench.limit)
        bench.settle(pipeline)
        watch = Stopwatch(pipeline.pipe)
        step = bench.costs(pipeline)
        watch.detach()
        kernels = watch.sums()
        rounds.append(
            {
                "step": max(cost.seconds for cost in step),
                "limit": _mean([*limit_before, *bench.costs(bench.limit)]),
                "kernels": kernels,
                "interpreter": step[dist.get_rank()].processor - total(kernels.values()).processor,
                "alone": [_in_turn(bench, contender, run) for contender, run in alone],
            }
        )
    divided, undivided, without_loss, limit, limit_body = (
        median_cost([figures["alone"][at] for figures in rounds]) for at in range(len(alone))
    )
    measured_rank = RankMeasured(
        {key: median_cost([figures["kernels"][key] for figures in rounds]) for key in rounds[0]["kernels"]},
        median(figures["interpreter"] for figures in rounds),
        divided,
        undivided,
        without_loss if keeps.has_loss else undivided,
        keeps.has_loss,
    )
    ranks, limits, bodies = zip(*gathered((measured_rank, limit, limit_body)), strict=True)
    step_seconds = median(figures["step"] for figures in rounds)
    limit_measured = LimitMeasured(median_cost([figures["limit"] for figures in rounds]), _mean(limits), _mean(bodies))
    fault = median(gathered(seconds_of_fault()))
    transfer = _message_seconds(max(gathered(keeps.boundary_bytes())))
    rank_accounts = accounts(step_seconds, limit_measured, ranks, pipeline.pipe.schedule, transfer, fault)
    return {
        "step": step_seconds,
        "limit": limit_measured.together.seconds,
        "seconds_of_fault": fault,
        "seconds_of_transfer": transfer,
        "ranks": [asdict(account) for account in rank_accounts],
    }


def _in_turn(bench: Bench, contender: Contender, run: Callable[[], Cost]) -> Cost:
    """Run a part of a contender in one process after the other, so that each has the machine for itself."""
    bench.settle(contender)
    cost = Cost()
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            cost = run()
            bench.limit.clear()
    dist.barrier()
    return cost


def _message_seconds(size: int) -> float:
    """Return half of the seconds of a message of `size` bytes to another rank and back: the median of some."""
    message, rank = torch.zeros(max(1, size), dtype=torch.uint8), dist.get_rank()
    if rank > 1:
        return 0.0

    def there_and_back() -> None:
        (dist.send if rank == 0 else dist.recv)(message, 1 - rank)
        (dist.recv if rank == 0 else dist.send)(message, 1 - rank)

    return median(cost_of(there_and_back).seconds for _ in range(MESSAGES)) / 2


def _mean(costs: Any) -> Cost:
    return Cost(*(sum(column) / len(costs) for column in zip(*(asdict(cost).values() for cost in costs), strict=True)))
