"""The example's loop trains and predicts as a plain loop does, for any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from pipegraph import PipegraphError, Pipeline
from pipegraph.integrations.accelerate import PipelineAccelerator
from tests.integrations import example_scripts

example = example_scripts.load("accelerated")


def expected_lines() -> list[str]:
    model = example.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    lines = []
    inputs, labels = example.DATA.tensors
    for rows in torch.arange(len(inputs)).split(8):
        loss = cross_entropy(model(inputs[rows]), labels[rows])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        lines.append(f"loss {loss:.6f}, norm {norm:.6f}")
    return [*lines, f"predicted {model(inputs).argmax(-1).tolist()}"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.timeout(200)
def test_the_loop_is_that_of_one_process(ranks: int, tmp_path: Path) -> None:
    printed = example_scripts.run("accelerated", ranks, tmp_path / "package")
    assert printed.splitlines() == expected_lines()


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return example.pipeline(tmp_path_factory.mktemp("accelerated") / "package")


def test_another_precision_is_refused(pipe: Pipeline) -> None:
    with pytest.raises(PipegraphError) as caught:
        PipelineAccelerator(pipe, cpu=True, mixed_precision="bf16")
    assert "precision=" in caught.value.advice


def test_there_is_no_backward(pipe: Pipeline) -> None:
    with pytest.raises(PipegraphError) as caught:
        PipelineAccelerator(pipe, cpu=True).backward(torch.zeros(()))
    assert "pipe.step(" in caught.value.advice
