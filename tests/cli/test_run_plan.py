"""``pipegraph run`` of a package with a plan: it runs the plan, unless options say otherwise."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipegraph.cli import main
from tests.cli.command import ROOT, Command
from tests.equal_work import equal_work_shared

AUTOGRAD = ("--kernels", "autograd")
CHAIN = ROOT / "tests/models/chain.py"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of a plan: zb-v, 3 microbatches, 4 stages on 2 ranks."""
    folder = tmp_path_factory.mktemp("planned")
    plan = ["--schedule", "zb-v", "--microbatches", "3", "--recompute", "none", "-o", str(folder / "plan.json")]
    for arguments in (
        ["plan", str(CHAIN), "--ranks", "2", *plan],
        ["split", str(CHAIN), "--plan", str(folder / "plan.json"), "-o", str(folder / "package")],
    ):
        with equal_work_shared(), pytest.raises(SystemExit) as raised:
            main(arguments)
        assert not raised.value.code
    return folder / "package"


@pytest.mark.parametrize("nproc", [(), ("--nproc", 1)])
def test_a_planned_package_runs_its_plan(pipegraph: Command, planned: Path, nproc: Sequence[object]) -> None:
    done = pipegraph("run", planned, *AUTOGRAD, *nproc, "--steps", 2, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)  # which one process prints
    assert (result["schedule"], result["microbatches"], result["ranks"]) == ("zb-v", 3, 2)
    comparison = result["predicted_and_measured"]
    assert comparison["processes"] == (1 if nproc else 2)
    assert not [hint for hint in comparison["hints"] if "The plan was" in hint]
    value = json.loads((planned / "pipeline.json").read_text())["plan"]["prediction"]["value"]
    assert (comparison["step"]["predicted"] == pytest.approx(value)) == (not nproc)


def test_options_win_over_the_plan(pipegraph: Command, planned: Path) -> None:
    run = ("run", planned, *AUTOGRAD, "--nproc", 1)
    done = pipegraph(*run, "--microbatches", 4)
    hint = "The plan was zb-v with 3 microbatches on 2 ranks, and this was {}. Try: without --schedule, --microbatches"
    assert hint.format("zb-v with 4 microbatches on 2 ranks") in done.out
    done = pipegraph(*run, "--schedule", "1f1b")
    assert hint.format("1f1b with 3 microbatches on 4 ranks") in done.out
    done = pipegraph("run", planned, "--nproc", 4)
    assert (done.code, done.out) == (2, "")
    assert "4 processes cannot run 4 stages under zb-v" in done.err


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"placement": [0], "memory": [1], "memory_parts": []}, "it is of 1 stages"),
        ({"precision": "bf61"}, 'precision: "bf61" must be'),
        ({"memory": [1, 1]}, "memory_parts: its sums are not the bytes"),
        ({"microbatches": "x"}, 'microbatches: "x" must be a'),
    ],
)
def test_a_damaged_plan(
    pipegraph: Command, planned: Path, tmp_path: Path, damage: dict[str, object], said: str
) -> None:
    file = Path(shutil.copytree(planned, tmp_path / "damaged")) / "pipeline.json"
    manifest = json.loads(file.read_text())
    manifest["plan"]["prediction"] |= damage
    file.write_text(json.dumps(manifest))
    done = pipegraph("run", file.parent, "--nproc", 1)
    assert (done.code, done.out) == (2, "")
    assert re.search(f"pipeline.json: plan.prediction.*{said}", " ".join(done.err.split()))


def test_show_draws_the_planned_schedule(pipegraph: Command, planned: Path) -> None:
    assert "zb-v: 2 ranks, 4 stages, 3 microbatches" in pipegraph("show", planned).out
    assert "1f1b: 4 ranks, 4 stages, 2 microbatches" in pipegraph(
        "show", planned, "--schedule", "1f1b", "--microbatches", 2
    ).out  # fmt: skip


def test_the_plan_of_a_schedule_from_a_file(pipegraph: Command, tmp_path: Path) -> None:
    """The package holds its order, which runs by default."""
    file, out = tmp_path / "mine.csv", tmp_path / "out"
    assert pipegraph("schedule", "zb-h1", "--ranks", 2, "--microbatches", 3, "--csv", file).code == 0
    split = pipegraph("split", CHAIN, "--stages", 2, "--schedule", file, "--microbatches", 3, "-o", out)
    assert split.code == 0, split.err
    done = pipegraph("run", out, *AUTOGRAD, "--nproc", 1, "--json")
    assert json.loads(done.out)["schedule"] == "mine"
    assert "The plan was" not in pipegraph("run", out, *AUTOGRAD, "--nproc", 1, "--schedule", file).out
    other = pipegraph("run", out, *AUTOGRAD, "--nproc", 1, "--schedule", "1f1b").out
    assert "The plan was mine with 3 microbatches on 2 ranks, and this was 1f1b with 3 microbatches" in other
    assert "without --schedule" in other
