"""The transport between the virtual ranks of one process: tensors are handed over, not copied."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipegraph.runtime.step_inputs import StepInputs
from pipegraph.runtime.transport.buffer_pool import overwrite, verifies_releases
from pipegraph.runtime.wiring import Transfer

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

    def learn(self, ranks: tuple[int, int], given: StepInputs) -> None:
        pass  # the process is given every input

    def receive(self, transfer: Transfer, given: StepInputs) -> LocalReceive:
        return self._receive(transfer, self._arrived)

    def start(self, kind: str, given: StepInputs) -> None:
        self._arrived.clear()  # what a step that failed has left

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._arrived.clear()
