"""Functions that ranks run: stages whose parameters two ranks share, compared with the same stages in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close

from pipegraph.package import Package
from tests.runtime.mesh_messages import Messages
from tests.runtime.meshes import full_tensor, make, near
from tests.runtime.packages import Sketch, Stage

WIDTH = 3
DTYPES = ("bfloat16", "float32", "complex64")


def several_dtypes() -> Sketch:
    """Two stages of two layers each, with parameters of several dtypes, and one without elements."""
    parts, values = [], {"x": ("float32", ("batch", WIDTH), False)}
    for index in range(2):
        source, name = ("x", "h") if index == 0 else ("h", "y")
        layers = ", ".join(
            "nn.ParameterDict({"
            f"'weight': torch.rand({WIDTH}, {WIDTH}, dtype=torch.bfloat16), "
            f"'none': torch.rand(0, {WIDTH}), 'scale': 1 + torch.rand({WIDTH}) / 999, "
            f"'phase': torch.rand({WIDTH}, 2, dtype=torch.complex64)}})"
            for _ in range(2)
        )
        body = (
            f"for layer in self.layers{index}:\n"
            f"    {source} = torch.cat([{source}, layer['none']]).to(torch.bfloat16) @ layer['weight']\n"
            f"    {source} = {source}.float() * layer['scale']\n"
            f"    {source} = {source} + (layer['phase'] * layer['phase'] * 1j).real.sum(1)\n"
        )
        parts.append(Stage(source, name, f"self.layers{index} = nn.ModuleList([{layers}])", f"{body}return {source}"))
        values[name] = ("float32", ("batch", WIDTH), True)
    return Sketch(tuple(parts), values, "y")


def square(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


def train_beside_one_process(rank: int, folder: str, options: dict[str, Any]) -> tuple[int, int]:
    """Two accumulated steps. How many gathers and reductions the first of them sent."""
    reduce_dtype = options.pop("reduce_dtype", None)
    if reduce_dtype is not None:
        options["fsdp"] = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype)}
    shape, schedule = {"pp": 1, "dp_shard": 2}, "looped-bfs"
    pipe, _ = make(folder, shape, schedule, 2, loss_fn=square, **options)
    reference = [copy.deepcopy(stage) for stage in map(Package.open(folder).load_stage, range(len(pipe.stages)))]
    counts = []
    for number in range(2):
        x = torch.rand(8, WIDTH, generator=torch.Generator().manual_seed(number))
        with Messages() as messages:
            loss = pipe.step(x[4 * rank : 4 * rank + 4]).loss
        counts.append((messages.counts["_allgather_base_"], messages.counts["alltoall_base_"]))
        expected = square(nn.Sequential(*reference)(x), None)
        expected.backward()
        near(loss, expected.detach(), "loss")
    gradients = {name: parameter.grad for stage in reference for name, parameter in stage.named_parameters()}
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == gradients[name].dtype
        is_rounded = parameter.dtype == torch.bfloat16  # for each microbatch
        tolerance = {"rtol": 2e-2, "atol": 1e-2} if is_rounded else {"rtol": 1e-5, "atol": 1e-6}
        assert_close(full_tensor(parameter.grad), gradients[name], msg=name, **tolerance)
    norm = torch.nn.utils.clip_grad_norm_([parameter for stage in reference for parameter in stage.parameters()], 0.1)
    assert_close(pipe.clip_grad_norm_(0.1), norm, rtol=1e-2, atol=0)
    return counts[0]


def evaluate_in_inference_mode(rank: int, folder: str) -> list[float]:
    """Losses of an evaluation in inference mode, of a step after it, and of another evaluation."""
    pipe, _ = make(folder, {"dp_shard": 2}, "looped-bfs", 2, loss_fn=square)
    x = torch.ones(4, WIDTH)
    with torch.inference_mode():
        first_loss = pipe.evaluate(x, target=None).loss
    trained = pipe.step(x).loss
    with torch.inference_mode():
        last_loss = pipe.evaluate(x, target=None).loss
    return [float(loss) for loss in (first_loss, trained, last_loss)]
