"""What a rank holds during a step, and when its receives are posted."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from pipegraph.errors import PipegraphError
from pipegraph.runtime.microbatches import StepInputs
from pipegraph.runtime.parameters import share_memory
from pipegraph.runtime.transport.protocol import Receive
from pipegraph.runtime.wiring import Transfer
from pipegraph.schedule import Action

COMPUTING_ACTIONS: Final = 2
"""How many computing actions ahead of its use a receive is posted.

A message without a posted receive stays with its sender and sets off only when one is posted. Two actions ahead is
early enough for every message that travels for less time than they compute, also if actions are not equally long. Each
posted receive takes a buffer, so that to post all of them at once would take one for every microbatch.
"""


@dataclass(frozen=True)
class StepOutputs:
    """The results of a step on the rank of the last stage, by microbatch."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    metrics: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def add_loss(self, microbatch: int, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """Keep what `loss_fn` returned for a microbatch. Raises PipegraphError if its metrics have other names."""
        first_microbatch, first = next(iter(self.metrics.items()), (microbatch, metrics))
        if metrics.keys() != first.keys():
            raise PipegraphError(
                f"loss_fn returned {_listed(metrics)} for microbatch {microbatch}, and {_listed(first)} for microbatch "
                f"{first_microbatch}.",
                "the same names for each; nan for one without a value.",
            )
        self.losses[microbatch] = loss
        self.metrics[microbatch] = metrics

    def loss_by_microbatch(self) -> Tensor | None:
        """Return the losses [microbatches]; None if this rank has no losses."""
        return torch.stack([self.losses[index] for index in sorted(self.losses)]) if self.losses else None

    def metrics_by_microbatch(self) -> dict[str, Tensor] | None:
        """Return the metrics by name, each [microbatches]; None if this rank has no losses."""
        if not self.losses:
            return None
        ordered = [self.metrics[index] for index in sorted(self.metrics)]
        return {name: torch.stack([metrics[name] for metrics in ordered]) for name in ordered[0]}


def _listed(names: Iterable[str]) -> str:
    return f"the metrics {', '.join(names)}" if names else "no metrics"


class GradientSums(dict[str, Tensor]):
    """Gradients by the name of their value, summed over the consumers of the value."""

    def add(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        for name, gradient in gradients:
            # Never in place: the first gradient may share memory with what its sender still reads.
            self[name] = self[name] + gradient if name in self else gradient


class PostedReceive(NamedTuple):
    """A receive on its way: the RECV action, what it moves, and what is waited for."""

    action: Action
    message: Transfer
    receive: Receive


class ReceivedMessages:
    """The pooled messages that one stage has received for one microbatch: inputs, and gradients of its outputs.

    They are released after the stage's last action for the microbatch (B, W, or F if there is no backward), because
    its kernels may keep them until then. A message whose memory leaves the executor is not released: its memory
    belongs to the receiver from then on. It can leave in three ways, and each is followed by a check:

    - as an output or loss of F, which is sent, given to another stage or returned to the caller: `keep_shared`;
    - as a gradient of an input, which is sent or given to another stage: `keep_shared`;
    - to the module's own Python code, which may keep anything it sees: `keep_all`, unless the kernels promise
      `Forward.is_pure`. That promise covers `.grad` as well.
    """

    __slots__ = ("_is_kept", "_receives")

    def __init__(self) -> None:
        self._receives: list[tuple[Receive, Sequence[Tensor]]] = []
        self._is_kept = False

    def add(self, receive: Receive, tensors: Sequence[Tensor]) -> None:
        if not self._is_kept:
            self._receives.append((receive, tensors))

    def keep_all(self) -> None:
        """Release neither these messages nor those still to come for the microbatch."""
        self._is_kept = True
        self._receives.clear()

    def keep_shared(self, tensors: Sequence[Any]) -> None:
        """Do not release the messages whose memory one of these tensors uses."""
        self._receives = [message for message in self._receives if not share_memory(tensors, message[1])]

    def release(self) -> None:
        for receive, _ in self._receives:
            receive.release()


@dataclass(frozen=True)
class StepState:
    """The tensors of one step on one rank.

    Each is in one place and leaves it when it is used, at its last read in the schedule's `lifetimes`. Keys are
    (stage, microbatch), with True for what comes back, or (from stage, to stage, microbatch).

    Attributes:
        handed_back: the gradients of inputs that a stage handed on, from the stages to which it did.
        cast: the dtypes that outputs had before they were cast to those that their consumers expect, by name.
        received: messages whose memory goes back to the transport.
    """

    step_inputs: StepInputs
    results: StepOutputs
    inputs: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    gradients: dict[tuple[int, int], GradientSums] = field(default_factory=lambda: defaultdict(GradientSums))
    handed_back: dict[tuple[int, int], GradientSums] = field(default_factory=lambda: defaultdict(GradientSums))
    saved: dict[tuple[int, int], Any] = field(default_factory=dict)
    cast: dict[tuple[int, int], dict[str, torch.dtype]] = field(default_factory=lambda: defaultdict(dict))
    outgoing: dict[tuple[int, int, int], Sequence[Tensor]] = field(default_factory=dict)
    posted: dict[tuple[int, int, bool], list[PostedReceive]] = field(default_factory=lambda: defaultdict(list))
    received: dict[tuple[int, int], ReceivedMessages] = field(default_factory=lambda: defaultdict(ReceivedMessages))

    def release(self, key: tuple[int, int]) -> None:
        """Release what the stage has received for the microbatch. Its kernels are done with it."""
        received = self.received.pop(key, None)
        if received is not None:
            received.release()


def receives_due(actions: Sequence[Action]) -> list[int]:
    """For each action of a rank, how many of the rank's receives are posted before it is done."""
    computed = list(itertools.accumulate((not action.kind.is_transfer for action in actions), initial=0))
    is_receive = (action.kind.is_transfer and not action.sends for action in actions)
    reached = [count for count, receives in zip(computed, is_receive, strict=False) if receives]
    return [bisect_right(reached, count + COMPUTING_ACTIONS) for count in computed[:-1]]
