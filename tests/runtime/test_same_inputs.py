"""Ranks of one pipeline are given the same batch: other values, or the same rows in another order, are an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import init_device_mesh

import pipegraph
from pipegraph.errors import PipegraphError
from pipegraph.runtime.checksums import ABSENT, Checksums, checksum
from tests.messages import missing
from tests.runtime import ranks
from tests.runtime.packages import loss, write
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain

ORDER = [1, 0, 2, 3]


def rows(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def batch_of(rank: int, how: str) -> tuple[Tensor, Tensor | None]:
    x, target = rows(0), torch.arange(4.0)
    if rank == 1:
        x = {"values": rows(1), "order": x[ORDER], "cut": x}.get(how, x)
        target = target[ORDER] if how == "target" else target
    return x, target


def steps(rank: int, folder: str, cases: list[tuple[str, dict[str, Any]]], shape: dict[str, int] | None = None) -> Any:
    """Of each case: the error of a step that one rank takes with another batch, and the number of steps before."""
    outcomes = []
    for how, options in cases:
        done = 0
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape)) if shape else None
        schedule = "interleaved-1f1b" if shape else "1f1b"
        pipe = pipegraph.Pipeline(folder, schedule, 2, loss, kernels="autograd", timeout=30, mesh=mesh, **options)
        try:
            for number in range(3):
                x, target = batch_of(rank, how if number == 1 else "same")
                if number == 1 and how == "none" and rank == 1:
                    pipe.step(None, target=target)
                elif number == 1 and how == "cut" and rank == 1:
                    pipe.step([x[:2], x[2:]], target=[target[:2], target[2:]])
                else:
                    pipe.step(x, target=target)
                done += 1
            outcomes.append((done, ""))
        except PipegraphError as error:
            outcomes.append((done, f"{type(error).__name__}: {error}"))
    return outcomes


def test_other_values_and_orders_are_refused_on_every_rank_within_a_step(tmp_path: Path) -> None:
    cases = [
        ("values", {}),
        ("order", {}),
        ("target", {}),
        ("same", {}),
        ("none", {}),
        ("cut", {}),
        ("values", {"check_inputs": False}),
    ]
    for outcomes in ranks.run(steps, 2, str(write(chain(2), tmp_path / "chain")), cases):
        assert isinstance(outcomes, list), outcomes
        for name, (done, message) in zip(("x", "x", "target"), outcomes[:3], strict=True):
            assert done == 1
            assert not missing(
                message, "RuntimeFault", f"values of {name},", "rank 0 against rank 1", "Try: the same batch"
            )
        assert outcomes[3:] == [(3, "")] * 4


def test_data_parallel_ranks_are_given_different_batches(tmp_path: Path) -> None:
    folder = str(write(chain(2), tmp_path / "chain"))
    assert ranks.run(steps, 2, folder, [("values", {})], {"dp_replicate": 2}) == [[(3, "")]] * 2


def test_ranks_are_numbered_among_the_data_parallel_ranks(tmp_path: Path) -> None:
    pipe = pipeline(write(chain(2), tmp_path / "chain"))
    assert (pipe.dp_rank, pipe.dp_size) == (0, 1)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("count", [1, 5, 2048, 5000])
def test_a_checksum_tells_values_and_orders_apart(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(0, 256, (3, count), generator=generator).to(dtype)
    if dtype is torch.bool:
        values = torch.arange(3 * count).reshape(3, count) % 3 == 0
        values[0, 0], values[1, 0] = True, False
    total = int(checksum(values, 0))
    assert total == int(checksum(values.clone(), 0))
    changed = values.clone()
    changed[2, count - 1] = not changed[2, count - 1] if dtype is torch.bool else changed[2, count - 1] + 1
    if not torch.equal(changed, values):
        assert int(checksum(changed, 0)) != total
    if not torch.equal(values[[1, 0, 2]], values):
        assert int(checksum(values[[1, 0, 2]], 0)) != total


def test_a_checksum_is_that_of_the_values_alone() -> None:
    values = torch.randn(7, 6, 3)
    total = int(checksum(values, 0))
    assert int(checksum([values[:2], values[2:6], values[6:]], 0)) == total, "of a list of microbatches"
    assert int(checksum(torch.cat([torch.zeros(1, 6, 3), values])[1:], 0)) == total, "at another place of a storage"
    assert int(checksum(values.transpose(0, 1), 1)) == total, "with the rows in another dimension"
    assert int(checksum(values.transpose(0, 1).contiguous().split([3, 4], 1)[0], 1)) == int(checksum(values[:3], 0))
    assert int(checksum({"a": values, "b": [values]}, 0)) != total
    assert checksum(None, 0) is None
    assert checksum("mean", 0) is None


def test_a_cpu_reports_the_checksums_of_the_same_call() -> None:
    number = torch.tensor(5)
    assert Checksums(2, torch.device("cpu")).report(3, [number, None]) == (3, (5, ABSENT))
