"""The manifest: what stands in pipeline.json, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from pipegraph.errors import PackageError
from pipegraph.package import Buffer, ListedFile, Manifest, ModelEntry, PlanEntry, StageEntry, Value, leaves
from pipegraph.package.sizes import Size
from tests.messages import refused
from tests.package.predictions import prediction

MANIFEST = Manifest(
    generator="pipegraph 0.1.0",
    model=ModelEntry("model.py", "Transformer", "00"),
    args=["tokens", {"mask": [None, "mask"]}],
    kwargs={"cached": "cached"},
    outputs={"logits": "logits", "hidden": ["h"]},
    values={
        "tokens": Value("tokens", "int64", (8, 128), -1, (0,), bound=100),
        "mask": Value("mask", "bool", (8, 128), -1, (1,)),
        "cached": Value("cached", "", (), -1, (), constant=None),
        "h": Value("h", "float32", (8, 128, 16), 0, (1, 2), True),
        "angle": Value("angle", "float32", (128, 16), 0, (2,)),
        "k": Value("k", "float32", (8, 128, 16), 1, (2,), True),
        "logits": Value("logits", "float32", (8, 128, 100), 2, (), True),
    },
    stages=(
        StageEntry(0, "stage_0", "Stage0", ("tokens",), ("h", "angle"), ("embed.weight",), (Buffer("table", False),)),
        StageEntry(1, "stage_1", "Stage1", ("mask", "h"), ("k",), buffers=(Buffer("count"),)),
        StageEntry(2, "stage_2", "Stage2", ("k", "angle", "h"), ("logits", "h"), ("output.weight",)),
    ),
    tied=(("embed.weight", "output.weight"),),
    files={"stage_0.py": ListedFile(300, f"sha256 {64 * '0'}")},
)

LISTED = {"bytes": 9, "digest": f"sha256 {64 * '0'}"}


def test_json_and_back_is_the_same() -> None:
    text = MANIFEST.to_json()
    assert Manifest.from_json(text, "pipeline.json") == MANIFEST
    assert Manifest.from_json(text, "pipeline.json").to_json() == text
    assert json.loads(text)["stages"][0] == {
        "index": 0,
        "module": "stage_0",
        "class": "Stage0",
        "inputs": ["tokens"],
        "outputs": ["h", "angle"],
        "parameters": ["embed.weight"],
        "buffers": [{"name": "table", "persistent": False}],
        "weights": None,
        "cost": {},
    }


def test_json_is_sorted_and_one_value_is_one_line() -> None:
    lines = MANIFEST.to_json().splitlines()
    assert ' "args": ["tokens", {"mask": [null, "mask"]}],' in lines
    angle = '{"batch_dim": null, "consumers": [2], "dtype": "float32", "producer": 0, "requires_grad": false, '
    assert f'  "angle": {angle}"shape": [128, 16]}},' in lines
    keys = list(json.loads(MANIFEST.to_json()))
    assert keys == sorted(keys)


def test_a_constant_none_is_not_the_absence_of_a_constant() -> None:
    values = Manifest.from_json(MANIFEST.to_json(), "pipeline.json").values
    assert values["cached"].is_constant
    assert values["cached"].constant is None
    assert values["mask"].constant is UNSET


def test_edges() -> None:
    assert MANIFEST.edges() == ((0, 1), (0, 2), (1, 2))
    assert MANIFEST.gradient_edges() == ((0, 1), (0, 2), (1, 2))
    assert MANIFEST.edge_values(0, 2) == ("angle", "h")  # in the order of the consumer's inputs
    no_gradient = replace(MANIFEST.values["h"], requires_grad=False)
    assert replace(MANIFEST, values=MANIFEST.values | {"h": no_gradient}).gradient_edges() == ((1, 2),)


def test_a_tied_weight_is_stored_under_its_first_name() -> None:
    assert MANIFEST.stored_name("output.weight") == "embed.weight"
    assert MANIFEST.stored_name("other.weight") == "other.weight"


def test_leaves_keep_their_order() -> None:
    assert list(leaves([{"b": "x", "a": ["y", None]}, "z"])) == ["x", "y", None, "z"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (MANIFEST.to_json()[:300], ["not JSON"]),
        ("[]", ["a list", "an object"]),
        ("{}", ["no schema_version"]),
        ('{"schema_version": 4}', ["schema_version", "4", "1 to 3", "newer pipegraph"]),
        ('{"schema_version": 3}', ["lacks generator"]),
    ],
    ids=["truncated", "another thing", "no version", "newer", "missing key"],
)
def test_a_text_that_is_no_manifest_is_refused(text: str, parts: list[str]) -> None:
    with refused(PackageError, "out/pipeline.json", *parts, advice="pipegraph split"):
        Manifest.from_json(text, "out/pipeline.json")


def _set(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(entry: Any) -> None:
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (_set("stages", 0, "weights", to="../weights"), ["stages[0].weights", "'../weights'", "folder"]),
        (_set("files", to={"/etc/passwd": LISTED}), ["files:", "'/etc/passwd'", "folder"]),
        (_set("stages", 0, "module", to="os; x"), ["stages[0]", "module 'os; x'"]),
        (_set("stages", 1, "index", to=5), ["stages:", "[0, 5, 2]", "numbered from 0"]),
        (_set("stages", to=[]), ["stages:", "[]", "numbered from 0"]),
        (_set("stages", 1, "inputs", to=["x"]), ["stages[1]", "'x'"]),
        (_set("stages", 1, "inputs", to=["k"]), ["stages[1].inputs", "'k'", "not reach stage 1"]),
        (_set("values", "h", "consumers", to=[0]), ["stages[1].inputs", "'h'", "not reach stage 1"]),
        (_set("values", "h", "producer", to=1), ["stages[1].inputs", "'h'", "not reach stage 1"]),
        (_set("values", "angle", "producer", to=1), ["values.angle.producer", "stage 1"]),
        (_set("values", "logits", "producer", to=9), ["values.logits.producer", "stage 9"]),
        (_set("values", "h", "shape", to=None), ["values.h.shape", "null", "list"]),
        (_set("args", to=["other"]), ["args:", "'other'"]),
        (_set("outputs", to=["k"]), ["outputs:", "'k'", "last stage"]),
        (_set("values", "h", "batch_dim", to=3), ["values.h.batch_dim", "is 3", "3 dimensions"]),
        (_set("values", "h", "dim_order", to=[0, 2, 2]), ["values.h.dim_order", "[0, 2, 2]", "3 dimensions"]),
        (_set("values", "h", "name", to="h"), ["values.h:", '"name"', "dim_order"]),
        (_set("shards", to={"../x": LISTED}), ["shards:", "'../x'", "folder"]),
        (_set("shards", to={"x": {**LISTED, "digest": "sha256 00"}}), ["shards.x.digest", '"sha256 00"']),
        (_set("args", to=[{"a": [1]}]), ["args:", "leaf 1"]),
    ],
)
def test_a_manifest_that_could_not_run_is_refused(change: Callable[[Any], None], parts: list[str]) -> None:
    entry = json.loads(MANIFEST.to_json())
    change(entry)
    with refused(PackageError, "out/pipeline.json: ", *parts, advice="pipegraph split"):
        Manifest.from_json(json.dumps(entry), "out/pipeline.json")


def test_the_models_own_dicts_keep_their_order() -> None:
    names = ("z", "a", "m")
    values = {name: Value(name, "float32", (2,), 0, ()) for name in names} | {
        "x": Value("x", "float32", (2,), -1, (0,))
    }
    manifest = Manifest(
        generator="pipegraph 0.1.0",
        model=ModelEntry(),
        args=["x"],
        kwargs={},
        outputs={"z": "z", "inner": {"m": "m", "a": "a"}},
        values=values,
        stages=(StageEntry(0, "stage_0", "Stage0", ("x",), names),),
    )
    outputs = Manifest.from_json(manifest.to_json(), "here").outputs
    assert (list(outputs), list(outputs["inner"])) == (["z", "inner"], ["m", "a"])


def test_version_1_is_read() -> None:
    """Its plan was flat, its files had no sizes, its shards no digests, and tensors were cut along dimension 0."""
    planned = replace(MANIFEST, plan=PlanEntry(("layers.1", "layers.2"), ("a", "b", "c"), prediction(3)))
    digest = f"sha256 {64 * '0'}"
    entry = json.loads(planned.to_json()) | {"schema_version": 1, "files": {"stage_0.py": digest}}
    for key in ("sizes", "shards", "tp_plan"):
        del entry[key]
    for value in entry["values"].values():
        del value["batch_dim"]
    entry["plan"] |= entry["plan"].pop("prediction")
    cut = {name: replace(value, batch_dim=None if value.is_constant else 0) for name, value in planned.values.items()}
    assert Manifest.from_json(json.dumps(entry), "pipeline.json") == replace(
        planned, values=cut, files={"stage_0.py": ListedFile(None, digest)}
    )
    del entry["plan"]["value"]
    with refused(PackageError, "pipeline.json", "plan.prediction", "value", advice="pipegraph split"):
        Manifest.from_json(json.dumps(entry), "pipeline.json")


def test_shapes_are_expressions_of_sizes() -> None:
    sizes = {"batch": Size(captured=8, min=1), "seq": Size(captured=128)}
    value = replace(MANIFEST.values["h"], shape=("batch", "seq // 4 + 1", 16))
    manifest = replace(MANIFEST, sizes=sizes, values=MANIFEST.values | {"h": value})
    assert Manifest.from_json(manifest.to_json(), "pipeline.json") == manifest
    assert value.shape_at({"batch": 2, "seq": 10}) == (2, 3, 16)
    assert replace(value, shape=("12 + -1 * (seq // 2) // 2",)).shape_at({"seq": 10}) == (9,)
    for dimension, parts in (
        ("bach", ['"bach"', '"batch"']),
        ("batch ** 9", ['"batch ** 9"', "not an expression"]),
        ("batch // 0", ['"batch // 0"', "not an expression"]),
        ("batch - 9", ['"batch - 9" is -1']),
        ("(" * 150, ["((((", "not an expression"]),
    ):
        with refused(PackageError, "values.h.shape", *parts):
            replace(manifest, values=manifest.values | {"h": replace(value, shape=(dimension,))})
