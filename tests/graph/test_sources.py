"""Model files in all forms that they may take, and ``empty_parameters``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pipegraph.errors import SourceError
from pipegraph.graph.sources import load
from pipegraph.graph.sources.model_source import parameters_on_meta
from tests.messages import refused

HEAD = "import torch\nfrom torch import nn\n"


def write(folder: Path, body: str, name: str = "model.py") -> str:
    (folder / name).write_text(HEAD + body)
    return str(folder / name)


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        ("(torch.ones(2),)", 1, []),
        ("(torch.ones(2), torch.ones(3))", 2, []),
        ("{'x': torch.ones(2)}", 0, ["x"]),
        ("((torch.ones(2),), {'y': 3})", 1, ["y"]),
        ("lambda: (torch.ones(2),)", 1, []),
        ("lambda: {'x': torch.ones(2)}", 0, ["x"]),
        ("()", 0, []),
    ],
)
def test_example_inputs(inputs: str, args: int, kwargs: list[str], tmp_path: Path) -> None:
    source = load(write(tmp_path, f"model = nn.Linear(2, 2)\nexample_inputs = {inputs}\n"))
    assert (len(source.args), list(source.kwargs)) == (args, kwargs)


MASKED = """
class Masked(nn.Module):
    def forward(self, x, mask=None):
        return x if mask is None else x * mask


model = Masked()
example_kwargs = {"mask": torch.ones(2)}
"""


def test_arguments_under_another_name_are_not_left_out_silently(tmp_path: Path) -> None:
    with refused(SourceError, "example_kwargs", "Masked (mask)", advice="example_inputs = ((tensor,), example_kwargs)"):
        load(write(tmp_path, f"{MASKED}example_inputs = (torch.ones(2),)\n"))
    source = load(write(tmp_path, f"{MASKED}example_inputs = ((torch.ones(2),), example_kwargs)\n"))
    assert list(source.kwargs) == ["mask"]


def test_build_model_comes_before_model(tmp_path: Path) -> None:
    body = "model = nn.Linear(2, 2)\ndef build_model():\n    return nn.ReLU()\nexample_inputs = (torch.ones(2),)\n"
    assert isinstance(load(write(tmp_path, body)).model, nn.ReLU)
    named = load(write(tmp_path, body) + ":model")
    assert isinstance(named.model, nn.Linear) and named.name == "model.py:model"


def test_loss_and_target_come_along(tmp_path: Path) -> None:
    body = "model = nn.ReLU()\nexample_inputs = (torch.ones(2),)\n"
    body += "def loss_fn(a, b): return a\ndef example_target(): return 5\n"
    source = load(write(tmp_path, body))
    assert source.loss_fn is not None and source.loss_fn(1, 2) == 1 and source.example_target == 5


def test_a_file_beside_the_model_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "beside_the_model.py").write_text("WIDTH = 3\n")
    body = "from beside_the_model import WIDTH\nmodel = nn.Linear(WIDTH, 1)\nexample_inputs = (torch.ones(2, 3),)\n"
    search_path = list(sys.path)
    assert load(write(tmp_path, body)).model.in_features == 3
    assert sys.path == search_path


def test_an_error_names_the_line_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "def build_model():\n    return nn.Linear(2, 'two')\nexample_inputs = ()\n")
    with refused(SourceError, f"{file}:4", "build_model()", "TypeError", advice="build_model()"):
        load(file)


def test_empty_parameters_keep_buffers_and_ties() -> None:
    with parameters_on_meta():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        model.register_buffer("table", torch.arange(3.0))
        model[0].bias.requires_grad_(False)
    assert {parameter.is_meta for parameter in model.parameters()} == {True}
    assert model[2].weight is model[0].weight
    assert not model[0].bias.requires_grad
    assert model.table.tolist() == [0, 1, 2] and model[1].running_var.tolist() == [1, 1, 1, 1]
    assert not nn.Linear(1, 1).weight.is_meta


def test_empty_parameters_end_with_an_error() -> None:
    with pytest.raises(ValueError, match="stop"), parameters_on_meta():
        raise ValueError("stop")
    assert not nn.Linear(1, 1).weight.is_meta


def test_empty_parameters_of_a_parameter_registered_twice() -> None:
    with parameters_on_meta():
        weight = nn.Parameter(torch.ones(2, 2))
        model = nn.ParameterDict({"a": weight, "b": weight})
    assert model["a"] is model["b"] and model["a"].is_meta


def test_pixels_have_the_size_that_a_configuration_inside_names(tmp_path: Path) -> None:
    vision = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 8, "num_hidden_layers": 1}
    vision |= {"intermediate_size": 8, "num_attention_heads": 1}
    config = {"model_type": "clip", "architectures": ["CLIPForImageClassification"], "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = load(f"hf:{tmp_path}", batch=2, weights=False)
    assert source.kwargs["pixel_values"].shape == (2, 1, 8, 8)
