"""`pipelining_fn` called as torchtitan's trainer calls it: losses and weights are those of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from pipegraph.schedule import build, to_csv
from tests.integrations import torchtitan_ranks
from tests.integrations import torchtitan_stand_in as titan
from tests.runtime import ranks

pytestmark = pytest.mark.timeout(200)


def seed_state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.3
        for name, tensor in titan.whole_model().state_dict().items()
    }


def expected(dp_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the whole model on the whole batch."""
    model = titan.whole_model(seed_state())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_rank = [list(titan.batches(rank, dp_ranks, 16)) for rank in range(dp_ranks)]

    def loss_of(first: int, count: int) -> tuple[Tensor, int]:
        parts = [microbatch for batches in of_rank for microbatch in batches[first : first + count]]
        tokens, positions, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, int((labels != -100).sum())

    losses = []
    for step in range(2):
        optimizer.zero_grad()
        loss, count = loss_of(8 * step, 8)
        (loss / count).backward()
        optimizer.step()
        losses.append(float(loss.detach() / count))
    with torch.no_grad():
        return [*losses, float(loss_of(0, 4)[0])], dict(model.state_dict())


@pytest.mark.parametrize(
    ("count", "dp_shard", "parallelism"),
    [
        (2, 1, {}),
        (2, 1, {"pipeline_parallel_schedule": "ZBVZeroBubble"}),
        (2, 1, {"module_fqns_per_model_part": [["tok_embeddings", "layers.0"], ["layers.1", "lm_head"]]}),
        (4, 2, {"pipeline_parallel_schedule": "Interleaved1F1B"}),
    ],
)
def test_a_trainers_steps(count: int, dp_shard: int, parallelism: dict[str, Any], tmp_path: Path) -> None:
    configuration = titan.Configuration(str(tmp_path), count, dp_shard=dp_shard, parallelism=parallelism)
    results = ranks.run(torchtitan_ranks.train, count, configuration, seed_state(), timeout=150)
    losses, weights = expected(dp_shard)
    trained: dict[str, Tensor] = {}
    for result in results:
        assert not isinstance(result, str), result
        assert result[0] == pytest.approx(losses, rel=1e-5)
        trained |= result[1]
    assert trained.keys() == weights.keys()
    for name, tensor in weights.items():
        assert_close(trained[name], tensor, msg=name)


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "schedule.csv").write_text(to_csv(build("zb-v", 2, 4)))
    parallelism = {"pipeline_parallel_schedule_csv": str(tmp_path / "schedule.csv")}
    results = ranks.run(
        torchtitan_ranks.train, 2, titan.Configuration(str(tmp_path), 2, parallelism=parallelism), seed_state()
    )
    losses, _ = expected(1)
    assert [result[0] for result in results] == [pytest.approx(losses, rel=1e-5)] * 2


def test_initial_values_are_those_of_the_model(tmp_path: Path) -> None:
    configuration = titan.Configuration(str(tmp_path), 2)
    states = ranks.run(torchtitan_ranks.initial_state, 2, configuration, timeout=100)
    assert not {*states[0]} & {*states[1]}
    model = titan.whole_model()
    for name, tensor in model.state_dict().items():
        assert_close((states[0] | states[1])[name], tensor)


@pytest.mark.parametrize(
    ("options", "kind", "place", "advice"),
    [
        ({"tp": 2}, "ArgumentError", "tp has 2 ranks", "data_parallel_shard_degree"),
        ({"loss_fn": titan.ChunkedLossWrapper()}, "ArgumentError", "ChunkedLossWrapper", "CrossEntropyLoss"),
        ({"attention": titan.FlexAttention.Config()}, "ArgumentError", "FlexAttention", "ScaledDotProductAttention"),
        ({"training": {"mixed_precision_param": "float16"}}, "ArgumentError", "float16", "bfloat16"),
        ({"parallelism": {"pipeline_parallel_schedule": "1F1C"}}, "ScheduleError", "1F1C", "1f1b"),
        (
            {"parallelism": {"pipeline_parallel_layers_per_stage": 2}},
            "ArgumentError",
            "3 stages on 2 ranks",
            "multiple",
        ),
        (
            {"parallelism": {"module_fqns_per_model_part": [["layers.0"], ["layers.9"]]}},
            "PipegraphError",
            "layers.9",
            "",
        ),
    ],
)
def test_refusals_reach_every_rank(options: dict[str, Any], kind: str, place: str, advice: str, tmp_path: Path) -> None:
    results = ranks.run(torchtitan_ranks.refused, 2, titan.Configuration(str(tmp_path), 2, **options), timeout=100)
    for name, problem, text in results:
        assert name == kind
        assert place in problem
        assert advice in text
