"""Steps under `torch.autocast`: what crosses between stages has the dtype that its stage makes."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import pipegraph
from tests.messages import warned
from tests.runtime import autocast_model, ranks
from tests.runtime import precision_models as models
from tests.runtime.pipelines import pipeline


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Split after a matrix product, which autocast computes in bfloat16, and after a sum with float32."""
    captured = pipegraph.capture(models.model(has_norm=False), (torch.randn(models.ROWS, models.WIDTH),))
    plan = pipegraph.plan(captured, points=["layers.1.down", "layers.2"])
    return str(pipegraph.write_package(plan, tmp_path_factory.mktemp("autocast") / "package").path)


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_a_step_is_that_of_the_unsplit_model(package: str, kernels: str) -> None:
    loss, gradients, dtypes = autocast_model.step(package, kernels)
    expected, of_model = autocast_model.reference()
    assert loss == expected
    assert_close(gradients, of_model, rtol=0, atol=0)
    assert dtypes[:2] == ["float32", "float32"] and dtypes[-2:] == ["float32", "bfloat16"]


def test_processes_send_it(package: str) -> None:
    alone = autocast_model.step(package, "eager")
    outcomes = ranks.run(autocast_model.on_rank, 3, package, "autograd")
    assert outcomes[2][0] == alone[0]
    together = {name: gradient for _, gradients, _ in outcomes for name, gradient in gradients.items()}
    assert_close(together, alone[1], rtol=0, atol=0)
    assert outcomes[1][2][-2:] == ["float32", "bfloat16"]


@pytest.mark.parametrize("chosen", [0, 1])
def test_a_rank_in_another_region_is_told(chosen: int, package: str) -> None:
    messages = ranks.run(autocast_model.only_on, 3, package, chosen)
    assert all("different regions of torch.autocast" in str(message) for message in messages)


def test_what_cannot_run_without_memory_is_cast(package: str) -> None:
    pipe = pipeline(package, loss_fn=models.loss, kernels="autograd")
    first = pipe.stages[0]
    first.register_forward_hook(lambda module, args, output: output if bool(output[0].isfinite().all()) else None)
    x, target = models.batch()
    with torch.autocast("cpu", torch.bfloat16), warned("stage 0", "autocast", "aten._local_scalar_dense"):
        pipe.step(x, target=target)
