"""Whether ranks along `tp` come to the same gradients of the parameters that each of them has whole.

step 1   norms of all of them ────────▶ all ranks: equal, or refused; or 0, which says nothing
step 2   norms of those that had 0 ───▶ …
step 3   none is left: nothing is sent until something else is trained

A gradient may be 0 at first: behind an output that is initialised with zeros, of an expert that got no token.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from pipegraph.errors import PipegraphError
from pipegraph.kernels.sharded import local
from pipegraph.runtime.checkpoint.random_state import random_states
from pipegraph.runtime.parameters import Stages, parameters_of
from pipegraph.runtime.processes.rank_grid import TENSOR
from pipegraph.runtime.processes.world import World, fingerprint
from pipegraph.runtime.tensor_parallel import mesh_dimensions

_ROUNDING: Final = 1e-3
"""Norms of equal gradients differ by less than this part: kernels need not add up in the same order."""


class ReplicatedGradientCheck:
    """Compares the gradient of each whole parameter in the first step in which it is a number other than 0.

    Args:
        stages: of this process.
        world: with ranks along `tp`.
        seeded: whether random numbers are the same on them.
    """

    def __init__(self, stages: Stages, world: World, seeded: bool) -> None:
        self._stages, self._world, self._seeded = stages, world, seeded
        self._compared: set[tuple[int, str]] = set()
        self._finished: tuple[bool, ...] | None = None  # what was trained when all of it had been compared
        self._random_state: Tensor | None = None

    def before_step(self) -> None:
        """Take down where this rank's random numbers are."""
        is_pending = self._finished != trained_flags(self._stages)
        self._random_state = self._current_random_state() if is_pending and not self._seeded else None

    def check(self) -> None:
        """Compare what has not been compared. Collective over the ranks along `tp`, on which the same is trained.

        Raises:
            PipegraphError: they differ: each rank has those of its own part of what a parameter is used for.
        """
        trained = trained_flags(self._stages)
        if self._finished == trained:
            return
        pending = {
            (index, name): parameter
            for index, stage in self._stages.items()
            for name, parameter in parameters_of(stage)
            if parameter.requires_grad and (index, name) not in self._compared and _is_whole(parameter)
        }
        rows = self._world.gather(_norms([parameter.grad for parameter in pending.values()]), TENSOR) if pending else []
        for key, norms in zip(pending, zip(*rows, strict=True), strict=True):
            if not all(map(math.isfinite, norms)) or max(norms) == 0:
                continue
            if max(norms) - min(norms) > _ROUNDING * max(norms):
                self._refuse(key[1])
            self._compared.add(key)
        if self._compared.issuperset(pending):
            self._finished = trained

    def _refuse(self, name: str) -> None:
        raise PipegraphError(
            f"the ranks along tp come to different gradients of {name}, which each of them has whole: {self._reason()}"
            f'"replicated_with_grad_allreduce" for {name.rpartition(".")[0] or name} in tp_plan if it gets some of the '
            "heads, or another style that divides or gathers what it returns."
        )

    def _reason(self) -> str:
        """Why they differ, as far as that is known, and what to try before a style. Collective over these ranks."""
        previous_state = self._random_state
        if previous_state is not None:
            drew = not torch.equal(previous_state, self._current_random_state())
            rank_states = self._world.gather([fingerprint(bytes(previous_state.tolist())), drew], TENSOR)
            if any(figure for _, figure in rank_states) and any(
                figure != rank_states[0][0] for figure, _ in rank_states
            ):
                return (
                    "they draw different random numbers, for dropout say, because they were seeded differently.\n"
                    "Try: Pipeline(seed=0), by which ranks along tp draw the same. If they still differ: "
                )
        return "each has that of its own part of what it is used for.\nTry: "

    def _current_random_state(self) -> Tensor:
        return torch.cat([*random_states(self._world.rank, self._world.device).values()])


def trained_flags(stages: Stages) -> tuple[bool, ...]:
    """Whether each parameter of these stages is trained, in their order."""
    return tuple(parameter.requires_grad for stage in stages.values() for parameter in stage.parameters())


def _is_whole(parameter: Any) -> bool:
    return TENSOR not in mesh_dimensions(parameter) and bool(local(parameter).numel())


def _norms(gradients: list[Tensor | None]) -> list[float]:
    """The norm of each gradient, 0 for one that is not there. A GPU is waited for once."""
    local_gradients = [local(gradient) for gradient in gradients if gradient is not None]
    norms = iter(torch.stack(list(map(_norm, local_gradients))).tolist() if local_gradients else ())
    return [0.0 if gradient is None else next(norms) for gradient in gradients]


def _norm(gradient: Tensor) -> Tensor:
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    dtype = torch.complex128 if gradient.is_complex() else torch.float64
    return torch.linalg.vector_norm(gradient, dtype=dtype)  # without a copy in this dtype
