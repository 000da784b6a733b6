"""A model of packed rows with image patches: every dynamic size may differ between the microbatches of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import init_device_mesh
from torch.testing import assert_close

import pipegraph
from pipegraph import Pipeline
from pipegraph.package import Package
from tests.runtime.packages import Reference, Sketch, Stage, write
from tests.runtime.pipelines import pipeline

# Of each microbatch: rows, length, offsets of documents, patches.
MICROBATCHES = (
    (2, 8, [0, 8], 3),
    (1, 16, [0, 3, 7, 16], 1),
    (3, 12, [0, 1, 5, 9, 12], 4),
    (2, 4, [0, 2, 4], 2),
    (1, 1, [0, 1], 1),
    (2, 8, [0, 5, 8], 3),
    (4, 6, [0, 6], 5),
    (1, 16, [0, 15, 16], 2),
)
LISTS = ("tokens", "patches", "offsets")


def sketch() -> Sketch:
    hidden = ("float32", ("batch", "length", 8), True)
    return Sketch(
        stages=(
            Stage(
                "tokens, patches",
                "a",
                "self.embed, self.patch = nn.Embedding(6, 8), nn.Linear(3, 8)",
                "return self.embed(tokens) + self.patch(patches).sum(0)",
            ),
            Stage("a", "b", "self.one = nn.Linear(8, 8)", "return torch.tanh(self.one(a)) + a.cumsum(1)"),
            Stage(
                "b, offsets",
                "c",
                "self.two = nn.Linear(8, 8)",
                "document = (torch.arange(b.shape[1])[:, None] >= offsets).sum(1)\n"
                "same = (document[:, None] == document).to(b.dtype)\n"
                "return torch.tanh(same @ self.two(b))",
            ),
            Stage("c, scale", "logits", "self.head = nn.Linear(8, 4)", "return self.head(c) * scale"),
        ),
        values={
            "tokens": ("int64", ("batch", "length"), False),
            "patches": ("float32", ("patches", 3), False),
            "offsets": ("int64", ("offsets",), False),
            "scale": ("float32", (4,), False),
            "a": hidden,
            "b": hidden,
            "c": hidden,
            "logits": ("float32", ("batch", "length", 4), True),
        },
        outputs="logits",
        sizes={"length": 6, "patches": 2, "offsets": 3},
        roles={"patches": "list", "offsets": "list", "scale": "whole"},
    )


def build(folder: Path) -> str:
    return str(write(sketch(), folder / "packed"))


def batch(count: int = 8) -> tuple[dict[str, Any], list[Tensor]]:
    """Lists of microbatches, and their targets."""
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {name: [] for name in LISTS}
    targets = []
    for rows, length, offsets, patches in MICROBATCHES[:count]:
        inputs["tokens"].append(torch.randint(6, (rows, length), generator=generator))
        inputs["patches"].append(torch.randn(patches, 3, generator=generator))
        inputs["offsets"].append(torch.tensor(offsets))
        targets.append(torch.randn(rows, length, 4, generator=generator))
    return {**inputs, "scale": torch.randn(4, generator=generator)}, targets


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def assert_is_the_step_of_the_model(pipe: Pipeline, needed_only: bool = False) -> None:
    """Outputs, loss, gradients and evaluation are those of the unsplit model, microbatch by microbatch.

    Args:
        needed_only: whether a rank is given the inputs of its stages alone.
    """
    inputs, targets = batch()
    reference = Reference(Package.open(pipe.package.path))
    outputs = [
        reference({name: value[index] if name in LISTS else value for name, value in inputs.items()})
        for index in range(len(targets))
    ]
    rows = sum(map(len, targets))
    losses = [loss(output, target) * len(target) / rows for output, target in zip(outputs, targets, strict=True)]
    total = torch.stack(losses).sum()
    total.backward()
    manifest = pipe.package.manifest
    is_last = len(manifest.stages) - 1 in pipe.stages
    passed = inputs
    if needed_only:
        input_names = {name for index in pipe.stages for name in manifest.stages[index].inputs}
        passed = {name: value if name in input_names else None for name, value in inputs.items()}
    target = targets if is_last or not needed_only else None
    for _ in range(2):  # the second time kernels for other sizes than the first ones are there
        result = pipe.step(**passed, target=target, return_outputs=True, microbatches=8)
        for name, parameter in pipe.named_parameters():
            assert_close(parameter.grad, reference.parameters[name].grad)
            parameter.grad = None
        if is_last:
            assert result.loss is not None
            assert_close(result.loss, total.detach())
            assert isinstance(result.outputs, list)
            assert_close(result.outputs, [output.detach() for output in outputs])
    evaluated = pipe.eval(**passed, microbatches=8)
    if is_last:
        assert_close(evaluated, [output.detach() for output in outputs])
    assert pipe.last_sizes is not None
    assert [sizes.sizes["length"] for sizes in pipe.last_sizes.microbatches] == [shape[1] for shape in MICROBATCHES]


def step(rank: int, folder: str, schedule: str, kernels: str, needed_only: bool) -> str:
    assert_is_the_step_of_the_model(
        pipeline(folder, schedule, kernels, microbatches=8, loss_fn=loss), needed_only=needed_only
    )
    return "equal"


def step_on_a_mesh(rank: int, folder: str, shape: dict[str, int], schedule: str) -> str:
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    plan = {"two": "colwise_gather_output"} if "tp" in shape else None
    pipe = pipegraph.Pipeline(folder, schedule, 8, loss, kernels="eager", mesh=mesh, tp_plan=plan, timeout=60)
    assert (pipe.dp_rank, pipe.dp_size) == ((0, 1) if "tp" in shape else (rank, 2))
    inputs, targets = batch()
    reference = Reference(Package.open(folder))
    total = torch.zeros(())
    for index, target in enumerate(targets):
        output = reference({name: value[index] if name in LISTS else value for name, value in inputs.items()})
        total = total + loss(output, target) * len(target) / sum(map(len, targets))
    total.backward()
    result = pipe.step(**inputs, target=targets)
    assert_close(result.loss, total.detach())
    for name, parameter in pipe.named_parameters():
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        assert_close(gradient, reference.parameters[name].grad)
    return "equal"
