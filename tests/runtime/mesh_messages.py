"""What the ranks of a mesh send in a step: how often, how much, when, and to whom."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipegraph.runtime.measurements import Message
from pipegraph.runtime.processes.group import Group
from pipegraph.schedule import Action, Collective
from tests.runtime.meshes import LENGTH, TP_PLAN, Shape, make, sequence_plan


class Messages(TorchDispatchMode):
    """Counts the collectives of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


def count_messages(rank: int, folder: str, resident: int | None) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Of a step of 4 stages on 2 ranks, each shared by 2: its messages, those of the schedule, and bytes of parameters.

    The bytes are those of whole parameters, and of this rank's parts, after the step.
    """
    pipe, _ = make(folder, {"pp": 2, "dp_shard": 2}, "interleaved-1f1b", resident=resident)
    tokens, target = torch.zeros(8, LENGTH, dtype=torch.int64), torch.zeros(8)
    with Messages() as messages:
        pipe.step(tokens, target=target)
    groups = 3  # two layers, and what is left of the stage
    for kernels in pipe._runner.kernels.values():  # equal layers are one block
        assert [len(variant.divided.blocks) for variant in kernels.variants] == [1]
    kinds = Counter(
        action.kind.value
        for action in pipe._runner.executors.training.program(pipe.ranks[0])
        if isinstance(action, Collective)
    )
    gc.collect()
    alive = [parameter for parameter in gc.get_objects() if isinstance(parameter, nn.Parameter)]
    whole_bytes = sum(parameter.untyped_storage().nbytes() for parameter in alive if not isinstance(parameter, DTensor))
    parts = {id(parameter): parameter.to_local().untyped_storage().nbytes() for parameter in pipe.parameters()}
    return (
        dict(messages.counts),
        {kind: count * groups for kind, count in kinds.items()},
        whole_bytes,
        sum(parts.values()),
    )


def sent_bytes(rank: int, folder: str) -> list[int]:
    """What values take that this rank sends in a step: with whole boundaries, and with parts of the sequence."""
    totals, sizes, send = [], list[int](), Group.send

    def count(group: Group, tensor: Tensor, receiver: int) -> Any:
        sizes.append(tensor.nbytes if tensor.is_floating_point() else 0)  # the first message of a step has sizes
        return send(group, tensor, receiver)

    for plan in (TP_PLAN, sequence_plan()):
        pipe, _ = make(folder, {"pp": 2, "tp": 2}, "1f1b", tp_plan=plan)
        tokens, target = torch.zeros(8, LENGTH, dtype=torch.int64), torch.zeros(8)
        sizes.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Group, "send", count)
            pipe.step(tokens, target=target)
        totals.append(sum(sizes))
    return totals


class Order:
    """An observer that records when actions and collectives begin, in order of time."""

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
    reports = []
    for shape in shapes:
        pipe, _ = make(folder, shape, "interleaved-1f1b")
        tokens, target = torch.zeros(8, LENGTH, dtype=torch.int64), torch.zeros(8)
        order = Order()
        with Messages() as messages, pipe.observe(order):
            pipe.step(tokens, target=target)
        counts = dict(messages.counts)
        reports.append({"begun": [name for _, name in sorted(order.begun)], "sent": order.messages, "counts": counts})
    return reports
