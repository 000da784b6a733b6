"""Training and evaluation: what follows the mode follows it after the split, and modules start in the mode they had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipegraph.errors import CaptureError
from tests.codegen.layers import Block, Row, batch
from tests.codegen.parity import differences, source, split
from tests.slow import cases

pytestmark = pytest.mark.usefixtures("from_graph")


class Dropouts(nn.Module):
    """Dropout as a module and as a function, of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.plain = nn.Dropout(0.1)
        self.channels = nn.Dropout2d(0.5)
        self.alpha = nn.AlphaDropout(0.2)
        self.b = Block()
        self.leaky = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.channels(self.plain(self.a(x))[:, :, None, None])[:, :, 0, 0]
        return self.leaky(F.dropout(self.alpha(self.b(h)), 0.3, self.training))


class FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.weight, None, self.training, 0.2, 1e-3)


class Norms(nn.Module):
    """Batch norm as a module and as functions, with and without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.functional = FunctionalNorm()
        self.b = nn.Linear(8, 8)
        self.plain = nn.BatchNorm1d(8, affine=False, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.functional(self.norm(self.a(x))))
        return self.plain(h) + F.batch_norm(h, None, None, training=True) + F.instance_norm(h[None])[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = Block()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(3, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0, is_causal=True, scale=0.2)
        return self.out(y.transpose(1, 2).reshape(3, 4, 8))


class EagerAttention(nn.Module):
    """As transformers writes it: in evaluation mode nothing is left of the dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(8, 16)
        self.out = Block()

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        scores = F.softmax(q @ k.mT, dim=-1)
        weights = F.dropout(scores, p=0.3 if self.training else 0.0, training=self.training)
        return self.out(weights @ x)


class ContiguousAttention(Attention):
    """The kernel that drops nothing gives another layout, in which ``contiguous`` does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(3, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0, is_causal=True)
        return self.out(y.contiguous().view(6, 4, 4).transpose(1, 2).contiguous().view(3, 4, 8))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
    return nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(8, 2))


CASES = {
    "dropouts": (Dropouts, "b", batch()),
    "norms": (Norms, "b", batch(6, 8)),
    "attention": (Attention, "out", batch(3, 4, 8)),
    "eager attention": (EagerAttention, "out", batch(3, 4, 8)),
    "contiguous": (ContiguousAttention, "out", batch(3, 4, 8)),
    "encoder": (encoder, "0.layers.1,1", batch(3, 4, 8)),
    "lstm": (lambda: nn.Sequential(Block(), Last()), "1", batch(3, 4, 8)),
}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


# tests/codegen/test_attention.py evaluates one, and trains one that is cut inside.
SLOW = ("encoder",)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("case", cases(CASES, slow=SLOW))
def test_stages_follow_the_mode(case: str, train: bool, tmp_path: Path) -> None:
    """torch.distributed.pipelining leaves dropout on after ``.eval()``."""
    build, cut, x = CASES[case]
    torch.manual_seed(0)
    model = build()
    assert differences(split(tmp_path, model, (x,), cut=cut), model, (x,), train=train) == []


def test_a_batch_norm_without_momentum_is_refused_if_it_is_no_module(tmp_path: Path) -> None:
    model = nn.Sequential(Block(), nn.BatchNorm1d(8, momentum=None), Block())
    model[1].register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(CaptureError, match="momentum=None"):
        split(tmp_path, model, (batch(),), cut="2")


class Mixed(Row):
    """Batch norm frozen in one layer, a whole layer in another, a part of a layer that is evaluated in a third."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(4)])
        self.drop = Drop()
        self.layers[0][1].eval()
        self.layers[1].eval()
        self.layers[2].eval()
        self.layers[2][2].train()
        self.drop.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))


class Drop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


def test_modules_start_in_the_mode_they_had(tmp_path: Path) -> None:
    model = Mixed()
    package = split(tmp_path, model, (batch(6, 8),), cut="layers.2")
    expected = {name: module.training for name, module in model.named_modules()}
    for index in range(2):
        for name, module in package.load_stage(index).named_modules():
            assert module.training == expected[name], name
    assert differences(package, model, (batch(6, 8),)) == []


def test_a_model_in_evaluation_mode_stays_in_it(tmp_path: Path) -> None:
    model = Mixed().eval()
    package = split(tmp_path, model, (batch(6, 8),), cut="layers.2")
    assert not any(module.training for index in range(2) for module in package.load_stage(index).modules())
    assert differences(package, model, (batch(6, 8),)) == []
    assert differences(package, model, (batch(6, 8),), train=True) == []


class AlwaysDrops(nn.Module):
    """Dropout that the model does not switch off in evaluation mode, between two that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = Block()

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.dropout(self.a(x), 0.1, self.training), 0.2)
        h = F.dropout1d(F.alpha_dropout(self.b(h), 0.2, True))
        h = F.feature_alpha_dropout(h, 0.1, True) + F.feature_alpha_dropout(h, 0.1, self.training)
        return F.dropout(h, 0.3, self.training)


def test_dropout_in_every_mode_stays_in_every_mode(tmp_path: Path) -> None:
    model, inputs = AlwaysDrops(), (batch(2, 3, 8),)
    package = split(tmp_path, model, inputs, cut="b")
    assert differences(package, model, inputs, train=True) == []
    assert differences(package, model, inputs, train=False) == []
    source = (package.path / "stage_0.py").read_text()
    assert "F.dropout(F.dropout(self.a(x), 0.1, self.training), 0.2)" in source
    stage = package.load_stage(0).eval()
    assert (stage(torch.ones(64, 8)) == 0).float().mean() > 0.1


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_keep_their_gradients(use_reentrant: bool, tmp_path: Path) -> None:
    model, x = Checkpointed(use_reentrant), batch().requires_grad_()
    package = split(tmp_path, model, (x,), cut="blocks.2")
    assert "no_grad" not in source(package)
    assert differences(package, model, (x,)) == []


class Frozen(FunctionalNorm):
    """A batch norm that always takes the running statistics, in a class that does not ask for its mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.weight, training=False)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("middle", [nn.Tanh(), nn.Dropout(0.5)])
def test_a_batch_norm_that_is_switched_off_stays_off(middle: nn.Module, train: bool, tmp_path: Path) -> None:
    model, x = nn.Sequential(Frozen(), Block(), middle, Frozen(), FunctionalNorm()), batch()
    package = split(tmp_path, model, (x,), cut="3")
    assert source(package).count("training=False") == 1
    assert differences(package, model, (x,), train=train) == []


class Inactive(nn.Module):
    """A dropout that the source switches off, one that follows the mode, and one that is always active."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), 0.5, training=False) * 2
        return F.dropout(F.dropout(x, 0.1, self.training), 0.2)


@pytest.mark.parametrize("train", [True, False])
def test_a_dropout_that_is_switched_off_stays_off(train: bool, tmp_path: Path) -> None:
    model, x = nn.Sequential(Inactive(), Block(), Inactive()), batch()
    package = split(tmp_path, model, (x,), cut="1")
    assert source(package).count("dropout(") == 2
    assert differences(package, model, (x,), train=train) == []
