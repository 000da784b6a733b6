"""What a capture knows of the batch: the role of each input, where rows lie in each value, and what mixes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from torch import fx

Kind = Literal["rows", "whole", "list"]
Proof = Literal["", "rules", "values", "declared"]


@dataclass(frozen=True)
class BatchRole:
    """How an input is given to microbatches.

    Attributes:
        kind: "rows", "whole" or "list".
        dim: of the rows, along which the input is cut; None for other kinds.
        declared: whether the user said so.
    """

    kind: Kind
    dim: int | None = None
    declared: bool = False


@dataclass(frozen=True)
class MixingOperator:
    """An operator whose result in one row depends on other rows.

    Attributes:
        operator: its name: ``cumsum``.
        line: its line in the model's source: ``model.py:12``; "" if it is not known.
        result: "number" if it gives one number for all rows, such as a loss; "buffer" if it updates a buffer.
    """

    operator: str
    line: str = ""
    result: Literal["rows", "number", "buffer"] = "rows"


@dataclass(frozen=True)
class BatchReport:
    """The batch of a captured model.

    Attributes:
        roles: label of an input → its role.
        dims: value of the graph → the dimension of its rows; None if it has none. Values that mix rows are left out.
        target_dim: the dimension of the rows of a target, if it was declared.
        proof: "rules", "values" or "declared", as in the manifest.
        per_microbatch: operators that mix rows by design, and are computed for each microbatch.
        mixing: operators that mix rows otherwise, so that a batch may not be cut.
        suggestion: the role ``name=dimension`` with which nothing mixes rows, if there is such a dimension.
    """

    roles: Mapping[str, BatchRole] = field(default_factory=dict)
    dims: Mapping[fx.Node, int | None] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    target_dim: int | None = None
    proof: Proof = ""
    per_microbatch: tuple[MixingOperator, ...] = ()
    mixing: tuple[MixingOperator, ...] = ()
    suggestion: str = ""
