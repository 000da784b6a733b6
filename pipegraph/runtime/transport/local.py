"""The transport between the virtual ranks of one process: tensors are handed over, not copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pipegraph.runtime.wiring import Transfer

_Arrived = dict[tuple[int, int, int], Sequence[Tensor]]


@dataclass(frozen=True)
class LocalReceive:
    transfer: Transfer
    arrived: _Arrived

    def ready(self) -> bool:
        return self.transfer.key in self.arrived

    def wait(self) -> Sequence[Tensor]:
        return self.arrived.pop(self.transfer.key)


class LocalTransport:
    """One object shared by all ranks of the process."""

    def __init__(self) -> None:
        self._arrived: _Arrived = {}

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        self._arrived[transfer.key] = tensors

    def receive(self, transfer: Transfer) -> LocalReceive:
        return LocalReceive(transfer, self._arrived)

    def start(self, kind: str) -> None:
        self._arrived.clear()  # what a step that failed has left

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._arrived.clear()
