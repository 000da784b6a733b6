"""One step of a model as a whole, which a package is compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from pipegraph.cost.model_output import output_tensors
from pipegraph.errors import SourceError
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.kernels.loss import divide_loss
from pipegraph.runtime.step_runner import LossFunction


@dataclass(frozen=True)
class StepTensors:
    """Tensors of one step, by name. A parameter's gradient may be None."""

    outputs: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    evaluated: dict[str, Tensor]

    def by_kind(self) -> dict[str, Mapping[str, Tensor | None]]:
        """The tensors by the kinds of `TensorComparison`."""
        return {
            "output": self.outputs,
            "loss": {"loss": self.loss},
            "gradient": self.gradients,
            "buffer": self.buffers,
            "evaluation": self.evaluated,
        }


def run_model(
    source: ModelSource,
    loss_fn: LossFunction,
    evaluate: bool = False,
    backward: bool = True,
    seed: int = 0,
    nudged: bool = False,
) -> StepTensors:
    """Run one step, and the model in evaluation mode after it, on a model of its own.

    Args:
        source: the model, with its example inputs.
        loss_fn: the loss of the step.
        evaluate: run the step in evaluation mode.
        backward: without it, nothing but the outputs and the loss is made.
        seed: what random operations draw from.
        nudged: whether every parameter and input is first moved by one unit in its last place, up or down at random.
    """
    with own_model(source, seed) as model:
        if evaluate:
            model.eval()
        args, kwargs, target = copy.deepcopy((source.args, source.kwargs, source.example_target))
        if nudged:
            _nudge([*model.parameters(), *output_tensors([args, kwargs]).values()])
        output = model(*args, **kwargs)
        loss, _ = divide_loss(loss_fn(output, target))
        if backward and loss.requires_grad:
            loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
        buffers = dict(model.named_buffers(remove_duplicate=False))
        evaluated: dict[str, Tensor] = {}
        if backward:
            if not nudged:
                args, kwargs = copy.deepcopy((source.args, source.kwargs))
            with torch.no_grad():
                evaluated = output_tensors(model.eval()(*args, **kwargs))
    return StepTensors(output_tensors(output), loss.detach(), gradients, buffers, evaluated)


@contextmanager
def own_model(source: ModelSource, seed: int = 0) -> Iterator[nn.Module]:
    """The model of a source, built anew with the same values, while random numbers are seeded.

    A deep copy would not do: what a lambda or a closure of the model holds is not copied.
    """
    with torch.random.fork_rng(devices=[]):
        model = source.rebuild() if source.rebuild is not None else source.model
        if model is source.model:
            model = copy.deepcopy(source.model)  # nothing builds another one
        else:
            _copy_values(source, model)
        torch.manual_seed(seed)
        yield model


def _copy_values(source: ModelSource, model: nn.Module) -> None:
    """Give a model that was built anew the values of the first one: it need not be seeded."""
    state, values = dict(_tensors(model)), dict(_tensors(source.model))
    if {name: tensor.shape for name, tensor in state.items()} != {name: each.shape for name, each in values.items()}:
        differing = sorted(state.keys() ^ values.keys()) or sorted(
            name for name in state if state[name].shape != values[name].shape
        )
        raise SourceError(
            f"{source.name} builds another model each time: {differing[0]} differs.\n"
            "Try: let it build the same modules with the same sizes whenever it runs."
        )
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(values[name])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


@torch.no_grad()
def _nudge(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            signs = torch.randint(2, tensor.shape, device=tensor.device) * 2 - 1
            moved = tensor + tensor * signs.to(tensor.dtype) * torch.finfo(tensor.dtype).eps
            tensor.copy_(torch.where(moved.isfinite(), moved, tensor))  # a mask may hold the least number that there is
