"""What ranks are given is compared as text that is the same on all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel

from pipegraph.errors import ArgumentError
from pipegraph.runtime.processes.agreement import check_agreement
from pipegraph.runtime.processes.rank_grid import single
from pipegraph.runtime.processes.world import fingerprint
from pipegraph.runtime.rank_options import described
from tests.messages import refused


class OtherRanks(SimpleNamespace):
    """The world of the first of some ranks, by what each of them passes under one name."""

    def __init__(self, *texts: str) -> None:
        super().__init__(rank=0, grid=single(len(texts)), texts=list(texts))

    def gather(self, figures: list[float], *_: str) -> list[list[float]]:
        assert figures == [fingerprint(self.texts[0].encode())]
        return [[fingerprint(text.encode())] for text in self.texts]

    def gather_text(self, text: str, *_: str) -> list[str]:
        assert text == self.texts[0]
        return self.texts


LONG = "layers.*.up: colwise, layers.*.down: rowwise, head: colwise_gather_output, embed: rowwise"


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (["None", "5"], ["seed", "5 on rank 1", "None on rank 0"]),
        (["5", "None", "None"], ["seed", "5 on rank 0", "None on rank 1"]),
        (
            [LONG, LONG.replace("rowwise,", "colwise,")],
            ["seed is …colwise, head: ", " on rank 1, and …rowwise, head: "],
        ),
        ([LONG, LONG[:40]], ["seed is …row on rank 1", "…rowwise, head: colwise_gather_output, ", " on rank 0"]),
    ],
)
def test_the_rank_that_differs_is_named_with_both_values(texts: list[str], parts: list[str]) -> None:
    world: Any = OtherRanks(*texts)
    with refused(ArgumentError, *parts, advice="the same on every rank"):
        check_agreement(world, {"seed": texts[0]}, "pp")


def test_equal_texts_are_not_sent() -> None:
    world: Any = OtherRanks("5", "5")
    world.gather_text = None
    check_agreement(world, {"seed": "5"}, "pp")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        ("sum", '"sum"'),
        ({"layers.*": ColwiseParallel()}, "{layers.*: ColwiseParallel}"),
        ({"shard_placement_fn": lambda parameter: None}, "{shard_placement_fn: <lambda>}"),
        ([1, (2, test_equal_texts_are_not_sent)], "[1, [2, test_equal_texts_are_not_sent]]"),
        (object(), "<object object>"),
    ],
)
def test_a_description_is_the_same_on_every_rank(value: Any, text: str) -> None:
    assert described(value) == text


def test_a_policy_is_described_by_its_fields() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert "param_dtype=torch.bfloat16" in described({"mp_policy": policy})
