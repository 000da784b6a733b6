"""What users of other pipelines ran into, by the public face. Each test says what happens elsewhere."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import pipegraph
from pipegraph.package import Package
from tests.equal_work import equal_work_shared
from tests.messages import refused
from tests.models import buffers, chain, dropout, masked, rotary
from tests.parity.cases import ROOT
from tests.parity.training import KERNELS, TOLERANCE
from tests.parity.workshop import Workshop
from tests.slow import cases


def write(
    model: nn.Module, out: Path, inputs: Any, points: list[str] | None = None, stages: int | None = None
) -> Package:
    with equal_work_shared():
        captured = pipegraph.capture(model, inputs)
    plan = pipegraph.plan(captured, points=points, stages=stages, balance=None if points else "uniform")
    return pipegraph.write_package(plan, out)


def pipeline(package: Package, microbatches: int, loss_fn: Any = chain.loss_fn) -> pipegraph.Pipeline:
    return pipegraph.Pipeline(package, "1f1b", microbatches=microbatches, loss_fn=loss_fn, kernels=KERNELS)


def gradients(holder: nn.Module | pipegraph.Pipeline) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in holder.named_parameters() if parameter.grad is not None}


@pytest.mark.slow  # tests/runtime/test_ties.py has smaller models
@pytest.mark.timeout(300)  # as of the matrix, whose work it may be the first to need
def test_item_2_tied_weights_stay_one_weight(shared_workshop: Workshop) -> None:
    """Elsewhere each stage trains its own copy, and the copies drift apart."""
    ranks = shared_workshop.in_processes("llama", 2)
    assert all(rank["differences"][f"gradient {name} 1"] <= TOLERANCE for rank, name in zip(ranks, NAMES, strict=True))
    first, last = (rank["copies"]["model.embed_tokens.weight"] for rank in ranks)
    assert first == last


NAMES = ("model.embed_tokens.weight", "lm_head.weight")


class Gated(nn.Module):
    """A float gate, without gradient, that is made from an activation and read by every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        gate = torch.sigmoid(x.detach())
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)) * gate
        return x


def test_item_3_a_float_without_gradient_crosses_two_stages(tmp_path: Path) -> None:
    """Elsewhere: "Backward of skip connections not supported yet"."""
    model, x = Gated(), torch.randn(4, 8)
    package = write(model, tmp_path / "gated", (x[:2],), points=["layers.1", "layers.2", "layers.3"])
    manifest = package.manifest
    gates = [value for value in manifest.values.values() if value.consumers == (1, 2, 3)]
    assert [(gate.dtype, gate.producer, gate.requires_grad) for gate in gates] == [("float32", 0, False)]
    assert_same_training(package, model, (x,), torch.zeros(4, 8), chain.loss_fn)


@pytest.mark.parametrize("module", [pytest.param(rotary, marks=pytest.mark.slow), masked], ids=["rotary", "masked"])
def test_item_3_what_holds_no_parameter_is_computed_where_it_is_used(module: Any, tmp_path: Path) -> None:
    """Rotary tables and padding masks need not cross at all."""
    model = module.build_model()
    package = write(model, tmp_path / "package", module.example_inputs, stages=3)
    assert [value.requires_grad for value in package.manifest.values.values() if value.producer in (0, 1)] == [True] * 2
    batch = tuple(torch.cat([example, example]) for example in module.example_inputs)
    assert_same_training(package, model, batch, torch.cat([module.example_target] * 2), module.loss_fn)


def assert_same_training(package: Package, model: nn.Module, inputs: Any, target: Tensor, loss_fn: Any) -> None:
    """One step in two microbatches against plain autograd."""
    pipe = pipeline(package, 2, loss_fn)
    result = pipe.step(*inputs, target=target)
    expected = loss_fn(model(*inputs), target)
    expected.backward()
    assert_close(result.loss, expected.detach())
    assert_close(gradients(pipe), gradients(model))


def test_item_4_a_batch_of_another_size_is_taken(tmp_path: Path) -> None:
    """Elsewhere four rows and then two give four rows, two of them stale; five in two microbatches crash."""
    model = chain.build_model()
    pipe = pipeline(write(model, tmp_path / "chain", (torch.randn(2, 8),), stages=2), microbatches=2)
    for rows in (4, 2, 5, 1, 4):
        x = torch.randn(rows, 8)
        assert_close(pipe.eval(x), model(x).detach())


def test_item_5_evaluation_mode_switches_dropout_off(tmp_path: Path) -> None:
    """Elsewhere `.eval()` on a traced stage leaves it on."""
    model = dropout.build_model()
    pipe = pipeline(write(model, tmp_path / "dropout", dropout.example_inputs, stages=2), microbatches=1)
    (x,) = dropout.example_inputs
    assert not torch.equal(pipe.eval(x), pipe.eval(x))
    for stage in pipe.stages.values():
        stage.eval()
    assert_close(pipe.eval(x), model.eval()(x).detach())
    pipe.stages[0].train()
    assert not torch.equal(pipe.eval(x), pipe.eval(x))


def test_item_6_the_state_dict_has_the_keys_of_the_model(tmp_path: Path) -> None:
    """Elsewhere non-persistent buffers become persistent."""
    model = buffers.build_model()
    pipe = pipeline(write(model, tmp_path / "buffers", buffers.example_inputs, stages=3), microbatches=1)
    state, expected = pipe.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert_close(state, dict(expected))
    named = {name: buffer for stage in pipe.stages.values() for name, buffer in stage.named_buffers()}
    assert_close(named["layers.3.table"], model.get_buffer("layers.3.table"))  # which is not in the state


def test_item_7_a_model_can_be_split_again(tmp_path: Path) -> None:
    """Elsewhere the split changes the user's module, and the next one recurses for ever."""
    model = chain.build_model()
    original = copy.deepcopy(model)
    captured = pipegraph.capture(model, chain.example_inputs)
    for name, points in (("first", ["layers.2"]), ("other", ["layers.1", "layers.3"]), ("again", ["layers.2"])):
        pipegraph.write_package(pipegraph.plan(captured, points=points), tmp_path / name)
    write(model, tmp_path / "last", chain.example_inputs, points=["layers.2"])
    assert contents(tmp_path / "first") == contents(tmp_path / "again") == contents(tmp_path / "last")
    assert repr(model) == repr(original)
    assert_close(dict(model.state_dict()), dict(original.state_dict()), rtol=0, atol=0)
    assert_close(model(*chain.example_inputs), original(*chain.example_inputs), rtol=0, atol=0)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_item_8_training_and_evaluation_in_turns_run_no_extra_forward(tmp_path: Path) -> None:
    """Elsewhere the second switch infers all shapes again: one more forward per stage."""
    package = write(chain.build_model(), tmp_path / "chain", (torch.randn(2, 8),), stages=3)
    pipe = pipeline(package, microbatches=4)
    forwards: Counter[int] = Counter()
    for index, stage in pipe.stages.items():
        stage.register_forward_pre_hook(lambda module, args, index=index: forwards.update([index]))
    x, target = torch.randn(8, 8), torch.randn(8, 2)
    pipe.step(x, target=target)
    pipe.evaluate(x)
    traced = dict(forwards)
    for _ in range(2):
        pipe.step(x, target=target)
        pipe.evaluate(x)
    assert forwards == traced  # kernels that are traced call the module no more


RANK = """
import sys, torch, pipegraph
loss = lambda output, _: output.square().mean()
pipe = pipegraph.Pipeline(sys.argv[1], microbatches=4, loss_fn=loss, kernels="autograd")
for _ in range(20_000):
    pipe.step(torch.ones(8, 8))
    if sys.argv[2:]:
        print(sys.argv.pop(), flush=True)
"""


@pytest.mark.slow  # tests/runtime/test_faults.py has more of them
def test_item_10_a_rank_that_dies_is_named_by_the_others(tmp_path: Path) -> None:
    """Elsewhere its peers say only "Connection closed by peer"."""
    package = write(chain.build_model(), tmp_path / "chain", (torch.randn(2, 8),), stages=3)
    # Ranks that are started by hand, through env://, on a store whose port the system chose.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(package.path), "stepped"],
            env=os.environ | meeting | {"PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "stepped\n"
        ranks[1].kill()
        errors = [rank.communicate(timeout=20)[1] for rank in ranks]  # 10 seconds, and those of a busy machine
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for index in (0, 2):
        assert ranks[index].returncode > 0
        # In an action, or, where its own part of a step was done, in the next one's first.
        where = rf"rank {index} stopped in stage {index}, action {index}\w+, microbatch \d, waiting for rank 1: "
        assert re.search(f"{where}rank 1 is gone \\(", errors[index]), errors[index]


def test_item_11_gradients_accumulate_over_steps(tmp_path: Path) -> None:
    """Elsewhere the scaling at the end of a step divides what earlier steps left in `.grad` once more."""
    model = chain.build_model()
    pipe = pipeline(write(model, tmp_path / "chain", (torch.randn(2, 8),), stages=2), microbatches=3)
    for _ in range(3):
        x, target = torch.randn(6, 8), torch.randn(6, 2)
        pipe.step(x, target=target)
        chain.loss_fn(model(x), target).backward()
        assert_close(gradients(pipe), gradients(model))


@pytest.mark.parametrize("layers", cases([3, 5], slow=[5]))
def test_item_13_no_layer_is_dropped_where_they_do_not_divide_evenly(layers: int, tmp_path: Path) -> None:
    """Elsewhere what is left over goes missing."""
    model = rotary.RotaryTransformer(layers=layers)
    package = write(model, tmp_path / "rotary", rotary.example_inputs, stages=4)
    stages = [stage.parameters for stage in package.manifest.stages]
    assert all(stages)
    assert [name for stage in stages for name in stage] == [name for name, _ in model.named_parameters()]
    pipe = pipeline(package, microbatches=1)
    assert_close(pipe.eval(*rotary.example_inputs), model(*rotary.example_inputs).detach())


def test_item_15_a_split_point_starts_a_stage() -> None:
    """Elsewhere it is unclear whether `layers.2` is in or out, and a typo complains of group sizes."""
    captured = pipegraph.capture(chain.build_model(), chain.example_inputs)
    described = ["stage 0: layers.0 – layers.1", "stage 1: layers.2 – layers.3, head"]
    for point in ("layers.2", "layers.1:end"):
        assert pipegraph.plan(captured, points=[point]).describe() == described
    with refused(pipegraph.PlanError, "layer.2", '"layers.2"', advice="layers.2"):
        pipegraph.plan(captured, points=["layer.2"])
