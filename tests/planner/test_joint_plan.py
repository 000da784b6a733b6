"""The joint plan: what collectives take, which layouts there are, and the best of all plans."""

from __future__ import annotations

import json
import math
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
from pipegraph.cost.hardware import ALL_GATHER, ALL_REDUCE, Hardware, Link, SizeTable
from pipegraph.cost.training_state import TrainingState
from pipegraph.errors import PlanError
from pipegraph.graph.nodes import value_bytes
from pipegraph.planner.joint_plan import search as joint_search
from pipegraph.planner.joint_plan.choices import JointCandidate, Layout, layouts
from pipegraph.planner.joint_plan.layout_costs import LayoutCosts, tensor_shares
from pipegraph.planner.joint_plan.search import JointSearch, joint_plan, plan_of_choice
from pipegraph.planner.plan_file import PlanFile
from pipegraph.planner.plan_options import PlanOptions
from pipegraph.planner.recompute_options import RecomputeOptions
from pipegraph.planner.searched_order import LEAST_GAIN
from pipegraph.planner.solver.solve import MemoryShortage
from pipegraph.planner.step_prediction import stage_times
from pipegraph.recompute import OFFLOAD
from pipegraph.report.text.package_tables import render_joint_comparison
from pipegraph.runtime.parallelized_stages import resident_stages
from pipegraph.schedule import Times, build, check, simulate
from tests.messages import refused
from tests.runtime import mesh_mixture

A100 = Hardware.load("a100")
TP_PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up = nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def captured(rows: int) -> Any:
    with torch.device("meta"):
        return pipegraph.capture(Model(), (torch.randn(rows, 512, 256),))


@pytest.fixture(scope="module")
def costs() -> LayoutCosts:
    options = PlanOptions(hardware=A100)
    single, double = (RecomputeOptions.price(captured(rows), options) for rows in (2, 4))
    return LayoutCosts(A100, 2, single, double, tensor_shares(single.costs[0].priced.chain, TP_PLAN))


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    inside, across = A100.links.intra_node, A100.link(0, 8)
    assert A100.links.collective_seconds(ALL_GATHER, 8e9, 4) == pytest.approx(3 * (1e-5 + 2e9 / 240e9))
    assert A100.links.collective_seconds(ALL_REDUCE, 8e9, 4) == pytest.approx(6 * inside.seconds(2e9))
    assert A100.links.collective_seconds(ALL_GATHER, 8e9, 16) == pytest.approx(15 * across.seconds(5e8))
    assert A100.links.collective_seconds(ALL_GATHER, 8e9, 4, stride=8) == pytest.approx(3 * across.seconds(2e9))
    assert A100.links.collective_seconds(ALL_REDUCE, 8e9, 1) == 0


def test_a_collective_that_was_measured_takes_what_it_took() -> None:
    table = SizeTable({"ranks": (2.0, 4.0), "bytes": (1e3, 1e9)}, ((1e9, 1e9), (2e8, 2e8)))
    inside = structs.replace(A100.links.intra_node, all_reduce=table)
    links = structs.replace(A100.links, intra_node=inside)
    assert links.collective_seconds(ALL_REDUCE, 1e9, 2) == pytest.approx(1.0)
    assert links.collective_seconds(ALL_REDUCE, 1e9, 4) == pytest.approx(5.0)
    assert links.collective_seconds(ALL_GATHER, 1e9, 4) == A100.links.collective_seconds(ALL_GATHER, 1e9, 4)
    assert links.collective_seconds(ALL_REDUCE, 8, 2) == links.collective_seconds(ALL_REDUCE, 1e3, 2)
    across = links.collective_seconds(ALL_REDUCE, 1e9, 4, stride=8)  # between nodes nothing was measured
    assert across == A100.links.collective_seconds(ALL_REDUCE, 1e9, 4, stride=8)


def test_layouts_use_every_device() -> None:
    choices = list(layouts(8, 4, 2))
    assert all(layout.pp * layout.copies * layout.tp == 8 and layout.pp <= 4 and layout.tp <= 2 for layout in choices)
    assert len(choices) == len(set(choices)) == 4 + 3 + 2 + 3 + 2 + 1


def bytes_of_parameter(layout: Layout, precision: str | None = None) -> float:
    """Bytes of an element of a parameter that AdamW trains."""
    training = TrainingState(precision)
    factors, dtypes = layout.factors(training.factors), training.dtypes
    size = 4 if dtypes is None else dtypes.computed.itemsize
    optimizer = 2 * size if dtypes is None else 2 * dtypes.moment + dtypes.master
    return (factors.parameters + factors.copies + factors.gradients) * size + factors.optimizer * optimizer


def test_what_ranks_hold_of_a_parameter() -> None:
    """ZeRO (arXiv:1910.02054) counts 2 + 2 + 12/N bytes with bfloat16 gradients for ZeRO-1; here they are float32."""
    shards = (1, 2, 4, 8)
    assert [bytes_of_parameter(Layout(1, 1, count, 1)) / 4 for count in shards] == [4, 4, 3, 2.5]
    assert [bytes_of_parameter(Layout(1, 1, 1, 1), name) for name in ("fp32", "bf16", "bf16-true", "bf16-master")] == [
        16,
        18,
        8,
        18,
    ]
    assert [bytes_of_parameter(Layout(1, count, 1, 1, zero1=count > 1), "bf16-master") for count in shards] == [
        18,
        12,
        9,
        7.5,
    ]
    assert [bytes_of_parameter(Layout(1, 1, count, 1), "bf16") for count in shards] == [18, 14, 10, 8]


def test_copies_agree_on_each_step() -> None:
    took = 2 * 6 * A100.links.intra_node.seconds(16)  # two rings of four, for a few numbers
    assert Layout(2, 2, 2, 1).agreement_seconds(A100) == pytest.approx(took)
    assert Layout(4, 1, 1, 2).agreement_seconds(A100) == 0


def test_tp_divides_what_each_choice_keeps(costs: LayoutCosts) -> None:
    """The input of a layer, which "block" keeps alone, is whole on each rank."""
    saved = {}
    for index, recompute in enumerate(costs.recompute[:3]):
        full, halves = (costs.options(Layout(1, 1, 1, tp), 2)[index] for tp in (1, 2))
        saved[str(recompute)] = [sum(cost.saved_bytes for cost in option.segments) for option in (full, halves)]
    boundary, inside = 2 * 512 * 256 * 4, 2 * 512 * 1024 * 4
    of_block, of_min_cut = saved["layers.*=block"], saved["min-cut"]
    assert of_block[0] == of_block[1] >= 5 * boundary
    assert of_min_cut[0] - of_min_cut[1] == 6 * inside / 2  # what tanh makes


def test_tokens_are_divided_with_sequence_parallelism(costs: LayoutCosts) -> None:
    """Then everything is: inputs of layers, norms, what crosses between stages; exchanges take as long as before."""
    chain = costs.single.costs[0].priced.chain
    by_tokens = replace(costs, shares=tensor_shares(chain, TP_PLAN, divides_tokens=True))
    layout = Layout(1, 1, 1, 2)
    for index in range(3):
        whole = costs.options(Layout(1, 1, 1, 1), 2)[index].segments
        parts, token_parts = (prices.options(layout, 2)[index].segments for prices in (costs, by_tokens))
        for full, part, token_part in zip(whole, parts, token_parts, strict=True):
            assert token_part.boundary_bytes == full.boundary_bytes / 2 and part.boundary_bytes == full.boundary_bytes
            assert token_part.parameter_bytes == part.parameter_bytes
            assert token_part.saved_bytes <= part.saved_bytes and token_part.forward <= part.forward
        assert sum(cost.saved_bytes for cost in token_parts) < sum(cost.saved_bytes for cost in parts)
    exchanges = zip(costs.shares, by_tokens.shares, strict=True)
    assert all((share.forward, share.backward) == (other.forward, other.backward) for share, other in exchanges)


@pytest.mark.parametrize("overlap", [0.25, 1.0])
def test_a_part_of_the_exchanges_is_hidden_behind_products(costs: LayoutCosts, overlap: float) -> None:
    """At most as much as the products take."""
    hardware = structs.replace(A100, tp_overlap=overlap)
    overlapped = replace(costs, hardware=hardware)
    pairs = zip(costs.chain(0, 2, 2), overlapped.chain(0, 2, 2), costs.shares, strict=True)
    exchanges = 0
    for waiting, beside, share in pairs:
        forward, backward = share.exchange_seconds(A100, 2, 1)
        for exchange, whole, part in (
            (forward, waiting.forward, beside.forward),
            (backward, waiting.input_grad, beside.input_grad),
        ):
            exchanges += exchange > 0
            assert part == pytest.approx(whole - min(overlap * exchange, whole - exchange))
        assert beside.weight_grad == waiting.weight_grad
    assert exchanges


def test_tp_divides_experts_embeddings_and_heads() -> None:
    """Each has an exchange before and after it; the head gathers its output."""
    model = mesh_mixture.build("transposed experts")
    captured = pipegraph.capture(model, (torch.zeros(2, 8, dtype=torch.int64),))
    plan = {**mesh_mixture.TRANSPOSED_PLAN, "head": "colwise_gather_output"}
    chain = RecomputeOptions.price(captured, PlanOptions(hardware=A100)).costs[0].priced.chain
    shares = tensor_shares(chain, plan)
    divided = 0.0
    for index, share in enumerate(shares):
        nodes = chain.nodes(index, index + 1)
        state = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source.op == "get_attr")
        divided += share.parameters * sum(value_bytes(attribute) for attribute in state)
    unsplit = ("norm", "router", "out.bias", "scale")
    assert divided == pytest.approx(
        4 * sum(leaf.numel() for name, leaf in model.named_parameters() if not any(part in name for part in unsplit))
    )
    hidden = 2 * 8 * mesh_mixture.WIDTH * 4
    assert sum(sum(share.forward) for share in shares) == 5 * hidden  # an embedding, two layers of two
    assert sum(sum(share.gathered) for share in shares) == 2 * 8 * mesh_mixture.WORDS * 4
    routed = 2 * 8 * 3 * 4
    assert sum(sum(share.backward) for share in shares) == 2 * (hidden + routed) + hidden  # fused and experts share one


def test_tp_divides_what_its_plan_says(costs: LayoutCosts) -> None:
    full, halves = (costs.options(Layout(1, 1, 1, tp), 2)[0] for tp in (1, 2))
    layer = sum(parameter.numel() for parameter in Layer().parameters()) * 4
    divided = (2 * 256 * 1024 + 1024) * 4  # but not the norm, and the bias after the sum
    assert sum(cost.parameter_bytes for cost in full.segments) == 6 * layer
    sharded_bytes = sum(cost.parameter_bytes for cost in halves.segments)
    assert 6 * (layer - divided / 2) == pytest.approx(sharded_bytes, rel=0.01)
    exchanged = A100.links.collective_seconds(ALL_REDUCE, 2 * 512 * 256 * 4, 2)
    assert sum(sum(share.forward) for share in costs.shares) == 6 * 2 * 512 * 256 * 4
    for name in ("forward", "input_grad"):
        took = [sum(getattr(cost, name) for cost in option.segments) for option in (full, halves)]
        assert took[0] / 2 + 6 * exchanged < took[1] < took[0] + 6 * exchanged


def test_rows_scale(costs: LayoutCosts) -> None:
    two, four, eight = (costs.options(Layout(1, 1, 1, 1), rows)[0].segments for rows in (2, 4, 8))
    assert four == costs.double.costs[0].segments
    saved = [sum(cost.saved_bytes for cost in segments) for segments in (two, four, eight)]
    assert saved == [saved[0], 2 * saved[0], 4 * saved[0]]


@pytest.mark.parametrize(("ranks", "microbatches", "part"), [(1, 4, 1.0), (2, 1, 1.0), (2, 2, 2 / 3), (4, 8, 0.3021)])
def test_the_least_makespan_of_whole_backwards(costs: LayoutCosts, ranks: int, microbatches: int, part: float) -> None:
    """With B after F, the shares of ranks shrink by 1 − 1/m from one to the next: T = Σw / (1 − (1 − 1/m)^p)."""
    layout = Layout(ranks, 1, 1, 1)
    work = microbatches * costs.totals(layout, 2).seconds
    least = costs.least_makespan(layout, 2, microbatches, whole_backwards=True)
    assert least == pytest.approx(part * work, rel=1e-3)
    assert work / ranks * (1 - 1e-9) <= costs.least_makespan(layout, 2, microbatches, whole_backwards=False) <= least


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "gpipe"])
@pytest.mark.parametrize("seed", range(5))
def test_no_cuts_take_less_than_the_least_makespan(costs: LayoutCosts, name: str, seed: int) -> None:
    random = Random(seed)
    ranks, microbatches = random.randint(2, 5), random.randint(1, 9)
    candidate = JointCandidate(Layout(ranks, 1, 1, 1), name, 1, 2, microbatches)
    bound = JointSearch(costs, ranks, 2 * microbatches, schedules=[name])._problems.bound(candidate)
    options = costs.options(candidate.layout, 2)
    for _ in range(20):
        edges = [0, *sorted(random.sample(range(1, costs.segments), ranks - 1)), costs.segments]
        stages = [random.choice(options).stage(*edge) for edge in pairwise(edges)]
        figures = ([getattr(stage, name) for stage in stages] for name in ("forward", "input_grad", "weight_grad"))
        assert simulate(build(name, ranks, microbatches), Times(*figures)).makespan >= bound * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("part", [None, 0.6])
def test_what_bounds_rule_out_is_not_better(costs: LayoutCosts, part: float | None) -> None:
    def search(memory: float | None) -> JointSearch:
        return JointSearch(costs, 4, 32, memory, ["1f1b", "zb-h1"])

    free = search(None).run()
    memory = None if part is None else part * free.best.peak
    comparison, every = search(memory).run(), search(memory)
    plans = [every.search(candidate) for candidate in every.candidates]
    assert all(plan is None or every._problems.bound(plan.candidate) <= plan.step * (1 + 1e-9) for plan in plans)
    assert min(plan.step for plan in plans if plan is not None) >= comparison.best.step * (1 - 1e-3)
    assert comparison.lower_bound <= comparison.best.step and comparison.searched <= comparison.considered
    assert all(memory is None or choice.peak <= memory for choice in comparison.choices)
    steps, peaks = [choice.step for choice in comparison.choices], [choice.peak for choice in comparison.choices]
    assert steps == sorted(steps) and peaks == sorted(peaks, reverse=True)
    if part is not None:
        assert comparison.best.step >= free.best.step * (1 - 1e-3)
    else:
        assert comparison.best.candidate.layout.pp == 1  # four devices hold the model, and a pipeline has a bubble


@pytest.mark.slow  # what bounds rule out is the same question
def test_what_the_slowest_stage_rules_out_is_not_better(costs: LayoutCosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model of many layers, which is cut between layers first."""
    monkeypatch.setattr(joint_search, "_FEW_LAYERS", len(costs.layers))
    memory = 0.6 * JointSearch(costs, 4, 32, None, ["1f1b"]).run().best.peak
    search, every = (JointSearch(costs, 4, 32, memory, ["1f1b", "interleaved-1f1b"]) for _ in range(2))
    comparison, choices = search.run(), [every.search(candidate) for candidate in every.candidates]
    for choice in choices:
        if choice is not None:
            bound = every._problems.slowest_stage(choice.candidate) + every._problems.least_exposed(choice.candidate)
            assert bound <= choice.step * (1 + 1e-9)
    assert comparison.best.step <= min(choice.step for choice in choices if choice is not None) * (1 + 1e-3)
    assert comparison.searched < sum(map(every._problems.may_fit, every.candidates))


def test_divisions_of_copies_share_what_was_found_where_it_fits(costs: LayoutCosts) -> None:
    """A pipeline is searched for once, with the memory that its leanest division leaves."""

    def search_and_candidates(memory: float) -> tuple[JointSearch, JointCandidate, JointCandidate]:
        search = JointSearch(costs, 8, 64, memory, ["1f1b"])
        plans = [plan for plan in search.candidates if (plan.layout.pp, plan.layout.tp, plan.rows) == (2, 1, 2)]
        replicated, sharded = (next(plan for plan in plans if plan.layout.dp_shard == count) for count in (1, 4))
        return search, replicated, sharded

    search, replicated, sharded = search_and_candidates(2**40)
    choice, leanest = search.search(replicated), search.search(sharded)
    alone = search.search(replicated, effort=0.02)
    assert choice is not None and leanest is not None and alone is not None
    assert (choice.solution.cuts, choice.solution.options) == (leanest.solution.cuts, leanest.solution.options)
    assert choice.solution.value == leanest.solution.value == alone.solution.value
    assert choice.peak == alone.peak > leanest.peak
    assert search._least_found(replicated, whole_layers=False) <= choice.step * (1 + 1e-9)
    tight, replicated, sharded = search_and_candidates(choice.peak - 1)
    tighter, leanest = tight.search(replicated), tight.search(sharded)
    assert tighter is not None and leanest is not None
    assert tighter.peak < choice.peak and tighter.step >= choice.step and leanest.peak < choice.peak
    assert (tighter.solution.cuts, tighter.solution.options) != (choice.solution.cuts, choice.solution.options)
    starved, replicated, sharded = search_and_candidates(1024)
    assert starved.search(replicated) is None and starved._least_found(replicated, whole_layers=False) == math.inf


def test_fewer_stages_are_whole_where_that_saves_memory(costs: LayoutCosts) -> None:
    """They are gathered more often, and a run takes their number from the plan's file."""
    search = JointSearch(costs, 4, 32, 2**40, ["interleaved-1f1b"])
    every = [option for option in search.candidates if option.layout == Layout(2, 1, 2, 1) and option.rows == 2]
    assert [option.resident for option in every] == [None, 1]
    default_choice, resident = map(search.search, every)
    assert default_choice is not None and resident is not None
    assert resident.step > default_choice.step and resident.peak < default_choice.peak
    plan = plan_of_choice(captured(2), resident, PlanOptions(hardware=A100), 0.0)
    again = PlanFile.from_json(PlanFile.from_plan(plan).to_json(), "it")
    assert again.prediction.mesh_text == "pp 2 × dp_shard 2, with 1 stage of a rank whole at a time"
    assert resident_stages(None, None, again.prediction) == 1 and resident_stages(None, 2, again.prediction) == 2
    assert {option.resident for option in JointSearch(costs, 4, 32, None, ["interleaved-1f1b"]).candidates} == {None}


def test_a_package_holds_what_a_rank_along_tp_has(costs: LayoutCosts) -> None:
    """So that a run is compared with the parameters of one rank."""
    search = JointSearch(costs, 4, 32, None, ["1f1b"])
    candidate = next(option for option in search.candidates if option.layout == Layout(2, 1, 1, 2) and option.rows == 2)
    choice = search.search(candidate)
    assert choice is not None
    plan = plan_of_choice(captured(2), choice, PlanOptions(hardware=A100), 0.0)
    assert plan.prediction is not None
    sums = [cost.parameter_bytes for cost in plan.costs]
    assert (
        sums == [cost.parameter_bytes for cost in plan.prediction.stages] == [cost.trained_bytes for cost in plan.costs]
    )
    model_bytes = sum(parameter.numel() for parameter in Model().parameters()) * 4
    assert model_bytes / 2 <= sum(size or 0 for size in sums) < 0.6 * model_bytes


@pytest.mark.slow
def test_copies_to_the_host_have_to_hide_in_each_layout() -> None:
    fast, slow = (structs.replace(A100, host_link=Link(0.0, rate)) for rate in (1e15, 1e8))
    single, double = (RecomputeOptions.price(captured(rows), PlanOptions(hardware=fast)) for rows in (2, 4))
    shares = tensor_shares(single.costs[0].priced.chain, TP_PLAN)
    with_copies, every = LayoutCosts(fast, 2, single, double, shares), [*range(len(single.recompute))]
    offloads = [OFFLOAD in str(choice) for choice in single.recompute]
    assert sum(offloads) == 1
    for layout in (Layout(4, 1, 1, 1), Layout(2, 1, 1, 2)):
        assert with_copies.hidden(layout, 2) == every
        hidden = replace(with_copies, hardware=slow).hidden(layout, 2)
        assert hidden == [option for option in every if not offloads[option]]


def test_what_cannot_be_is_refused(costs: LayoutCosts) -> None:
    with refused(PlanError, "4 devices", "3 rows", advice="global_batch=4"):
        JointSearch(costs, 4, 3).run()
    with refused(MemoryShortage, "1.0 KiB", "47.1 MiB", advice="memory_bytes=") as shortage:
        JointSearch(costs, 2, 8, 1024, ["1f1b"]).run()
    assert shortage.value.peak > 1024


def test_its_file_is_taken_as_it_is(tmp_path: Path) -> None:
    options = PlanOptions(hardware=A100, memory_bytes=38 * 2**20)
    comparison, plan = joint_plan(lambda rows: (captured(rows), None), 2, options, 4, 32, ["1f1b"], TP_PLAN)
    assert plan.prediction is not None and plan.prediction.peak <= 38 * 2**20
    file = tmp_path / "plan.json"
    file.write_text(PlanFile.from_plan(plan).to_json())
    mesh, layout = json.loads(file.read_text()).get("mesh", {}), comparison.best.candidate.layout
    assert layout.pp * math.prod(mesh.values()) == 4
    again = PlanFile.read(file).apply(captured(comparison.best.candidate.rows))
    assert again.prediction == plan.prediction and again.points == plan.points


def test_the_best_plan_gets_an_order_of_its_own_where_ranks_are_far_apart() -> None:
    links = A100.links
    far = structs.replace(
        A100, links=structs.replace(links, intra_node=structs.replace(links.intra_node, latency=4e-4))
    )
    memory = 72 * 2**20
    options = PlanOptions(hardware=far, memory_bytes=memory)

    def best_of(searches: bool) -> tuple[joint_search.JointComparison, pipegraph.Plan]:
        return joint_plan(lambda rows: (captured(rows), None), 2, options, 4, 32, ["1f1b", "zb-h1"], searches=searches)

    (named, _), (searched, plan) = best_of(False), best_of(True)
    best = searched.best
    assert not best.has_named_order and best.step < named.best.step * (1 - LEAST_GAIN)
    check(best.solution.schedule)
    assert searched.lower_bound <= named.lower_bound and searched.lower_bound < best.step
    assert best.peak <= memory
    stages = best.costs.stages(best.solution.cuts)
    times = stage_times(stages, best.solution.schedule, options.link)
    assert simulate(best.solution.schedule, times).makespan == pytest.approx(best.solution.value)
    file = PlanFile.from_plan(plan)
    assert file.prediction.schedule == "searched" and len(file.order) == best.candidate.layout.pp
    assert "searched" in render_joint_comparison(searched, 32, 4, None)
    assert PlanFile.from_json(file.to_json(), "plan.json").apply(captured(best.candidate.rows)).points == plan.points


def test_plans_keep_their_names_where_an_order_saves_little(costs: LayoutCosts) -> None:
    choices = JointSearch(costs, 4, 32, None, ["1f1b"], searches=True).run().choices
    assert all(choice.has_named_order for choice in choices)
