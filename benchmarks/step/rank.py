"""One of the two processes: makes the contenders, finds their cuts, and runs them in turns."""

from __future__ import annotations

import gc
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step.account import Stopwatch, account, mean
from benchmarks.step.contenders import Contender, Limit, OwnPipeline, Packages, TorchPipeline
from benchmarks.step.cuts import (
    RANKS,
    Candidate,
    Cuts,
    fastest,
    probe,
    searched,
    shortlist,
    unit_times,
)
from benchmarks.step.model import StepSetting, build_model
from pipegraph.schedule import Times, build

TORCH = {  # (torch's schedule, compiled) → the schedule of pipegraph whose simulation proposes its cuts
    ("GPipe", False): "gpipe",
    ("GPipe", True): "gpipe",
    ("1F1B", False): "1f1b",
    ("1F1B", True): "1f1b",
    ("Interleaved1F1B", False): "interleaved-1f1b",
    ("Interleaved1F1B", True): "interleaved-1f1b",
    ("ZBVZeroBubble", False): "zb-v",
    ("DualPipeV", False): "dualpipe-v",
}
OWN = ("1f1b", "zb-h1", "zb-v", "searched")
BETWEEN = 3
"""contenders that run between two runs of the limit"""
TRIALS = 5
"""steps of each candidate, in turns; the fastest candidate becomes a contender"""


@dataclass(frozen=True)
class Options:
    """Options of a rank's process."""

    setting: StepSetting
    kernels: str
    rounds: int
    tries: int
    only: tuple[str, ...]
    known: dict[str, Cuts]
    """cuts of an earlier run, by contender"""
    cores: tuple[int, ...]
    folder: Path
    """for packages"""


@dataclass(frozen=True)
class Entry:
    """A contender with its name and cuts."""

    name: str
    cuts: Cuts
    contender: Contender


class Bench:
    """One process's part of the benchmark."""

    def __init__(self, options: Options) -> None:
        self.options, self.setting = options, options.setting
        self._batch = self.setting.batch()
        self._model = build_model(self.setting)
        self._packages = Packages(self.setting, self._model, options.folder)
        self._limit = Limit(self.setting, self._model)
        self._units: Times | None = None
        self._core = 0.0
        """CPU seconds of the main thread in the last step, the mean of both processes"""
        self._imbalance = 0.0
        """time of the slower process in the last step ÷ the mean, − 1"""
        self.losses: dict[str, float] = {}

    def seconds(self, contender: Contender, name: str = "") -> float:
        """Run one step; return the seconds of the slower process, for the limit the mean of both."""
        dist.barrier()
        start, worked = time.perf_counter(), time.thread_time()
        loss = contender.step(*self._batch)
        figures = time.perf_counter() - start, time.thread_time() - worked, loss or 0.0
        taken = torch.tensor(figures, dtype=torch.float64)
        for parameter in contender.parameters():
            parameter.grad = None
        every = [torch.empty_like(taken) for _ in range(RANKS)]
        dist.all_gather(every, taken)
        times, cores, losses = torch.stack(every).unbind(1)
        self._core = cores.mean().item()
        self._imbalance = (times.max() / times.mean()).item() - 1
        if name:
            self.losses[name] = losses.sum().item()
        return (times.mean() if isinstance(contender, Limit) else times.max()).item()

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Keep every thread of this process on its core. Only for a while: compilers' processes inherit it."""
        allowed = os.sched_getaffinity(0)
        _pin_threads({self.options.cores[dist.get_rank()]})
        try:
            yield
        finally:
            _pin_threads(allowed)

    def limit(self) -> float:
        return self.seconds(self._limit, "limit")

    def _limit_and_core(self) -> tuple[float, float]:
        return self.limit(), self._core

    def entries(self) -> list[Entry]:
        """Return every wanted contender with its cuts, compiled."""
        self.limit()
        found = []
        for (schedule, compiled), name in TORCH.items():
            how = f"{schedule} {'compiled' if compiled else 'eager'}"
            for split in ("even", "best"):
                if not self._is_wanted(entry := f"torch {how}, {split} cut"):
                    continue

                def make(candidate: Candidate, schedule: str = schedule, compiled: bool = compiled) -> Contender:
                    return TorchPipeline(self.setting, self._model, schedule, candidate.cuts, compiled)

                stages = build(name, RANKS, self.setting.microbatches).stages
                even = Candidate(name, self.setting.even(stages), 0.0)
                found.append(
                    self._entry(entry, make, even if split == "even" else self._candidates(entry, name, False))
                )
        for name in OWN:
            if self._is_wanted(entry := f"pipegraph {name}"):
                found.append(self._entry(entry, self._own_pipeline, self._candidates(entry, name, True)))
        return found

    def measure(self, entries: Sequence[Entry]) -> list[dict[str, float]]:
        """Run rounds of one step each, in a new random order: seconds by contender, and the limit's before and after.

        Every other round the processes swap cores, because one core may be slower than the other.
        """
        rounds = []
        for number in range(self.options.rounds):
            _pin_threads({self.options.cores[(dist.get_rank() + number) % RANKS]})
            order = list(entries)
            random.Random(number).shuffle(order)
            taken: dict[str, float] = {}
            before = self.limit()
            taken["core imbalance"] = self._imbalance
            for start in range(0, len(order), BETWEEN):
                group = order[start : start + BETWEEN]
                taken |= {entry.name: self.seconds(entry.contender, entry.name) for entry in group}
                after = self.limit()
                taken |= {f"limit of {entry.name}": (before + after) / 2 for entry in group}
                before = after
            rounds.append(taken)
            _print(f"round {number + 1} of {self.options.rounds}")
        return rounds

    def accounts(self, entries: Sequence[Entry]) -> dict[str, dict[str, float]]:
        """Return where the time goes, for pipegraph's own contenders."""
        return {
            entry.name: account(
                entry.contender,
                partial(self.seconds, entry.contender),
                self._limit_and_core,
                self.options.rounds,
            ).to_json()
            for entry in entries
            if isinstance(entry.contender, OwnPipeline)
        }

    def _is_wanted(self, entry: str) -> bool:
        return not self.options.only or any(part in entry for part in self.options.only)

    def _own_pipeline(self, candidate: Candidate) -> Contender:
        package = self._packages.at(candidate.cuts)
        return OwnPipeline(self.setting, package, candidate.schedule, self.options.kernels)

    def _entry(
        self, name: str, make: Callable[[Candidate], Contender], candidates: Candidate | list[Candidate]
    ) -> Entry:
        if isinstance(candidates, list) and len(candidates) > 1:

            def trial(some: Sequence[Candidate]) -> list[float]:
                made = [make(candidate) for candidate in some]
                for contender in made:
                    self.seconds(contender)  # compiles
                with self.pinned():
                    rounds = [[self.seconds(contender) for contender in made] for _ in range(TRIALS)]
                shares = ([seconds / sum(taken) for seconds in taken] for taken in rounds)
                return [median(column) for column in zip(*shares, strict=True)]

            chosen = fastest(candidates, trial)
            gc.collect()
        else:
            chosen = candidates[0] if isinstance(candidates, list) else candidates
        contender = make(chosen)
        first = self.seconds(contender)
        with self.pinned():
            second = self.seconds(contender)
        _print(
            f"{name}: cut at {chosen.cuts}, simulated {chosen.makespan:.2f} s, took {first:.1f} s, then {second:.2f} s"
        )
        return Entry(name, chosen.cuts, contender)

    def _measured_units(self) -> Times:
        """Return the smallest times of each unit, in a pipeline that runs as the contenders do."""
        pipeline = OwnPipeline(self.setting, self._packages.at(probe(self.setting)), "zb-v", self.options.kernels)
        self.seconds(pipeline)  # compiles
        found = []
        with self.pinned():
            for _ in range(TRIALS):
                watch = Stopwatch(pipeline)
                self.seconds(pipeline)
                watch.detach()
                found.append(mean(watch.core))
        return unit_times(self.setting, {key: min(each[key] for each in found) for key in found[0]})

    def _candidates(self, entry: str, name: str, inside: bool) -> list[Candidate]:
        """Broadcast rank 0's candidates: the cuts to try, or the known ones. Collective."""
        if self._units is None:
            self._units = self._measured_units()
        shared: list[Any] = [None]
        if dist.get_rank() == 0:
            known = self.options.known.get(entry)
            if known is None:
                shared = [shortlist(self.setting, self._units, name, inside, self.options.tries)]
            elif name == "searched":
                shared = [[searched(self.setting, self._units, known, 2)]]
            else:
                shared = [[Candidate(name, known, 0.0)]]
        dist.broadcast_object_list(shared)
        return list(shared[0])


def main(rank: int, options: Options, port: int, results: Any) -> None:
    """Run the process of a rank. Rank 0 puts the results into the queue."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if options.kernels == "inductor":
        warnings.filterwarnings("error", message=".*(runs? uncompiled|left to autograd)")
    torch._dynamo.config.recompile_limit = 1000  # the parts of all contenders share one code object
    dist.init_process_group("gloo")
    bench = Bench(options)
    entries = bench.entries()
    with bench.pinned():
        rounds = bench.measure(entries)
        losses = dict(bench.losses)
        accounts = bench.accounts(entries)
    if rank == 0:
        results.put(
            {
                "rounds": rounds,
                "cuts": {entry.name: entry.cuts for entry in entries},
                "losses": losses,
                "accounts": accounts,
                "units": asdict(bench._units) if bench._units else None,
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def _pin_threads(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)


def _print(what: str) -> None:
    if dist.get_rank() == 0:
        print(what, flush=True)
