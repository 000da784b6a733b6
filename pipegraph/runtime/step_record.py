"""The record of a rank in a step: all that other ranks have to know of its call, as a vector of fixed length."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pipegraph.package import CALLER, Manifest
from pipegraph.runtime.step_sizes import ShownSizes

ROOM: Final = 96
"""The sizes of microbatches that fit into a record. A longer list follows it in a separate message."""

_UNKNOWN: Final = -1
_FIELDS: Final = 10
_COUNT: Final = 8  # the place of the number of sizes


@dataclass(frozen=True)
class StepRecord:
    """The record of one call on one rank.

    Attributes:
        number: the number of calls of the pipeline that the rank has begun.
        evaluates: whether the call is an evaluation.
        microbatches: the requested number.
        autocast: a number for the state of autocast; 0 if it is off.
        loss: whether the loss is computed; None on a rank without the last stage.
        trained: a fingerprint of which parameters are trained; 0 if no other rank has them.
        trains: whether any parameter is trained.
        weight: the number of items that count in the batch; None if it is not needed, or not known yet.
        sizes: the sizes that the inputs of this rank show, as `RecordLayout.encode_sizes` returns them.
        checksum_call: the number of the call that the checksums belong to; 0 without checksums.
        checksums: the checksums of the inputs and of the target.
    """

    number: int
    evaluates: bool
    microbatches: int
    autocast: int = 0
    loss: bool | None = None
    trained: int = 0
    trains: bool = True
    weight: float | None = None
    sizes: tuple[int, ...] = (0,)
    checksum_call: int = 0
    checksums: tuple[int, ...] = ()

    @property
    def has_lists(self) -> bool:
        return self.sizes[0] > 0

    @property
    def kind(self) -> str:
        return "an evaluation" if self.evaluates else "a step"


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of a record are in its vector.

    Attributes:
        sizes: the names of all sizes.
        inputs: the names of the inputs that have checksums; the target follows them.
    """

    sizes: tuple[str, ...]
    inputs: tuple[str, ...]

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> RecordLayout:
        values = manifest.values.values()
        inputs = tuple(value.name for value in values if value.producer == CALLER and not value.is_constant)
        return cls(tuple(manifest.sizes), inputs)

    @property
    def length(self) -> int:
        return _FIELDS + ROOM + len(self.inputs) + 1

    def encode(self, record: StepRecord) -> list[int]:
        """The vector of a record, without sizes that do not fit into it."""
        count = len(record.sizes)
        return [
            record.number,
            record.evaluates,
            record.microbatches,
            record.autocast,
            _UNKNOWN if record.loss is None else record.loss,
            record.trained,
            record.trains,
            _UNKNOWN if record.weight is None else _bits(record.weight),
            count,
            record.checksum_call,
            *(record.sizes if count <= ROOM else ()),
            *(0,) * (ROOM - count if count <= ROOM else ROOM),
            *record.checksums,
        ]

    def following(self, vectors: Sequence[Sequence[int]]) -> int:
        """How many numbers follow the vectors of all ranks, the most of any rank; 0 if all sizes fit into them."""
        most = max(vector[_COUNT] for vector in vectors)
        return most if most > ROOM else 0

    def decode(self, vector: Sequence[int], following: Sequence[int] = ()) -> StepRecord:
        """The record of a vector, and of the sizes that followed it."""
        number, evaluates, microbatches, autocast, loss, trained, trains, weight, count, call = vector[:_FIELDS]
        return StepRecord(
            number,
            bool(evaluates),
            microbatches,
            autocast,
            None if loss == _UNKNOWN else bool(loss),
            trained,
            bool(trains),
            None if weight == _UNKNOWN else _number(weight),
            tuple(following[:count] if following else vector[_FIELDS : _FIELDS + count]),
            call,
            tuple(vector[_FIELDS + ROOM :]),
        )

    def encode_sizes(self, sizes: ShownSizes) -> tuple[int, ...]:
        """Sizes as numbers: of microbatches in lists, of whole tensors, of each microbatch in lists; −1 if unknown."""
        tables = sizes.batch_sizes, *sizes.lists
        return len(sizes.lists), *(table.get(name, _UNKNOWN) for table in tables for name in self.sizes)

    def decode_sizes(self, numbers: Sequence[int]) -> ShownSizes:
        """The sizes of the numbers that `encode_sizes` returned."""
        width = len(self.sizes)
        parts = [numbers[1 + place * width : 1 + (place + 1) * width] for place in range(numbers[0] + 1)]
        first, *lists = (
            {name: number for name, number in zip(self.sizes, part, strict=True) if number >= 0} for part in parts
        )
        return ShownSizes(first, tuple(lists))


def _bits(number: float) -> int:
    """The bits of a float that is 0 or more, as an integer that is 0 or more."""
    return int.from_bytes(struct.pack(">d", number + 0.0), "big")


def _number(bits: int) -> float:
    number: float = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    return number
