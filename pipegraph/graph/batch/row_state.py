"""What is known of the rows of a value: their place, or why it depends on several of them at once.

A batch of ``B`` rows is cut along a dimension of each input. A value has rows if cutting it along ``dim`` gives what
the graph computes from the cut inputs. Dimensions may be merged: in ``[B * heads, tokens, width]`` the row of an
element of dimension 0 is ``(index // heads) % B``, and ``inner`` is ``heads``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import fx


class Content(Enum):
    """What the elements of a value with rows are."""

    DATA = "data"
    UNIFORM = "the same number everywhere"
    EQUAL = "equal along the dimension of the rows"
    NUMBERS = "the numbers of the rows"
    POSITIONS = "the numbers of all elements"
    STARTS = "the number of the first element of each row"


@dataclass(frozen=True)
class Sorted:
    """The elements are in the order of a key, as `expert_rules` has it.

    Attributes:
        kind: "values" in this order, the "order" itself, or the "places" of the elements in it.
        keys: the value that they are sorted by.
        step: of an order: the number that its elements are divided by.
    """

    kind: str
    keys: fx.Node
    step: int = 1


@dataclass(frozen=True)
class Invariant:
    """The value is the same for every batch: no element depends on a row, and no size on their number."""


@dataclass(frozen=True)
class Rows:
    """The value has rows along ``dim``, each ``inner`` elements long there."""

    dim: int
    inner: int = 1
    content: Content | Sorted = Content.DATA

    @property
    def is_constant(self) -> bool:
        """Whether elements are equal along the dimension, so that their rows are those of what they meet."""
        return self.content in (Content.UNIFORM, Content.EQUAL)

    @property
    def is_index(self) -> bool:
        """Whether the elements are numbers of rows, tokens or places, with which nothing may be computed."""
        is_values = isinstance(self.content, Sorted) and self.content.kind == "values"
        return not is_values and self.content is not Content.DATA and not self.is_constant


@dataclass(frozen=True)
class Mixed:
    """The value depends on several rows at once, or no rule says that it does not.

    Attributes:
        certain: the operators that mix rows.
        undecided: the operators for which there is no rule.
    """

    certain: tuple[fx.Node, ...] = ()
    undecided: tuple[fx.Node, ...] = ()

    def union(self, second: Mixed) -> Mixed:
        """The operators of both, in order."""
        certain = tuple(dict.fromkeys((*self.certain, *second.certain)))
        undecided = tuple(dict.fromkeys((*self.undecided, *second.undecided)))
        return Mixed(certain[:_MOST], undecided[:_MOST])


@dataclass(frozen=True)
class Counts:
    """The value is how often each key occurs in the whole batch, or the sums of these numbers."""

    keys: fx.Node


@dataclass(frozen=True)
class Listed:
    """The value depends on an input that the caller gives for each microbatch."""


State = Invariant | Rows | Counts | Mixed | Listed

INVARIANT = Invariant()
LISTED = Listed()

_MOST = 8  # operators that a message can name


class RowsMixError(Exception):
    """An operator computes a row of its result from other rows."""


class NoRuleError(Exception):
    """No rule says what an operator does with rows."""
