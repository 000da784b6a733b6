"""When a rank reduces its gradients in a step, and with whom."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from pipegraph.runtime.measurements import Message
from pipegraph.schedule import Action, Collective
from tests.runtime.meshes import LENGTH, Messages, Shape, make


class Order:
    """An observer of what is begun, in the order of time."""

    def __init__(self) -> None:
        self.begun: list[tuple[float, str]] = []
        self.messages: dict[str, list[Message]] = {}

    def begin(self, rank: int, action: Action) -> None:
        self.begun.append((time.perf_counter(), str(action)))

    def end(self, rank: int, action: Action, saved: Any) -> None:
        pass

    def collective(
        self, rank: int, collective: Collective, begin: float, end: float, messages: Sequence[Message]
    ) -> None:
        self.begun.append((begin, str(collective)))
        self.messages.setdefault(str(collective), []).extend(messages)


def reduce(rank: int, folder: str, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Of each mesh, in a step of 4 microbatches: what was begun, what was sent, and how often torch reduced."""
    found = []
    for shape in shapes:
        pipe, _ = make(folder, shape, "interleaved-1f1b")
        tokens, target = torch.zeros(8, LENGTH, dtype=torch.int64), torch.zeros(8)
        order = Order()
        with Messages() as messages, pipe.observe(order):
            pipe.step(tokens, target=target)
        counts = dict(messages.counts)
        found.append({"begun": [name for _, name in sorted(order.begun)], "sent": order.messages, "counts": counts})
    return found
