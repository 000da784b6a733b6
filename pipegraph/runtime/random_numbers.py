"""The keys of random numbers under `Pipeline(seed=)`: by step, microbatch of the whole batch, and what draws.

Nothing of the cuts, the schedule or the processes is in a key. The microbatches of data-parallel ranks are counted one
rank after the other, so that a batch may be divided among any number of ranks. A draw is called after its module in the
model and its place among the draws of that module: ``layers.3.dropout#0``. A stage that has a part of a module, or of
its calls, lists the names of the draws that it makes in pipeline.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from msgspec import UNSET
from torch import nn

from pipegraph.arguments import require_type
from pipegraph.errors import PipegraphError
from pipegraph.kernels import SeededKernels, StageKernels
from pipegraph.package import StageEntry
from pipegraph.runtime.parameters import names_without_wrappers


@dataclass
class RandomNumbers:
    """The state that the random numbers of the current forward depend on, together with the names of the draws.

    Attributes:
        seed: the user's seed; None for torch's own generators.
        steps: the number of steps that have been done, which a checkpoint saves.
        microbatch: the current microbatch.
        microbatches: the number of microbatches of each data-parallel rank in this step.
        evaluates: whether this is an evaluation.
    """

    seed: int | None
    steps: int = 0
    microbatch: int = 0
    microbatches: int = 1
    evaluates: bool = False

    def __post_init__(self) -> None:
        if self.seed is not None:
            require_type(self.seed, int, "seed is a whole number", "seed=0")

    def key(self, draw: str, replica: int) -> int:
        """The key of a draw on a data-parallel rank: an odd number of 64 bits, with a sign."""
        call = "evaluate" if self.evaluates else "step"
        text = f"{self.seed} {call} {self.steps} {replica * self.microbatches + self.microbatch} {draw}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True) | 1


class StageDraws:
    """The keys of one stage's draws.

    Args:
        numbers: of the pipeline.
        entry: the stage in the manifest.
        stage: the stage as it runs, in which modules may be wrapped.
        replica: the place of this rank among those that take different shares of the batch.
    """

    def __init__(self, numbers: RandomNumbers, entry: StageEntry, stage: nn.Module, replica: int) -> None:
        self._numbers, self._replica = numbers, replica
        self._listed: Mapping[str, tuple[str, ...]] = {} if entry.draws is UNSET else entry.draws
        self._stage = entry.index
        self._names = names_without_wrappers(stage)

    def key(self, module: str, number: int) -> int:
        name = self._names.get(module, module)
        listed = self._listed.get(name)
        if listed is None:
            return self._numbers.key(f"{name}#{number}", self._replica)
        if number < len(listed):
            return self._numbers.key(listed[number], self._replica)
        # The source was edited and draws more than the model: the next number may be another stage's.
        return self._numbers.key(f"{name}#{number} of stage {self._stage}", self._replica)


def seed_kernels(kernels: StageKernels, draws: StageDraws) -> None:
    """Let kernels take their random numbers from keys. Raises PipegraphError if they cannot."""
    if not isinstance(kernels, SeededKernels):
        raise PipegraphError(
            f"seed= needs kernels that take keys for their random numbers, and {type(kernels).__name__} does not.",
            'kernels="inductor" or "eager", or a method draw_from(keys).',
        )
    kernels.draw_from(draws)
