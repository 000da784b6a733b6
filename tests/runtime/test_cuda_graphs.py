"""Pipelines whose kernels are recorded. A call that is made again stands for a graph; `tests/gpu` has real ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipegraph import Pipeline
from pipegraph.errors import PipegraphError, RuntimeFault
from pipegraph.kernels import maker
from pipegraph.recompute import Recompute
from pipegraph.runtime.kernel_makers import graph_recorder
from pipegraph.schedule import names
from pipegraph.schedule.recipes import trains
from tests.kernels.recording import recorded_kernels
from tests.messages import refused
from tests.runtime import rank_functions, ranks
from tests.runtime.packages import batch, loss, write
from tests.runtime.parity import assert_parity
from tests.runtime.sketches import PARITY, chain, normed, tied
from tests.slow import LIKE_OTHERS, cases


@pytest.mark.parametrize("name", PARITY)
def test_parity_with_the_unsplit_model(name: str, tmp_path: Path) -> None:
    """With what was recorded in the first steps, also where two steps are accumulated: ties keep sums of their own."""
    folder = write(PARITY[name](), tmp_path / name)
    assert_parity(folder, "zb-h1", microbatches=5, steps=4, accumulate=2, kernels=recorded_kernels)


@pytest.mark.parametrize("schedule", cases([name for name in names() if trains(name)], slow=LIKE_OTHERS))
def test_parity_under_every_schedule(schedule: str, tmp_path: Path) -> None:
    folder = write(chain(4), tmp_path / "chain")
    assert_parity(folder, schedule, microbatches=4, steps=3, kernels=recorded_kernels)


def test_parity_between_processes(tmp_path: Path) -> None:
    folder = str(write(tied(), tmp_path / "tied"))
    cases = [(folder, name) for name in ("1f1b", "zb-h1")]
    assert ranks.run(rank_functions.parity, 3, cases, recorded_kernels) == ["equal"] * 3


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_dropout_of_a_seed_statistics_and_evaluation(precision: str | None, tmp_path: Path) -> None:
    folder = write(normed(), tmp_path / "normed")
    factories: Mapping[str, Any] = {"recorded": recorded_kernels, "launched": maker("eager")}
    options: Mapping[str, Any] = {"seed": 3, "precision": precision}
    pipes = {name: Pipeline(folder, "1f1b", 4, loss, kernels=factory, **options) for name, factory in factories.items()}
    for number in range(4):
        results = {}
        for name, pipe in pipes.items():
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
            results[name] = [pipe.step(x, target=torch.zeros(16)).loss, pipe.evaluate(x, target=torch.zeros(16)).loss]
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        torch.testing.assert_close(results["recorded"], results["launched"], rtol=0, atol=0)
    torch.testing.assert_close(pipes["recorded"].state_dict(), pipes["launched"].state_dict(), rtol=0, atol=0)


def test_a_step_that_failed_leaves_the_memory_free(tmp_path: Path) -> None:
    pipe = Pipeline(write(chain(2), tmp_path / "chain"), "1f1b", 4, loss, kernels=recorded_kernels)
    (x,) = batch(pipe.package.manifest, 4).values()
    expected = [pipe.step(x, target=torch.zeros(8)).loss for _ in range(3)]
    with refused(RuntimeFault, "stage 1", "size of tensor"):
        pipe.step(x, target=torch.zeros(8, 3, 2))
    for parameter in pipe.parameters():
        parameter.grad = None
    assert pipe.step(x, target=torch.zeros(8)).loss == expected[0]


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    folder = write(chain(2), tmp_path / "chain")
    with refused(PipegraphError, "cuda_graphs=True", "cpu", advice='device="cuda"'):
        Pipeline(folder, loss_fn=loss, cuda_graphs=True)
    gpu, plain, stages = torch.device("cuda"), (Recompute(),), {0: nn.Linear(2, 2)}
    with refused(PipegraphError, "cuda_graphs=True", "function of yours", advice='kernels="inductor"'):
        graph_recorder(recorded_kernels, gpu, plain, stages)
    with refused(PipegraphError, "cuda_graphs=True", 'recompute="offload"', advice='recompute="min-cut"'):
        graph_recorder("inductor", gpu, (*plain, Recompute.parse({"layers.*": "offload"})), stages)
    assert graph_recorder("inductor", gpu, plain, stages) is not None
