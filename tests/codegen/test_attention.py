"""``nn.MultiheadAttention`` and layers of ``nn.Transformer`` are written as themselves, and called as in the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from tests.codegen.layers import batch
from tests.codegen.parity import differences, forward_lines, source, split
from tests.slow import cases


class Attending(nn.Module):
    """An attention between two layers; ``arguments`` are those of its call."""

    def __init__(self, settings: dict[str, Any], arguments: dict[str, Any], crossed: str = "xxx") -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, **{"batch_first": True, **settings})
        self.after = nn.Linear(8, 8)
        self.arguments = arguments
        self.crossed = crossed
        self.register_buffer("mask", torch.tensor([[0.0, -1.0, 0.5], [0.0] * 3, [2.0, 0.0, 0.0]]))
        self.register_buffer("padding", torch.tensor([[False, False, True], [False] * 3]))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        handed = {"x": self.before(x), "y": y + 1, "z": z * 2}
        named = {name: value * 1.5 if name == "attn_mask" else value for name, value in self.arguments.items()}
        masks = {"mask": self.mask + 0.5, "padding": ~self.padding}
        named = {name: masks.get(value, value) if isinstance(value, str) else value for name, value in named.items()}
        result, weights = self.attention(*(handed[name] for name in self.crossed), **named)
        return self.after(result) if weights is None else self.after(result) * weights.sum()


NO_WEIGHTS = {"need_weights": False}
CASES: dict[str, tuple[nn.Module, str]] = {
    "self": (Attending({}, NO_WEIGHTS), "self.attention(linear, linear, linear, need_weights=False)[0]"),
    "no bias": (
        Attending({"bias": False}, NO_WEIGHTS),
        "nn.MultiheadAttention(8, 2, bias=False, batch_first=True)",
    ),
    "cross": (Attending({}, NO_WEIGHTS, "xyy"), "need_weights=False)[0]"),
    "three": (Attending({}, NO_WEIGHTS, "xyz"), "need_weights=False)[0]"),
    "sequence first": (Attending({"batch_first": False}, NO_WEIGHTS), "nn.MultiheadAttention(8, 2)"),
    "added key": (Attending({"add_bias_kv": True}, NO_WEIGHTS), "add_bias_kv=True"),
    "masked": (Attending({}, {**NO_WEIGHTS, "attn_mask": "mask"}), ", attn_mask="),
    "padded": (Attending({}, {**NO_WEIGHTS, "key_padding_mask": "padding"}), ", key_padding_mask="),
    "weights": (Attending({}, {}), "nn.MultiheadAttention(8, 2, batch_first=True)"),
    "weights of heads": (Attending({}, {"average_attn_weights": False}), ", average_attn_weights=False)"),
}


@pytest.mark.parametrize(
    "case", cases(list(CASES), slow=("no bias", "sequence first", "three", "added key", "weights of heads"))
)
def test_attention_is_a_module_of_torch(case: str, tmp_path: Path) -> None:
    model, expected = CASES[case]
    args = tuple(batch(2, 3, 8) + shift for shift in range(3))
    if case == "masked":
        model.arguments = {**NO_WEIGHTS, "attn_mask": model.mask}
    package = split(tmp_path, model, args, cut="attention")
    assert "class MultiheadAttention" not in source(package)
    assert expected in source(package)
    for training in (True, False):
        assert differences(package, model, args, train=training) == []


def test_dropout_of_attention_follows_the_mode(tmp_path: Path) -> None:
    model, args = Attending({"dropout": 0.25}, NO_WEIGHTS), (batch(2, 3, 8),) * 3
    package = split(tmp_path, model, args, cut="attention")
    assert "nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True)" in source(package)
    for training in (True, False):
        assert differences(package, model, args, train=training) == []


class Doubled(nn.Module):
    """A result that a hook changes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.attention.register_forward_hook(lambda module, args, result: (result[0] * 2, result[1]))
        self.after = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.attention(x, x, x, need_weights=False)[0])


def test_a_hook_on_attention_is_kept(tmp_path: Path) -> None:
    model, args = Doubled(), (batch(2, 3, 8),)
    package = split(tmp_path, model, args, cut="after")
    assert differences(package, model, args, train=True) == []


def test_a_causal_hint_may_leave_the_mask_unread(tmp_path: Path) -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    model = Attending({}, {**NO_WEIGHTS, "attn_mask": mask, "is_causal": True})
    args = (batch(2, 3, 8),) * 3
    package = split(tmp_path, model, args, cut="attention")
    assert "class MultiheadAttention" not in source(package)
    assert differences(package, model, args, train=True) == []


class Decoding(nn.Module):
    """A causal decoder: its masks are made in ``forward``, and attention does not read them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, 0.0, **settings)
        self.head = nn.Linear(8, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[int(self.transformer.batch_first)])
        embedded = self.embedding(source), self.embedding(target)
        return self.head(self.transformer(*embedded, tgt_mask=mask, tgt_is_causal=True))


@pytest.mark.parametrize(
    ("settings", "written", "length"),
    [
        (
            {"batch_first": True},
            "nn.TransformerDecoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)",
            1,
        ),
        ({"activation": "gelu", "norm_first": True}, 'activation="gelu", norm_first=True', 0),
    ],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("cut", ["transformer.decoder.layers.1", "transformer.encoder.layers.1"])
def test_layers_of_a_transformer_are_modules_of_torch(
    cut: str, settings: dict[str, Any], written: str, length: int, tmp_path: Path
) -> None:
    model = Decoding(**settings)
    args = torch.randint(20, (3, 5)), torch.randint(20, (3, 4) if length else (4, 5))
    package = split(tmp_path, model, args, cut=cut)
    text = " ".join(source(package).split())
    assert written in text
    assert "class TransformerDecoderLayer" not in text
    assert f"generate_square_subsequent_mask(tgt.shape[{length}]" in text
    for training in (True, False):
        assert differences(package, model, args, train=training) == []


def test_a_layer_whose_parts_were_changed_is_written_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), nn.Linear(8, 8))
    model[0].dropout2.p = 0.0
    package = split(tmp_path, model, (batch(2, 3, 8),), cut="1")
    assert "class TransformerEncoderLayer" in source(package)
    assert differences(package, model, (batch(2, 3, 8),), train=False) == []


class OwnActivation:
    """A callable without a hash."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Tensor) -> Tensor:
        return x.relu() * 2


def doubled(layer: nn.TransformerEncoderLayer) -> None:
    layer.linear1.register_forward_hook(lambda module, args, result: result * 2)


def own_activation(layer: nn.TransformerEncoderLayer) -> None:
    layer.activation = OwnActivation()


def frozen(layer: nn.TransformerEncoderLayer) -> None:
    layer.requires_grad_(False)


def evaluated(layer: nn.TransformerEncoderLayer) -> None:
    layer.dropout1.eval()


@pytest.mark.parametrize(
    ("change", "is_itself"), [(doubled, False), (own_activation, False), (frozen, True), (evaluated, True)]
)
def test_layers_that_were_changed(
    change: Callable[[nn.TransformerEncoderLayer], None], is_itself: bool, tmp_path: Path
) -> None:
    """A frozen layer has one operation in evaluation mode, unless it is traced."""
    model = nn.Sequential(
        *(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)), nn.Linear(8, 8)
    )
    change(model[0])
    package = split(tmp_path, model, (batch(2, 3, 8),), cut="1")
    assert ("class TransformerEncoderLayer" not in source(package)) == is_itself
    for training in (True, False):
        assert differences(package, model, (batch(2, 3, 8),), train=training) == []
    assert torch.backends.mha.get_fastpath_enabled()


class Pairs(nn.Module):
    """A module of two arguments, of which one is passed by name."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(8, 8, 4)
        self.cell = nn.GRUCell(4, 8)
        self.after = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.after(self.cell(self.pair(y.tanh(), x.tanh()), hx=x))


def test_a_module_of_torch_takes_several_arguments(tmp_path: Path) -> None:
    model, args = Pairs(), (batch(2, 8), batch(2, 8) + 1)
    package = split(tmp_path, model, args, cut="after")
    assert "self.cell(self.pair(y.tanh(), x.tanh()), hx=x)" in source(package)
    assert differences(package, model, args, train=True) == []


def test_a_cut_inside_attention_leaves_two_classes(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    package = split(tmp_path, model, (batch(2, 3, 8),), cut="layers.1.self_attn:end")
    assert source(package).count("nn.MultiheadAttention(8, 2, batch_first=True)") >= 1
    assert differences(package, model, (batch(2, 3, 8),), train=True) == []


@pytest.mark.slow
def test_evaluation_takes_the_same_kernels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    package = split(tmp_path, model, (batch(2, 3, 8),), cut="layers.2")
    assert forward_lines(package)[-1] == "return src"
    pipe = pipegraph.Pipeline(package, schedule="gpipe", microbatches=2, kernels="eager")
    for stage in pipe.stages.values():
        stage.eval()
    x = batch(4, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval(x), model.eval()(x))
