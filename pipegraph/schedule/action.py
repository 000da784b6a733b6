"""One action of a schedule: what a rank does with one microbatch of one stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipegraph.errors import ScheduleError, nearest


class Kind(StrEnum):
    """What an action does. The values are torch's, so that schedules can be exchanged as text."""

    F = "F"  # forward
    I = "I"  # input gradient  # noqa: E741 - the field's letter
    W = "W"  # weight gradient
    B = "B"  # full backward: I and W in one
    SEND_F = "SEND_F"  # send this stage's outputs to a later stage
    RECV_F = "RECV_F"  # receive this stage's inputs from an earlier stage
    SEND_B = "SEND_B"  # send the gradients of this stage's inputs to the earlier stage that made the inputs
    RECV_B = "RECV_B"  # receive the gradients of this stage's outputs from the later stage that used them

    @property
    def is_transfer(self) -> bool:
        return self in _PEER


BACKWARD = frozenset((Kind.B, Kind.I, Kind.W))
"""The kinds that compute a gradient."""

# transfer → (the kind at its other end, whether that is at a later stage, +1, or at an earlier one, −1)
_PEER: dict[Kind, tuple[Kind, int]] = {
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}

# At most nine digits: no schedule needs more, and passes work on machine integers.
_NUMBER = "([0-9]{1,9})"
_END = 10**9
_ACTION = re.compile(rf"{_NUMBER}([A-Za-z_]+){_NUMBER}(?:([<>]){_NUMBER})?")
_FORM = "An action is a stage, a kind and a microbatch."
_EXAMPLES = "2F0, 0B3, 0SEND_F1, or 0SEND_F1>3 to a stage that is not next"


@dataclass(frozen=True, slots=True)
class Action:
    """One action, printed as torch prints it: ``2F0`` is the forward of microbatch 0 on stage 2.

    ``peer`` is the other stage of a transfer, and None for an action that computes. It defaults to the neighbour, and
    is printed only if it is another stage: ``0SEND_F0>3`` sends to stage 3 what ``3RECV_F0<0`` receives.

    Raises ScheduleError if a field is not a valid number, or if the peer is on the wrong side of the stage.
    """

    stage: int
    kind: Kind
    microbatch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        stage, microbatch = self.stage, self.microbatch
        if not (type(stage) is type(microbatch) is int and 0 <= stage < _END and 0 <= microbatch < _END):
            raise ScheduleError(
                f"The stage and microbatch of an action count from 0 to {_END - 1}: "
                f"{self.stage!r} and {self.microbatch!r} do not."
            )
        if type(self.kind) is not Kind:
            object.__setattr__(self, "kind", _kind(self.kind))
        if self.kind not in _PEER:
            if self.peer is not None:
                raise ScheduleError(f"{self.stage}{self.kind.value}{self.microbatch} moves nothing, so it has no peer.")
            return
        _, side = _PEER[self.kind]
        if self.peer is None:
            object.__setattr__(self, "peer", self.stage + side)
        peer = self.peer
        if type(peer) is not int or not 0 <= peer < _END or (peer - self.stage) * side <= 0:
            raise ScheduleError(
                f"{self.stage}{self.kind.value}{self.microbatch} cannot have stage {peer} at its other end: "
                f"a {self.kind.value} has {'a later' if side > 0 else 'an earlier'} stage there."
            )

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        if self.peer is None or abs(self.peer - self.stage) == 1:
            return text
        return f"{text}{'>' if self.sends else '<'}{self.peer}"

    __repr__ = __str__

    @property
    def sends(self) -> bool:
        return self.kind is Kind.SEND_F or self.kind is Kind.SEND_B

    @property
    def partner(self) -> Action:
        """The other end of a transfer: ``1RECV_F2`` for ``0SEND_F2``. Raises ScheduleError if the action computes."""
        if self.peer is None:
            raise ScheduleError(f"{self} moves nothing, so it has no partner.")
        return Action(self.peer, _PEER[self.kind][0], self.microbatch, self.stage)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text that ``str`` writes. Raises a ScheduleError that quotes the text and shows an action's form."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"{text.strip()!r} is not an action. {_FORM}", f"{_EXAMPLES}.")
        stage, kind, microbatch, arrow, peer = match.groups()
        action = cls(int(stage), _kind(kind), int(microbatch), None if peer is None else int(peer))
        if arrow is not None and (arrow == ">") is not action.sends:
            raise ScheduleError(f"{text.strip()!r} is not an action: a SEND points to its peer with >, a RECV with <.")
        return action


class CollectiveKind(StrEnum):
    """What a collective does for the parameters of a stage. The values are torch's."""

    UNSHARD = "UNSHARD"  # gather the shards of its parameters
    RESHARD = "RESHARD"  # keep this rank's shard alone
    REDUCE_GRAD = "REDUCE_GRAD"  # sum its gradients over the ranks that hold it


_COLLECTIVE = re.compile(rf"{_NUMBER}({'|'.join(CollectiveKind)})")


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective among the actions of a rank, printed as torch prints it: ``0UNSHARD``.

    ``before`` is the action of its rank that it comes right before; None if it comes after all of them.
    """

    stage: int
    kind: CollectiveKind
    before: Action | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}"

    __repr__ = __str__

    @classmethod
    def parse(cls, text: str) -> Collective | None:
        """Read the text that ``str`` writes, as a collective after all actions; None if it is not a collective."""
        match = _COLLECTIVE.fullmatch(text.strip())
        return None if match is None else cls(int(match[1]), CollectiveKind(match[2]))


def unit_text(unit: Sequence[Action] | Collective) -> str:
    """Return a collective, one action, or an overlapped pair of two, as torch writes it."""
    if isinstance(unit, Collective):
        return str(unit)
    return f"({unit[0]};{unit[1]})OVERLAP_F_B" if len(unit) == 2 else str(unit[0])


def _kind(text: str) -> Kind:
    try:
        return Kind(text)
    except ValueError:
        choices = [kind.value for kind in Kind]
        raise ScheduleError(
            f"There is no action of the kind {text!r}.{nearest(str(text), choices)} The kinds are {', '.join(choices)}."
        ) from None
