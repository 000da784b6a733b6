"""``--recompute auto`` with ranks and with points, and plans of Hugging Face models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import CHAIN, Command

LLAMA = "hf:tests/models/tied_llama"


@pytest.mark.slow
def test_plan_for_ranks_chooses_what_stages_compute_again(pipegraph: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = ("plan", LLAMA, "--ranks", 2, "--schedule", "1f1b", "--microbatches", 4, "--hardware", "h100")
    done = pipegraph(*plan, "--recompute", "auto", "-o", file, "--json")
    assert (done.code, done.err) == (0, "")
    free = json.loads(done.out)["plan"]
    uniform = json.loads(pipegraph(*plan, "--recompute", "none,min-cut,block", "--json").out)["plan"]
    assert free["value"] <= uniform["value"]
    split = pipegraph("split", LLAMA, "--plan", file, "-o", tmp_path / "out")
    assert split.code == 0, split.err
    manifest = json.loads((tmp_path / "out/pipeline.json").read_text())
    assert manifest["plan"]["prediction"]["recompute"] == json.loads(file.read_text())["recompute"]


def test_points_with_the_best_recompute_of_each_stage(pipegraph: Command) -> None:
    split = ("split", CHAIN, "--points", "layers.2", "--hardware", "h100", "--dry-run")
    auto, none = (predicted(pipegraph(*split, "--recompute", mode, "--json").out) for mode in ("auto", "none"))
    assert auto["value"] <= none["value"]
    assert auto["points"] == none["points"] == ["layers.2"]
    short = pipegraph(*split, "--recompute", "auto", "--memory", "1MiB")
    assert (short.code, short.err) == (0, "")


def compared(pipegraph: Command, *recompute: object) -> set[str]:
    """What the plans that are worth it compute again."""
    arguments = [argument for mode in recompute for argument in ("--recompute", mode)]
    few = ("--schedule", "1f1b,zb-v", "--microbatches", 4, "--hardware", "h100")
    done = pipegraph("plan", CHAIN, "--ranks", 2, *few, *arguments, "--json")
    assert (done.code, done.err) == (0, "")
    return {plan["recompute"] for plan in json.loads(done.out)["alternatives"]}


def test_a_choice_with_rules_is_one_choice(pipegraph: Command) -> None:
    assert compared(pipegraph, "layers.*=block,head=none") == {"layers.*=block,head=none"}
    assert compared(pipegraph, "layers.*=block,head=none", "none,min-cut") <= {
        "layers.*=block,head=none",
        "none",
        "min-cut",
    }


def test_a_choice_for_each_stage_is_one_choice(pipegraph: Command) -> None:
    assert compared(pipegraph, "block;none") == {"block (stage 0), none (stage 1)"}
    assert compared(pipegraph, "block|(none|)*2,none") == {"block (stage 0), none (stages 1 – 3)"}
    done = pipegraph("plan", CHAIN, "--ranks", 3, "--recompute", "block;none")
    assert done.code == 2
    assert "--recompute block;none" in done.err and "2 stages" in done.err


@pytest.mark.parametrize(("stages", "recompute"), [(4, "block|(none|)*2,none"), (2, "block|none"), (2, "block;none")])
def test_split_takes_a_choice_for_each_stage(pipegraph: Command, stages: int, recompute: str) -> None:
    done = pipegraph("split", CHAIN, "--stages", stages, "--recompute", recompute, "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert "with recompute block (stage 0), none (stage" in done.out


def predicted(out: str) -> dict[str, Any]:
    result = json.loads(out)
    return {**result["plan"], "points": result["points"]}


@pytest.fixture
def llama_plan(pipegraph: Command, tmp_path: Path) -> Path:
    """For three rows of 24 tokens."""
    file = tmp_path / "plan.json"
    options = ("--schedule", "1f1b", "--microbatches", 4, "--hardware", "h100", "--recompute", "none")
    done = pipegraph("plan", LLAMA, "--ranks", 2, "--batch", 3, "--seq", 24, *options, "-o", file)
    assert (done.code, done.err) == (0, "")
    return file


@pytest.mark.slow
def test_a_hugging_face_model_is_split_as_planned(pipegraph: Command, llama_plan: Path, tmp_path: Path) -> None:
    """With the plan's rows and tokens, which are not those of the configuration's example."""
    done = pipegraph("split", LLAMA, "--plan", llama_plan, "--no-weights", "-o", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    plan = json.loads(llama_plan.read_text())
    manifest = json.loads((tmp_path / "out/pipeline.json").read_text())
    assert manifest["plan"]["points"] == plan["points"]
    captured = [size["captured"] for size in manifest["sizes"].values()]
    assert captured == [3, 24]
    assert manifest["plan"]["prediction"]["value"] == plan["value"]


@pytest.mark.slow
def test_other_sizes_than_the_plans_are_refused(pipegraph: Command, llama_plan: Path) -> None:
    done = pipegraph("split", LLAMA, "--plan", llama_plan, "--seq", 32, "--dry-run")
    assert (done.code, done.out) == (3, "")
    assert "[3, 24]" in done.err and "[3, 32]" in done.err
