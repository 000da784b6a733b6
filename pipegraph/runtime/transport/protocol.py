"""What the executor asks of whatever carries tensors between stages, and what does so within one process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipegraph.runtime.microbatches import StepInputs
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

        Memory that is still in use elsewhere is never released: it belongs to its other holder.
        """
        ...


class Transport(Protocol):
    """Carries messages. Between two ranks, each direction keeps its order."""

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        """Start sending and return at once. The tensors are kept until they are sent, and no longer."""
        ...

    def receive(self, transfer: Transfer, step_inputs: StepInputs) -> Receive:
        """Start receiving and return at once."""
        ...

    def start(self) -> None:
        """Begin a step or an evaluation. Messages that a failed one has left are dropped."""
        ...

    def finish(self) -> None:
        """End a call: everything sent has arrived, or is kept until it has. Raises ConnectionLost."""
        ...

    def close(self) -> None:
        """End every connection, so that ranks that wait for this one stop waiting."""
        ...


def verifies_releases() -> bool:
    """Whether `PIPEGRAPH_VERIFY=1` asks to overwrite released memory at once, so that a wrong release shows."""
    return os.environ.get("PIPEGRAPH_VERIFY", "0") not in ("", "0")


def overwrite(tensors: Iterable[Tensor]) -> None:
    """Fill tensors with values that no later result can hide: NaN, or the largest integer."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        else:
            tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


_Arrived = dict[tuple[int, int, int], Sequence[Tensor]]


class LocalReceive:
    """A message that another executor of this process sends."""

    is_pooled = False

    def __init__(self, transfer: Transfer, arrived: _Arrived) -> None:
        self._transfer = transfer
        self._arrived = arrived

    def ready(self) -> bool:
        return self._transfer.key in self._arrived

    def wait(self) -> Sequence[Tensor]:
        return self._arrived.pop(self._transfer.key)

    def release(self) -> None:
        pass


class CopiedReceive(LocalReceive):
    """For `PIPEGRAPH_VERIFY`: a copy, which is overwritten when it is released, as a message of another process is."""

    is_pooled = True

    def wait(self) -> Sequence[Tensor]:
        self._copies = [tensor.clone() for tensor in super().wait()]
        return self._copies

    def release(self) -> None:
        overwrite(self._copies)


class LocalTransport:
    """One object shared by all ranks of the process."""

    def __init__(self) -> None:
        self._arrived: _Arrived = {}
        self._receive = CopiedReceive if verifies_releases() else LocalReceive

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        self._arrived[transfer.key] = tensors

    def receive(self, transfer: Transfer, step_inputs: StepInputs) -> LocalReceive:
        return self._receive(transfer, self._arrived)

    def start(self) -> None:
        self._arrived.clear()

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._arrived.clear()
