"""What the executor asks of whatever carries tensors between stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pipegraph.runtime.wiring import Transfer


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
