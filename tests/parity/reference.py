"""The unsplit model: its packages, and what two optimizer steps of plain autograd give."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pipegraph
from pipegraph.graph.sources import load
from pipegraph.graph.sources.model_source import ModelSource
from tests.equal_work import equal_work_shared
from tests.parity.cases import CASES, EQUAL, MODELS, ROOT, STAGES, Case, Model

STEPS = 2


def prepare(model_name: str, folder: Path) -> None:
    """Write the model's packages (``2``, ``3``, ``4``) and the references (``<case>.pt``) of all its cases."""
    model = MODELS[model_name]
    source = _load(model)
    with equal_work_shared():
        captured = pipegraph.capture(source.model, source.args, source.kwargs)
    for stages in STAGES:
        cut = model.cuts[stages]
        if cut == EQUAL:
            plan = pipegraph.plan(captured, stages=stages, balance="uniform")
        else:
            plan = pipegraph.plan(captured, points=cut.split(","))
        assert len(plan.stages) == stages
        pipegraph.write_package(plan, folder / str(stages))
    for name, case in CASES.items():
        if case.model == model_name:
            torch.save(_reference(case, source), folder / f"{name}.pt")


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum, so that the second step depends on the first one's gradients beyond the weights."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def named_tensors(output: Any, prefix: str = "output") -> dict[str, Tensor]:
    """The tensors of a nested output by their place in it."""
    if isinstance(output, Tensor):
        return {prefix: output}
    if output is None:
        return {}
    items = output.items() if hasattr(output, "items") else enumerate(output)
    return {name: leaf for key, item in items for name, leaf in named_tensors(item, f"{prefix} {key}").items()}


def _load(model: Model) -> ModelSource:
    source = load(str(ROOT / model.source))
    args, kwargs, target = (
        pytree.tree_map_only(Tensor, lambda tensor: _smaller(tensor, model), item)
        for item in (source.args, source.kwargs, source.example_target)
    )
    return replace(source, args=args, kwargs=kwargs, example_target=target)


def _smaller(tensor: Tensor, model: Model) -> Tensor:
    tensor = tensor[: model.rows]
    return tensor if model.tokens is None else tensor[:, : model.tokens]


def _reference(case: Case, source: ModelSource) -> dict[str, Any]:
    model = copy.deepcopy(source.model).train(case.training)
    loss_fn = MODELS[case.model].loss
    descent = optimizer(model.parameters())
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(STEPS):
        descent.zero_grad()
        batches = [_batch(source, case.microbatches, generator) for _ in range(case.batches)]
        losses, outputs = zip(*(_backward(model, loss_fn, batch, case) for batch in batches), strict=True)
        gradients = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        steps.append({"batches": batches, "losses": losses, "outputs": outputs, "gradients": gradients})
        descent.step()
    return {"steps": steps, "state": model.state_dict()}


def _batch(source: ModelSource, microbatches: int, generator: torch.Generator) -> tuple[Any, Any, Any]:
    """Arguments, keyword arguments and target of a batch, made after the example of one microbatch."""

    def like(example: Tensor) -> Tensor:
        shape = (microbatches * len(example), *example.shape[1:])
        if example.is_floating_point():
            return torch.randn(shape, generator=generator)
        return torch.randint(int(example.max()) + 1, shape, generator=generator)

    return pytree.tree_map_only(Tensor, like, (source.args, source.kwargs, source.example_target))


def _backward(model: nn.Module, loss_fn: Any, batch: Any, case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and outputs of a batch, whose gradients are added to the model's."""
    pieces = case.microbatches if case.by_microbatch else 1
    losses, outputs = [], []
    for index in range(pieces):
        args, kwargs, target = _piece(batch, index, pieces)
        output = model(*args, **kwargs)
        losses.append(loss_fn(output, target))
        (losses[-1] / pieces).backward()
        outputs.append(named_tensors(output))
    joined = {name: torch.cat([tensors[name] for tensors in outputs]).detach() for name in outputs[0]}
    return torch.stack(losses).mean().detach(), joined


def _piece(batch: Any, index: int, pieces: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.chunk(pieces)[index], batch)
