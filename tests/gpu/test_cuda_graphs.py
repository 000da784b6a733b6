"""Kernels recorded as CUDA graphs: they train as the same kernels do that are launched one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import pipegraph
from pipegraph import Pipeline
from pipegraph.kernels.cuda_graphs import CudaGraphRecorder
from pipegraph.schedule import names
from pipegraph.schedule.recipes import trains
from tests.gpu.gpu_models import DEVICE, MICROBATCHES, Split, loss_of, split

pytestmark = pytest.mark.timeout(300)

STEPS = 4


class Counter:
    recorded = replayed = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How many graphs are recorded, and how often one is launched."""
    counter, record = Counter(), CudaGraphRecorder.record

    def counting(self: Any, call: Callable[[], Any]) -> Any:
        result, replay = record(self, call)
        counter.recorded += 1

        def counting_replay() -> None:
            counter.replayed += 1
            replay()

        return result, counting_replay

    monkeypatch.setattr(CudaGraphRecorder, "record", counting)
    return counter


def train(case: Split, schedule: str, steps: int = STEPS, evaluates: bool = False, **options: Any) -> list[Tensor]:
    """What some steps of AdamW lead to: their losses, and the state after them."""
    torch.manual_seed(0)
    pipe = Pipeline(case.package, schedule, MICROBATCHES, loss_of, device=DEVICE, **options)
    for stage in pipe.stages.values():
        stage.train()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    args, kwargs = case.batch()
    losses = []
    for _ in range(steps):
        losses.append(pipe.step(*args, target=None, **kwargs).loss)
        if evaluates:
            losses.append(pipe.evaluate(*args, target=None, **kwargs).loss)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = [tensor for tensor in pipe.state_dict().values() if isinstance(tensor, Tensor)]
    return [torch.stack(losses), *(tensor.detach().clone() for tensor in state)]


def assert_alike(case: Split, schedule: str, tolerance: float = 2e-5, **options: Any) -> None:
    launched, recorded = (train(case, schedule, cuda_graphs=enabled, **options) for enabled in (False, True))
    assert_close(recorded, launched, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("file", "kernels"),
    [
        ("tests/models/llama.py", "inductor"),
        ("tests/models/batch_norm.py", "eager"),
        ("tests/models/mixture_of_experts.py", "eager"),
        ("tests/models/t5.py", "eager"),
        ("examples/unet.py", "eager"),
    ],
)
def test_models(file: str, kernels: str, counted: Counter, tmp_path: Path) -> None:
    # A bias before a batch norm has a gradient of rounding alone, of which AdamW makes whole steps.
    tolerance = 3e-3 if "batch_norm" in file or "unet" in file else 2e-5
    assert_alike(split(tmp_path, file), "zb-v", tolerance, kernels=kernels)
    assert counted.replayed > counted.recorded > 3 * MICROBATCHES


@pytest.mark.parametrize("schedule", [name for name in names() if trains(name)])
def test_schedules(schedule: str, counted: Counter, tmp_path: Path) -> None:
    assert_alike(split(tmp_path, "tests/models/rotary.py"), schedule, kernels="eager", evaluates=True)
    assert counted.replayed > counted.recorded > 0


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
def test_dropout_of_a_seed(kernels: str, counted: Counter, tmp_path: Path) -> None:
    case = split(tmp_path, "tests/models/dropout.py", points="layers.1,layers.2,layers.3")
    assert_alike(case, "1f1b", kernels=kernels, seed=3)
    assert counted.replayed > counted.recorded > 0


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
def test_dropout_of_torchs_generator_differs_from_step_to_step(kernels: str, tmp_path: Path) -> None:
    case = split(tmp_path, "tests/models/dropout.py", points="layers.1,layers.2,layers.3")
    pipe = Pipeline(case.package, "1f1b", 1, loss_of, device=DEVICE, kernels=kernels, cuda_graphs=True)
    for stage in pipe.stages.values():
        stage.train()
    args, kwargs = (copy.copy(inputs) for inputs in case.batch())
    losses = [float(pipe.step(*args, target=None, **kwargs).loss) for _ in range(6)]
    assert len(set(losses)) == 6


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"recompute": "block"}, {"recompute": "none"}])
def test_options(options: dict[str, Any], counted: Counter, tmp_path: Path) -> None:
    assert_alike(split(tmp_path, "tests/models/llama.py"), "zb-h1", 1e-3, kernels="eager", **options)
    assert counted.replayed > counted.recorded > 0


def test_memory_does_not_grow(tmp_path: Path) -> None:
    case = split(tmp_path, "tests/models/llama.py")
    pipe = Pipeline(case.package, "zb-v", MICROBATCHES, loss_of, device=DEVICE, kernels="eager", cuda_graphs=True)
    args, kwargs = case.batch()
    used = []
    for _ in range(8):
        pipe.step(*args, target=None, **kwargs)
        for parameter in pipe.parameters():
            parameter.grad = None
        used.append(torch.cuda.memory_allocated())
    assert len(set(used[4:])) == 1, used


@torch.library.custom_op("pipegraph_tests::on_the_host", mutates_args=())
def on_the_host(x: Tensor) -> Tensor:
    """Waits for the GPU, which nothing that is recorded may do."""
    return x * float(x.abs().max().cpu() > 0)


on_the_host.register_fake(torch.empty_like)
on_the_host.register_autograd(lambda context, gradient: gradient)


class Waiting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(on_the_host(torch.tanh(self.first(x))))


def test_what_waits_for_the_gpu_is_launched(tmp_path: Path) -> None:
    """And what is recorded after it is right."""
    args = (torch.randn(4, 8),)
    model = Waiting()
    plan = pipegraph.plan(pipegraph.capture(model, args), points=["second"])
    case = Split(model, pipegraph.write_package(plan, tmp_path / "package"), args, {})
    with pytest.warns(UserWarning, match="cannot be recorded as a CUDA graph"):
        assert_alike(case, "zb-h1", kernels="eager")


def test_one_rank_over_nccl(tmp_path: Path) -> None:
    from tests.gpu import nccl_rank
    from tests.runtime import meshes, ranks
    from tests.runtime.packages import write

    folder = str(write(meshes.perceptrons(1), tmp_path / "perceptrons"))
    cases = ({"pp": 1}, {}), ({"pp": 1}, {"cuda_graphs": True}), ({"pp": 1, "dp_replicate": 1}, {"cuda_graphs": True})
    runs = []
    for case in cases:
        arguments = folder, *case
        runs += ranks.run(nccl_rank.losses, 1, *arguments, timeout=100.0, backend="cpu:gloo,cuda:nccl", method="spawn")
    assert isinstance(runs[0], list) and len(runs[0]) == nccl_rank.STEPS, runs
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    assert runs[2] == pytest.approx(runs[0], rel=1e-5)
