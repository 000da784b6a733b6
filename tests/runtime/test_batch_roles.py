"""A batch whose rows the model mixes is not cut, and outputs come back as what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch.testing import assert_close

from pipegraph.errors import BatchError
from pipegraph.package import BatchEntry, Package, RowOperator
from tests.messages import refused
from tests.runtime.packages import Sketch, Stage, loss, write
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain

X, TARGET = torch.randn(6, 8), torch.arange(6.0)


def mixing(folder: Path) -> Package:
    """Rows that depend on other rows, as the proof of the roles says."""
    package = Package.open(write(chain(2), folder / "chain"))
    entry = BatchEntry("rules", mixing=(RowOperator("cumsum", "model.py:12"), RowOperator("sort", "model.py:14")))
    manifest = structs.replace(package.manifest, batch=entry)
    (package.path / "pipeline.json").write_text(manifest.to_json())
    return Package.open(package.path)


def test_a_batch_whose_rows_are_mixed_is_not_cut(tmp_path: Path) -> None:
    pipe = pipeline(mixing(tmp_path), microbatches=3, loss_fn=loss)
    parts = ("cumsum (model.py:12)", "1 more operator", "3 microbatches")
    for call in (pipe.step, pipe.evaluate, pipe.check_batch):
        with refused(
            BatchError, *parts, advice="--batch-dim x=DIM|whole|list; or pass lists of microbatches; or microbatches=1"
        ):
            call(X, target=TARGET)
    pipe.step(X[:2], target=TARGET[:2], microbatches=1)
    pipe.step([X[:2], X[2:4]], target=[TARGET[:2], TARGET[2:4]])


def outputs_sketch() -> Sketch:
    """The model returns its rows, an input, a temperature, a table, a sum over rows, and their number."""
    names = "y, x, temperature, table, total, count"
    return Sketch(
        stages=(
            Stage("x", "h", "self.one = nn.Linear(8, 8)", "return self.one(x)"),
            Stage(
                "h, x",
                names,
                "self.temperature = nn.Parameter(torch.tensor(2.5))\nself.register_buffer('table', torch.arange(4.0))",
                "return h * self.temperature, x, self.temperature, self.table, h.mean(), torch.tensor(len(h))",
            ),
        ),
        values={
            "x": ("float32", ("batch", 8), False),
            "h": ("float32", ("batch", 8), True),
            "y": ("float32", ("batch", 8), True),
            "temperature": ("float32", (), True),
            "table": ("float32", (4,), False),
            "total": ("float32", (), True),
            "count": ("int64", (), False),
        },
        outputs=names.split(", "),
        roles={"table": "whole"},
    )


def test_outputs_without_rows_come_back_as_they_are(tmp_path: Path) -> None:
    pipe = pipeline(write(outputs_sketch(), tmp_path / "outputs"), microbatches=2, loss_fn=loss)
    x = torch.randn(5, 8)
    y, passed, temperature, table, total, count = pipe.eval(x)
    whole_y, _, _, _, whole_total, _ = pipe.eval(x, microbatches=1)
    assert_close(y, whole_y)
    assert torch.equal(passed, x)
    assert (temperature.dim(), float(temperature)) == (0, 2.5)
    assert torch.equal(table, torch.arange(4.0))
    assert_close(total, whole_total)  # 3 rows and 2 rows: a mean over rows
    assert count.tolist() == [3, 2]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kernels", ["autograd", "eager"])
def test_an_output_shares_no_memory_with_the_batch(count: int, kernels: str, tmp_path: Path) -> None:
    pipe = pipeline(write(outputs_sketch(), tmp_path / "outputs"), "1f1b", kernels, loss_fn=loss)
    x = torch.randn(4, 8)
    original = x.clone()
    for batch in (x, [*x.chunk(count)]):
        passed = pipe.eval(batch, microbatches=count)[1]
        passed.zero_()
        assert torch.equal(x, original)
