"""``pipegraph run``: the precision of numbers, and the seed of random ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegraph.runtime.processes import launch
from tests.cli.command import Command
from tests.cli.test_run import AUTOGRAD, losses


@pytest.mark.slow  # tests/runtime has both, without the command
def test_precision_and_seed(pipegraph: Command, chain: Path) -> None:
    single, half = (pipegraph("run", chain, *AUTOGRAD, "--seed", 1, *flags) for flags in ((), ("--precision", "bf16")))
    assert (single.code, half.code) == (0, 0), (single, half)
    (exact,), (rounded,) = losses(single.out), losses(half.out)
    assert exact != rounded and float(rounded) == pytest.approx(float(exact), rel=0.05)
    wrong = pipegraph("run", chain, "--nproc", 1, *AUTOGRAD, "--precision", "bf61")
    assert wrong.code == 2 and "bf16" in wrong.err


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("--kernels", "Inductor", "Try: --kernels inductor."),
        ("--precision", "bf61", "Try: --precision bf16."),
        ("--dynamic", "always", "Try: --dynamic true"),
        ("--tp", 2, "in the model's file, and split it again."),
        ("--model", "tests/models/chains.py", 'Did you mean "tests/models/chain.py"?'),
        ("--model", "hf:nothing", "No configuration file nothing"),
    ],
)
def test_values_are_refused_before_any_process_starts(
    pipegraph: Command, chain: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: object, advice: str
) -> None:
    monkeypatch.setattr(launch, "_start", lambda *arguments: pytest.fail("a process was started"))
    done = pipegraph("run", chain, option, value)
    assert done.code == 2 and advice in done.err, done


def test_a_loss_that_ends_the_process_ends_no_run_in_silence(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    body = "from tests.models.chain import build_model, example_inputs, example_target\n"
    model.write_text(f"{body}def loss_fn(output, target):\n    raise SystemExit(0)\n")
    done = pipegraph("run", chain, "--nproc", 1, *AUTOGRAD, "--model", model)
    assert done.code == 4 and f"{model}:3: raise SystemExit(0)" in done.err and "Try: " in done.err


@pytest.mark.parametrize(("rank", "world"), [("2", "2"), ("x", "2"), ("0", ""), ("-1", "1")])
def test_an_environment_of_no_ranks_is_refused(
    pipegraph: Command, chain: Path, monkeypatch: pytest.MonkeyPatch, rank: str, world: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    done = pipegraph("run", chain, *AUTOGRAD)
    assert done.code == 4 and f"RANK is {rank!r} and WORLD_SIZE {world!r}" in done.err and "Try: torchrun" in done.err


def test_a_learning_rate_is_a_number(pipegraph: Command, chain: Path) -> None:
    done = pipegraph("run", chain, "--nproc", 1, *AUTOGRAD, "--learning-rate", "inf")
    assert done.code == 2 and "inf is not a learning rate" in done.err


@pytest.mark.parametrize("dynamic", ["auto", "true", "false"])
def test_kernels_for_all_sizes(pipegraph: Command, chain: Path, dynamic: str) -> None:
    options = ("--nproc", 1, "--kernels", "eager", "--steps", 2)
    assert losses(pipegraph("run", chain, *options, "--dynamic", dynamic).out) == losses(
        pipegraph("run", chain, *options).out
    )
