"""One process's part of the benchmark: makes the contenders, checks them, finds their cuts, and runs them in turns."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

import torch.distributed as dist

import pipegraph
from benchmarks.step.contenders import Checker, Contender, Limit, Packages, Reference
from benchmarks.step.cuts import Candidate, CutSearch
from benchmarks.step.entries import Entry, Options, entries
from benchmarks.step.machine import CoreTime, pin_threads, use_default_malloc
from benchmarks.step.stopwatch import Cost, cost_of
from pipegraph.kernels.cpu.process import keep_freed_memory

BETWEEN = 3
"""contenders that run between two runs of the limit"""
TRIALS = 6
"""steps of each candidate, in turns, after which the faster half stays, until one is left: it becomes a contender"""
LIMIT = "limit"


class Bench:
    """Contenders and their steps. All methods are collective.

    Attributes:
        contenders: by name, with the limit. Each has run a step, and was right.
        chosen: the cuts of those that have any.
        wrong: contender → what is wrong with it. It is not timed.
        search: proposes cuts, in the process of rank 0, once some are to be found.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.case = options, options.case
        self.batch = self.case.batch()
        self.model = self.case.build()
        self._checker = Checker(Reference(self.case, self.model), self.batch, self.case.tolerance)
        self._captured: Any = None
        if dist.get_rank() == 0:
            self._captured = pipegraph.capture(self.case.unsplit(self.model), self.case.microbatch()[:1])
        self._packages = Packages(self._captured, options.folder)
        self.search: CutSearch | None = None
        self.contenders: dict[str, Contender] = {}
        self.chosen: dict[str, Candidate] = {}
        self.wrong: dict[str, str] = {}
        self._keeps_memory: bool | None = None

    @property
    def limit(self) -> Contender:
        return self.contenders[LIMIT]

    def prepare(self) -> None:
        """Make the limit and all contenders that were asked for."""
        self.add(LIMIT, Limit(self.case, self.model, compiled=self.options.compiled))
        for entry in entries(self.options, self.model, self._packages):
            self.chosen[entry.name] = self._choose(entry)
            self.add(entry.name, entry.make(self.chosen[entry.name]))
            gc.collect()

    def add(self, name: str, contender: Contender) -> None:
        """Run a contender's first step, and time it later if its gradients are those of the reference."""
        start = time.perf_counter()
        mistake = self._checker.mistake(contender)
        if mistake:
            self.wrong[name] = mistake
        else:
            self.contenders[name] = contender
        cut = f"cut at {', '.join(self.chosen[name].cuts)}: " if name in self.chosen else ""
        _print(f"{name}: {cut}{mistake or 'right'} ({time.perf_counter() - start:.1f} s)")

    def settle(self, contender: Contender) -> None:
        """Give each process the memory that it would have with this contender alone: after a change, run a step."""
        keeps = contender.keeps_memory or self.options.keep_memory
        if keeps is not self._keeps_memory:
            self._keeps_memory = keeps
            (keep_freed_memory if self._keeps_memory else use_default_malloc)()
            contender.step(*self.batch)
            contender.clear()

    def costs(self, contender: Contender) -> list[Cost]:
        """Run one step; return what it took on the main thread of each process."""
        self.settle(contender)
        dist.barrier()
        cost = cost_of(lambda: contender.step(*self.batch))
        contender.clear()
        return gathered(cost)

    def seconds(self, contender: Contender) -> float:
        """Run one step; return the seconds of the slower process, for the limit the mean of both."""
        durations = [cost.seconds for cost in self.costs(contender)]
        return mean(durations) if isinstance(contender, Limit) else max(durations)

    def pin(self, number: int) -> None:
        """Keep each process on its cores: every other round on others, because they may be slower."""
        cores, core_count = self.options.cores, self.options.cores_per_process
        start = (dist.get_rank() + number) % (len(cores) // core_count) * core_count
        pin_threads(set(cores[start : start + core_count]))

    def measure(self) -> list[dict[str, Any]]:
        """Run rounds of one step each, in a new random order: seconds by contender, and the limit's around them."""
        names = [name for name in self.contenders if name != LIMIT]
        rounds = []
        for number in range(self.options.rounds):
            self.pin(number)
            cores, worked = CoreTime(self.options.cores), time.process_time()
            order = list(names)
            random.Random(number).shuffle(order)
            seconds, limits = {}, {}
            limit_before = self.seconds(self.limit)
            for start in range(0, len(order), BETWEEN):
                group = order[start : start + BETWEEN]
                seconds |= {name: self.seconds(self.contenders[name]) for name in group}
                limit_after = self.seconds(self.limit)
                limits |= dict.fromkeys(group, (limit_before + limit_after) / 2)
                limit_before = limit_after
            other_share = cores.share_of_others(sum(gathered(time.process_time() - worked)))
            rounds.append({"seconds": seconds, "limit": limits, "others": other_share})
            _print(f"round {number + 1} of {self.options.rounds}; other programs had {other_share:.0%} of the cores")
        return rounds

    def _choose(self, entry: Entry) -> Candidate:
        """Return the cuts that are given or known; otherwise the fastest of the shortlist."""
        known_candidate = self.options.known_cuts.get(entry.found_for) or self.chosen.get(entry.found_for)
        if entry.cuts is not None:
            return Candidate(entry.schedule, entry.cuts)
        if known_candidate is not None:
            return known_candidate
        if dist.get_rank() == 0 and self.search is None:
            self.search = CutSearch(self.case, self._captured, self.options.compiled)
        shared: list[Any] = [None]
        if self.search is not None:
            shared = [self.search.shortlist(entry.schedule, entry.inside, self.options.tries)]
        dist.broadcast_object_list(shared)
        candidates: list[Candidate] = shared[0]
        if len(candidates) == 1:
            return replace(candidates[0], found="the one that simulation proposed")
        contenders = [entry.make(candidate) for candidate in candidates]
        for contender in contenders:
            self.seconds(contender)  # compiles
        allowed = os.sched_getaffinity(0)
        self.pin(0)
        fastest = self._fastest(contenders)
        pin_threads(allowed)  # compilers' processes inherit it
        origin = f"the fastest of {len(candidates)} that simulation proposed, run in turns, of which half stay"
        return replace(candidates[fastest], found=origin)

    def _fastest(self, contenders: Sequence[Contender]) -> int:
        """Return the position of the one that is left if the slower half goes after each `TRIALS` steps in turns."""
        positions = list(range(len(contenders)))
        while len(positions) > 1:
            rounds = [[self.seconds(contenders[at]) for at in positions] for _ in range(TRIALS)]
            shares = [[seconds / sum(durations) for seconds in durations] for durations in rounds]
            medians = dict(zip(positions, map(median, zip(*shares, strict=True)), strict=True))
            positions = sorted(positions, key=medians.__getitem__)[: (len(positions) + 1) // 2]
        return positions[0]


def gathered(local_value: Any) -> list[Any]:
    """Return the objects of all processes, by rank. Collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, local_value)
    return every


def _print(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)
