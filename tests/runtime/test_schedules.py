"""Every named schedule gives the numbers of plain autograd, on the number of ranks that the package's stages need."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegraph.errors import ScheduleError
from pipegraph.runtime.schedule_choice import resolve_schedule
from pipegraph.schedule import Kind, Times, build, check, from_csv, join_backwards, lower, names, to_csv
from pipegraph.schedule.recipes import trains
from tests.messages import refused
from tests.runtime import rank_functions, ranks
from tests.runtime.packages import loss, write
from tests.runtime.parity import assert_parity
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain, skips, tied
from tests.torch_version import TORCH

TRAINING = [name for name in names() if trains(name)]
# Of torch's runtime: 2.11 sends itself a first message, which gloo cannot; 2.15 wants a WAIT_SEND for each send.
V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v") if TORCH >= (2, 13) else ()
torch_waits_for_sends = pytest.mark.skipif(TORCH >= (2, 15), reason="torch wants a WAIT_SEND for each send")


@pytest.mark.parametrize("name", TRAINING)
def test_parity_with_the_unsplit_model(name: str, tmp_path: Path) -> None:
    assert_parity(write(skips(), tmp_path / "skips"), name, microbatches=8, accumulate=2)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs", "interleaved-zb"])
def test_parity_with_three_stages_on_a_rank(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(to_csv(build(name, 2, 4, chunks=3)))
    assert_parity(write(chain(6), tmp_path / "chain"), str(tmp_path / "mine.csv"), microbatches=4)


@pytest.mark.parametrize("kernels", ["autograd", "eager"])
def test_parity_with_whole_and_divided_backwards_of_one_stage(kernels: str, tmp_path: Path) -> None:
    joined = join_backwards(build("zb-v", 2, 4), Times.equal(4))
    assert {action.kind for action in joined.actions[1] if action.stage == 1} == {Kind.F, Kind.I, Kind.W, Kind.B}
    (tmp_path / "mine.csv").write_text(to_csv(joined))
    folder = write(skips(), tmp_path / "skips")
    assert_parity(folder, str(tmp_path / "mine.csv"), microbatches=4, accumulate=2, kernels=kernels)


def test_a_file_with_transfers_and_collectives_runs(tmp_path: Path) -> None:
    first, second = to_csv(lower(build("zb-v", 2, 4))).splitlines()
    text = f"0UNSHARD,{first},0RESHARD,0REDUCE_GRAD\n1UNSHARD,{second},1RESHARD,1REDUCE_GRAD\n"
    (tmp_path / "mine.csv").write_text(text)
    folder = write(skips(), tmp_path / "skips")
    assert_parity(folder, str(tmp_path / "mine.csv"), microbatches=4)
    pipe = pipeline(folder, schedule=from_csv(text), loss_fn=loss)
    assert (pipe.schedule.lowered, len(pipe.schedule.collectives)) == (False, 6)


def test_parity_over_real_processes(tmp_path: Path) -> None:
    folder = str(write(skips(), tmp_path / "skips"))
    cases = [(folder, name) for name in ("interleaved-1f1b", "zb-v", "dualpipe-v")]
    assert ranks.run(rank_functions.parity, 2, cases) == ["equal"] * 2


def test_parity_with_i_and_w_apart_over_real_processes(tmp_path: Path) -> None:
    cases = [(str(write(tied(), tmp_path / "tied")), "zb-h1")]
    assert ranks.run(rank_functions.parity, 3, cases, "eager") == ["equal"] * 3


@pytest.mark.parametrize("lowered", [False, pytest.param(True, marks=torch_waits_for_sends)])
def test_torch_runs_what_we_write(lowered: bool, tmp_path: Path) -> None:
    files = []
    for name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb", *V_SHAPED):
        schedule = build(name, 2, 4)
        files.append(str(tmp_path / f"{name}.csv"))
        Path(files[-1]).write_text(to_csv(lower(schedule) if lowered else schedule))
    assert ranks.run(rank_functions.run_by_torch, 2, str(write(chain(4), tmp_path / "chain")), files) == ["equal"] * 2


@pytest.mark.parametrize(
    ("name", "stages", "processes", "ranks_and_chunks"),
    [
        ("1f1b", 4, None, (4, 1)),
        ("zb-v", 4, None, (2, 2)),
        ("zb-v", 4, 2, (2, 2)),
        ("dualpipe-v", 2, 1, (1, 2)),
        ("interleaved-1f1b", 8, None, (4, 2)),
        ("interleaved-1f1b", 8, 2, (2, 4)),
        ("interleaved-1f1b", 8, 8, (8, 1)),
        ("ScheduleLoopedBFS", 9, 3, (3, 3)),
    ],
)
def test_stages_are_shared_out(
    name: str, stages: int, processes: int | None, ranks_and_chunks: tuple[int, int]
) -> None:
    schedule = resolve_schedule(name, 8, stages, processes)
    check(lower(schedule))
    assert (schedule.ranks, schedule.stages // schedule.ranks) == ranks_and_chunks
    assert schedule.stages == stages


def test_a_process_for_all_ranks_does_not_choose_their_number() -> None:
    assert resolve_schedule("looped-bfs", 4, 8, processes=None, ranks=None).ranks == 4
    assert resolve_schedule("looped-bfs", 4, 8, processes=None, ranks=2).ranks == 2
    assert resolve_schedule("looped-bfs", 4, 8, processes=None, ranks=3).ranks == 4


@pytest.mark.parametrize(
    ("name", "microbatches", "stages", "processes", "parts", "advice"),
    [
        ("zb-v", 12, 5, None, ["zb-v", "5 stages"], "4 or 6 stages, or a schedule with 1 stage on each rank"),
        ("interleaved-1f1b", 12, 1, None, ["interleaved-1f1b", "1 stage"], "2 stages"),
        (
            "1f1b",
            12,
            4,
            2,
            [
                "1f1b",
                "4 stages on 4 ranks",
                "2 processes",
                "--nproc-per-node 4",
                "torchrun",
                "2 stages on each of 2 ranks",
                "interleaved-1f1b, looped-bfs, interleaved-zb, zb-v, v-half, v-min, dualpipe-v",
            ],
            "",
        ),
        ("zb-v", 12, 6, 2, ["on 3 ranks", "2 processes", "--nproc-per-node 3"], ""),
        ("zb-v", 12, 6, 4, ["on 3 ranks", "4 processes", "torchrun"], ""),
        ("zb-v", None, 6, None, ["1 microbatch", "3 ranks", "5 microbatches"], "5 microbatches"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    name: str, microbatches: int | None, stages: int, processes: int | None, parts: list[str], advice: str
) -> None:
    with refused(ScheduleError, *parts, advice=advice):
        resolve_schedule(name, microbatches, stages, processes)


def test_a_mesh_with_too_few_ranks_along_the_pipeline_says_how_many_processes_it_takes() -> None:
    with refused(
        ScheduleError, "1f1b", "2 ranks", "1 along pp", advice="2 along pp, which takes 8 processes"
    ) as caught:
        resolve_schedule("1f1b", 2, 2, 1, sharing=4)
    assert "interleaved" in caught.value.advice
