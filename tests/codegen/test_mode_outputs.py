"""Outputs that a model has in one mode only, and what no stage can do in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegraph.errors import CaptureError
from pipegraph.runtime.pipeline import Pipeline
from tests.codegen.layers import Layers, batch
from tests.codegen.parity import differences, plain, split


class AuxiliaryHead(Layers):
    """Returns more in training mode."""

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        h = self.a(x)
        extra = self.c(h) if self.training else None
        y = self.b(h)
        return {"y": y, "extra": extra} if extra is not None else y


class NoneInEvaluation(AuxiliaryHead):
    """Returns None in the place of what it does not compute."""

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        h = self.a(x)
        return {"y": self.b(h), "extra": self.c(h) if self.training else None}


@pytest.mark.filterwarnings("ignore:.* got no gradient in a step, as in the model")
@pytest.mark.parametrize(("build", "schedule"), [(AuxiliaryHead, "1f1b"), (NoneInEvaluation, "zb-h1")])
def test_outputs_of_training_alone(build: type[nn.Module], schedule: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    package = split(tmp_path, model, (batch(),), cut="b")
    assert package.manifest.evaluation_outputs is not None

    def loss(output: Any, target: Tensor) -> Any:
        parts = output.values() if isinstance(output, dict) else [output]
        return sum((part - target).square().mean() for part in parts if part is not None)

    pipe = Pipeline(package, schedule=schedule, microbatches=2, loss_fn=loss, kernels="eager")
    x, target = batch(4, 8), torch.zeros(4, 8)
    for training in (False, True, False):
        model.train(training)
        for stage in pipe.stages.values():
            stage.train(training)
        expected = model(x)
        result = pipe.step(x, target=target, return_outputs=True)
        torch.testing.assert_close(result.loss, loss(expected, target))
        torch.testing.assert_close(result.outputs, expected)
        torch.testing.assert_close(pipe.eval(x), expected)


class OtherOutput(Layers):
    """After DeiT: one head for each of two losses, and their mean in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.a(x)
        y, distilled = self.b(h), self.c(h)
        if self.training:
            return y, distilled
        return (y + distilled) / 2


class Detect(Layers):
    """After YOLO: in evaluation mode what follows from the maps, in another shape and dtype, and the maps."""

    def forward(self, x: Tensor) -> Tensor | list[Tensor] | tuple[Tensor, Tensor, list[Tensor]]:
        maps = [self.b(self.a(x)), self.c(x)]
        if self.training:
            return maps
        boxes = torch.cat([feature_map.sigmoid() for feature_map in maps], 1)
        return boxes, boxes.argmax(1), maps


class Head(nn.Module):
    """A module that returns more in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y if self.training else (y.softmax(-1), y.argmax(-1))


class InnerHead(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.c = Head()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.c(self.b(self.a(x)))


class Hidden(Layers):
    """Returns in evaluation mode a value that training mode makes, too, of another shape."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x)
        y = self.b(h)
        return {"loss": y.square().mean()} if self.training else {"hidden": h, "y": y}


class HiddenInTraining(Layers):
    """Returns in training mode alone what both modes make: the modes run the same operations."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.a(x)
        return {"y": self.b(h), "hidden": [h] if self.training else None}


class SumOfLosses(Layers):
    """Layers that make a loss each, which training alone adds."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        losses = []
        for layer in (self.a, self.b):
            x = layer(x)
            if self.training:
                losses.append(x.square().mean())
        y = self.c(x)
        return (y, sum(losses)) if self.training else y


class ReadsBranch(Layers):
    """A branch that reads what an earlier one makes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        scaled = h * 0.5 if self.training else h.cos()
        y = self.b(scaled)
        y = y * scaled if self.training else y + scaled.tanh()
        return self.c(y)


class ReadsLater(Layers):
    """What one mode makes early, and reads late."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        gate = h.sigmoid() if self.training else None
        h = self.b(h)
        return self.c(h * gate if gate is not None else h)


RIGHT = [OtherOutput, Detect, InnerHead, Hidden, HiddenInTraining, SumOfLosses, ReadsBranch, ReadsLater]


@pytest.mark.parametrize("build", RIGHT)
def test_both_modes_return_what_the_model_does(build: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    package = split(tmp_path, model, (batch(),), cut="b")
    for train in (True, False):
        assert differences(package, model, (batch(),), train=train) == []
    pipe = Pipeline(package, schedule="1f1b", microbatches=1, kernels="eager", loss_fn=lambda output, target: target)
    for training in (True, False):
        for stage in pipe.stages.values():
            stage.train(training)
        torch.testing.assert_close(plain(pipe.eval(batch(4, 8))), plain(model.train(training)(batch(4, 8))))


class WritesInEvaluation(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def middle(self, h: Tensor) -> Tensor:
        if not self.training:
            self.seen.add_(h.sum(0).detach())
        return h


class OtherShape(Layers):
    """Evaluation mode continues with more rows."""

    def middle(self, h: Tensor) -> Tensor:
        return h if self.training else torch.cat([h, h])


class CannotBeTraced(Layers):
    def middle(self, h: Tensor) -> Tensor:
        return h if self.training else h[h.sum(1) > 0]


class DrawsInEvaluation(Layers):
    """A random number that evaluation mode alone returns."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.b(self.a(x))
        return y if self.training else (y, torch.rand(2, 2))


REFUSED = {
    WritesInEvaluation: "self.seen.add_",
    OtherShape: "torch.cat",
    CannotBeTraced: "h.sum",
    DrawsInEvaluation: "torch.rand",
}


@pytest.mark.parametrize("build", REFUSED)
def test_what_no_stage_can_do_in_both_modes_is_refused(build: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=rf"(?s){build.__name__}.*in evaluation mode.*{REFUSED[build]}.*Try: "):
        split(tmp_path, build(), (batch(),), cut="b")


def test_a_model_in_evaluation_mode_is_split_for_that_mode_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = OtherShape().eval()
    with pytest.warns(UserWarning, match="OtherShape is captured in evaluation mode alone, and .*torch.cat"):
        package = split(tmp_path, model, (batch(),), cut="b")
    assert differences(package, model, (batch(),)) == []
    with pytest.raises(NotImplementedError, match="OtherShape was captured in evaluation mode alone"):
        package.load_stage(0).train()(batch())
