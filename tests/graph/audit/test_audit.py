"""Everything that a model does apart from its operations is in its stages, or raises an error with its line."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch

import pipegraph
from pipegraph.errors import CaptureError
from tests.graph.audit import models
from tests.messages import refused, warned

X = torch.linspace(-1, 1, 32).reshape(4, 8)
REFUSED = ("counts_in_buffer", "evaluation")
"""A kind and a place that are refused, though the kind is right in other places."""
# They change containers or attributes without a call that Python reports, or at no line of their own.
WITHOUT_LINE = (
    "counts_in_closure",
    "sets_item",
    "changes_object",
    "changes_global",
    "changes_class",
    "adds_in_place",
    "draws",
)


@pytest.mark.parametrize("place", models.PLACES)
@pytest.mark.parametrize("kind", models.REFUSED)
def test_what_no_stage_does_is_refused(kind: str, place: str) -> None:
    torch.manual_seed(0)
    model = models.Model(kind, place)
    with pytest.raises(CaptureError) as raised:
        pipegraph.capture(model, (X,))
    message = str(raised.value)
    assert re.search(r"(cannot be captured|The model draws|a stage cannot)(.|\n)*\nTry: .", message), message
    lines = re.findall(r"\n  at .*tests/graph/audit/models.py:(\d+)", message)
    if kind not in (*WITHOUT_LINE, "switches_gradients_off"):
        source = Path(models.__file__).read_text().splitlines()
        start = next(number for number, line in enumerate(source) if f"def {kind}(" in line)
        assert len(lines) == 1 and start < int(lines[0]) - 1 <= start + 3


@pytest.mark.filterwarnings("ignore:the forward of Model sets")
@pytest.mark.parametrize(("kind", "place"), [case for case in product(models.RIGHT, models.PLACES) if case != REFUSED])
def test_what_a_stage_does_as_well_is_right(kind: str, place: str, tmp_path: Path) -> None:
    """Three steps, because a buffer is another one in each."""
    torch.manual_seed(0)
    model = models.Model(kind, place)
    package = pipegraph.write_package(pipegraph.plan(pipegraph.capture(model, (X,)), points=["last"]), tmp_path / "out")

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    pipe = pipegraph.Pipeline(package, kernels="autograd", loss_fn=loss_fn)
    optimizers = [torch.optim.SGD(owner.parameters(), 0.1) for owner in (pipe, model)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.compiler.set_stance("force_eager"):
            expected = loss_fn(model(X), torch.ones(4, 8))
        expected.backward()
        loss = pipe.step(X, target=torch.ones(4, 8)).loss
        torch.testing.assert_close(loss, expected.detach())
        gradients = {name: param.grad for stage in pipe.stages.values() for name, param in stage.named_parameters()}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad)
        for optimizer in optimizers:
            optimizer.step()


def test_a_write_in_evaluation_mode_alone_is_refused() -> None:
    with refused(CaptureError, "Model", "evaluation mode", "models.py:158: self.total += 1", advice="model.eval()"):
        pipegraph.capture(models.Model(*REFUSED), (X,))


def test_attributes_that_forward_sets_are_named() -> None:
    with warned("Model", "state.scratch"):
        pipegraph.capture(models.Model("passes_on", "forward"), (X,))


def test_a_model_is_left_as_it_was() -> None:
    model = models.Model("appends", "forward")
    with pytest.raises(CaptureError):
        pipegraph.capture(model, (X,))
    assert model.state.list == []


@pytest.mark.parametrize("kind", ["switches_gradients_off", "seeds", "forks"])
def test_torch_is_left_as_it_was(kind: str) -> None:
    model = models.Model(kind, "forward")
    torch.manual_seed(7)
    rng_state = torch.get_rng_state()
    with pytest.raises(CaptureError):
        pipegraph.capture(model, (X,))
    assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), rng_state)
