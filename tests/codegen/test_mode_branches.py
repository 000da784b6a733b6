"""What a model does in one mode only is ``if self.training:`` in its stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import PlanError
from pipegraph.runtime.pipeline import Pipeline
from tests.codegen.layers import Block, Layers, batch
from tests.codegen.parity import differences, source, split, write

pytestmark = pytest.mark.usefixtures("from_graph")


class TrainingOnly(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            h = h.tanh()
        return self.b(h)


class EvaluationOnly(Layers):
    """A module that evaluation mode alone calls."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.training:
            h = h + self.c(h)
        return self.b(h)


class BothModes(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            gate = h.sigmoid()
            h = h * gate
        else:
            h = h * 0.5
        return self.b(h) + h


class Chooses(Layers):
    """Both modes run the same operations, and read other results of them."""

    def forward(self, x: Tensor) -> Tensor:
        h, g = self.a(x), self.c(x)
        return self.b(h if self.training else g) + h + g


class Factor(Layers):
    def middle(self, h: Tensor) -> Tensor:
        return h * (0.5 if self.training else 1.0)


class Tables(Layers):
    """Constants of one mode: of the code, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = torch.rand(2, 8)

    def middle(self, h: Tensor) -> Tensor:
        h = h + torch.tensor(0.5 if self.training else 0.25)
        return h * (self.table if self.training else self.other)


class Rearranges(Layers):
    """Copies in training alone, as a VAE of diffusers does. The values are the same, and the order of sums is not."""

    def middle(self, h: Tensor) -> Tensor:
        h = h.exp().t()
        if self.training:
            h = h.contiguous()
        return h.sin().t()


class DropsInTraining(Layers):
    def middle(self, h: Tensor) -> Tensor:
        return F.dropout(h.tanh(), 0.5, self.training) if self.training else h


class CentersByRows(Layers):
    """Reads a size, and holds a region without gradients."""

    def middle(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                mean = h.mean(0)
            h = h - mean + torch.arange(h.shape[0], device=h.device).unsqueeze(1)
        return h


class StochasticDepth(nn.Module):
    """After torchvision's: keeps whole rows."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        kept = torch.empty(x.shape[0], 1, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p).div_(1 - self.p)
        return x * kept


class Residual(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.other_drop = StochasticDepth(0.3), StochasticDepth(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.a(x))
        return x + self.other_drop(self.b(x))


class Dropped(Residual):
    """The value that evaluation mode reads has passed a dropout, which does nothing there."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.dropout(self.a(x)))
        return x + self.other_drop(self.dropout(self.b(x)))


class TwoTowers(nn.Module):
    """Calls a layer twice: its batch norm, whose statistics the second call finds changed, and its branch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), StochasticDepth(0.3)
        self.b = Block()

    def encode(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.encode(x), self.encode(x.flip(0))
        return self.b(x - y)


class OwnBatchNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            mean, var = input.mean(0), input.var(0, unbiased=False)
            with torch.no_grad():
                self.running_mean.mul_(0.9).add_(mean * 0.1)
                self.running_var.mul_(0.9).add_(var * 0.1)
        else:
            mean, var = self.running_mean, self.running_var
        return (input - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class Normed(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnBatchNorm(8)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(h)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))
        self.b = Block()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.b(x)


class Spectral(Layers):
    """torch's parametrization improves its estimate in training mode alone, in buffers that both modes read."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.utils.parametrizations.spectral_norm(self.c)

    def middle(self, h: Tensor) -> Tensor:
        return self.c(h)


class SpectralHook(Layers):
    """The older function does so in a hook that depends on the mode, though torch's layer itself does not."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.utils.spectral_norm(self.c)

    def middle(self, h: Tensor) -> Tensor:
        return self.c(h)


CASES = {
    SpectralHook: """
        else:
            result = self.weight_v
            result_1 = self.weight_u
""",
    Spectral: """
        self.c = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
""",
    TrainingOnly: """
        h = self.a(x)
        if self.training:
            h = h.tanh()
        return h
""",
    EvaluationOnly: """
        h = self.a(x)
        if not self.training:
            h = h + self.c(h)
        return h
""",
    BothModes: """
        if self.training:
            gate = h.sigmoid()
            h = h * gate
        else:
            h = h * 0.5
""",
    Chooses: """
        if self.training:
            h_1 = h
        else:
            h_1 = g
""",
    Factor: """
        if self.training:
            a = a * 0.5
""",
    Tables: """
            h_1 = torch.full((), 0.25, device=x.device)
        h = h + h_1
        if self.training:
            result = self.table
        else:
            result = self.other
        return h * result
""",
    Rearranges: """
        if self.training:
            h = h.contiguous()
""",
    DropsInTraining: """
        if self.training:
            a = F.dropout(a.tanh(), 0.5, self.training)
""",
    CentersByRows: """
        if self.training:
            with torch.no_grad():
                mean = h.mean(0)
            h = h - mean + torch.arange(x.shape[0], device=x.device).unsqueeze(1)
""",
    Residual: """
        return x + self.drop(self.a(x))
""",
    Dropped: """
        return x + self.drop(self.dropout(self.a(x)))
""",
    TwoTowers: """
        x = x + self.drop(self.norm(self.a(x)))
        y = flip + self.drop(self.norm(self.a(flip)))
        return x - y
""",
    Normed: """
        else:
            mean = self.running_mean
            var = self.running_var
""",
    Deep: """
        x = x + self.drop(self.a(x))
        return x + self.other_drop(self.b(x))
""",
}


@pytest.mark.filterwarnings("ignore:The tensor attribute self.c.weight was assigned")  # by the hook
@pytest.mark.parametrize("build", CASES)
def test_a_branch_on_the_mode_is_a_branch(build: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    package = split(tmp_path, model, (batch(),), cut="layers.2" if build is Deep else "b")
    assert CASES[build].strip("\n") in source(package)
    for train in (True, False):
        assert differences(package, model, (batch(),), train=train) == []


@pytest.mark.filterwarnings("ignore:.* got no gradient in a step, as in the model")
@pytest.mark.parametrize("kernels", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_pipeline_follows_the_mode_from_step_to_step(kernels: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BothModes()
    package = split(tmp_path, model, (batch(),), cut="b")
    pipe = Pipeline(package, schedule="zb-h1", microbatches=2, loss_fn=F.mse_loss, kernels=kernels)
    x, target = batch(4, 8), torch.zeros(4, 8)
    for training in (True, False, True):
        model.train(training)
        for stage in pipe.stages.values():
            stage.train(training)
        expected = F.mse_loss(model(x), target)
        assert torch.allclose(pipe.step(x, target=target, return_losses=True).loss, expected)
        with torch.no_grad():
            assert torch.allclose(pipe.eval(x), model(x))


class SkipsLayers(Deep):
    """Calls layers in training mode alone, between which a stage may not begin."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) if self.training or index == 0 else x
        return self.b(x)


def test_a_module_that_does_nothing_in_evaluation_mode_asks_for_it_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    package = split(tmp_path, Residual(), (batch(),), cut="b")
    drop = source(package).partition("class StochasticDepth")[2].partition("def forward")[2]
    assert drop.splitlines()[1:6] == [
        "        if self.training:",
        "            kept = torch.empty(x.shape[0], 1, dtype=x.dtype, device=x.device)",
        "            kept.bernoulli_(p=1 - self.p)",
        "            kept.div_(1 - self.p)",
        "            x = x * kept",
    ]


def test_no_stage_begins_inside_a_branch(tmp_path: Path) -> None:
    captured = pipegraph.capture(SkipsLayers(), (batch(),))
    with pytest.raises(PlanError, match=r"one mode only.*\n.*layers.py"):
        write(tmp_path, pipegraph.plan(captured, points=["layers.2"]))
    chosen = pipegraph.plan(captured, stages=2).points
    assert not {"layers.2", "layers.3"} & {point.fqn for point in chosen}
