"""What one step takes: a batch, which is cut into microbatches once its sizes are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipegraph.errors import RuntimeFault
from pipegraph.package import Value
from pipegraph.runtime.sizes import StepSizes


class StepBatch(NamedTuple):
    """A batch in microbatches: their sizes, every input by name, and the target, each as one item per microbatch."""

    sizes: StepSizes
    inputs: Mapping[str, Sequence[Any]]
    targets: Sequence[Any]


class StepInputs:
    """What a step takes.

    A process that is given no input with some size learns it from the first message that it receives. Until then its
    batch is not cut.

    Args:
        known: the sizes that the inputs of this process show, by name.
        names: all sizes, in the order of the manifest.
        cut: cuts the batch, given all sizes. Raises BatchError.
        microbatches: how many were asked for. There are fewer if the batch has too few rows.
        with_loss: whether the loss is asked for.
        keep_outputs: whether the outputs are.
    """

    def __init__(
        self,
        known: Mapping[str, int],
        names: Sequence[str],
        cut: Callable[[Mapping[str, int]], StepBatch],
        microbatches: int,
        with_loss: bool = False,
        keep_outputs: bool = False,
    ) -> None:
        self.microbatches, self.with_loss, self.keep_outputs = microbatches, with_loss, keep_outputs
        self._known, self._names, self._cut = dict(known), names, cut
        self._batch: StepBatch | None = None

    @property
    def unknown(self) -> list[str]:
        """The sizes that this process does not know yet."""
        return [name for name in self._names if name not in self._known]

    @property
    def numbers(self) -> tuple[int, ...]:
        """All sizes in the order of the manifest; −1 for one that is not known."""
        return tuple(self._known.get(name, -1) for name in self._names)

    def learn(self, sizes: Mapping[str, int]) -> None:
        """Take over the sizes that this process does not know, and cut the batch. Raises BatchError."""
        self._known = {**sizes, **self._known}
        if not self.unknown:
            self._batch = self._cut(self._known)

    def learn_numbers(self, numbers: Sequence[int]) -> None:
        """Take over sizes in the form of `numbers`."""
        named = zip(self._names, numbers, strict=True)
        self.learn({name: number for name, number in named if number >= 0})

    @property
    def batch(self) -> StepBatch:
        """The batch. Raises RuntimeFault if a size is not known."""
        if self._batch is None:
            raise RuntimeFault(
                f"this rank does not know {', '.join(self.unknown)}, which no message has told it: pass every input of "
                "the model to every rank."
            )
        return self._batch

    def shape(self, value: Value, microbatch: int) -> tuple[int, ...]:
        """The shape of a value in a microbatch."""
        return self.batch.sizes.microbatches[microbatch].shape(value)
