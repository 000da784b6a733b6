"""Models on a GPU: one step of a pipeline with all stages on it is compared with that of the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pipegraph
from pipegraph.graph.sources import load
from pipegraph.package import Package

ROOT = Path(__file__).parents[2]
DEVICE = "cuda"
MICROBATCHES = 4

CUTS = {
    "examples/transformer.py:build_tiny_model": "layers.2,layers.4.linear1,layers.7:end",
    "examples/unet.py": "down.1.3,bottom,up.0.convolution",
    "tests/models/batch_norm.py": "layers.1,layers.2.2,layers.3",
    "tests/models/llama.py": "model.layers.0:end,model.layers.1.mlp,model.layers.2.self_attn",
    "tests/models/mixture_of_experts.py": "layers.1,layers.1.feed_forward,layers.3",
    "tests/models/rotary.py": "layers.1.attention.out,layers.2,layers.4.mlp.1",
    "tests/models/t5.py": "t5.encoder.block.1.layer.1,t5.decoder.block.0,t5.lm_head",
}


@dataclass(frozen=True)
class Split:
    """A model, its package in four stages, and a microbatch."""

    model: nn.Module
    package: Package
    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]

    def batch(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs on the device, as often as there are microbatches, each time in another order of rows."""

        def repeated(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            return torch.cat([value.roll(number, 0) for number in range(MICROBATCHES)]).to(DEVICE)

        args, kwargs = pytree.tree_map(repeated, (self.args, dict(self.kwargs)))
        return args, kwargs


def split(folder: Path, file: str, dtype: torch.dtype | None = None, points: str | None = None) -> Split:
    """Capture a model of the repository on the CPU, and write its package, cut as in `CUTS` by default."""
    source = load(str(ROOT / file))
    model = source.model if dtype is None else source.model.to(dtype)
    captured = pipegraph.capture(model, source.args, source.kwargs)
    plan = pipegraph.plan(captured, points=(points or CUTS[file]).split(","))
    return Split(model, pipegraph.write_package(plan, folder / "package"), source.args, source.kwargs)


def loss_of(output: Any, _: object = None) -> Tensor:
    """Some number that depends on each element of each output."""
    floats = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([F.smooth_l1_loss(leaf.float(), torch.ones_like(leaf).float()) for leaf in floats]).sum()


@dataclass(frozen=True)
class Step:
    loss: Tensor
    gradients: dict[str, Tensor]


def of_model(case: Split, autocast: torch.dtype | None = None) -> Step:
    """A step of the unsplit model on the GPU, one microbatch after the other."""
    model = copy.deepcopy(case.model).to(DEVICE).train()
    args, kwargs = case.batch()
    losses = []
    for number in range(MICROBATCHES):

        def rows(value: object, number: int = number) -> object:
            return value.chunk(MICROBATCHES)[number] if isinstance(value, Tensor) else value

        positional, named = pytree.tree_map(rows, (args, kwargs))
        with nullcontext() if autocast is None else torch.autocast(DEVICE, autocast):
            loss = loss_of(model(*positional, **named))
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Step(torch.stack(losses).mean(), gradients)


def of_pipeline(case: Split, schedule: str, kernels: str, autocast: torch.dtype | None = None, **options: Any) -> Step:
    """The same step of the pipeline."""
    pipe = pipegraph.Pipeline(case.package, schedule, MICROBATCHES, loss_of, kernels=kernels, device=DEVICE, **options)
    for stage in pipe.stages.values():
        stage.train()
    args, kwargs = case.batch()
    with nullcontext() if autocast is None else torch.autocast(DEVICE, autocast):
        result = pipe.step(*args, target=None, **kwargs)
    assert result.loss is not None
    stored = case.package.manifest.stored_name
    gradients = {
        stored(name): parameter.grad
        for stage in pipe.stages.values()
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    }
    assert {gradient.device.type for gradient in gradients.values()} == {DEVICE}
    return Step(result.loss, gradients)


def difference(actual: Step, expected: Step) -> float:
    """The largest difference of the loss or a gradient, relative to the largest value of it.

    What is zero but for rounding is compared with a thousandth of the largest gradient.
    """
    assert actual.gradients.keys() == expected.gradients.keys()
    floor = max(float(tensor.abs().max()) for tensor in expected.gradients.values()) / 1000
    worst = float((actual.loss - expected.loss).abs() / expected.loss.abs())
    for name, gradient in expected.gradients.items():
        scale = max(float(gradient.abs().max()), floor)
        worst = max(worst, float((actual.gradients[name].float() - gradient.float()).abs().max()) / scale)
    return worst
