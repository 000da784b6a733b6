"""What one step takes, holds and gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipegraph.runtime.transport.protocol import Receive
from pipegraph.runtime.wiring import Transfer
from pipegraph.schedule import Action


@dataclass(frozen=True)
class Feed:
    """What a step takes from the caller: every input by name and the target, each as one item per microbatch."""

    inputs: Mapping[str, Sequence[Any]]
    targets: Sequence[Any]
    with_loss: bool = False
    keep_outputs: bool = False


@dataclass(frozen=True)
class Results:
    """What a step gives on the rank of the last stage, by microbatch."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


class Sums(dict[str, Tensor]):
    """Gradients by the name of their value, summed over the consumers of the value."""

    def add(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        for name, gradient in gradients:
            # Never in place: what came first may be shared with the graph that it came from.
            self[name] = self[name] + gradient if name in self else gradient


class Posting(NamedTuple):
    """A receive on its way: the RECV action, what it moves, and what is waited for."""

    action: Action
    message: Transfer
    receive: Receive


@dataclass(frozen=True)
class Step:
    """The tensors of one step on one rank. Each stands in one place, and leaves it when it is used, which is where the
    schedule's `lifetimes` have its last read.

    Keys are (stage, microbatch), with True for what comes back, or (from stage, to stage, microbatch).
    """

    inputs: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    gradients: dict[tuple[int, int], Sums] = field(default_factory=lambda: defaultdict(Sums))
    saved: dict[tuple[int, int], Any] = field(default_factory=dict)
    cast: dict[tuple[int, int], dict[str, torch.dtype]] = field(default_factory=lambda: defaultdict(dict))
    """by (stage, microbatch): of outputs that were cast to what the manifest promises, what they were before"""
    outgoing: dict[tuple[int, int, int], Sequence[Tensor]] = field(default_factory=dict)
    posted: dict[tuple[int, int, bool], list[Posting]] = field(default_factory=lambda: defaultdict(list))
