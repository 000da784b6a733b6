"""The bytes of parameters, gradients and optimizer state in training, by precision and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from pipegraph.arguments import argument
from pipegraph.cost import ONCE, MemoryFactors
from pipegraph.errors import ArgumentError, closest, nearest
from pipegraph.graph.captured import Captured, StateEntry
from pipegraph.graph.conversion import converted

# ---- precision -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingPrecision:
    """The dtypes of a training, as bytes of an element where a dtype only matters for its size.

    Attributes:
        computed: the dtype of activations, of what stages send, and of the parameters that kernels read.
        parameter: bytes of a parameter.
        copies: bytes of the copies that kernels read in its place, and that a rank keeps.
        gradient: bytes of an accumulated gradient.
        master: bytes of the optimizer's own copy of a parameter.
        moment: bytes of an element of a moment.
        products: the name in hardware profiles of the dtype in which matrices are multiplied; empty for ``computed``.
    """

    computed: torch.dtype
    parameter: int
    copies: int
    gradient: int
    master: int
    moment: int
    products: str = ""


_BF16_MASTER: Final = TrainingPrecision(torch.bfloat16, parameter=2, copies=0, gradient=4, master=4, moment=4)

PRECISIONS: Final[Mapping[str, TrainingPrecision]] = {
    "fp32": TrainingPrecision(torch.float32, parameter=4, copies=0, gradient=4, master=0, moment=4),
    "bf16": TrainingPrecision(torch.bfloat16, parameter=4, copies=2, gradient=4, master=0, moment=4),
    "fp16": TrainingPrecision(torch.float16, parameter=4, copies=2, gradient=4, master=0, moment=4),
    "bf16-true": TrainingPrecision(torch.bfloat16, parameter=2, copies=0, gradient=2, master=0, moment=2),
    "fp16-true": TrainingPrecision(torch.float16, parameter=2, copies=0, gradient=2, master=0, moment=2),
    "bf16-master": _BF16_MASTER,
    # Each weight in 8 bits as well, and once more transposed, for the products of the backward.
    "fp8": TrainingPrecision(torch.bfloat16, parameter=2, copies=2, gradient=4, master=4, moment=4, products="float8"),
}
"""By name. The first five are those of `pipegraph.Pipeline`. "bf16-master" is how Megatron-LM and DeepSpeed train: the
parameters are bfloat16, and the optimizer has float32 ones; 18 bytes for each parameter with AdamW (Rajbhandari et al.,
ZeRO, arXiv:1910.02054, counts 16, with bfloat16 gradients). "fp8" is this with products in float8, as in NVIDIA's
Transformer Engine; what the backward reads is kept in bfloat16."""


# ---- optimizer -------------------------------------------------------------------------------------------------------


def _adamw(entry: StateEntry, is_embedding: bool) -> int:
    return 2 * entry.numel


def _sgd(entry: StateEntry, is_embedding: bool) -> int:
    return 0


def _momentum(entry: StateEntry, is_embedding: bool) -> int:
    return entry.numel


def _muon(entry: StateEntry, is_embedding: bool) -> int:
    """One moment of a matrix; AdamW trains everything else, and embeddings, as `torch.optim.Muon` advises."""
    return entry.numel if len(entry.shape) == 2 and not is_embedding else 2 * entry.numel


def _adafactor(entry: StateEntry, is_embedding: bool) -> int:
    """A mean of each row and of each column of a matrix, as `torch.optim.Adafactor` keeps them."""
    if len(entry.shape) < 2:
        return entry.numel
    *leading, rows, columns = entry.shape
    return math.prod(leading) * (rows + columns)


OPTIMIZERS: Final[Mapping[str, Callable[[StateEntry, bool], int]]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "sgd-momentum": _momentum,
    "muon": _muon,
    "adafactor": _adafactor,
}
"""Name → (parameter, whether it is one of an embedding) → elements of its state."""


# ---- training state --------------------------------------------------------------------------------------------------


def _check_name(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(
            f"{argument(name)} cannot be {value!r}.{nearest(str(value), choices)} There are: {', '.join(choices)}.",
            f"{argument(name, closest(str(value), choices) or next(iter(choices)))}.",
        )


@dataclass(frozen=True)
class TrainingState:
    """The arguments of a plan that say what a rank holds for each parameter.

    Attributes:
        precision: a name of `PRECISIONS`; None for the model's own dtypes, with everything in them.
        optimizer: a name of `OPTIMIZERS`.
        optimizer_bytes: bytes of the optimizer's state for each element that is trained, in place of what ``optimizer``
            keeps; float32 copies of bfloat16 parameters come on top.

    Raises ArgumentError for an unknown name or a negative number.
    """

    precision: str | None = None
    optimizer: str = "adamw"
    optimizer_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.precision is not None:
            _check_name("precision", self.precision, PRECISIONS)
        _check_name("optimizer", self.optimizer, OPTIMIZERS)
        size = self.optimizer_bytes
        is_size = isinstance(size, (int, float)) and not isinstance(size, bool) and 0 <= size < math.inf
        if size is not None and not is_size:
            raise ArgumentError(
                f"optimizer_bytes is the bytes of an optimizer's state for each parameter, not {size!r}.",
                f"{argument('optimizer_bytes', 8)}, as AdamW has in float32.",
            )

    @property
    def dtypes(self) -> TrainingPrecision | None:
        """What the precision says; None for the model's own dtypes."""
        return None if self.precision is None else PRECISIONS[self.precision]

    @property
    def factors(self) -> MemoryFactors:
        """How many times a rank holds each part, if no other rank shares its stages."""
        dtypes = self.dtypes
        if dtypes is None:
            return ONCE
        size = dtypes.computed.itemsize
        parameters, copies, gradients = (part / size for part in (dtypes.parameter, dtypes.copies, dtypes.gradient))
        return MemoryFactors(parameters, copies, gradients)

    def computed(self, captured: Captured) -> Captured:
        """Return a model in the dtype that it is computed in."""
        return captured if self.dtypes is None else converted(captured, self.dtypes.computed)

    def bytes_of(self, captured: Captured, entries: Iterable[StateEntry]) -> int:
        """Return the bytes of the optimizer's state of some parameters."""
        dtypes, total = self.dtypes, 0.0
        for entry in entries:
            if entry.kind != "parameter" or not entry.requires_grad:
                continue
            moment = entry.dtype.itemsize if dtypes is None else dtypes.moment
            if self.optimizer_bytes is not None:
                total += self.optimizer_bytes * entry.numel
            else:
                total += moment * OPTIMIZERS[self.optimizer](entry, _is_of_embedding(captured, entry))
            total += 0 if dtypes is None else dtypes.master * entry.numel
        return round(total)

    @property
    def optimizer_text(self) -> str:
        """The optimizer, or the bytes of its state."""
        return self.optimizer if self.optimizer_bytes is None else f"{self.optimizer_bytes:g} bytes for each parameter"


OWN_DTYPES: Final = TrainingState()


def _is_of_embedding(captured: Captured, entry: StateEntry) -> bool:
    owner = captured.modules.get(entry.fqn.rpartition(".")[0])
    return owner is not None and isinstance(owner.module, nn.Embedding)
