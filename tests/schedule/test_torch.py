"""torch's own generators make the same orders, action by action."""

import pytest

from pipegraph.schedule import build, to_csv

RANKS = range(2, 9)


def torch_cells(torch_name: str, ranks: int, microbatches: int, chunks: int | None = None) -> list[list[str]]:
    """torch's orders of computing actions. An overlapped pair is one cell, as in its CSV."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(torch_name, ranks, microbatches, chunks)
    return [[str(cell) for cell in row if cell is not None and "REDUCE_GRAD" not in str(cell)] for row in rows]


def cells(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> list[list[str]]:
    return [line.split(",") for line in to_csv(build(name, ranks, microbatches, chunks)).splitlines()]


@pytest.mark.parametrize("ranks", RANKS)
def test_gpipe(ranks: int) -> None:
    for microbatches in (1, ranks, 2 * ranks + 3):
        assert cells("gpipe", ranks, microbatches) == torch_cells("GPipe", ranks, microbatches)


@pytest.mark.parametrize("ranks", RANKS)
def test_1f1b(ranks: int) -> None:
    for microbatches in (ranks, ranks + 1, 2 * ranks + 3):  # torch's refuses fewer microbatches than ranks
        expected = torch_cells("1F1B", ranks, microbatches)
        last = ranks - 1  # whose forwards torch numbers from 1
        expected[last] = [
            f"{last}F{int(cell.partition('F')[2]) - 1}" if cell.startswith(f"{last}F") else cell
            for cell in expected[last]
        ]
        assert cells("1f1b", ranks, microbatches) == expected


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("name", "torch_name"),
    [("interleaved-1f1b", "Interleaved1F1B"), ("interleaved-zb", "InterleavedZeroBubble")],
)
def test_interleaved(name: str, torch_name: str, ranks: int, chunks: int) -> None:
    for microbatches in (ranks, 2 * ranks, 5 * ranks):
        expected = torch_cells(torch_name, ranks, microbatches, chunks)
        assert cells(name, ranks, microbatches, chunks) == expected


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("ranks", RANKS)
def test_looped_bfs(ranks: int, chunks: int) -> None:
    for microbatches in (1, ranks + 1, 2 * ranks + 3):
        assert cells("looped-bfs", ranks, microbatches, chunks) == torch_cells("LoopedBFS", ranks, microbatches, chunks)


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_v(ranks: int) -> None:
    for microbatches in (2 * ranks - 1, 2 * ranks, 4 * ranks + 3):
        assert cells("zb-v", ranks, microbatches) == torch_cells("ZBVZeroBubble", ranks, microbatches)


@pytest.mark.parametrize("ranks", RANKS)
def test_dualpipe_v(ranks: int) -> None:
    for microbatches in (2 * ranks, 2 * ranks + 1, 4 * ranks + 3):
        # Each as one cell: so the same pairs overlap.
        assert cells("dualpipe-v", ranks, microbatches) == torch_cells("DualPipeV", ranks, microbatches)
