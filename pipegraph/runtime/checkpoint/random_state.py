"""The state of torch's random number generators on each rank: that of the CPU, and that of its device."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

PREFIX: Final = "random."


def random_states(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The states of a rank [uint8], by their names in storage."""
    states = {f"{PREFIX}cpu.{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{PREFIX}cuda.{rank}"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], rank: int, device: torch.device) -> None:
    """Go on with the random numbers of a checkpoint, as far as it has them for this kind of device."""
    if (state := states.get(f"{PREFIX}cpu.{rank}")) is not None:
        torch.set_rng_state(state)
    if device.type == "cuda" and (state := states.get(f"{PREFIX}cuda.{rank}")) is not None:
        torch.cuda.set_rng_state(state, device)
