"""A model that returns its own loss: the check of the first step runs its last stage on parts of a microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import pipegraph
from pipegraph.errors import BatchError, RuntimeFault
from tests.messages import refused

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, pipegraph.Package]:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))
    captured = pipegraph.capture(model, kwargs=inputs(2, 0))
    plan = pipegraph.plan(captured, points=["model.layers.1"])
    return model, pipegraph.write_package(plan, tmp_path_factory.mktemp("llama") / "out")


def inputs(rows: int, padding: int) -> dict[str, Tensor]:
    ids = torch.arange(rows * 9).reshape(rows, 9) % 64
    mask = torch.ones_like(ids)
    mask[1::2, 9 - padding :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def own_loss(output: dict[str, Tensor], _: object) -> Tensor:
    return output["loss"]


def test_rows_with_equally_many_labels(package: tuple[Any, pipegraph.Package]) -> None:
    model, written = package
    pipe = pipegraph.Pipeline(written, "1f1b", 3, loss_fn=own_loss, kernels="eager")
    batch = inputs(6, 0)
    torch.testing.assert_close(pipe.step(**batch).loss, model(**batch).loss.detach())


def test_the_mean_over_labels_that_count_is_refused(package: tuple[Any, pipegraph.Package]) -> None:
    model, written = package
    batch = inputs(6, 4)
    pipe = pipegraph.Pipeline(written, "1f1b", 3, loss_fn=own_loss, kernels="eager")
    with refused(BatchError, "loss_fn", "mean over rows", advice="loss_weight="):
        pipe.step(**batch)
    pipe = pipegraph.Pipeline(written, "gpipe", 3, loss_fn=own_loss, loss_over="batch", kernels="eager")
    with refused(RuntimeFault, "action 1F2", 'loss_over="batch"', "loss", advice="loss_fn of the outputs"):
        pipe.step(**batch)
    pipe = pipegraph.Pipeline(written, "1f1b", 1, loss_fn=own_loss, kernels="eager")
    torch.testing.assert_close(pipe.step(**batch).loss, model(**batch).loss.detach())
