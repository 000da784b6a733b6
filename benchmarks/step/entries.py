"""Which contenders run, under which names, and which cuts each of them is tried with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import nn

from benchmarks.step.contenders import Contender, OwnPipeline, Packages
from benchmarks.step.cuts import RANKS, Candidate, Cuts
from benchmarks.step.models import Case
from benchmarks.step.peers import DeepSpeedPipeline, TorchPipeline
from benchmarks.step.shards import OwnShards, TorchShards
from pipegraph.schedule import build

PIPEGRAPH_SCHEDULES = "1f1b", "zb-v", "searched"
TORCH = {  # torch's schedule → the schedule of pipegraph whose simulation proposes its cuts
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved-1f1b",
    "LoopedBFS": "looped-bfs",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
SHARDED_TORCH = "1F1B", "Interleaved1F1B", "LoopedBFS"
"""torch's schedules that compiled stages with `fully_shard` can run under"""
DEFAULTS = {
    "torch 1F1B, loss not compiled": {"compiled_loss": False},
    "torch 1F1B, outputs joined": {"joined_outputs": True},
    "torch 1F1B, loss not compiled and outputs joined": {"compiled_loss": False, "joined_outputs": True},
}
"""What `PipelineStage`, a plain loss function and `schedule.step(…)` do unless they are told otherwise."""


@dataclass(frozen=True)
class Options:
    """Options of a rank's process.

    Attributes:
        known_cuts: cuts, and schedules, that an earlier run found; by contender.
        folder: for packages.
        shards: how many processes share each stage.
        keep_memory: whether every contender's processes keep freed memory, also those that do not by themselves.
        cores_per_process: on how many of `cores` each process runs.
    """

    case: Case
    cores: tuple[int, ...]
    folder: Path
    kernels: str = "inductor"
    rounds: int = 10
    tries: int = 3
    only: tuple[str, ...] = ()
    known_cuts: dict[str, Candidate] = field(default_factory=dict)
    deepspeed: bool = False
    defaults: bool = False
    account: bool = False
    shards: int = 1
    keep_memory: bool = False
    cores_per_process: int = 1

    @property
    def compiled(self) -> bool:
        return self.kernels == "inductor"


@dataclass(frozen=True)
class Entry:
    """A contender to be.

    Attributes:
        schedule: of pipegraph, whose simulation proposes cuts.
        cuts: None if they are to be found.
        found_for: the entry whose cuts it takes.
        inside: whether it can cut layers.
    """

    name: str
    schedule: str
    make: Callable[[Candidate], Contender]
    found_for: str
    cuts: Cuts | None = None
    inside: bool = False


def entries(options: Options, model: nn.Module, packages: Packages) -> list[Entry]:
    """Return those that were asked for."""
    case, selection = options.case, []

    def torch_pipeline(schedule: str, candidate: Candidate, **how: bool) -> Contender:
        if options.shards > 1:
            return TorchShards(case, model, schedule, candidate.cuts, options.shards, options.compiled)
        return TorchPipeline(case, model, schedule, candidate.cuts, options.compiled, **how)

    def deepspeed_pipeline(candidate: Candidate) -> Contender:
        return DeepSpeedPipeline(case, model, candidate.cuts, options.compiled)

    def own_pipeline(candidate: Candidate) -> Contender:
        package = packages.at(candidate.cuts)
        if options.shards > 1:
            return OwnShards(case, package, candidate.schedule, options.kernels, options.shards)
        return OwnPipeline(case, package, candidate.schedule, options.kernels)

    def peer(name: str, schedule: str, make: Callable[[Candidate], Contender]) -> list[Entry]:
        names = [label for label in (name, f"{name}, even") if is_wanted(label)]
        stages = build(schedule, RANKS, case.microbatches).stages if names else 0
        return [Entry(label, schedule, make, name, None if label == name else case.even(stages)) for label in names]

    def is_wanted(name: str) -> bool:
        return not options.only or any(part in name for part in options.only)

    if options.defaults:
        selection.append(Entry("torch 1F1B", "1f1b", partial(torch_pipeline, "1F1B"), "torch 1F1B"))
        for name, how in DEFAULTS.items():
            selection.append(Entry(name, "1f1b", partial(torch_pipeline, "1F1B", **how), "torch 1F1B"))
        return selection
    for schedule, similar in TORCH.items():
        if options.shards > 1 and schedule not in SHARDED_TORCH:
            continue
        selection += peer(f"torch {schedule}", similar, partial(torch_pipeline, schedule))
    if options.deepspeed:
        selection += peer("DeepSpeed", "1f1b", deepspeed_pipeline)
    for schedule in PIPEGRAPH_SCHEDULES:
        name = f"pipegraph {schedule}"
        if is_wanted(name):
            selection.append(Entry(name, schedule, own_pipeline, name, inside=True))
    return selection
