"""What TensorBoard shows of a run: read back from the event file, and asked of a real TensorBoard over HTTP."""

from __future__ import annotations

import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

import pipegraph
from pipegraph.cost.hardware import Hardware, Link, Links
from pipegraph.errors import PipegraphError
from pipegraph.report import tensorboard
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.schedule import build
from tests import tensorboard_server
from tests.messages import refused
from tests.runtime import ranks
from tests.runtime.packages import write
from tests.runtime.sketches import chain

STEPS = 3

needs_tensorboard = pytest.mark.usefixtures("_tensorboard")


@pytest.fixture(scope="module")
def _tensorboard() -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'pipegraph[tensorboard]'")


@pytest.fixture(scope="module")
def run(_tensorboard: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a loop of two real ranks that was profiled: a step that is left alone, one to warm up, one more."""
    folder = tmp_path_factory.mktemp("tensorboard")
    package = write(chain(2, width=8), folder / "chain")
    first, second = ranks.run(train, 2, str(package), str(folder / "runs"))
    assert first == second
    return Path(first)


def train(rank: int, package: str, folder: str) -> str:
    pipe = make_pipeline(package)
    with pipegraph.profile(pipe, folder, wait=1, warmup=1, active=1) as profiler:
        for _ in range(STEPS):
            profiler.step(pipe.step(inputs(pipe)))
    return str(profiler.folder)


def make_pipeline(package: str | Path) -> Pipeline:
    schedule = build("1f1b", 2, 4)
    return Pipeline(package, schedule, loss_fn=lambda output, target: output.square().mean(), kernels="eager")


def inputs(pipe: Pipeline) -> torch.Tensor:
    (value,) = (candidate for candidate in pipe.package.manifest.at_capture().values.values() if candidate.producer < 0)
    return torch.ones(4 * value.shape[0], *value.shape[1:])


def read(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run))
    events.Reload()
    return events


def test_one_folder_and_one_file(run: Path) -> None:
    (file,) = run.parent.rglob("events.out.tfevents*")
    assert file.parent == run


def test_scalars_of_every_step(run: Path) -> None:
    events = read(run)
    assert sorted(events.Tags()["scalars"]) == sorted(
        [
            "loss",
            "bubble",
            "time/step",
            "time/iteration",
            "throughput/samples_per_second",
            "first_step/step",
            "first_step/iteration",
            *(f"rank_0{rank}/time/{part}" for rank in (0, 1) for part in ("forward", "backward", "transfer", "wait")),
            "rank_00/memory/peak_MiB",
            "rank_01/memory/peak_MiB",
        ]
    )
    series = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    by_every_step = {name for name in series if name == "loss" or "memory" in name}
    for name, values in series.items():
        assert len(values) == (STEPS if name in by_every_step else 1 if "first_step" in name else STEPS - 1)
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2]
    assert [event.step for event in events.Scalars("time/step")] == [1, 2]
    for index in range(STEPS - 1):
        step = series["time/step"][index]
        scalars = {name: values[index] for name, values in series.items() if "first_step" not in name}
        busy = [scalars[f"rank_0{rank}/time/forward"] + scalars[f"rank_0{rank}/time/backward"] for rank in (0, 1)]
        assert scalars["bubble"] == pytest.approx(1 - sum(busy) / 2 / step, abs=1e-4)
        assert 0 < step <= scalars["time/iteration"] + 1e-6
        assert scalars["rank_01/memory/peak_MiB"] > 10


def test_the_plan_and_the_timeline(run: Path) -> None:
    from PIL import Image

    events = read(run)
    (plan,) = events.Tensors("plan/text_summary")
    text = plan.tensor_proto.string_val[0].decode()
    assert "1f1b: 2 ranks, 2 stages, 4 microbatches" in text
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    assert tables[0].startswith("| stage | rank | holds |")
    assert {line.count("|") - 1 for line in tables} == {5}
    assert events.Tags()["images"] == ["timeline/measured"]
    (image,) = events.Images("timeline/measured")
    assert image.step == STEPS - 1
    picture = Image.open(io.BytesIO(image.encoded_image_string))
    assert (picture.width, picture.height) == (image.width, image.height)
    assert {(27, 95, 170), (154, 51, 36)} <= {colour for _, colour in picture.getcolors(2**24)}  # F and B


@needs_tensorboard
def test_predicted_times_are_written_too(priced: Path, tmp_path: Path) -> None:
    pipe = make_pipeline(priced)
    with pipegraph.profile(pipe, tmp_path, warmup=1, active=1) as profiler:
        for _ in range(2):
            profiler.step(pipe.step(inputs(pipe)))
    events = read(profiler.folder)
    (predicted, _) = events.Scalars("time/step_predicted")
    costs = [stage.cost for stage in pipe.package.manifest.stages]
    assert predicted.value == pytest.approx(4 * sum(sum(cost.times or ()) for cost in costs), rel=1e-5)  # in turn
    assert events.Tags()["images"] == ["timeline/predicted", "timeline/measured"]
    assert "memory/peak_MiB" in events.Tags()["scalars"]
    assert "bubble" not in events.Tags()["scalars"]


@needs_tensorboard
def test_the_links_that_are_given_are_predicted_with(priced: Path, tmp_path: Path) -> None:
    folder, _ = ranks.run(train_far_apart, 2, str(priced), str(tmp_path))
    (predicted,) = read(Path(folder)).Scalars("time/step_predicted")
    assert 2 * FAR < predicted.value < 9 * FAR


def train_far_apart(rank: int, package: str, folder: str) -> str:
    pipe, links = make_pipeline(package), Links(1, Link(FAR, 1e9), Link(FAR, 1e9))
    hardware = structs.replace(Hardware.load("cpu"), links=links)
    with pipegraph.profile(pipe, folder, warmup=0, active=1, hardware=hardware) as profiler:
        profiler.step(pipe.step(inputs(pipe)))
    return str(profiler.folder)


FAR = 100.0  # seconds of a message
TIMES = ("forward", "input_grad", "weight_grad")


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of ``tests/models/chain.py`` with predicted times."""
    from tests.models.chain import build_model, example_inputs

    folder = tmp_path_factory.mktemp("priced") / "package"
    captured = pipegraph.capture(build_model(), example_inputs)
    plan = pipegraph.plan(captured, stages=2, schedule="1f1b", microbatches=4)
    pipegraph.write_package(plan, folder)
    return folder


def test_a_real_tensorboard_shows_it(served: str, run: Path) -> None:
    def ask(route: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(f"{served}data/{route}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read())

    def waited(route: str) -> Any:
        deadline = time.monotonic() + 60
        while not (reply := ask(route)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return reply

    name = run.name
    assert waited("runs") == [name]  # one run: hyper-parameters have made none of their own
    tags = waited("plugin/scalars/tags")[name]
    assert {"loss", "time/step", "rank_01/time/wait"} <= tags.keys()
    rows = ask(f"plugin/scalars/scalars?run={name}&tag=loss")
    assert [step for _, step, _ in rows] == [0, 1, 2]
    (image,) = ask(f"plugin/images/images?run={name}&tag=timeline%2Fmeasured&sample=0")
    assert image["step"] == STEPS - 1
    (plan,) = ask(f"plugin/text/text?run={name}&tag=plan%2Ftext_summary")
    assert "<table>" in plan["text"] and "1f1b: 2 ranks" in plan["text"]
    groups = ask(
        "plugin/hparams/session_groups",
        {
            "experimentName": "",
            "colParams": [{"hparam": "schedule", "includeInResult": True}],
            "startIndex": 0,
            "sliceSize": 10,
            "allowedStatuses": ["STATUS_SUCCESS", "STATUS_UNKNOWN", "STATUS_RUNNING", "STATUS_FAILURE"],
        },
    )
    (group,) = groups["sessionGroups"]
    assert group["hparams"]["schedule"] == "1f1b"
    assert {value["name"]["tag"] for value in group["metricValues"]} == {"time/step", "bubble"}


@pytest.fixture(scope="module")
def served(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a TensorBoard on that folder."""
    log = tmp_path_factory.mktemp("served") / "log"
    with tensorboard_server.tensorboard(run.parent, log, "--reload_interval", "1", "--load_fast", "false") as address:
        yield address


def test_without_tensorboard_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    with refused(PipegraphError, advice="pip install 'pipegraph[tensorboard]'"):
        tensorboard.check_tensorboard()
