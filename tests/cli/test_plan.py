"""``pipegraph plan``, and the cuts that ``split`` chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import CHAIN, ROOT, Command

QUICK = ("--schedule", "1f1b,zb-v", "--microbatches", "4", "--hardware", "h100")


@pytest.mark.slow
def test_plan_then_split(pipegraph: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = pipegraph("plan", CHAIN, "--ranks", 2, *QUICK, "-o", file)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].split() == [
        "schedule", "stages", "microbatches", "recompute", "step", "a", "microbatch", "slower", "memory", "saves",
    ]  # fmt: skip
    assert lines[1].startswith("*")
    assert lines[-1] == f"wrote {file}"
    points = json.loads(file.read_text())["points"]
    split = json.loads(pipegraph("split", CHAIN, "--plan", file, "-o", tmp_path / "out", "--json").out)
    assert split["points"] == points
    manifest = json.loads((tmp_path / "out/pipeline.json").read_text())
    assert manifest["plan"]["prediction"]["value"] == json.loads(file.read_text())["value"]
    mismatch = pipegraph("split", "examples/unet.py", "--plan", file, "--dry-run")
    assert (mismatch.code, mismatch.out) == (3, "")
    assert "a Chain" in mismatch.err and "a UNet" in mismatch.err


def test_precision_and_optimizer_are_planned_for_and_kept(pipegraph: Command, tmp_path: Path) -> None:
    file, out = tmp_path / "plan.json", tmp_path / "out"
    done = pipegraph("plan", CHAIN, "--ranks", 2, *QUICK, "--precision", "bf16", "--optimizer", "sgd", "-o", file)
    assert (done.code, done.err) == (0, "")
    assert "on the fullest rank with recompute" in done.out and ", bf16, sgd" in done.out
    planned = json.loads(file.read_text())
    assert (planned["precision"], planned["optimizer"]) == ("bf16", "sgd")
    for rank, size in zip(planned["memory_parts"], planned["memory"], strict=True):
        assert sum(rank.values()) == size and rank["optimizer_state"] == 0 and rank["gradients"] > 0
    split = pipegraph("split", CHAIN, "--plan", file, "-o", out)
    assert split.code == 0 and ", bf16, sgd" in split.out and "together" in split.out
    ran = pipegraph("run", out, "--nproc", 1, "--kernels", "eager", "--precision", "bf16", "--steps", 1)
    assert ran.code == 0 and "and this run used --precision" not in ran.out


def test_ranks_with_unequal_devices(pipegraph: Command, tmp_path: Path) -> None:
    file, devices = tmp_path / "plan.json", ("--hardware", "h100,a100", "--memory", "80GiB,40GiB")
    done = pipegraph("plan", CHAIN, "--ranks", 2, *QUICK[:4], "--recompute", "none,auto", *devices, "-o", file)
    assert (done.code, done.err) == (0, "")
    assert "on h100,a100" in done.out
    assert json.loads(file.read_text())["hardware"] == "h100,a100"
    split = pipegraph("split", CHAIN, "--plan", file, *devices[2:], "-o", tmp_path / "out")
    assert split.code == 0 and "on h100,a100" in split.out
    shown = pipegraph("show", tmp_path / "out")
    assert shown.code == 0
    ran = pipegraph("run", tmp_path / "out", "--nproc", 1, "--kernels", "eager", "--steps", 1)
    assert ran.code == 0


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("--ranks", 3, "--hardware", "h100,a100"), "each of 3 ranks"),
        (("--ranks", 2, "--hardware", "h100,a10"), "a100"),
        (("--ranks", 2, "--hardware", "h100*,a100"), "h100*4,a100*4"),
        (("--ranks", 2, "--hardware", "h100", "--memory", "80GiB*3"), "one for each rank"),
        (("--ranks", 2, "--hardware", "h100", "--memory", "80GiB*x"), "80GiB*4,40GiB*4"),
        (("--devices", 2, "--global-batch", 8, "--hardware", "h100,a100"), "--ranks"),
        (("--devices", 2, "--global-batch", 8, "--memory", "80GiB,40GiB"), "--ranks"),
    ],
)
def test_unequal_devices_that_are_no_ranks(pipegraph: Command, arguments: tuple[object, ...], advice: str) -> None:
    done = pipegraph("plan", CHAIN, *arguments)
    assert done.code in (2, 3) and advice in " ".join(done.err.split())


@pytest.mark.parametrize("hardware", ["h100", "h100,a100"])
def test_a_shortage_on_unequal_ranks_says_what_they_have(pipegraph: Command, hardware: str) -> None:
    options = ("--ranks", 2, "--schedule", "1f1b", "--microbatches", 4, "--hardware", hardware)
    done = pipegraph("plan", "examples/transformer.py:build_tiny_model", *options, "--memory", "8MiB,7MiB")
    assert (done.code, done.out) == (3, "")
    assert "7.0 MiB to 8.0 MiB on a rank" in done.err
    assert done.err.splitlines()[-1].startswith("Try: ") and "--debug" not in done.err


def test_a_cluster_with_zero1(pipegraph: Command) -> None:
    options = ("--devices", 4, "--global-batch", 64, *QUICK[:2], "--hardware", "h100", "--precision", "bf16-master")
    plans = [json.loads(pipegraph("plan", CHAIN, *options, *more, "--json").out)["plan"] for more in ((), ("--zero1",))]
    assert all(plan["precision"] == "bf16-master" for plan in plans)
    assert plans[1]["memory"][0] <= plans[0]["memory"][0]
    assert "zero1" not in plans[0]
    replicas = plans[1].get("mesh", {}).get("dp_replicate", 1)
    assert plans[1].get("zero1", False) == (replicas > 1)


@pytest.mark.parametrize(("schedules", "speaks_of_others"), [("1f1b", False), ("1f1b,zb-h2", True)])
def test_others_are_spoken_of_if_there_are_any(pipegraph: Command, schedules: str, speaks_of_others: bool) -> None:
    options = ("--schedule", schedules, "--microbatches", "4", "--recompute", "none", "--hardware", "h100")
    done = pipegraph("plan", CHAIN, "--ranks", 2, *options)
    rows = done.out.partition("\n\n")[0].splitlines()[1:]
    assert (len(rows) > 1, "The others here" in done.out) == (speaks_of_others, speaks_of_others)


def test_only_a_plan_is_replaced(pipegraph: Command, tmp_path: Path) -> None:
    file, plan = tmp_path / "model.py", ("plan", CHAIN, "--ranks", 2, *QUICK)
    file.write_text("precious")
    done = pipegraph(*plan, "-o", file)
    assert (done.code, done.out, file.read_text()) == (2, "", "precious")
    assert done.err == f"error: {file} exists already.\nTry: --overwrite, or another name for -o.\n"
    assert pipegraph(*plan, "-o", file, "--overwrite").code == 0
    assert pipegraph(*plan, "-o", file).code == 0  # which is a plan now
    assert pipegraph(*plan, "-o", tmp_path / "new/folder/plan.json").code == 0
    assert (tmp_path / "new/folder/plan.json").read_text() == file.read_text()


@pytest.mark.parametrize(
    ("out", "said"),
    [("/proc/plan.json", "it is not a regular file"), ("README.md/plan.json", "is a file, not a folder")],
)
def test_nothing_is_searched_if_no_plan_can_be_written(
    pipegraph: Command, monkeypatch: pytest.MonkeyPatch, out: str, said: str
) -> None:
    monkeypatch.setattr("pipegraph.graph.capture.capture", None)
    done = pipegraph("plan", CHAIN, "--ranks", 2, "-o", out)
    assert (done.code, done.out) == (2, "")
    assert f"{out} cannot be written: " in done.err and said in done.err


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("/proc/foo", "/proc/foo cannot be written: /proc takes no new folder"),
        ("README.md/x", "README.md is a file, not a folder"),
    ],
)
def test_no_package_can_be_written(pipegraph: Command, out: str, said: str) -> None:
    done = pipegraph("split", CHAIN, "--points", "layers.2", "-o", out)
    assert (done.code, done.out) == (2, "")
    assert said in done.err and "Errno" not in done.err and "/.foo-" not in done.err


def test_a_plan_with_a_limit_is_checked(pipegraph: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLAN | {"memory": [2**30, 2**21]}))
    done = pipegraph("split", CHAIN, "--plan", file, "--memory", "1GB", "--dry-run")
    assert (done.code, done.out) == (3, "")
    assert "1.00 GiB" in done.err and "953.67 MiB" in done.err
    assert pipegraph("split", CHAIN, "--plan", file, "--memory", "1GiB", "--dry-run").code == 0


def test_points_are_predicted_for_what_is_named(pipegraph: Command) -> None:
    split = "split", CHAIN, "--points", "layers.2", "--dry-run"
    assert "predicted" not in pipegraph(*split).out
    for option in (("--schedule", "zb-h1"), ("--microbatches", 4), ("--recompute", "none"), ("--memory", "1GiB")):
        assert "predicted" in pipegraph(*split, *option).out
    four = pipegraph(
        "split", CHAIN, "--stages", 4, "--ranks", 1, "--schedule", "interleaved-1f1b", "--json", "--dry-run"
    )
    assert json.loads(four.out)["plan"]["placement"] == [0, 0, 0, 0]


def test_plan_json(pipegraph: Command) -> None:
    result = json.loads(pipegraph("plan", CHAIN, "--ranks", 2, *QUICK, "--json").out)
    assert result["schema_version"] == 1
    best = result["alternatives"][0]
    assert (best["best"], best["slower"], best["saves"], best["points"]) == (True, 0, 0, result["plan"]["points"])
    assert all(cut["reason"] for cut in result["plan"]["cuts"])
    assert result["considered"] == 6


def test_split_prints_the_predicted_step(pipegraph: Command) -> None:
    options = ("--stages", 2, "--hardware", "h100", "--microbatches", 6, "--dry-run")
    done = pipegraph("split", CHAIN, *options, "--verbose")
    assert (done.code, done.err) == (0, "")
    first, second, fixed, _, layout, predicted, memory, empty, headers, *table = done.out.splitlines()
    assert (first[:7], second[:7]) == ("stage 0", "stage 1")
    assert fixed.startswith("x.shape[1] is 8 in every batch: ")
    assert fixed.endswith("tests/models/chain.py:17: x = layer(x)")
    assert layout.startswith("layout     t*3|tL (for --points: E what runs before the layers, t a layer, ")
    assert predicted.startswith("predicted  ")
    assert predicted.endswith(
        " a step of 1f1b with 6 microbatches on h100; no other cuts at the 4 places looked at are better"
    )
    assert memory.endswith(" on the fullest rank with recompute min-cut")
    assert (empty, headers.split()) == ("", ["memory", "rank", "0", "rank", "1"])
    assert table[-2].startswith("together") and table[-1].startswith("a microbatch keeps")
    assert pipegraph("split", CHAIN, *options).out == done.out.replace(f"{layout}\n", "")


def test_split_balanced_by_a_weight(pipegraph: Command) -> None:
    done = pipegraph("split", CHAIN, "--stages", 2, "--balance", "parameters", "--dry-run")
    summary = "largest stage  162 parameters; no other cuts at the 4 places looked at are better"
    assert summary in done.out.splitlines()
    done = pipegraph("split", CHAIN, "--stages", 2, "--balance", "uniform", "--dry-run")
    assert len(done.out.splitlines()) == 4  # two stages, a size that does not vary, and the batch


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("split", CHAIN, "--stages", 2, "--memory", "80XB"), 2, "'80XB' is not an amount of memory: write 80GiB"),
        (("split", CHAIN, "--stages", 2, "--memory", "0"), 2, "give 1MiB to 1PiB"),
        (("split", CHAIN, "--stages", 2, "--memory", "9000000TiB"), 2, "give 1MiB to 1PiB"),
        (("split", CHAIN, "--stages", 2, "--memory", "-1"), 2, "not an amount of memory"),
        (("split", CHAIN, "--stages", 2, "--plan", "plan.json"), 2, "--points layers.4"),
        (("split", CHAIN, "--plan", "no_plan.json"), 2, "no_plan.json: No such file"),
        (("split", CHAIN, "--stages", 2, "--balance", "layers"), 2, "Stages cannot be balanced by"),
        (("split", CHAIN, "--stages", 2, "--balance", "type:Conv"), 3, "Linear"),
        (("split", CHAIN, "--stages", 2, "--hardware", "h1000"), 2, 'Did you mean "h100"'),
        (("split", CHAIN, "--stages", 2, "--schedule", "zb-q"), 2, "zb-"),
        (("split", "none.py", "--stages", 2, "--balance", "tyme"), 2, 'Did you mean "time"?'),
        (("split", "none.py", "--stages", 2, "--recompute", "blocks"), 2, 'Did you mean "block"?'),
        (("split", "none.py", "--stages", 2, "--hardware", "h10"), 2, 'Did you mean "h100"?'),
        (("split", CHAIN, "--stages", 2, "--device", "gpu"), 2, 'neither cpu nor cuda. Did you mean "cuda"?'),
        (("plan", CHAIN, "--ranks", 2, "--device", "gpu"), 2, 'neither cpu nor cuda. Did you mean "cuda"?'),
        (("split", CHAIN, "--points", "layers.2,head", "--schedule", "zb-v"), 2, "2 stages"),
        (("plan", CHAIN, "--ranks", 2, "--precision", "bf-16"), 2, 'Did you mean "bf16"?'),
        (("plan", CHAIN, "--ranks", 2, "--optimizer", "adam"), 2, 'Did you mean "adamw"?'),
        (("plan", CHAIN, "--ranks", 2, "--precision", "fp8"), 2, "The profile cpu has no rate for float8"),
        (("plan", CHAIN, "--ranks", 2, "--zero1"), 2, "ranks of one pipeline share no state"),
        (("split", "none.py", "--stages", 2, "--optimizer", "lion"), 2, "sgd-momentum"),
        (("split", CHAIN, "--plan", "x.json", "--optimizer-bytes", 4), 2, "leave out --optimizer-bytes; or"),
        (("plan", CHAIN, "--ranks", 0), 2, "--ranks"),
        (("plan", CHAIN), 2, "Try: --ranks 4, or --devices 8 --global-batch 64"),
        (("plan", CHAIN, "--devices", 4), 2, "Try: --devices 4 --global-batch 32"),
        (("plan", CHAIN, "--global-batch", 32), 2, "Try: --devices 8 --global-batch 32"),
        (("plan", CHAIN, "--ranks", 2, "--devices", 4), 2, "--ranks plans one pipeline, and --devices a cluster"),
        (
            ("plan", CHAIN, "--devices", 4, "--global-batch", 8, "--recompute", "none"),
            2,
            "--recompute: a plan for --devices chooses this itself",
        ),
        (("plan", CHAIN, "--ranks", 2, "--microbatches", "4,x"), 2, "Invalid value for --microbatches: '4,x'"),
        (("plan", CHAIN, "--ranks", 2, "--schedule", "1f1b,"), 2, "empty name"),
        (("plan", CHAIN, "--ranks", 2, "--balance", "flops"), 2, "is not time, measured or auto"),
        (("plan", CHAIN, "--ranks", 2, "--recompute", "all"), 2, 'recompute cannot be "all"'),
        (("plan", CHAIN, "--ranks", 9, *QUICK), 3, "The model can be cut into 5 segments"),
        (("plan", CHAIN, "--ranks", 9, *QUICK), 3, "Try: --ranks 5 or fewer."),
        (("plan", CHAIN, "--ranks", 2, "--schedule", "zb-v", "--microbatches", "1"), 3, "full pipeline"),
        (("plan", CHAIN, "--ranks", 2, "--schedule", "1f1c"), 2, 'Did you mean "1f1b"'),
        (("plan", CHAIN, "--ranks", 2, "--stages-per-rank", "7", "--schedule", "1f1b"), 2, "1f1b has 1 to a rank"),
        (("plan", CHAIN, "--ranks", 2, "--hardware", "h10"), 2, 'Did you mean "h100"'),
        (("plan", CHAIN, "--ranks", 2, "--memory", "much"), 2, "'much' is not an amount of memory"),
        (("split", CHAIN, "--stages", 6), 3, "can be cut into 5 segments, which is too few for 6 stages"),
        (("split", CHAIN, "--stages", 2, "--schedule", "zb-v", "--microbatches", 8, "--points", "head"), 2, "not both"),
        (("split", CHAIN, "--points", "head", "--balance", "flops"), 2, "flops chooses points, and they were given"),
        (("split", CHAIN, "--plan", "x.json", "--device", "cpu", "--ranks", 2), 2, "leave out --ranks, --device; or"),
        (
            ("split", CHAIN, "--plan", "plan.json", "--microbatches", 8),
            2,
            "leave out --microbatches; or leave out --plan",
        ),
    ],
)
def test_bad_input(pipegraph: Command, arguments: tuple[object, ...], code: int, said: str) -> None:
    done = pipegraph(*arguments)
    assert (done.code, done.out) == (code, "")
    assert said in " ".join(done.err.replace("│", " ").split())


def test_show_prints_predictions_and_reasons(pipegraph: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    split = pipegraph("split", CHAIN, "--stages", 2, "--hardware", "h100", "-o", out)
    lines = pipegraph("show", out).out.splitlines()
    assert lines[2].split() == ["stage", "holds", "parameters", "forward", "F", "I", "W", "µs", "keeps", "weights"]
    at = lines.index(next(line for line in split.out.splitlines() if line.startswith("predicted")))
    assert lines[at + 1] in split.out
    svg, page = tmp_path / "package.svg", tmp_path / "package.html"
    drawing = pipegraph("show", out, "--svg", svg, "--html", page)
    assert (drawing.code, drawing.out.splitlines()) == (0, lines)
    assert "<svg" in svg.read_text() and "<canvas" in page.read_text()
    assert pipegraph("show", out, "--svg", tmp_path / "none" / "a.svg").code == 2
    manifest = json.loads((out / "pipeline.json").read_text())
    (cut,) = manifest["plan"]["prediction"]["cuts"]
    assert lines[at + 2] == f"stage 1 begins at {cut['point']}: {cut['reason']}"
    assert json.loads(pipegraph("show", out, "--json").out)["plan"]["cuts"] == [cut]
    del manifest["plan"]["prediction"]["placement"]
    (out / "pipeline.json").write_text(json.dumps(manifest))
    damaged = pipegraph("show", out)
    assert (damaged.code, damaged.out) == (2, "")
    assert "pipeline.json: plan.prediction: it lacks placement" in damaged.err


def test_show_of_a_plan_by_weight(pipegraph: Command, tmp_path: Path) -> None:
    pipegraph("split", CHAIN, "--stages", 2, "--balance", "parameters", "-o", tmp_path / "out")
    text = pipegraph("show", tmp_path / "out").out
    assert "largest stage  162 parameters; no other cuts at the 4 places looked at are better" in text
    assert "stage 1 begins at layers.2: stages 0 and 1 take 144 parameters and 162 parameters" in text


PLAN: dict[str, Any] = {
    "schema_version": 1, "model": {"class": "Chain", "parameters": 306},
    "inputs": [{"name": "x", "shape": [4, 8], "dtype": "float32"}], "points": ["layers.2"], "balance": "time",
    "recompute": "none", "hardware": "cpu", "unit": "s", "schedule": "1f1b", "placement": [0, 1], "microbatches": 4,
    "value": 1.0, "places": 4, "lower_bound": None, "memory": [1, 1],
    "costs": [
        {"forward": 1.0, "input_grad": 0.0, "weight_grad": 1.0, "saved_bytes": 1, "parameter_bytes": 1}
    ] * 2,
    "cuts": [{"point": "layers.2", "boundary_bytes": 1, "earlier": None, "later": None}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({}, 0, ""),
        (b"", 2, "plan.json: the file is not JSON, or truncated"),
        (b"\xff\xfe\x00", 2, "plan.json: the file is not JSON, or truncated"),
        (b"[1, 2]", 2, "plan.json: the whole is a list: a plan must be an object"),
        ({"schema_version": 99}, 2, "schema_version: it is 99, and this pipegraph reads 1 to 1"),
        ({"points": []}, 2, "costs: it has 2 stages, and 0 points make one more"),
        ({"costs": "dear"}, 2, 'costs: "dear" must be a list'),
        ({"microbatches": "many"}, 2, 'microbatches: "many" must be a whole number'),
        ({"microbatches": 0}, 2, "microbatches: 0 must be 1 or more"),
        ({"value": "1.0"}, 2, 'value: "1.0" must be a number'),
        ({"value": float("nan")}, 2, "plan.json: the file is not JSON"),
        ({"value": -1}, 2, "value: -1 must be 0 or more"),
        ({"lower_bound": 2.0}, 2, "lower_bound: it is more than value"),
        ({"recompute": "all"}, 2, 'recompute: it cannot be "all"'),
        ({"schedule": "1f1c"}, 2, 'There is no schedule "1f1c". Did you mean "1f1b"?'),
        ({"placement": [0, 7]}, 2, "placement: it is on ranks [0, 7], and memory is of 2 ranks"),
        ({"memory": [1, 1, 1]}, 2, "placement: it is on ranks [0, 1], and memory is of 3 ranks"),
        ({"unit": "miles"}, 2, 'unit: "miles" must be one of s, FLOP'),
        ({"cuts": []}, 2, "cuts: they are at other points"),
        ({"inputs": [{"name": "x", "shape": [2, 9], "dtype": "float32"}]}, 3, "is for the inputs x float32[2, 9], and"),
        ({"points": ["layers.9"], "cuts": [{**PLAN["cuts"][0], "point": "layers.9"}]}, 3, "layers.9"),
        ({"model": {"class": "Chain", "parameters": 307}}, 3, "with 307 parameters, and this one has 306"),
        ({"model": {"class": "Train", "parameters": 306}}, 3, "is of a Train, and this model is a Chain"),
    ],
)
def test_plan_files(pipegraph: Command, tmp_path: Path, change: Any, code: int, said: str) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(change if isinstance(change, bytes) else json.dumps(PLAN | change).encode())
    done = pipegraph("split", CHAIN, "--plan", file, "--dry-run")
    assert (done.code, bool(done.out)) == (code, code == 0)
    assert said in " ".join(done.err.split())
    assert code == 0 or "Try: " in done.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_bandwidth": -1.0}, "memory_bandwidth"),
        ({"memory_bandwidth": None}, "memory_bandwidth"),
        ({"peak_flops": {}}, "peak_flops"),
        ({"kernel_floor": "short"}, "kernel_floor"),
        ({"links": None}, "links"),
    ],
)
def test_a_profile_with_missing_or_absurd_figures(
    pipegraph: Command, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    profile = json.loads((ROOT / "pipegraph/cost/profiles/cpu.json").read_text())
    figures = {name: value for name, value in (profile | change).items() if value is not None}
    file = tmp_path / "hardware.json"
    file.write_text(json.dumps(figures))
    for verb in (("split", CHAIN, "--stages", 2, "--dry-run"), ("plan", CHAIN, "--ranks", 2, *QUICK[:4])):
        done = pipegraph(*verb, "--hardware", file)
        assert (done.code, done.out) == (2, "")
        assert said in done.err and str(file) in done.err
