"""Errors of commands that say what to try, as a command spells it; and options that contradict each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import CHAIN, Command, fails

BUILT = ("schedule", "1f1b", "--ranks", 2, "--microbatches", 2)
EAGER = ("--nproc", 1, "--kernels", "eager", "--steps", 1)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("schedule", "1f1b", "--ranks", 10**8, "--microbatches", 2), "Try: 1,000,000 stages or fewer."),
        (
            ("schedule", "zb-v", "--ranks", 2, "--microbatches", 4, "--chunks", 3),
            "leave --chunks out, or give --chunks 2.",
        ),
        (("split", "", "--stages", 2), "MODEL is '', which names no file.\nTry: "),
        (("split", f"{CHAIN}:", "--stages", 2), "which names no model in the file.\nTry: "),
        (("split", "tests/models", "--stages", 2), "tests/models is a folder, and MODEL a file. "),
        (("split", CHAIN, "--stages", 2, "--hardware", ""), 'No hardware profile is called ""'),
        (("run", ""), "the name of a folder is empty.\nTry: "),
        (("run", CHAIN), "chain.py is a file, and a package is a folder.\nTry: "),
        (("export", "runs", "out", "-o", "x", "--shard-size", 1), "'1' is too little or too much: give 1MiB"),
        ((*BUILT, "--effort", 2), "it belongs to search, and 1f1b needs none.\nTry: leave it out."),
    ],
)
def test_what_cannot_be(pipegraph: Command, command: tuple[object, ...], said: str) -> None:
    fails(pipegraph(*command), 2, said, "\nTry: ")


def test_arguments_of_verify_in_the_other_order(pipegraph: Command, chain: Path) -> None:
    fails(pipegraph("verify", CHAIN, chain), 2, f"Try: pipegraph verify {chain} {CHAIN}")


@pytest.mark.parametrize("order", ["", "pp,dp"])
def test_an_order_of_unknown_dimensions(pipegraph: Command, chain: Path, order: str) -> None:
    fails(pipegraph("run", chain, "--mesh-order", order), 2, "\nTry: one of pp, dp_replicate, dp_shard, tp for each.")


def test_a_timeout_is_spelled_as_an_option(pipegraph: Command, chain: Path) -> None:
    fails(pipegraph("run", chain, "--timeout", "inf"), 2, "--timeout cannot be inf", "Try: --timeout 1800")


@pytest.mark.parametrize(
    "content", ["junk", "[]", json.dumps({"forward": [-1], "input_grad": [1], "weight_grad": [1]})]
)
def test_bad_times_show_what_times_are(pipegraph: Command, tmp_path: Path, content: str) -> None:
    file = tmp_path / "times.json"
    file.write_text(content)
    fails(pipegraph(*BUILT, "--times", file), 2, f"{file}: ", '\nTry: {"forward": [1.0, 1.0], ')


def test_an_unknown_action_shows_what_actions_are(pipegraph: Command, tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,hello\n1F0,1B0\n")
    fails(pipegraph("schedule", file), 2, "'hello' is not an action", "\nTry: 2F0, 0B3, ")


@pytest.mark.parametrize("loss", ["raise ValueError('lossy')", "return output"])
def test_a_bad_loss(pipegraph: Command, chain: Path, tmp_path: Path, loss: str) -> None:
    file = tmp_path / "model.py"
    model = "from tests.models.chain import build_model, example_inputs, example_target"
    file.write_text(f"{model}\ndef loss_fn(output, target): {loss}\n")
    done = pipegraph("run", chain, "--model", file, *EAGER)
    assert done.code == 4
    *_, row, advice = done.err.splitlines()
    assert row.endswith("<-- ERROR HERE") and advice.startswith("Try: ")


def test_a_damaged_checkpoint(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    step = tmp_path / "run/step-00000001"
    assert pipegraph("run", chain, *EAGER, "--checkpoint", step.parent).code == 0
    (step / "checkpoint.json").write_text("{")
    result = pipegraph("export", step.parent, chain, "-o", tmp_path / "out")
    fails(result, 2, f"no checkpoint in {step.parent} is whole:", "\nTry: restore the files")


def test_a_model_file_with_a_zero_byte(pipegraph: Command, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_bytes(b"import torch\n\0")
    result = pipegraph("split", file, "--stages", 2)
    fails(result, 2, f"error: {file}: importing it raised")
    assert "None" not in result.err


def test_a_drawing_has_a_place_of_its_own(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    fails(
        pipegraph("show", chain, "--html", page, "--svg", page), 2, f"{page} was named for two files", "Try: two names"
    )
    fails(pipegraph("show", chain, "--svg", chain / "picture.svg"), 2, "lies in the package", "Try: another folder")
    assert not page.exists() and not (chain / "picture.svg").exists()
