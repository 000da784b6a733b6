"""Values that the stages in between hand on: the source reads as if they were arguments, and is the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pipegraph
from pipegraph.graph.sources import load
from pipegraph.package import CALLER, Package
from tests.codegen.parity import ROOT, differences
from tests.models.skipping import build_model, example_inputs
from tests.runtime.parity import assert_parity


def relayed(folder: Path, model: Any, args: Any, kwargs: Any = None, **cut: Any) -> Package:
    plan = pipegraph.plan(pipegraph.capture(model, args, kwargs), **cut, relay_skips=True)
    return pipegraph.write_package(plan, folder / "package")


@pytest.fixture
def skipping(tmp_path: Path) -> Package:
    return relayed(tmp_path, build_model(), example_inputs, points=["middle", "late", "norm"])


def test_the_source_takes_what_it_hands_on_by_name_and_returns_it(skipping: Package) -> None:
    text = (skipping.path / "stage_2.py").read_text()
    body = text.split("    def forward(")[1]
    assert body == (
        "\n        self, scale: Tensor, kept: Tensor, embedded: Tensor, h: Tensor\n"
        "    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:\n"
        "        h = torch.tanh(self.late(h))\n"
        "        return scale, kept, embedded, h\n"
    )
    assert "    Hands scale, kept, embedded on to the next stage.\n" in text
    assert "Hands" not in (skipping.path / "stage_3.py").read_text()
    assert differences(skipping, build_model(), example_inputs) == []


def test_every_value_goes_to_the_neighbour_in_the_order_in_which_it_is_taken(skipping: Package) -> None:
    manifest = skipping.manifest
    assert [value.consumers for value in manifest.values.values() if len(value.consumers) > 1] == []
    assert manifest.edges() == ((0, 1), (1, 2), (2, 3))
    for stage, following in zip(manifest.stages, manifest.stages[1:], strict=False):
        assert stage.outputs == following.inputs
    assert manifest.stages[0].inputs == manifest.args == ("tokens", "scale", "kept")
    caller = {name for name, value in manifest.values.items() if value.producer == CALLER}
    assert caller == {"tokens", "scale", "kept"}
    assert {value.requires_grad for name, value in manifest.values.items() if "scale" in name} == {False}
    received = [stage.cost.input_bytes for stage in manifest.stages]
    assert received == [0, 120 + 320, 120 + 2 * 320, 120 + 2 * 320]


def test_without_relays_a_value_goes_straight_there(tmp_path: Path) -> None:
    captured = pipegraph.capture(build_model(), example_inputs)
    manifest = pipegraph.write_package(pipegraph.plan(captured, ["middle", "late", "norm"]), tmp_path / "p").manifest
    assert manifest.values["embedded"].consumers == (1, 3)
    assert manifest.values["scale"].consumers == (3,)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_a_pipeline_runs_such_a_package(schedule: str, skipping: Package) -> None:
    assert_parity(skipping.path, schedule, microbatches=4, kernels="eager")


@pytest.mark.parametrize(
    ("model", "cut"),
    [
        pytest.param("examples/unet.py", {"points": ["down.1", "bottom", "up.1"]}, marks=pytest.mark.slow),
        ("tests/models/masked.py", {"points": ["layers.1", "layers.2", "layers.3"]}),
        ("tests/models/nested_values.py", {"points": ["layers.1", "head"]}),
        ("tests/models/late_input.py", {"stages": 3, "balance": "uniform"}),
    ],
)
def test_models_with_relays_are_the_model(model: str, cut: dict[str, Any], tmp_path: Path) -> None:
    source = load(str(ROOT / model))
    package = relayed(tmp_path, source.model, source.args, source.kwargs, **cut)
    assert all(consumer == producer + 1 for producer, consumer in package.manifest.edges())
    assert differences(package, source.model, source.args, source.kwargs) == []


def test_a_searched_plan_keeps_its_prediction(tmp_path: Path) -> None:
    captured = pipegraph.capture(build_model(), example_inputs)
    straight, handed_on = (pipegraph.plan(captured, stages=3, relay_skips=relays) for relays in (False, True))
    assert handed_on.prediction == straight.prediction
    assert [cost.forward for cost in handed_on.costs] == [cost.forward for cost in straight.costs]
    assert (handed_on.costs[1].output_bytes or 0) > (straight.costs[1].output_bytes or 0)
