"""What is known of the rows of a value: where they are, or why it depends on several of them at once.

A batch of ``B`` rows is cut along a dimension of each input. A value has rows if cutting it along ``dim`` gives what the
graph computes from the cut inputs. Dimensions may be merged: in ``[B * heads, tokens, width]`` the row of an element of
dimension 0 is ``(index // heads) % B``, and ``inner`` is ``heads``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import fx


class Content(Enum):
    """What the elements of a value with rows are."""

    DATA = "data"
    UNIFORM = "the same number everywhere, which has the rows of whatever it is combined with"
    NUMBERS = "the numbers of the rows"


@dataclass(frozen=True)
class Whole:
    """The value is the same for every batch: no element depends on a row, and no size on their number."""


@dataclass(frozen=True)
class Rows:
    """The value has rows along ``dim``, each ``inner`` elements long there."""

    dim: int
    inner: int = 1
    content: Content = Content.DATA

    @property
    def is_data(self) -> bool:
        """Whether the rows have data of their own."""
        return self.content is Content.DATA


@dataclass(frozen=True)
class Mixed:
    """The value depends on several rows at once, or no rule says that it does not.

    Attributes:
        certain: the operators that mix rows.
        undecided: the operators for which there is no rule.
    """

    certain: tuple[fx.Node, ...] = ()
    undecided: tuple[fx.Node, ...] = ()

    def union(self, other: Mixed) -> Mixed:
        """The operators of both, in order."""
        certain = tuple(dict.fromkeys((*self.certain, *other.certain)))
        undecided = tuple(dict.fromkeys((*self.undecided, *other.undecided)))
        return Mixed(certain[:_MOST], undecided[:_MOST])


@dataclass(frozen=True)
class Listed:
    """The value depends on an input that the caller gives for each microbatch."""


State = Whole | Rows | Mixed | Listed

WHOLE = Whole()
LISTED = Listed()

_MOST = 8  # operators that a message can name


class RowsMixError(Exception):
    """An operator computes a row of its result from other rows."""


class NoRuleError(Exception):
    """No rule says what an operator does with rows."""
