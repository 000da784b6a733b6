"""A pipeline over real processes and gloo."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from pipegraph.package import Package
from pipegraph.runtime.step_state import receives_due
from pipegraph.schedule import Schedule, build, lower, receive_buffers
from tests.messages import missing
from tests.runtime import norm_ranks, rank_functions, ranks
from tests.runtime.packages import Reference, batch, write
from tests.runtime.sketches import PARITY, chain, skips, tied


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_parity_with_the_unsplit_model(processes: int, tmp_path: Path) -> None:
    sketches = {name: make() for name, make in PARITY.items()}
    fitting = {name: sketch for name, sketch in sketches.items() if len(sketch.stages) == processes}
    folders = [str(write(sketch, tmp_path / name)) for name, sketch in fitting.items()]
    cases = [(folder, schedule) for folder in folders for schedule in ("gpipe", "1f1b")]
    assert len(cases) >= 4
    assert ranks.run(rank_functions.parity, processes, cases) == ["equal"] * processes


def test_evaluation_and_training_in_turns_give_the_same_numbers(tmp_path: Path) -> None:
    messages = ranks.run(rank_functions.evaluate, 4, str(write(skips(), tmp_path / "skips")))
    for message in messages:  # the batch of a wrong size at its end stops it, on every rank
        assert message.startswith("BatchError: tokens has the shape [2, 5]: 2 rows for 2 microbatches.")
        assert message.endswith("Try: 4 rows, or microbatches=1.")


def test_the_norm_of_all_gradients_counts_a_tied_weight_once(tmp_path: Path) -> None:
    folder = str(write(tied(), tmp_path / "tied"))
    assert ranks.run(norm_ranks.clip, 3, folder, [2.0, float("inf")]) == ["equal"] * 3


def test_the_norm_is_nan_on_every_rank_if_one_gradient_is(tmp_path: Path) -> None:
    folder, norm_types = str(write(chain(2), tmp_path / "chain")), [2.0, float("inf")]
    for clipped in ranks.run(norm_ranks.clip_not_a_number, 2, folder, norm_types):
        assert len(clipped) == 4
        assert all(math.isnan(norm) and is_spoiled for norm, is_spoiled in clipped), clipped


@pytest.mark.parametrize(
    ("numbers", "greatest"),
    [([1.0, -2.0], 2.0), ([-2.0], 2.0), ([1.0, math.nan], math.nan)],  # of one number a rank has nothing
)
def test_the_greatest_gradient_of_shards_is_found_whoever_has_it(numbers: list[float], greatest: float) -> None:
    assert ranks.run(norm_ranks.greatest_of_shards, 2, numbers) == pytest.approx([greatest] * 2, nan_ok=True)


def test_a_scaler_outlives_its_pipeline(tmp_path: Path) -> None:
    assert ranks.run(norm_ranks.scaled_elsewhere, 2, str(write(chain(2), tmp_path / "chain"))) == ["done"] * 2


def test_stages_of_another_dtype_cross_in_it(tmp_path: Path) -> None:
    """Converted in parallelize_fn, on all ranks or on none."""
    folder = write(chain(2), tmp_path / "chain")
    first_loss, last_loss = ranks.run(rank_functions.halved, 2, str(folder), [0, 1])
    package = Package.open(folder)
    reference = Reference(package)
    for stage in reference.stages:
        stage.to(torch.bfloat16)
    output = reference({"x": batch(package.manifest, 2)["x"].bfloat16()})
    assert first_loss == last_loss == f"{output.square().mean().item():.4f}"
    for message in ranks.run(rank_functions.halved, 2, str(folder), [1]):
        assert not missing(message, "ArgumentError", "between stages", "parallelize_fn")
        assert re.search(r'"bfloat16", .* on rank 1, and .*"float32", .* on rank 0', message), message


def test_a_rank_may_be_given_only_the_inputs_of_its_stages(tmp_path: Path) -> None:
    assert ranks.run(rank_functions.own_inputs, 4, str(write(skips(), tmp_path / "skips"))) == ["done"] * 4


def test_two_pipelines_run_side_by_side_in_groups_of_their_own(tmp_path: Path) -> None:
    assert ranks.run(rank_functions.groups, 4, str(write(chain(2), tmp_path / "chain"))) == ["done"] * 4


def test_receives_use_no_more_buffers_than_the_schedule_holds(tmp_path: Path) -> None:
    """torch.distributed.pipelining allocates a buffer for each microbatch (pytorch #136380)."""
    names = ["gpipe", "1f1b", "zb-h1"]
    by_rank = ranks.run(rank_functions.receives, 3, str(write(chain(3), tmp_path / "chain")), names, 16)
    for name, *rank_memories in zip(names, *by_rank, strict=True):
        lowered = lower(build(name, 3, 16))
        most = receive_buffers(lowered, receives_ahead(lowered))
        used = {stages: len(memory) for of_rank in rank_memories for stages, memory in of_rank.items()}
        assert used.keys() == most.keys()
        assert all(count <= most[stages] for stages, count in used.items()), (name, used, most)
        if name != "gpipe":  # which holds all inputs until their backward
            assert max(used.values()) <= 6


def receives_ahead(schedule: Schedule) -> int:
    """How many receives of a rank are posted before the schedule reaches them, at most."""
    ahead = [0]
    for actions in schedule.actions:
        reached = accumulate(action.kind.is_transfer and not action.sends for action in actions)
        ahead += [due - at for due, at in zip(receives_due(actions), reached, strict=True)]
    return max(ahead)


@pytest.mark.parametrize("infinite", [0, 1])
def test_ranks_agree_on_infinite_gradients(infinite: int, tmp_path: Path) -> None:
    """Also where no loss is computed and the GradScaler has no scale yet."""
    folder = str(write(chain(2), tmp_path / "chain"))
    assert ranks.run(norm_ranks.scale, 2, folder, infinite) == [[4.0, 4.0]] * 2


@pytest.mark.slow  # tests/runtime/test_meeting.py has the stores of a restart, tests/cli/test_run.py a torchrun
def test_torchrun_makes_the_process_group_also_after_a_restart(tmp_path: Path) -> None:
    folder = write(chain(2), tmp_path / "chain")
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport sys\nimport torch\nfrom pipegraph.runtime.pipeline import Pipeline\n"
        "pipe = Pipeline(sys.argv[1], microbatches=2, kernels='autograd', loss_fn=lambda output, _: output.mean())\n"
        "result = pipe.step(torch.ones(4, 8))\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    if 1 in pipe.stages:\n"
        "        pipe.stages[1].register_forward_pre_hook(lambda *_: 1 / 0)\n"
        "    pipe.step(torch.ones(4, 8))\n"
        "assert float(result.loss) > -100\n"
        "sys.stdout.write(f'stage {min(pipe.stages)} done\\n')\n"  # in one piece: two processes write there
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    torchrun += ["--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, script, folder], capture_output=True, text=True, timeout=100)
    assert sorted(done.stdout.splitlines()) == ["stage 0 done", "stage 1 done"], done.stderr
