"""The rows of values, operator by operator: each model here is captured, and its outputs have rows or mix them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.graph.captured import Captured


class Function(nn.Module):
    """A layer with parameters, followed by a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.layer(x)
        return self.function(h) if y is None else self.function(h, y)


def captured(function: Callable[..., Tensor], *inputs: Tensor, **options: object) -> Captured:
    return pipegraph.capture(Function(function), inputs or (torch.randn(3, 4, 6),), **options)


INDEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "merged and divided again": lambda h: h.reshape(-1, 6).tanh().view(h.shape[0], -1, 6),
    "heads": lambda h: h.view(h.shape[0], -1, 2, 3).transpose(1, 2).reshape(-1, h.shape[1], 3).softmax(-1),
    "mean over tokens": lambda h: h.mean(1),
    "normalized over features": lambda h: F.layer_norm(h, (6,)),
    "product of tokens": lambda h: h @ h.transpose(1, 2),
    "einsum": lambda h: torch.einsum("bsd,btd->bst", h, h),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h, is_causal=True),
    "halves of features": lambda h: torch.cat(h.chunk(2, dim=-1)[::-1], dim=-1),
    "both halves of a doubled batch": lambda h: sum(torch.cat([h, h * 2]).chunk(2)),
    "sorted tokens": lambda h: h.sort(dim=1).values,
    "last token": lambda h: h[torch.arange(h.shape[0]), h.argmax(1)[:, 0]],
    "own positions": lambda h: h + torch.arange(h.shape[1])[None, :, None],
    "a class token": lambda h: torch.cat([torch.zeros(h.shape[0], 1, 6), h], dim=1),
    "padded": lambda h: F.pad(h, (0, 0, 1, 2)),
    "convolution": lambda h: F.conv1d(h.transpose(1, 2), torch.ones(2, 6, 3), padding=1),
    "pooled": lambda h: F.max_pool1d(h, 2),
    "repeated": lambda h: h.repeat_interleave(2, dim=0).view(h.shape[0], 2, -1).sum(1),
    "gathered features": lambda h: h.gather(2, h.argsort(2)),
    "masked": lambda h: h.masked_fill(h > h.amax(1, keepdim=True) - 0.1, 0.0),
    "cumulative over tokens": lambda h: h.cumsum(1),
    "scattered": lambda h: torch.zeros_like(h).scatter(1, h.argsort(1), h),
}

MIXED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mean of the batch": (lambda h: h - h.mean(0), "mean"),
    "softmax over rows": (lambda h: h.softmax(0), "softmax"),
    "rows against rows": (lambda h: h.flatten(1) @ h.flatten(1).t(), "matmul"),
    "pairs of rows": (lambda h: (h[:, None] - h[None]).flatten(1), "sub"),
    "the first row": (lambda h: h - h[:1], "slice"),
    "shifted rows": (lambda h: h + h.roll(1, 0), "roll"),
    "reversed rows": (lambda h: h + h.flip(0), "flip"),
    "cumulative over rows": (lambda h: h.cumsum(0), "cumsum"),
    "cumulative over all tokens": (lambda h: h.reshape(-1, 6).cumsum(0).view(h.shape), "cumsum"),
    "divided by the number of rows": (lambda h: h / h.shape[0], "div"),
    "attention over rows": (
        lambda h: F.scaled_dot_product_attention(*(h.transpose(0, 1),) * 3).transpose(0, 1),
        "scaled_dot_product_attention",
    ),
    "normalized over rows": (lambda h: F.layer_norm(h.permute(1, 2, 0), (h.shape[0],)), "layer_norm"),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_rows_are_independent(name: str) -> None:
    batch = captured(INDEPENDENT[name]).batch
    assert (batch.proof, batch.mixing) == ("rules", ())


@pytest.mark.parametrize("name", MIXED)
def test_an_operator_that_mixes_rows_is_named_with_its_line(name: str) -> None:
    function, operator = MIXED[name]
    (mixing,) = captured(function).batch.mixing
    assert mixing.operator == operator
    assert mixing.line.startswith("test_row_rules.py:")


def test_rows_keep_their_place_through_merged_dimensions() -> None:
    capture = captured(lambda h: h.transpose(0, 1).reshape(h.shape[1], -1))
    assert [capture.batch.dims[node] for node in capture.returned] == [1]


def test_an_output_that_follows_from_no_row_has_no_dimension() -> None:
    class Temperature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.scale, self.scale

    capture = pipegraph.capture(Temperature(), (torch.randn(2, 3),))
    assert [capture.batch.dims[node] for node in capture.returned] == [0, None]


def test_a_loss_over_rows_is_computed_for_each_microbatch() -> None:
    capture = captured(lambda h: h.square().mean())
    assert capture.batch.mixing == ()
    assert [(mixing.operator, mixing.result) for mixing in capture.batch.per_microbatch] == [("mean", "number")]


def test_a_contrastive_loss_of_the_model_mixes_rows() -> None:
    def loss(h: Tensor) -> Tensor:
        rows = F.normalize(h.flatten(1), dim=1)
        return F.cross_entropy(rows @ rows.t(), torch.arange(rows.shape[0]))

    assert [mixing.operator for mixing in captured(loss).batch.mixing] == ["matmul"]


def test_batch_norm_mixes_rows_by_design() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    batch = pipegraph.capture(model, (torch.randn(3, 6),)).batch
    assert batch.mixing == ()
    assert [mixing.operator for mixing in batch.per_microbatch][:2] == ["batch norm", "random numbers"]


def test_what_one_mode_mixes_is_found() -> None:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            if not self.training:
                h = h - h.mean(0)
            return h

    assert [mixing.operator for mixing in pipegraph.capture(Centered(), (torch.randn(3, 6),)).batch.mixing] == ["mean"]


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrent_layer_has_its_rows_along_one_dimension(batch_first: bool) -> None:
    model = nn.GRU(6, 4, batch_first=batch_first)
    batch = pipegraph.capture(model, (torch.randn(3, 5, 6),), batch_dims={"input": 0 if batch_first else 1}).batch
    assert batch.mixing == ()
    other_batch = pipegraph.capture(model, (torch.randn(3, 5, 6),), batch_dims={"input": 1 if batch_first else 0}).batch
    assert [mixing.operator for mixing in other_batch.mixing] == ["gru"]


def test_the_dimension_with_which_nothing_mixes_rows_is_suggested() -> None:
    batch = pipegraph.capture(nn.GRU(6, 4), (torch.randn(3, 5, 6),)).batch
    assert batch.mixing
    assert batch.suggestion == "input=1"


def test_experts_leave_rows_independent() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    batch = pipegraph.capture(model, kwargs={"input_ids": torch.randint(32, (3, 5))}).batch
    assert (batch.proof, batch.mixing) == ("rules", ())


@torch.library.custom_op("pipegraph_tests::reversed_features", mutates_args=())
def reversed_features(x: Tensor) -> Tensor:
    return x.flip(-1)


@reversed_features.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pipegraph_tests::reversed_rows", mutates_args=())
def reversed_rows(x: Tensor) -> Tensor:
    return x.flip(0)


@reversed_rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_values_decide_where_no_rule_does() -> None:
    batch = captured(lambda h: reversed_features(h)).batch
    assert (batch.proof, batch.mixing) == ("values", ())
    batch = captured(lambda h: reversed_rows(h)).batch
    assert batch.proof == "values"
    assert [mixing.operator for mixing in batch.mixing] == ["reversed_rows"]


def test_a_mode_with_random_outputs_decides_nothing() -> None:
    """Only evaluation mode shows that rows are independent, or are not."""

    class Noisy(nn.Module):
        def __init__(self, reverse: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.layer, self.reverse = nn.Linear(6, 6), reverse

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return self.reverse(h + torch.randn_like(h) if self.training else h)

    x = torch.randn(3, 6)
    assert pipegraph.capture(Noisy(reversed_features), (x,)).batch.mixing == ()
    assert pipegraph.capture(Noisy(reversed_rows), (x,)).batch.mixing


def test_without_values_an_operator_without_a_rule_needs_a_declaration() -> None:
    inputs = (torch.empty(3, 4, 6, device="meta"),)
    batch = captured(lambda h: reversed_features(h), *inputs).batch
    assert batch.proof == ""
    assert batch.mixing[0].operator.startswith("reversed_features")
    batch = captured(lambda h: reversed_features(h), *inputs, batch_dims={"x": 0}).batch
    assert (batch.proof, batch.mixing) == ("declared", ())
