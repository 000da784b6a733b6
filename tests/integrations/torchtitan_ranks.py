"""What ranks run in `test_torchtitan.py`: the steps of torchtitan's trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.integrations import torchtitan_stand_in as titan


def _pipeline(configuration: titan.Configuration) -> Any:
    titan.install()
    from pipegraph.integrations.torchtitan import pipelining_fn

    with torch.device("meta"):
        model = titan.Decoder(configuration.layers)
    schedule, parts, has_first, has_last = pipelining_fn(model, **configuration.arguments(), kernels="eager")
    assert has_first
    assert has_last
    for part in parts:
        part.to_empty(device="cpu")
        part.init_weights(buffer_device=None)
        part.train()
    return schedule, parts


def initial_state(rank: int, configuration: titan.Configuration) -> dict[str, Tensor]:
    """The state dict of this rank's parts after `init_weights`."""
    _, parts = _pipeline(configuration)
    return {name: tensor.clone() for part in parts for name, tensor in part.state_dict().items()}


def train(
    rank: int, configuration: titan.Configuration, state: dict[str, Tensor]
) -> tuple[list[float], dict[str, Any]]:
    """Two steps of two accumulated batches, and a validation: their losses, and the state of this rank's parts."""
    schedule, parts = _pipeline(configuration)
    for part in parts:
        part.load_state_dict(_read(state, part.state_dict()) | {"optimizer.step": torch.zeros(())}, strict=False)
    pipe, ranks = schedule.pipe, configuration.dp_shard
    optimizer = torch.optim.SGD([parameter for part in parts for parameter in part.parameters()], lr=0.1)
    microbatches = list(titan.batches(pipe.dp_rank, ranks, 16))
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        groups = [microbatches[8 * step + 4 * group :][:4] for group in range(2)]
        tokens = _summed(sum((labels != -100).sum() for group in groups for _, _, labels in group), pipe)
        step_losses: list[Tensor] = []
        for group in groups:
            schedule.step(**_arguments(group), losses=step_losses, loss_kwargs={"global_valid_tokens": tokens})
        optimizer.step()
        losses.append(float(_summed(torch.stack(step_losses).sum(), pipe)))
    for part in parts:
        part.eval()
    sums: list[Tensor] = []
    schedule.eval(**_arguments(microbatches[:4]), losses=sums)
    losses.append(float(_summed(torch.stack(sums).sum(), pipe)))
    state = {name: _full_tensor(tensor) for part in parts for name, tensor in part.state_dict().items()}
    return losses, state


def _read(state: dict[str, Tensor], part_state: dict[str, Any]) -> dict[str, Any]:
    """Read the tensors of a part, as DCP does: DTensors in their placements."""
    return {
        name: distribute_tensor(state[name], tensor.device_mesh, tensor.placements)
        if isinstance(tensor, DTensor)
        else state[name]
        for name, tensor in part_state.items()
    }


def _arguments(group: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    return {
        "arg_mbs": [(tokens,) for tokens, _, _ in group],
        "kwarg_mbs": [{"positions": positions} for _, positions, _ in group],
        "target_mbs": [labels for _, _, labels in group],
    }


def _summed(number: Any, pipe: Any) -> Tensor:
    """The sum over data-parallel ranks."""
    rows = pipe.gather([float(number)], everywhere=True)
    return torch.tensor(sum(row[0] for row in rows) * pipe.dp_size / len(rows))


def _full_tensor(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def refused(rank: int, configuration: titan.Configuration) -> tuple[str, str, str]:
    """The class, the problem and the advice of the error that a configuration raises."""
    from pipegraph.errors import PipegraphError

    try:
        _pipeline(configuration)
    except PipegraphError as error:
        return type(error).__name__, error.problem, error.advice
    raise AssertionError("it is taken")
