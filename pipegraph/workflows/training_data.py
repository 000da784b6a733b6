"""The batches that a run trains on: those of a model file's ``data(rank, world)``, or its example again and again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from pipegraph.cost.model_output import output_tensors
from pipegraph.errors import SourceError
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.runtime.checkpoint.extra_state import is_stateful
from pipegraph.runtime.checksums import checksum
from pipegraph.workflows.batch import Batch
from pipegraph.workflows.training_functions import errors_named, training_function

_END: Final = object()


class TrainingData:
    """Batches one after the other.

    Args:
        batches: of this process.
        convert: makes the arguments of a step of what `batches` yields.
        named: what messages call them.
    """

    def __init__(
        self, batches: Iterable[Any], convert: Callable[[Any], Batch] = lambda batch: batch, named: str = "the example"
    ) -> None:
        self._batches, self._convert, self.named = batches, convert, named
        self._iterator: Iterator[Any] | None = None
        self._position = 0

    @classmethod
    def from_source(cls, source: ModelSource | None, name: str, rank: int, world: int) -> TrainingData | None:
        """The batches that a model file's function returns for a data-parallel rank; None without that function."""
        function = training_function(source, name)
        if source is None or function is None:
            return None
        batches, named = function(rank, world), f"{name}({rank}, {world}) of {source.name}"
        if not isinstance(batches, Iterable):
            raise SourceError(
                f"{named} returned a {type(batches).__name__}, which holds no batches.\n"
                "Try: a list, a generator, a torch DataLoader or any other iterable."
            )
        has_target = source.example_target is not None
        return cls(batches, lambda item: _step_batch(item, has_target, named), named)

    @classmethod
    def repeated(cls, batch: Batch) -> TrainingData:
        """One batch without end."""
        return cls(itertools.repeat(batch))

    @property
    def stateful(self) -> Any | None:
        """The object with the position as its state, such as a loader of torchdata; None without such an object."""
        return self._batches if is_stateful(self._batches) else None

    def go_on_from(self, count: int) -> None:
        """Skip the first ``count`` batches, unless the position was restored from a state. Call it before `take`."""
        while self.stateful is None and self._position < count and self.take() is not None:
            pass
        self._position = count

    def take(self) -> Batch | None:
        """The next batch; None after the last. Raises SourceError if it is not a batch."""
        with errors_named(self.named, f"batch {self._position}"):
            if self._iterator is None:
                self._iterator = iter(self._batches)
            item = next(self._iterator, _END)
        if item is _END:
            return None
        self._position += 1
        return self._convert(item)

    @property
    def last(self) -> str:
        """How messages name the batch that was taken last."""
        return f"batch {self._position - 1} of {self.named}"


def fingerprint(batch: Batch) -> int:
    """A number of 48 bits that differs for batches with other values. It waits for a GPU."""
    number = checksum(tuple(output_tensors(batch).values()), 0)
    return 0 if number is None else int(number) % 2**48


def _step_batch(item: Any, has_target: bool, named: str) -> Batch:
    """The arguments of a step: inputs as `example_inputs` has them, or a pair of them and the target."""
    inputs, target = item, None
    if has_target:
        if not isinstance(item, tuple | list) or len(item) != 2:
            kind = f"{len(item)} things" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
            raise SourceError(
                f"a batch of {named} is {kind}; in a file with example_target it is a pair of inputs and target.\n"
                "Try: yield inputs, target"
            )
        inputs, target = item
    if isinstance(inputs, dict):
        return Batch((), inputs, target)
    if not isinstance(inputs, tuple | list):
        return Batch((inputs,), {}, target)
    if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
        return Batch(inputs[0], inputs[1], target)
    return Batch(tuple(inputs), {}, target)
