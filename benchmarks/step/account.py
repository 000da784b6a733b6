"""Where the time of one of pipegraph's own steps goes beyond the limit, rank by rank.

    step − limit = page faults + cache and memory + preempted + divided backward + loss + cuts    (the kernels)
                 + imbalance + busiest rank idle + transfers + interpreter + unexplained

Kernels are counted by the processor's time of the thread that runs them. "Alone": a rank's kernels run for all
microbatches of a step, while the other rank waits. If the limit has a cause too, the difference is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

from benchmarks.step.stopwatch import Cost, Kernel, total
from pipegraph.schedule import Kind, Schedule, Times, simulate


@dataclass(frozen=True)
class RankMeasured:
    """What one rank measured in the steps of some rounds, as medians. Seconds, for one step."""

    kernels: Mapping[Kernel, Cost]
    """in a step: the sum over microbatches, by stage and kind"""
    interpreter: float
    """processor's seconds of the thread outside kernels: the executor, and posting messages"""
    divided: Cost
    """F, I and W alone, or B where the schedule has it"""
    undivided: Cost
    """F and B alone"""
    body: Cost
    """F and B alone without the loss"""
    has_loss: bool

    @property
    def busy(self) -> Cost:
        return total(self.kernels.values())


@dataclass(frozen=True)
class LimitMeasured:
    """The limit, as the mean of the ranks: with all ranks at work, with one, and that one without the loss."""

    together: Cost
    alone: Cost
    body: Cost


@dataclass(frozen=True)
class Account:
    """Seconds of one rank's step beyond the limit. They add up to `beyond`."""

    page_faults: float
    """faults within kernels − the limit's, times what one takes"""
    cache_and_memory: float
    """kernels in the step − alone, without faults: what the other rank and the other kernels cost; − the limit's"""
    preempted: float
    """time within kernels in which another thread had the core: the messages' threads, other programs; − the limit's"""
    divided_backward: float
    """F, I and W − F and B, alone"""
    loss: float
    """the last stage with its loss − without, alone; − the same of the limit"""
    cuts: float
    """F and B of the stages without the loss − their share of the unsplit model's forward and backward, alone"""
    imbalance: float
    """the share of the limit's work that lies here − an equal share, and how much more the busiest rank has to do"""
    busiest_rank_idle: float
    """the schedule's makespan with the kernels as in the step and no transfers − the busiest rank's kernels"""
    transfers: float
    """the makespan if a transfer takes as long as a message to and fro ÷ 2 − that without transfers"""
    interpreter: float
    """processor's time outside kernels"""
    unexplained: float
    """the rest: kernels that took longer than on average where others waited, and what nothing here measures"""

    @property
    def beyond(self) -> float:
        """The seconds of a step − those of the limit."""
        return sum(asdict(self).values())


CAUSES = tuple(field.name for field in fields(Account))


def accounts(
    step: float,
    limit: LimitMeasured,
    ranks: Sequence[RankMeasured],
    schedule: Schedule,
    hop: float,
    fault: float,
) -> list[Account]:
    """Divide the time of a step beyond the limit.

    Args:
        step: seconds of a step.
        hop: seconds of a transfer.
        fault: processor's seconds of a page fault.
    """
    count = len(ranks)
    limit_together, limit_alone = limit.together.without_faults(fault), limit.alone.without_faults(fault)
    limit_body = limit.body.without_faults(fault)
    bodies = sum(rank.body.without_faults(fault) for rank in ranks)
    most = max(rank.busy.seconds for rank in ranks)
    makespan, with_transfers = (simulate(schedule, _times(schedule, ranks, delay)).makespan for delay in (0.0, hop))
    rank_accounts = []
    for rank in ranks:
        busy, divided = rank.busy, rank.divided.without_faults(fault)
        undivided, body = rank.undivided.without_faults(fault), rank.body.without_faults(fault)
        share = count * limit_body * body / bodies
        limit_loss = count * (limit_alone - limit_body) if rank.has_loss else 0.0
        causes = {
            "page_faults": (busy.faults - limit.together.faults) * fault,
            "cache_and_memory": (busy.without_faults(fault) - divided) - (limit_together - limit_alone),
            "preempted": (busy.seconds - busy.processor) - (limit.together.seconds - limit.together.processor),
            "divided_backward": divided - undivided,
            "loss": undivided - body - limit_loss,
            "cuts": body - share,
            "imbalance": share + limit_loss - limit_alone + most - busy.seconds,
            "busiest_rank_idle": makespan - most,
            "transfers": with_transfers - makespan,
            "interpreter": rank.interpreter,
        }
        rank_accounts.append(Account(**causes, unexplained=step - limit.together.seconds - sum(causes.values())))
    return rank_accounts


def mean_account(rank_accounts: Sequence[Account]) -> Account:
    """Return the mean over ranks. Its imbalance is the busiest rank's kernels − the mean rank's."""
    return Account(
        *(
            sum(column) / len(rank_accounts)
            for column in zip(*(asdict(account).values() for account in rank_accounts), strict=True)
        )
    )


def median_cost(costs: Sequence[Cost]) -> Cost:
    """Return the medians, figure by figure."""
    return Cost(*(median(column) for column in zip(*(asdict(cost).values() for cost in costs), strict=True)))


def _times(schedule: Schedule, ranks: Sequence[RankMeasured], hop: float) -> Times:
    """Return the mean times of kernels for the simulator, which takes B as I and W together."""
    kernel_seconds = {key: cost.seconds for rank in ranks for key, cost in rank.kernels.items()}
    of_kind = {kind: [0.0] * schedule.stages for kind in "FIW"}
    actions = [action for row in schedule.actions for action in row]
    for stage in range(schedule.stages):
        counts = {kind: sum(a.stage == stage and a.kind is Kind(kind) for a in actions) for kind in "FIWB"}
        for kind in "FI":
            of_kind[kind][stage] = kernel_seconds.get((stage, kind), 0.0) / max(1, counts[kind])
        weight_part = kernel_seconds.get((stage, "B"), 0.0) - counts["B"] * of_kind["I"][stage]
        backward = kernel_seconds.get((stage, "W"), 0.0) + weight_part
        of_kind["W"][stage] = max(0.0, backward / max(1, counts["W"] + counts["B"]))
    return Times(*of_kind.values(), hop=hop)
