"""The benchmark of a step: contenders are checked before they are timed, accounts add up, kept figures are compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pipegraph
from benchmarks.step import repeats, results, tables
from benchmarks.step.account import CAUSES, LimitMeasured, RankMeasured, accounts, mean_account
from benchmarks.step.bench import Bench
from benchmarks.step.contenders import Reference
from benchmarks.step.cuts import Candidate, CutSearch
from benchmarks.step.entries import Options
from benchmarks.step.models import LlamaCase, UNetCase
from benchmarks.step.rank import report
from benchmarks.step.stopwatch import Cost
from pipegraph.schedule import Schedule, build, to_csv
from tests.runtime import ranks

CASE = UNetCase(microbatches=4, rows=1, width=4, side=16)
CORES = tuple(sorted(os.sched_getaffinity(0)) * 2)[:2]


class ScaledGradient(Reference):
    """Adds a hundredth to one gradient."""

    def gradients(self) -> dict[str, Tensor | None]:
        gradients = super().gradients()
        return gradients | {"head.weight": gradients["head.weight"] * 1.01}


class MissingGradient(Reference):
    """Leaves one parameter out on every rank."""

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: gradient for name, gradient in super().gradients().items() if name != "bottom.0.weight"}


class OtherLoss(Reference):
    """Returns the mean loss in every process, of which the benchmark takes the sum."""


class TwoCuts(CutSearch):
    """Proposes two cuts for whatever schedule, and prices nothing."""

    def __init__(self) -> None: ...

    def shortlist(self, schedule: str, inside: bool, count: int) -> list[Candidate]:
        return [Candidate(schedule, ("down.1", "bottom", last)) for last in ("up.1", "head")]


def _run_with_wrong_contenders(rank: int, folder: str) -> dict[str, Any]:
    names = "torch Interleaved1F1B", "pipegraph zb-v"
    cuts = {"pipegraph zb-v": Candidate("zb-v", ("down.1", "bottom", "up.1"))}
    bench = Bench(Options(CASE, CORES, Path(folder), "eager", rounds=2, only=names, known_cuts=cuts, account=True))
    bench.search = TwoCuts() if rank == 0 else None
    bench.prepare()
    for kind in (ScaledGradient, MissingGradient, OtherLoss):
        bench.add(kind.__name__, kind(bench.case, bench.model))
    return report(bench)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, second = ranks.run(_run_with_wrong_contenders, 2, str(tmp_path_factory.mktemp("packages")), timeout=110)
    assert isinstance(first, dict) and isinstance(second, dict), (first, second)
    return first


@pytest.mark.slow
def test_a_run_has_figures_of_all_and_accounts_that_add_up(measured: dict[str, Any]) -> None:
    figures = results.figures(measured)
    assert set(figures["contenders"]) == {"torch Interleaved1F1B", "torch Interleaved1F1B, even", "pipegraph zb-v"}
    assert figures["best"] == "pipegraph zb-v"
    assert figures["contenders"]["pipegraph zb-v"]["over_best"] == [1.0, 1.0, 1.0]
    assert figures["contenders"]["torch Interleaved1F1B, even"]["at"] == CASE.even(4)
    chosen = figures["contenders"]["torch Interleaved1F1B"]
    assert chosen["at"][:2] == ("down.1", "bottom") and "fastest of 2" in chosen["found"]
    account = figures["accounts"]["pipegraph zb-v"]
    assert len(account["ranks"]) == 2
    for rank in account["ranks"]:
        assert set(rank) == set(CAUSES)
        assert sum(rank.values()) == pytest.approx(account["step"] - account["limit"])
        assert rank["interpreter"] > 0


@pytest.mark.slow
def test_a_contender_with_wrong_gradients_is_named_and_not_timed(measured: dict[str, Any]) -> None:
    wrong = measured["wrong"]
    assert "head.weight is off by 1.0e-02" in wrong["ScaledGradient"]
    assert "no rank has bottom.0.weight" in wrong["MissingGradient"]
    assert "the loss is" in wrong["OtherLoss"]
    assert not any(timed_round["seconds"].keys() & wrong.keys() for timed_round in measured["rounds"])


@pytest.mark.slow
def test_cuts_are_proposed_between_layers_and_inside() -> None:
    captured = pipegraph.capture(CASE.build(), CASE.microbatch()[:1])
    search = CutSearch(CASE, captured, measured=False)
    between, anywhere = (search.shortlist("zb-v", inside, 2) for inside in (False, True))
    assert len(between) == 2 and len(anywhere) == 4
    assert all(set(proposal.cuts) <= set(CASE.places) for proposal in between)
    assert any(not set(proposal.cuts) <= set(CASE.places) for proposal in anywhere)
    assert between[0].makespan <= between[1].makespan
    assert between[0].makespan >= anywhere[0].makespan
    for candidate in search.shortlist("searched", False, 2):
        assert isinstance(candidate.schedule, Schedule) and candidate.schedule.stages == len(candidate.cuts) + 1


def test_an_account_finds_each_cause() -> None:
    """Two ranks of 1f1b, two microbatches. Rank 0 takes 4 s in all, rank 1 with the loss 6 s."""
    schedule = build("1f1b", 2, 2)
    first = {(0, "F"): Cost(1.0, 0.9, 10), (0, "B"): Cost(3.0, 2.8, 0)}
    second = {(1, "F"): Cost(2.0, 1.9, 0), (1, "B"): Cost(4.0, 3.9, 0)}
    alone = [Cost(3.5, 3.5, 0), Cost(5.5, 5.5, 0), Cost(5.0, 5.0, 0)]
    measured = [
        RankMeasured(first, 0.25, alone[0], alone[0], alone[0], has_loss=False),
        RankMeasured(second, 0.25, alone[1], alone[1], alone[2], has_loss=True),
    ]
    limit = LimitMeasured(Cost(4.4, 4.3, 2), Cost(4.2, 4.2, 0), Cost(4.0, 4.0, 0))
    rank_accounts = accounts(9.0, limit, measured, schedule, hop=0.125, fault=0.01)
    mean = mean_account(rank_accounts)
    assert all(account.beyond == pytest.approx(9.0 - 4.4) for account in rank_accounts)
    assert [account.page_faults for account in rank_accounts] == pytest.approx([0.08, -0.02])
    assert [account.preempted for account in rank_accounts] == pytest.approx([0.3 - 0.1, 0.2 - 0.1])
    assert [account.divided_backward for account in rank_accounts] == [0.0, 0.0]
    assert [account.loss for account in rank_accounts] == pytest.approx([0.0, 0.5 - 2 * 0.2])
    assert mean.cuts == pytest.approx((3.5 + 5.0) / 2 - 4.0)
    assert mean.imbalance == pytest.approx(6.0 - 5.0)
    assert mean.busiest_rank_idle == pytest.approx((0.5 + 6.0 + 1.5) - 6.0)
    assert mean.transfers == pytest.approx(2 * 0.125)
    assert mean.unexplained == pytest.approx(9.0 - (8.0 + 0.25) - 0.25)


def test_ratios_are_taken_within_a_round() -> None:
    """The second round runs on a machine half as fast. Rounds have the contenders in any order."""
    cuts = {"at": ["layers.4"], "schedule": "1f1b", "found": ""}
    rounds = [
        {"seconds": {"slow": 3.0, "first": 2.2}, "limit": {"slow": 2.0, "first": 2.0}, "others": 0.0},
        {"seconds": {"first": 4.4, "slow": 6.4}, "limit": {"slow": 4.0, "first": 4.0}, "others": 0.5},
    ]
    measured = {
        "rounds": rounds,
        "cuts": {"first": cuts, "slow": cuts, "bad": cuts},
        "wrong": {"bad": "…"},
        "accounts": {},
    }
    figures = results.figures(measured)
    assert figures["best"] == "first" and [*figures["contenders"]] == ["first", "slow"]
    assert figures["contenders"]["slow"]["over_limit"] == pytest.approx([1.525, 1.55, 1.575])
    assert figures["contenders"]["first"]["over_limit"] == pytest.approx([1.1, 1.1, 1.1])
    assert figures["contenders"]["slow"]["over_best"][1] == pytest.approx((3 / 2.2 + 6.4 / 4.4) / 2)


def test_a_ratio_is_worse_if_the_middle_halves_lie_apart(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    results.keep(_run([1.04, 1.05, 1.06]), file)
    last = results.find_kept(_run([1.0, 1.0, 1.0]), file)
    assert last is not None
    assert results.worse(_run([1.065, 1.09, 1.12]), last) == []
    (line,) = results.worse(_run([1.08, 1.09, 1.12]), last)
    assert line.startswith("pipegraph zb-v: 1.090")
    assert results.find_kept(_run([1.0, 1.0, 1.0]) | {"torch": "2.15.0"}, file) is None


def test_what_is_kept_brings_back_its_cuts_and_its_account(tmp_path: Path) -> None:
    file, order = tmp_path / "kept.json", build("zb-v", 2, 4)
    results.keep(_run([1.0, 1.0, 1.0], schedule=to_csv(order), accounts={"pipegraph zb-v": {}}), file)
    candidate = results.kept_cuts(_run([1.0, 1.0, 1.0]), file)["pipegraph zb-v"]
    assert isinstance(candidate, Candidate) and candidate.cuts == ("a", "b", "c")
    assert not isinstance(candidate.schedule, str) and candidate.schedule.actions == order.actions
    results.keep(_run([1.1, 1.1, 1.1]), file)
    (run,) = results.load_kept(file)
    assert run["contenders"]["pipegraph zb-v"]["over_limit"] == [1.1, 1.1, 1.1]
    assert run["accounts"] == {"pipegraph zb-v": {}}


def test_runs_are_put_together() -> None:
    """Of each run the fastest of a kind counts, and of these the median."""
    runs = []
    for pipegraph_ratio, torch_ratio in ((1.1, 1.2), (1.0, 1.3), (1.2, 1.25)):
        run = _run([pipegraph_ratio, pipegraph_ratio, pipegraph_ratio]) | {"best": "pipegraph zb-v"}
        run["contenders"]["pipegraph zb-v"]["over_best"] = [1.0, 1.0, 1.0]
        for name, ratio in (("torch 1F1B", torch_ratio), ("torch slow", 9.0), ("torch 1F1B, even", 2.0)):
            run["contenders"][name] = {"over_best": [ratio, ratio, ratio]}
        runs.append(run)
    newer_run = {**runs[0], "torch": "2.15.0"}
    _, _, first, second = repeats.markdown([runs[0], newer_run, *runs[1:]]).splitlines()
    ratios = "1.100 (1.000 – 1.200) | 1.250 (1.200 – 1.300) | – | 2.000 (2.000 – 2.000)"
    assert first == f"| llama | 2.13.0 | 3 | {ratios} |"
    assert second.startswith("| llama | 2.15.0 | 1 | 1.100 (1.100 – 1.100) |")


def test_the_page_shows_what_is_kept() -> None:
    page_table = tables.PAGE.read_text().split(tables.BEGIN)[1].split(tables.END)[0].strip()
    assert page_table == tables.markdown(results.load_kept()).strip(), "run: python -m benchmarks.step --keep"


@pytest.mark.parametrize("case", [CASE, LlamaCase(2, 1, vocabulary=16, layers=4, width=32, sequence=4)])
def test_parts_one_after_the_other_are_the_model(case: Any) -> None:
    torch.manual_seed(0)
    model, (inputs, _) = case.build(), case.microbatch()
    parts = case.parts(model, [case.places[0], case.places[-1]])
    values: Any = (inputs,)
    for part in parts:
        values = part(*values)
        values = values if isinstance(values, tuple) else (values,)
    torch.testing.assert_close(values[0], case.unsplit(model)(inputs))
    names = {name for part in parts for name, _ in part.named_parameters()}
    assert names == {name for name, _ in case.unsplit(model).named_parameters()}


def _run(ratio: list[float], schedule: str = "zb-v", accounts: dict[str, Any] | None = None) -> dict[str, Any]:
    contender = {"at": ["a", "b", "c"], "schedule": schedule, "found": "by trying", "over_limit": ratio, "seconds": 1.0}
    names = {"case": "llama", "table": "peers", "torch": "2.13.0", "machine": "one", "kernels": "inductor"}
    return names | {"contenders": {"pipegraph zb-v": contender}, "accounts": accounts or {}}
