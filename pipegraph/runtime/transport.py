"""What the executor asks of whatever carries tensors between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from pipegraph.package import Value


@dataclass(frozen=True)
class Transfer:
    """One message: all values of one edge, for one microbatch, in one direction."""

    sender: int
    receiver: int
    backward: bool
    microbatch: int
    ranks: tuple[int, int]
    """of the sender and of the receiver"""
    values: tuple[Value, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.values)

    def __str__(self) -> str:
        action = f"{self.sender}SEND_{'B' if self.backward else 'F'}{self.microbatch}"
        return f"stage {self.sender}, action {action}, microbatch {self.microbatch}"

    @property
    def key(self) -> tuple[int, int, int]:
        """Equal at both ends, and for no other message of a step: sender < receiver tells the direction."""
        return self.sender, self.receiver, self.microbatch


class Receive(Protocol):
    """A message on its way."""

    def ready(self) -> bool:
        """False while another executor of this process has to run first; waiting is for `wait`."""
        ...

    def wait(self) -> Sequence[Tensor]:
        """The tensors, in the order of the transfer's values. Raises ConnectionLost where they cannot come."""
        ...


class Transport(Protocol):
    """Carries messages. Between two ranks, each direction keeps its order."""

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        """Start sending and return at once; the tensors are kept until they are sent, and no longer."""
        ...

    def receive(self, transfer: Transfer) -> Receive:
        """Start receiving and return at once."""
        ...

    def start(self, kind: str) -> None:
        """Be ready for a call, a "step" or an "eval", whatever the one before has left."""
        ...

    def finish(self) -> None:
        """End a call: what is sent has arrived, or is kept until it has. Raises ConnectionLost."""
        ...

    def close(self) -> None:
        """End every connection, so that whoever waits for this rank stops waiting."""
        ...


class ConnectionLost(Exception):
    """A connection to the rank `peer` is closed, or `silent`; None where it cannot be told to which of several.

    `where` is what was being sent, where the action that is named beside it is another one.
    """

    def __init__(self, peer: int | None, why: str, silent: bool = False, where: str = "") -> None:
        super().__init__(why)
        self.peer = peer
        self.silent = silent
        self.where = where
