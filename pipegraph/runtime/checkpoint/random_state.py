"""The state of torch's random number generators on each rank: that of the CPU, and that of its device."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pipegraph.device import Device

_PREFIX: Final = "random."


def stored_names(rank: int) -> tuple[str, str]:
    """The names of a rank's states in storage: that of the CPU, and that of a GPU."""
    return f"{_PREFIX}cpu.{rank}", f"{_PREFIX}cuda.{rank}"


def random_states(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The states of a rank [uint8], by their names in storage."""
    cpu, gpu = stored_names(rank)
    states = {cpu: torch.get_rng_state()}
    if (state := Device(device).rng_state()) is not None:
        states[gpu] = state
    return states


def set_random_states(states: dict[str, Tensor], rank: int, device: torch.device) -> None:
    """Go on with the random numbers of a checkpoint, as far as it has them for this kind of device."""
    cpu, gpu = stored_names(rank)
    if (state := states.get(cpu)) is not None:
        torch.set_rng_state(state)
    if (state := states.get(gpu)) is not None:
        Device(device).set_rng_state(state)
