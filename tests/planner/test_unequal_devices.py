"""Pipelines whose ranks have unequal devices: a profile, a memory and links for each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

import pipegraph
from pipegraph.cost import SegmentCost
from pipegraph.cost.hardware import Hardware, Link
from pipegraph.cost.rank_profiles import RankProfiles, load_profiles
from pipegraph.errors import ArgumentError, PipegraphError
from pipegraph.graph.captured import Captured
from pipegraph.planner.plan_file import PlanFile
from pipegraph.planner.solver.solve import MemoryShortage, Problem
from pipegraph.planner.step_prediction import PlannedStep, predict_step
from pipegraph.schedule import Schedule, Times, build, simulate
from pipegraph.units import parse_rank_bytes
from tests.planner.brute_force import every_cut, memory
from tests.slow import cases


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.fixture(scope="module")
def captured() -> Captured:
    return pipegraph.capture(Stack(), (torch.randn(64, 64),))


def slower(profile: Hardware, factor: float, name: str) -> Hardware:
    """The same device, ``factor`` times slower in all."""
    return structs.replace(
        profile,
        name=name,
        peak_flops={dtype: rate / factor for dtype, rate in profile.peak_flops.items()},
        memory_bandwidth=profile.memory_bandwidth / factor,
        kernel_floor=profile.kernel_floor * factor,
        kernel_overhead=profile.kernel_overhead * factor,
    )


def layers_of_stages(plan: pipegraph.Plan) -> list[int]:
    return [len([fqn for fqn in stage.state if fqn.endswith("weight")]) for stage in plan.stages]


# ---- the solver ------------------------------------------------------------------------------------------------------


def linked_makespan(
    costs: Sequence[SegmentCost], cuts: tuple[int, ...], schedule: Schedule, links: dict[tuple[int, int], Link]
) -> float:
    """By `simulate`, with a link of its own for each pair of ranks."""
    stages = [costs[begin:end] for begin, end in pairwise((0, *cuts, len(costs)))]
    forward, back, weight = (
        [sum(getattr(cost, name) for cost in stage) for stage in stages]
        for name in ("forward", "input_grad", "weight_grad")
    )
    back[0], weight[0] = 0.0, back[0] + weight[0]
    hops, sent = [], []
    for cut, pair in zip(cuts, pairwise(schedule.placement), strict=True):
        link = links.get(pair)
        hops.append(0.0 if link is None else link.latency)
        sent.append(0.0 if link is None else costs[cut - 1].boundary_bytes / link.bandwidth)
    return simulate(schedule, Times(forward, back, weight, hops, sent)).makespan


@pytest.mark.parametrize("seed", cases(range(40), slow=range(10, 40)))
def test_the_best_of_all_cuts_is_found(seed: int) -> None:
    """Random chains on ranks with costs, memory and links of their own."""
    random = Random(seed)
    ranks = random.choice([2, 3])
    schedule = build(random.choice(["1f1b", "gpipe", "zb-h1"]), ranks, random.choice([3, 4, 6]))
    kinds = random.choice([1, 2])
    speeds = [[random.choice([1.0, 2.0, 3.0])] + [random.choice([1.0, 1.5, 4.0])] * (kinds - 1) for _ in range(2)]
    base = [
        SegmentCost(
            *(float(random.randint(0, 9)) for _ in range(3)), random.randint(0, 20), random.randint(0, 20),
            random.randint(0, 9),
        )
        for _ in range(random.randint(ranks, 8))
    ]  # fmt: skip
    profiles = [random.randrange(2) for _ in range(ranks)]
    options, allowed = [], [[] for _ in range(ranks)]
    for profile, factors in enumerate(speeds):
        for kind, factor in enumerate(factors):
            options.append(
                [
                    replace(
                        cost,
                        forward=cost.forward * factor,
                        input_grad=cost.input_grad * factor,
                        weight_grad=cost.weight_grad * factor,
                        saved_bytes=cost.saved_bytes // (1 + kind),
                    )
                    for cost in base
                ]
            )
            for rank in range(ranks):
                if profiles[rank] == profile:
                    allowed[rank].append(len(options) - 1)
    pairs = [(rank, other) for rank in range(ranks) for other in range(ranks) if rank != other]
    links = {pair: Link(random.choice([0.0, 0.1]), random.choice([1e6, 2e6]), "") for pair in pairs}
    links = {pair: replace_bandwidth(link, random.choice([5.0, 50.0])) for pair, link in links.items()}
    every = []
    for cuts in every_cut(len(base), schedule.stages):
        for chosen in choices_of(allowed):
            edges = pairwise((0, *cuts, len(base)))
            costs = [options[one][at] for one, edge in zip(chosen, edges, strict=True) for at in range(*edge)]
            every.append((linked_makespan(costs, cuts, schedule, links), memory(costs, cuts, schedule)))
    limits = [random.choice([every[0][1][rank], max(need[rank] for _, need in every)]) for rank in range(ranks)]
    fitting = [
        value for value, need in every if all(bytes_ <= limit for bytes_, limit in zip(need, limits, strict=True))
    ]
    problem = Problem(
        options, schedule, memory_bytes=limits, link=lambda rank, other: links[rank, other], allowed=allowed
    )
    solution = problem.solve(())
    assert problem.fractional_bound() <= min(fitting) * (1 + 1e-9)
    assert solution.value == pytest.approx(min(fitting), rel=1e-9)
    assert all(option in allowed[stage] for stage, option in enumerate(solution.options))
    assert all(need <= limit for need, limit in zip(solution.memory, map(math.ceil, limits), strict=True))


def replace_bandwidth(link: Link, bandwidth: float) -> Link:
    return structs.replace(link, bandwidth=bandwidth)


def choices_of(allowed: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    chosen: list[tuple[int, ...]] = [()]
    for options in allowed:
        chosen = [(*before, option) for before in chosen for option in options]
    return chosen


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_slow_device_gets_fewer_layers(captured: Captured) -> None:
    fast = Hardware.load("h100")
    slow = slower(fast, 3.0, "slow")
    settings = {"stages": 2, "schedule": "1f1b", "microbatches": 8}
    assert layers_of_stages(pipegraph.plan(captured, hardware=[fast, fast], **settings)) == [6, 6]
    for devices, is_first_fast in (([fast, slow], True), ([slow, fast], False)):
        unequal = pipegraph.plan(captured, hardware=devices, **settings)
        fast_layers, slow_layers = layers_of_stages(unequal)[:: 1 if is_first_fast else -1]
        assert fast_layers >= 2 * slow_layers
        settings_at = {**settings, "stages": None, "hardware": devices}
        given = [pipegraph.plan(captured, points=[f"layers.{at}"], **settings_at) for at in range(1, 12)]
        best = min(given, key=lambda plan: value_of(plan))
        assert best.points == unequal.points
        assert value_of(unequal) == pytest.approx(value_of(best))
    halves = []
    for second in (fast, slow):
        half = pipegraph.plan(captured, points=["layers.6"], hardware=[fast, second], schedule="1f1b")
        assert half.prediction is not None
        halves.append([stage.forward for stage in half.prediction.stages])
    assert halves[1] == pytest.approx([halves[0][0], 3 * halves[0][1]], rel=0.01)


class Attending(nn.Module):
    """A GPU has another operation for its attention than a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q = layer(x).unflatten(-1, (4, 8)).transpose(1, 2)
            x = x + nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return x


def test_a_stage_costs_what_it_costs_on_its_device_alone() -> None:
    captured = pipegraph.capture(Attending(), (torch.randn(4, 64, 32),))
    settings: dict[str, Any] = {"points": ["layers.2"], "schedule": "1f1b", "microbatches": 4}
    alone = [pipegraph.plan(captured, hardware=name, **settings).costs for name in ("cpu", "h100")]
    for order in ((0, 1), (1, 0)):
        together = pipegraph.plan(captured, hardware=[("cpu", "h100")[profile] for profile in order], **settings)
        for stage, profile in enumerate(order):
            assert together.costs[stage] == alone[profile][stage]


def value_of(plan: pipegraph.Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.value


def test_equal_devices_in_a_list_have_the_plan_of_one_profile(captured: Captured) -> None:
    settings = {"stages": 4, "schedule": "1f1b", "microbatches": 8}
    one, several = (pipegraph.plan(captured, hardware=name, **settings).prediction for name in ("h100", "h100*4"))
    assert one is not None and several is not None
    assert (several.hardware, several.value) == ("h100*4", pytest.approx(one.value))
    assert several.stages == one.stages


def test_recompute_is_chosen_for_the_device_with_little_memory(captured: Captured) -> None:
    def planned(memory_bytes: Sequence[float]) -> pipegraph.Plan:
        return pipegraph.plan(
            captured, stages=2, schedule="1f1b", microbatches=4, hardware="h100,a100", recompute="auto",
            memory_bytes=memory_bytes,
        )  # fmt: skip

    free = planned([1e9, 1e9])
    assert free.prediction is not None
    first, second = free.prediction.memory
    limited = planned([0.8 * first, 2 * second])
    assert limited.prediction is not None
    assert limited.prediction.memory[0] <= 0.8 * first
    assert limited.prediction.value >= free.prediction.value
    with pytest.raises(MemoryShortage):
        planned([2**20, 2**20 // 64])


def test_a_package_predicts_the_step_of_its_plan(captured: Captured, tmp_path: Path) -> None:
    plan = pipegraph.plan(captured, stages=3, hardware="h100*2,a100", schedule="1f1b", microbatches=6)
    manifest = pipegraph.write_package(plan, tmp_path / "package").manifest
    assert manifest.prediction is not None and manifest.prediction.hardware == "h100*2,a100"
    step = PlannedStep.from_manifest(manifest)
    schedule = step.to_schedule() if step is not None else None
    assert schedule is not None
    predicted = predict_step(manifest, schedule)
    assert predicted.links_known and predicted.timeline is not None
    assert predicted.timeline.makespan == pytest.approx(manifest.prediction.value, rel=1e-4)
    other = predict_step(manifest, build("gpipe", 3, 6))
    assert other.links_known


def test_a_plan_file_says_whether_each_rank_has_enough(captured: Captured) -> None:
    plan = pipegraph.plan(captured, stages=2, hardware="h100,a100", schedule="1f1b", microbatches=4)
    plan_file = PlanFile.from_plan(plan)
    assert plan_file.apply(captured, list(plan_file.memory)).points == plan.points
    with pytest.raises(MemoryShortage, match="rank 1"):
        plan_file.apply(captured, [plan_file.memory[0], plan_file.memory[1] - 1])
    with pytest.raises(ArgumentError):
        plan_file.apply(captured, [2**30] * 3)


# ---- profiles --------------------------------------------------------------------------------------------------------


def test_links_between_devices() -> None:
    profiles = load_profiles("h100*3,a100*2,h100")
    assert isinstance(profiles, RankProfiles)
    h100, a100 = profiles.distinct
    assert [profile.name for profile in profiles.profiles] == ["h100"] * 3 + ["a100"] * 2 + ["h100"]
    assert profiles.name == "h100*3,a100*2,h100"
    assert profiles.link(0, 2) == h100.link(0, 2)
    assert profiles.link(4, 3) == a100.link(1, 0)
    for pair in ((2, 3), (0, 5), (5, 4)):
        link = profiles.link(*pair)
        both = [profile.links.inter_node for profile in ((h100, h100) if pair == (0, 5) else (h100, a100))]
        assert link.bandwidth == min(one.bandwidth for one in both if one is not None)
        assert link.latency == max(one.latency for one in both if one is not None)


class File:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def test_a_file_whose_name_has_a_comma_is_one_profile(tmp_path: Path) -> None:
    file = tmp_path / "a,b.json"
    file.write_text(slower(Hardware.load("h100"), 2.0, "half").to_json())
    for name in (str(file), file, File(file)):
        profile = load_profiles(name)
        assert isinstance(profile, Hardware) and profile.name == "half"


def test_profiles_that_are_equal_are_one() -> None:
    profiles = RankProfiles(tuple(Hardware.load("h100") for _ in range(4)))
    assert (len(profiles.distinct), profiles.numbers) == (1, (0, 0, 0, 0))
    assert profiles.link(0, 3) == Hardware.load("h100").link(0, 3)


@pytest.mark.parametrize(
    ("hardware", "error", "advice"),
    [
        ("h100*0,a100", ArgumentError, "h100*4,a100*4"),
        ("h100*x", ArgumentError, "h100*4,a100*4"),
        ("h100,a10", PipegraphError, "a100"),
        ([], ArgumentError, "h100"),
        ("h100*3", ArgumentError, "each of 2 ranks"),
        (["h100", 3], ArgumentError, "h100*4,a100*4"),
    ],
)
def test_wrong_devices_are_refused(
    hardware: object, error: type[PipegraphError], advice: str, captured: Captured
) -> None:
    with pytest.raises(error) as refused:
        pipegraph.plan(captured, stages=2, hardware=hardware, schedule="1f1b")  # type: ignore[arg-type]
    assert advice in str(refused.value)


def test_balances_that_know_no_device_are_refused(captured: Captured) -> None:
    with pytest.raises(ArgumentError) as refused:
        pipegraph.plan(captured, stages=2, hardware="h100,a100", balance="flops")
    assert "time" in str(refused.value)


def test_sizes_of_ranks() -> None:
    assert parse_rank_bytes("2GiB*2, 1GiB") == (2**31, 2**31, 2**30)
    assert parse_rank_bytes("2GiB") == 2**31
    for text in ("2GiB*0", "2GiB*x,1GiB", "*2", "2GiB,,1GiB"):
        with pytest.raises(ValueError, match=r"ranks|memory"):
            parse_rank_bytes(text)
