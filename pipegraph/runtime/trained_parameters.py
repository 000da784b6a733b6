"""Which parameters of a stage are trained: in each step the same on all ranks that hold the stage.

Gradients are reduced in buckets of what is trained, and a frozen stage sends none back. Ranks that differ would wait
for each other, or add up gradients of different parameters.
"""

from __future__ import annotations

from pipegraph.errors import RuntimeFault
from pipegraph.runtime.parameters import Stages, parameters_of
from pipegraph.runtime.processes.rank_grid import DATA, TENSOR
from pipegraph.runtime.processes.world import World, fingerprint

_SHARING = (*DATA, TENSOR)
"""The dimensions whose ranks hold the same stages."""


def trained_flags(stages: Stages) -> tuple[bool, ...]:
    """Whether each parameter of these stages is trained, in their order."""
    return tuple(each.requires_grad for stage in stages.values() for each in stage.parameters())


class TrainedParameters:
    """Compares what is trained on the ranks that hold the same stages. Making it is collective for them."""

    def __init__(self, stages: Stages, world: World) -> None:
        self._stages, self._world = stages, world
        world.along(*_SHARING, on_cpu=True)

    def agree(self) -> None:
        """Raise RuntimeFault, on all of these ranks, unless the same is trained on them. Collective for them.

        What is sent is one number, in every step: who has changed nothing does not know whether another rank has.
        """
        numbers = self._world.gather([fingerprint(bytes(trained_flags(self._stages)))], *_SHARING)
        if any(each != numbers[0] for each in numbers):
            self._refuse()

    def _refuse(self) -> None:
        own = [
            f"{name} of stage {index}"
            for index, stage in self._stages.items()
            for name, parameter in parameters_of(stage)
            if parameter.requires_grad
        ]
        trained = [dict.fromkeys(text.splitlines()) for text in self._world.gather_text("\n".join(own), *_SHARING)]
        ranks = self._world.grid.line(self._world.rank, *_SHARING)
        named = list(map(self._world.grid.text, ranks))
        everything = dict.fromkeys(name for each in trained for name in each)
        differing = [name for name in everything if not all(name in each for each in trained)]
        first, more = differing[0], f", and so do {len(differing) - 1} more parameters" if len(differing) > 1 else ""
        does = ", ".join(name for name, each in zip(named, trained, strict=True) if first in each)
        does_not = ", ".join(name for name, each in zip(named, trained, strict=True) if first not in each)
        raise RuntimeFault(
            f"{first} requires a gradient on {does}, and not on {does_not}{more}. These ranks hold the same stages.\n"
            "Try: the same requires_grad_() on all of them, between the same steps."
        )
