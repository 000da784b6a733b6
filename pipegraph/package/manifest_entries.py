"""The parts of a manifest: values, stages, the model, the plan, names in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pipegraph.package.json_file import KEY, Count, Entry, Figure, Name, Text
from pipegraph.package.prediction import Prediction
from pipegraph.package.sizes import Dimension, evaluate
from pipegraph.progress import track
from pipegraph.units import format_bytes

# ---- listed files ----------------------------------------------------------------------------------------------------
# The files that a package or a checkpoint lists, with their sizes and digests.


_THREADS: Final = 8
"""Threads that read files: hashlib releases the interpreter."""

Digest = Annotated[str, Meta(pattern="^sha256 [0-9a-f]{64}$")]


class ListedFile(Entry, frozen=True):
    """A file as it was written.

    Attributes:
        bytes: its size; None in a package of an older version of pipegraph.
        digest: of its content.
    """

    bytes: Count | None
    digest: Digest

    @classmethod
    def of_text(cls, text: str) -> ListedFile:
        """The entry of a file with this text, in UTF-8."""
        content = text.encode()
        return cls(len(content), f"sha256 {hashlib.sha256(content).hexdigest()}")

    @classmethod
    def read(cls, path: Path) -> ListedFile:
        """The entry of a file, which is read. Raises OSError."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}")

    def problem(self, path: Path) -> str:
        """What differs between the file and this entry; empty if nothing does. The file is there."""
        size = path.stat().st_size
        if self.bytes is not None and size != self.bytes:
            return f"it has {format_bytes(size)}, and was written with {format_bytes(self.bytes)}"
        return "" if ListedFile.read(path).digest == self.digest else "its content is not what was written"


def problems_of(folder: Path, files: Mapping[str, ListedFile]) -> dict[str, str]:
    """Name of each file that is there and differs from its entry → what differs. All of them are read."""
    names = sorted(name for name in files if (folder / name).is_file())
    with ThreadPoolExecutor(_THREADS) as threads:
        pending = [threads.submit(files[name].problem, folder / name) for name in names]
        results = zip(names, track("checking weights", pending), strict=True)
        return {name: result.result() for name, result in results if result.result()}


# ---- manifest entries ------------------------------------------------------------------------------------------------


CALLER: Final = -1
"""The producer of a value that the caller passes in."""

Constant = bool | int | float | str | None

Role = Literal["rows", "whole", "list"]
"""How an input is given to microbatches: cut along a dimension, unchanged, or as a list with one value for each."""


class Value(Entry, frozen=True, rename={"name": KEY}):
    """One value that crosses a boundary, for one microbatch: a tensor, or a constant fixed at capture.

    Attributes:
        name: its key among the values.
        dtype: torch's name without the prefix (``"float32"``); ``""`` for a constant.
        shape: numbers, and expressions of the manifest's sizes.
        producer: a stage, or `CALLER`.
        consumers: the stages that take it, ascending.
        requires_grad: whether a gradient comes back for it.
        bound: an exclusive upper bound for integers.
        batch_dim: the dimension along which it is cut into microbatches, or joined from them; None if it has no rows.
        role: of an input; UNSET for other values. Use `batch_role`, which also reads packages of older versions.
        constant: the constant; UNSET for a tensor.
        keeps_dtype: True if it has this dtype even if the model is converted to another one.
        dim_order: its dimensions as they lie in memory, outermost first, as in `torch.Tensor.dim_order`; UNSET for a
            contiguous tensor.
    """

    name: Name
    dtype: Text
    shape: tuple[Dimension, ...]
    producer: Annotated[int, Meta(ge=CALLER, le=10**6)]
    consumers: tuple[Count, ...]
    requires_grad: bool = False
    bound: Count | None = None
    batch_dim: Count | None = None
    constant: Constant | UnsetType = UNSET
    keeps_dtype: bool | UnsetType = UNSET
    dim_order: tuple[Count, ...] | UnsetType = UNSET
    role: Role | UnsetType = UNSET

    @property
    def batch_role(self) -> Role:
        """The role of an input."""
        if self.role is not UNSET:
            return self.role
        return "whole" if self.batch_dim is None else "rows"

    @property
    def is_constant(self) -> bool:
        return self.constant is not UNSET

    def shape_at(self, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The shape in numbers. Raises PackageError for a size that is not among ``sizes``."""
        return tuple(evaluate(dimension, sizes or {}) for dimension in self.shape)

    def __str__(self) -> str:
        return f"{self.name} = {self.constant!r}" if self.is_constant else f"{self.name} {self.type_text}"

    @property
    def type_text(self) -> str:
        """``float32[batch, 128]``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class Buffer(Entry, frozen=True):
    """A buffer's FQN, and whether it is in the model's `state_dict()`."""

    name: Name
    persistent: bool = True


class StageCost(Entry, frozen=True):
    """The cost of one microbatch on one stage; None for unknown values.

    Attributes:
        flops: floating-point operations of the forward; the backward takes about twice this number.
        parameters: elements of the stage's parameters, a tied weight counted once.
        parameter_bytes: the size of the parameters.
        trained_bytes: the size of the parameters that have a gradient.
        added_bytes: the part of ``trained_bytes`` whose gradients are made before they are added; None for all.
        buffer_bytes: buffers and constants.
        input_bytes, output_bytes: bytes that the stage receives from other stages and sends to them.
        saved_bytes: activations that F keeps for the backward.
        weight_saved_bytes: values kept from the end of I to the end of W.
        offloaded_bytes: the part of ``saved_bytes`` that waits in CPU memory; None for 0.
        transient_bytes: memory that F, I, W and B need while they run, as `pipegraph.cost.TransientBytes` counts it.
        forward, input_grad, weight_grad: predicted seconds of F, I and W.
    """

    flops: Count | None = None
    parameters: Count | None = None
    parameter_bytes: Count | None = None
    trained_bytes: Count | None = None
    buffer_bytes: Count | None = None
    input_bytes: Count | None = None
    output_bytes: Count | None = None
    saved_bytes: Count | None = None
    weight_saved_bytes: Count | None = None
    offloaded_bytes: Count | None = None
    transient_bytes: tuple[Count, Count, Count, Count] | None = None
    added_bytes: Count | None = None
    forward: Figure | None = None
    input_grad: Figure | None = None
    weight_grad: Figure | None = None

    @property
    def times(self) -> tuple[float, float, float] | None:
        """Seconds of F, I and W; None if they were not predicted."""
        if self.forward is None or self.input_grad is None or self.weight_grad is None:
            return None
        return self.forward, self.input_grad, self.weight_grad

    def to_dict(self) -> dict[str, float]:
        """The fields by name, without those that are not known."""
        return {name: figure for name, figure in msgspec.to_builtins(self).items() if figure is not None}


class StageEntry(Entry, frozen=True, rename={"class_name": "class"}):
    """One stage: `module` is its file without `.py`; `inputs` and `outputs` name values in the order of its forward.

    Attributes:
        untrained: trainable parameters that the model does not train, or not with every loss; UNSET if empty.
        draws: module of the stage → the names of the random numbers that it draws in training, in order. Modules with
            only their own names, numbered from 0, are left out: ``{"layers.4": ["layers.4#1"]}`` has the second random
            number of a layer that is cut after the first. UNSET if empty.
    """

    index: Count
    module: Name
    class_name: Name
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    parameters: tuple[Name, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    weights: Name | None = None
    cost: StageCost = StageCost()
    untrained: tuple[Name, ...] | UnsetType = UNSET
    draws: dict[Text, tuple[Name, ...]] | UnsetType = UNSET


class ModelEntry(Entry, frozen=True, rename={"class_name": "class"}):
    """The model that was split: where it came from, its class, and the sha256 of its source."""

    source: Text = ""
    class_name: Text = ""
    sha256: Text = ""


class RowOperator(Entry, frozen=True):
    """An operator whose result in one row depends on other rows of the batch.

    Attributes:
        operator: what it is: ``cumsum``, ``batch norm``.
        line: its line in the model's source: ``model.py:12``; "" if it is not known.
        result: "number" if it gives one number for all rows, such as a loss; "buffer" if it updates a buffer.
    """

    operator: Text
    line: Text = ""
    result: Literal["rows", "number", "buffer"] = "rows"

    def __str__(self) -> str:
        return f"{self.operator} ({self.line})" if self.line else self.operator


class BatchEntry(Entry, frozen=True):
    """What is known of the rows of a batch.

    Attributes:
        proof: how the roles of the inputs were proved: "rules" (operator by operator), "values" (the whole batch was
            compared with its halves), "declared" (by the user alone); "" in packages of older versions.
        per_microbatch: operators that mix rows by design, such as batch norm, and are computed for each microbatch.
        mixing: operators that mix rows otherwise. A batch is not cut into several microbatches then; lists of
            microbatches are right.
        suggestion: the role ``name=dimension`` with which nothing mixes rows, if there is such a dimension.
        target_dim: the dimension of the rows of a target; None for that of the outputs.
    """

    proof: Literal["", "rules", "values", "declared"] = ""
    per_microbatch: tuple[RowOperator, ...] = ()
    mixing: tuple[RowOperator, ...] = ()
    suggestion: Text = ""
    target_dim: Count | None = None


class PlanEntry(Entry, frozen=True):
    """Where the model was cut: the split points, the modules of each stage in words and, if it was priced, why.

    Attributes:
        layout: of the stages as Megatron writes it, ``Et*3|(tt|)*4,L``; UNSET if they are not of whole layers.
    """

    points: tuple[Name, ...] = ()
    stages: tuple[str, ...] = ()
    prediction: Prediction | None = None
    layout: Text | UnsetType = UNSET


class CheckpointNames(Entry, frozen=True):
    """The names in a Hugging Face checkpoint that differ from the model's.

    Attributes:
        base_model_prefix: what a checkpoint of the base model alone leaves out.
        stored: name of ``state_dict()`` → the names of its parts in the order in which they are joined; a ``*`` counts
            the first dimension. No parts: only transformers can read it.
    """

    base_model_prefix: Text = ""
    stored: dict[Name, tuple[Name, ...]] = msgspec.field(default_factory=dict)
