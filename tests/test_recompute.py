"""What is computed again, as people write it."""

from __future__ import annotations

from typing import Any

import pytest

from pipegraph.errors import ArgumentError
from pipegraph.recompute import Recompute, Region, describe_stages, layer_lists, parse_stages, stages_text

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
    ("given", "message"),
    [
        ("blocks", 'Did you mean "block"'),
        (True, "recompute cannot be"),
        ({"layers.*": "all"}, 'recompute cannot be "all"'),
        ({"layers[-2:]": "block"}, "whole numbers from 0 on"),
        ({"layers[::0]": "block"}, "whole numbers from 0 on"),
        ({"layers[02]": "block"}, "is not a pattern"),
        ({3: "block"}, "is not a pattern"),
        ({"a,b": "block"}, "is not a pattern"),
        ("layers.*=", 'recompute cannot be ""'),
        (["block"], "for each of 1 stages, and there are 2"),
        ("block;none;none", "for each of 3 stages, and there are 2"),
        (None, "recompute cannot be"),
    ],
)
def test_what_is_none_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_stages(given, 2)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    names = {f"layers.{number}" for number in range(12)} | {"embed", "layers.0.mlp"}
    Recompute.parse({"layers[::4].mlp": "none"}).check_names(names)
    with pytest.raises(ArgumentError, match=r'"embd" matches no module .*Did you mean "embed"') as refused:
        Recompute.parse({"layers.*": "none", "embd": "block"}).check_names(names)
    assert "one of embed, layers.0, layers.1, layers.2, layers.3, layers.4, …" in str(refused.value)
