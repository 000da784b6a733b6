"""What is computed again, as people write it."""

from __future__ import annotations

from typing import Any

import pytest

from pipegraph.errors import ArgumentError
from pipegraph.recompute import Recompute, Region, describe_stages, layer_lists, parse_stages, stages_text
from tests.messages import refused

LAYER, MLP = ("layers.3",), ("layers.3", "layers.3.mlp", "layers.3.mlp.up")


@pytest.mark.parametrize(
    ("given", "layer", "mlp"),
    [
        ("block", Region("", "block"), Region("", "block")),
        ({"layers.*": "block"}, Region("layers.3", "block"), Region("layers.3", "block")),
        ({"layers.*": "block", "*.mlp": "none"}, Region("layers.3", "block"), Region("layers.3.mlp", "none")),
        ({"*.mlp": "none", "layers.*": "block"}, Region("layers.3", "block"), Region("layers.3", "block")),
        ("layers.*=block, *.up=none", Region("layers.3", "block"), Region("layers.3.mlp.up", "none")),
        ({"": "none", "*.mlp": "block"}, Region("", "none"), Region("layers.3.mlp", "block")),
        ({"layers[::2]": "block"}, Region("", "min-cut"), Region("", "min-cut")),
        ({"layers[1::2]": "block"}, Region("layers.3", "block"), Region("layers.3", "block")),
        ({"layers[:3]": "block"}, Region("", "min-cut"), Region("", "min-cut")),
        ({"layers[3:4].mlp": "block"}, Region("", "min-cut"), Region("layers.3.mlp", "block")),
        ({"layers.?": "none"}, Region("layers.3", "none"), Region("layers.3", "none")),
    ],
)
def test_the_last_pattern_that_fits_counts(given: Any, layer: Region, mlp: Region) -> None:
    recompute = Recompute.parse(given)
    assert (recompute.region(LAYER), recompute.region(MLP)) == (layer, mlp)
    assert Recompute.parse(str(recompute)) == recompute


def test_a_dot_in_a_pattern_is_a_dot() -> None:
    assert Recompute.parse({"layers.*": "block"}).region(("layersX3",)) == Region("", "min-cut")
    assert Recompute.parse({"layers[0:9]": "block"}).region(("layers.x",)) == Region("", "min-cut")


def test_a_layer_with_a_cut_inside_is_one_region() -> None:
    """It is not called itself."""
    recompute = Recompute.parse({"*.layers.*": "block", "*.up": "none"})
    assert recompute.region(("h.layers.3.norm",)) == recompute.region(("h.layers.3.mlp", "h.layers.3.mlp.down"))
    assert recompute.region(("h.layers.3.norm",)) == Region("h.layers.3", "block")
    assert recompute.region(("h.layers.3.mlp", "h.layers.3.mlp.up")) == Region("h.layers.3.mlp.up", "none")
    assert Recompute.parse({"*": "block"}).region(("h.norm",)) == Region("h.norm", "block")


def test_block_for_everything_holds_for_layers() -> None:
    names = ["embed.weight", "h.0.mlp.experts.0.w", "h.0.mlp.experts.1.w", "h.1.mlp.w", "towers.0.w", "0.w", "1.w"]
    assert layer_lists(names) == ("h",)
    assert layer_lists(["features.0.weight", "features.3.weight"]) == ()
    assert Recompute.parse("block").with_layers(names) == Recompute.parse({"h.*": "block"})
    mixed = Recompute.parse({"": "block", "*.mlp": "none"}).with_layers(names)
    assert mixed == Recompute.parse({"h.*": "block", "*.mlp": "none"})
    for patterns in ("none", {"h.0": "block"}):
        assert Recompute.parse(patterns).with_layers(names) == Recompute.parse(patterns)
    assert Recompute.parse("block").with_layers(["0.w", "1.w"]) == Recompute.parse("block")


def test_one_for_each_stage() -> None:
    stages = parse_stages(["block", {"layers.*": "none"}, "block"], 3)
    assert describe_stages(stages) == "block (stages 0, 2), layers.*=none (stage 1)"
    assert stages_text(stages) == "block;layers.*=none;block" and parse_stages(stages_text(stages), 3) == stages
    assert parse_stages("block;none;none", 3) == parse_stages(["block", "none", "none"], 3)
    assert describe_stages(parse_stages("block;none;none", 3)) == "block (stage 0), none (stages 1 – 2)"
    assert stages_text(parse_stages("none", 3)) == "none"


@pytest.mark.parametrize(
    ("recompute", "parts", "advice"),
    [
        ("blocks", ['"blocks"', '"block"'], '"block"'),
        (True, ['"True"'], '"block"'),
        ({"layers.*": "all"}, ['"all"'], '"block"'),
        ({"layers[-2:]": "block"}, ["'layers[-2:]'", "from 0 on"], "layers[::2]"),
        ({"layers[::0]": "block"}, ["'layers[::0]'", "from 0 on"], "layers[::2]"),
        ({"layers[02]": "block"}, ["'layers[02]'", "pattern"], "layers[::2]"),
        ({3: "block"}, ["3 is", "pattern"], "layers[::2]"),
        ({"a,b": "block"}, ["'a,b'", "pattern"], "layers[::2]"),
        ("layers.*=", ['""'], '"block"'),
        (["block"], ["1 stages", "2"], "one for each stage"),
        ("block;none;none", ["3 stages", "2"], "one for each stage"),
        (None, ['"None"'], '"block"'),
    ],
)
def test_what_is_none_is_refused(recompute: Any, parts: list[str], advice: str) -> None:
    with refused(ArgumentError, "recompute", *parts, advice=advice):
        parse_stages(recompute, 2)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    names = {f"layers.{number}" for number in range(12)} | {"embed", "layers.0.mlp"}
    Recompute.parse({"layers[::4].mlp": "none"}).check_names(names)
    with refused(
        ArgumentError, '"embd"', '"embed"', advice="one of embed, layers.0, layers.1, layers.2, layers.3, layers.4, …"
    ):
        Recompute.parse({"layers.*": "none", "embd": "block"}).check_names(names)
