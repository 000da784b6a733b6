"""What the executor asks of whatever carries tensors between stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pipegraph.runtime.step_inputs import StepInputs
from pipegraph.runtime.wiring import Transfer


class Receive(Protocol):
    """A message that is expected."""

    is_pooled: bool
    """Whether `release` gives the memory of the tensors to a later message."""

    def ready(self) -> bool:
        """False while another executor of this process has to run first. If True, `wait` is to be called."""
        ...

    def wait(self) -> Sequence[Tensor]:
        """The tensors, in the order of the transfer's values. Raises ConnectionLost if they cannot come."""
        ...

    def release(self) -> None:
        """Give the tensors' memory back after the last read. A later message overwrites it.

        If that memory lives on elsewhere, it is never released: it then belongs to whoever holds it.
        """
        ...


class Transport(Protocol):
    """Carries messages. Between two ranks, each direction keeps its order."""

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        """Start sending and return at once. The tensors are kept until they are sent, and no longer."""
        ...

    def learn(self, ranks: tuple[int, int], given: StepInputs) -> None:
        """Wait for the sizes that come with the first message from one rank to another, and let `given` learn them."""
        ...

    def receive(self, transfer: Transfer, given: StepInputs) -> Receive:
        """Start receiving and return at once."""
        ...

    def start(self, kind: str, given: StepInputs) -> None:
        """Begin a call, a "step" or an "eval", with what it is given. What a call before it has left is forgotten."""
        ...

    def finish(self) -> None:
        """End a call: everything sent has arrived, or is kept until it has. Raises ConnectionLost."""
        ...

    def close(self) -> None:
        """End every connection, so that whoever waits for this rank stops waiting."""
        ...
