"""Hooks that a forward adds to tensors: a stage applies a Function for each, or the capture is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import CaptureError
from pipegraph.graph.captured import Captured
from pipegraph.graph.custom_functions import applied_functions
from tests.messages import refused
from tests.models import tensor_hooks as models


def hooks_in(captured: Captured) -> list[str]:
    nodes = [node for node in captured.nodes if applied_functions([node])]
    return [applied_functions([node])[0].function.__name__ for node in nodes]


def text_of(model: nn.Module, x: Tensor, folder: Path, points: tuple[str, ...]) -> str:
    pipegraph.write_package(pipegraph.plan(pipegraph.capture(model, (x,)), points=list(points)), folder / "out")
    return "".join((folder / "out" / name).read_text() for name in ("blocks.py", "stage_0.py", "stage_1.py"))


def test_the_text_of_a_hook_is_the_authors(tmp_path: Path) -> None:
    text = text_of(models.Residual(models.Scaled), torch.randn(4, 5, 8), tmp_path, ("blocks.1",))
    assert (
        "class GradientHook(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x, factor):\n"
        "        ctx.factor = factor\n"
        "        return x.view_as(x)\n"
        "\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad):\n"
        "        return grad * ctx.factor, None\n"
    ) in text
    assert (
        "        h = torch.relu(self.up(x))\n"
        "        h = GradientHook.apply(h, self.factor)\n"
        "        return x + self.down(h)\n"
    ) in text
    assert "GradientHook, Scaled: the text of tensor_hooks.py" in text


def test_a_hook_that_is_several_statements(tmp_path: Path) -> None:
    text = text_of(models.Residual(models.TwoHooks), torch.randn(4, 5, 8), tmp_path, ("blocks.1",))
    assert (
        "    def backward(ctx, gradient):\n"
        "        limit = ctx.limit\n"
        "\n"
        "        def clip_rows(gradient):\n"
        "            size = gradient.abs().mean(-1, keepdim=True)\n"
        "            return torch.where(size > limit, gradient * limit / size, gradient)\n"
        "\n"
        "        return clip_rows(gradient), None\n"
    ) in text


def test_a_hook_that_calls_a_function_of_the_model(tmp_path: Path) -> None:
    text = text_of(models.Residual(models.Calls), torch.randn(4, 5, 8), tmp_path, ("blocks.1",))
    assert text.count("def clip_rows(gradient: Tensor, limit: float) -> Tensor:\n") == 1
    assert "        return clip_rows(grad, limit=ctx.factor * 0.001), None\n" in text
    assert "        h = GradientHook.apply(h, self.factor)\n" in text


def test_a_hook_of_what_another_module_computes_stands_after_that(tmp_path: Path) -> None:
    text = text_of(models.Residual(models.HooksItsInput), torch.randn(4, 5, 8), tmp_path, ("blocks.1",))
    assert '        x = QuarterHook.apply(x + self.blocks["1"](x))\n' in text


def test_a_hook_in_one_of_many_layers() -> None:
    """The layers are equal but for their number, which the forward compares."""

    class Layer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.linear, self.index = nn.Linear(8, 8), index

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            if self.index == 14:
                h.register_hook(models.quarter)
            return x + h

    model = nn.Sequential(*map(Layer, range(20)))
    captured = pipegraph.capture(model, (torch.randn(4, 8),))
    (node,) = [node for node in captured.nodes if applied_functions([node])]
    assert node.meta["path"][-1][1] == "14"


def test_a_hook_of_an_input() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(models.quarter)
            return x + self.linear(x)

    assert hooks_in(pipegraph.capture(Net(), (torch.randn(4, 8, requires_grad=True),))) == ["QuarterHook"]
    assert hooks_in(pipegraph.capture(Net(), (torch.randn(4, 8),))) == []


def test_a_hook_without_gradient_is_the_error_of_torch() -> None:
    model = models.Residual(models.ReadBefore).requires_grad_(False)
    with refused(CaptureError, "register a hook", "tensor_hooks.py:"):
        pipegraph.capture(model, (torch.randn(4, 8),))


@pytest.mark.parametrize("use", models.REFUSED)
def test_what_no_stage_has_is_refused(use: object) -> None:
    lines = Path(models.__file__).read_text().splitlines()
    with pytest.raises(CaptureError) as caught:
        pipegraph.capture(models.Hooked(use), (torch.randn(4, 8),))  # type: ignore[arg-type]
    message = str(caught.value)
    (line,) = re.findall(r"tensor_hooks.py:(\d+)", message)
    assert "register_hook" in lines[int(line) - 1] or "remove" in lines[int(line) - 1]
    assert "\nTry: " in message


def test_rows_that_a_hook_mixes_are_reported() -> None:
    """It cuts a gradient off that is large: a small one says nothing."""
    captured = pipegraph.capture(models.Residual(models.ClipsNorm), (torch.randn(4, 8),))
    assert any("Hook" in operator.operator for operator in captured.batch.mixing)
    captured = pipegraph.capture(models.Residual(models.TwoHooks), (torch.randn(4, 8),))
    assert not captured.batch.mixing
