"""``pipegraph run`` over a mesh: what is shown, and where its ranks lie on two nodes, which are two torchruns here."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ROOT, Command

MODEL = """
from tests.models.chain import build_model, example_inputs, example_target, loss_fn

tp_plan = {"layers.*.0": "colwise_gather_output"}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "model.py").write_text(MODEL)
    split = ["-m", "pipegraph", "split", folder / "model.py", "--stages", 2, "-o", folder / "package"]
    subprocess.run([sys.executable, *map(str, split)], cwd=ROOT, check=True, capture_output=True, timeout=100)
    return folder / "package"


def on_two_nodes(package: Path, *options: object) -> list[subprocess.CompletedProcess[str]]:
    """What each of two nodes with two processes printed, where the run ended well."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    run = ["-m", "pipegraph", "run", package, "--kernels", "eager", "--microbatches", 2, *options]
    nodes = []
    for node in range(2):
        torchrun = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2, "--node-rank", node]
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", port]
        command = [sys.executable, *map(str, [*torchrun, *run])]
        nodes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        texts = [node.communicate(timeout=100) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    return [
        subprocess.CompletedProcess(node.args, node.returncode, *text) for node, text in zip(nodes, texts, strict=True)
    ]


def said_by(node: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    comparison: dict[str, Any] = json.loads(node.stdout)["predicted_and_measured"]
    return comparison


@pytest.mark.timeout(240)
@pytest.mark.slow  # tests/runtime has the grid of ranks over nodes
def test_stages_lie_across_nodes(package: Path) -> None:
    """The first process of the last stage prints: it is in the second node."""
    nodes = on_two_nodes(package, "--dp-shard", 2, "--steps", 3, "--json")
    assert [(node.returncode, bool(node.stdout)) for node in nodes] == [(0, False), (0, True)], nodes
    comparison = said_by(nodes[1])
    assert [record["stage"] for record in comparison["collectives"]] == [0, 1]
    for collectives in comparison["collectives"]:
        assert collectives["UNSHARD"]["measured"] > 0 and collectives["REDUCE_GRAD"]["measured"] > 0
        assert "RESHARD" not in collectives
    assert_parts_are_predicted(comparison)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("order", "printing"),
    [([], 1), (["--mesh-order", "tp,dp_shard,dp_replicate,pp"], 0)],
    ids=["default", "pp within"],
)
def test_tensor_parallel_ranks_lie_within_a_node(order: list[str], printing: int, package: Path) -> None:
    """Unless a whole pipeline is to be in each."""
    nodes = on_two_nodes(package, "--tp", 2, "--steps", 2, "--json", *order)
    assert [node.returncode for node in nodes] == [0, 0], nodes
    assert [bool(node.stdout) for node in nodes] == [printing == 0, printing == 1]
    slow = "ranks along tp lie in several nodes of 2 processes each"
    assert [slow in node.stderr for node in nodes] == [bool(order), False]
    comparison = said_by(nodes[printing])
    assert_parts_are_predicted(comparison)
    assert any("2 ranks along tp divide each" in hint for hint in comparison["hints"])


def assert_parts_are_predicted(comparison: dict[str, Any]) -> None:
    """A rank's state is that of its part of the parameters, with a count of AdamW's steps for each."""
    for memory in comparison["memory"]:
        for kind in ("parameters", "gradients", "optimizer_state"):
            assert memory[kind]["measured"] == pytest.approx(memory[kind]["predicted"], rel=0.05), kind


@pytest.mark.slow
def test_tensor_parallel_ranks_that_do_not_divide_heads_are_refused(tmp_path: Path, pipegraph: Command) -> None:
    """4 ranks would have half a head of keys each."""
    pytest.importorskip("transformers")
    model = ROOT / "tests/models/llama.py"
    assert pipegraph("split", model, "--points", "model.layers.2", "-o", tmp_path / "llama").code == 0
    done = pipegraph("run", tmp_path / "llama", "--nproc", 8, "--tp", 4, "--kernels", "eager")
    assert done.code == 2
    assert "stage 0" in done.err and "along tp" in done.err
    assert "self_attn: " in done.err
    assert "a tp that divides" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--nproc", 3, "--tp", 2],
            "no mesh of pp × tp 2, which takes 2 for each rank of a pipeline.\nTry: --nproc 4.",
        ),
        (["--dp-shard", 2, "--mesh-order", "pp,tp"], "Try: --mesh-order pp,tp,dp_replicate,dp_shard"),
        (["--tp", 2], "in the model's file, and split it again"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(
    pipegraph: Command, chain: Path, options: Sequence[object], message: str
) -> None:
    done = pipegraph("run", chain, *options)
    assert done.code == 2
    assert message in done.err
