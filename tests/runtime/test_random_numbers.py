"""Random numbers under `Pipeline(seed=)`: the same for any cut, schedule, number of processes and recompute."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import UNSET
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipegraph
from pipegraph.errors import ArgumentError, PipegraphError, RuntimeFault
from pipegraph.package import Manifest
from tests.messages import refused
from tests.runtime import random_models as models
from tests.runtime import ranks
from tests.runtime.pipelines import pipeline
from tests.slow import cases

Losses = list[float | None]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    models.write_packages(folder)
    return folder


@pytest.fixture(scope="module")
def losses(packages: Path) -> Losses:
    """Those of the model in one stage."""
    step_losses = models.train(models.start(packages / "one"))
    assert len({*step_losses}) == len(step_losses)
    return step_losses


@pytest.mark.parametrize(
    ("cut", "schedule", "recompute"),
    [
        ("two", "1f1b", "none"),
        pytest.param("two", "gpipe", "block", marks=pytest.mark.slow),
        ("three", "1f1b", "min-cut"),
        ("four", "zb-v", "block"),
        pytest.param("four", "interleaved-1f1b", "none", marks=pytest.mark.slow),
        ("inside", "zb-v", "none"),
        pytest.param("inside", "1f1b", "block", marks=pytest.mark.slow),
    ],
)
def test_no_cut_schedule_or_recompute_changes_them(
    packages: Path, losses: Losses, cut: str, schedule: str, recompute: str
) -> None:
    assert models.train(models.start(packages / cut, schedule, recompute=recompute)) == losses


@pytest.mark.parametrize(
    ("cut", "schedule", "kernels"),
    [
        ("two", "1f1b", "autograd"),
        ("inside", "zb-v", "eager"),
        pytest.param("two", "1f1b", "eager", marks=pytest.mark.slow),
        pytest.param("inside", "zb-v", "autograd", marks=pytest.mark.slow),
    ],
)
def test_nor_do_processes_or_kernels_that_run_uncompiled(
    packages: Path, losses: Losses, cut: str, schedule: str, kernels: str
) -> None:
    losses_by_rank = ranks.run(models.train_rank, 2, str(packages / cut), schedule, {"kernels": kernels})
    pipeline_losses = next(series for series in losses_by_rank if series[0] is not None)
    assert pipeline_losses == pytest.approx(losses, rel=1e-6)


def test_each_step_microbatch_and_seed_has_its_own(packages: Path, losses: Losses) -> None:
    assert models.train(models.start(packages / "two", seed=8)) != losses
    pipe = models.start(packages / "two")
    batch = models.tokens(1).expand(models.MICROBATCHES, -1)
    steps = [pipe.step(batch, target=batch, return_losses=True).losses for _ in range(2)]
    microbatch_losses = torch.cat([tensor for tensor in steps if tensor is not None]).tolist()
    assert len({*microbatch_losses}) == 2 * models.MICROBATCHES


def test_layers_and_calls_of_one_module_have_their_own(tmp_path: Path) -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ModuleList(nn.Dropout(0.5) for _ in range(2))
            self.shared, self.scale = nn.Dropout(0.5), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            outputs = [dropout(x) for dropout in (*self.own, self.shared, self.shared)]
            return self.scale(torch.stack(outputs, -1)[..., None])

    x = torch.ones(1, 64)
    package = pipegraph.write_package(pipegraph.plan(pipegraph.capture(Noise(), (x,)), stages=1), tmp_path / "package")
    pipe = pipeline(package, "1f1b", kernels="eager", loss_fn=lambda output, _: output.mean(), seed=0)
    output = pipe.step(x, target=None, return_outputs=True).outputs
    masks = {tuple(column.tolist()) for column in output[0, :, :, 0].T}
    assert len(masks) == 4


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_them(packages: Path, losses: Losses, tmp_path: Path) -> None:
    pipe = models.start(packages / "inside", "zb-v")
    assert models.train(pipe, 2) == losses[:2]
    pipe.save(tmp_path, step=1)  # as with two accumulated steps
    resumed = models.start(packages / "three")
    resumed.load(tmp_path)
    assert models.train(resumed, 1) == losses[2:]


def test_an_evaluation_draws_its_own_and_moves_nothing_on(packages: Path, losses: Losses) -> None:
    pipe = models.start(packages / "two")
    batch = models.tokens(2 * models.MICROBATCHES)
    first, again = (pipe.evaluate(batch, target=batch).loss for _ in range(2))
    assert first == again != losses[0]
    assert models.train(pipe) == losses


def test_data_parallel_ranks_differ(packages: Path) -> None:
    first, second = ranks.run(models.replicas, 2, str(packages / "one"), "dp_shard")
    assert len({*first, *second}) == 2 * models.MICROBATCHES


@pytest.mark.slow
def test_tensor_parallel_ranks_agree(packages: Path) -> None:
    first, second = ranks.run(models.replicas, 2, str(packages / "one"), "tp")
    assert first == second


def test_torchs_generators_stay_as_they_are_and_are_used_without_a_seed(packages: Path, losses: Losses) -> None:
    torch.manual_seed(0)
    generator_state = torch.get_rng_state()
    models.train(models.start(packages / "two"), 1)
    assert torch.equal(generator_state, torch.get_rng_state())
    first = models.train(models.start(packages / "two", seed=None))
    torch.set_rng_state(generator_state)
    assert models.train(models.start(packages / "two", seed=None)) == first != losses


def test_a_stage_lists_what_is_called_after_other_modules(packages: Path) -> None:
    names = ("one", "two", "inside")
    unsplit, two, inside = (Manifest.read(packages / name / "pipeline.json").stages for name in names)
    assert unsplit[0].draws is UNSET
    assert two[1].draws == {"body": ("body#1",), "body.between": ("body.between#2", "body.between#3")}
    assert inside[1].draws == {"body.layers.1": ("body.layers.1#2",), "body.between": ("body.between#1",)}


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
@pytest.mark.parametrize("reentrant", cases([False, True], slow=[False]))
def test_what_a_checkpoint_runs_again_draws_the_same(
    packages: Path, losses: Losses, reentrant: bool, kernels: str
) -> None:
    """One checkpoint inside another, around modules that draw and around what draws by itself."""

    def checkpointed(stage: nn.Module) -> None:
        for name in ("body.layers.1", "body.layers.1.attention", "body.layers.3"):
            layer: Any = stage.get_submodule(name)
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)

    warned = pytest.warns(UserWarning, match="left to autograd") if reentrant and kernels == "eager" else nullcontext()
    with warned:
        pipe = models.start(packages / "one", kernels=kernels, parallelize_fn=checkpointed)
        assert models.train(pipe) == pytest.approx(losses, rel=1e-6)


def test_a_backward_that_draws_by_itself_is_refused(packages: Path) -> None:
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient + torch.randn_like(gradient)

    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return models.loss(Noise.apply(output), target)

    pipe = models.start(packages / "one", kernels="autograd", loss_fn=noisy)
    with refused(RuntimeFault, "action 0B0", "aten.randn_like", "seed=", advice="torch.utils.checkpoint"):
        models.train(pipe)


@pytest.mark.slow
def test_a_batch_draws_the_same_on_any_number_of_data_parallel_ranks(packages: Path) -> None:
    pipe = models.start(packages / "one", microbatches=2 * models.MICROBATCHES)
    batch = models.tokens(1).expand(2 * models.MICROBATCHES, -1)
    alone = pipe.step(batch, target=batch, return_losses=True).losses
    first, second = ranks.run(models.replicas, 2, str(packages / "one"), "dp_replicate")
    assert alone is not None and [*first, *second] == alone.tolist()


@pytest.mark.parametrize(
    ("seed", "kernels", "kind", "advice"),
    [("0", "eager", ArgumentError, "seed=0"), (0, None, PipegraphError, "draw_from")],
)
def test_what_cannot_be_seeded_is_refused(
    packages: Path, seed: Any, kernels: Any, kind: type[PipegraphError], advice: str
) -> None:
    with refused(kind, "seed", advice=advice):
        models.start(packages / "one", seed=seed, kernels=kernels or (lambda *_: object()))
