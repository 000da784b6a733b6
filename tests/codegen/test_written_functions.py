"""Functions that no package can have as text are functions of the package all the same, written from the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from tests.codegen.parity import differences, source, split

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]


def padding(mask: Tensor) -> Rule:
    def is_there(rows: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        return mask[rows, keys]

    return is_there


def window(length: int) -> Rule:
    return lambda rows, queries, keys: (keys <= queries) & (queries - keys < length)


def create_mask(mask: Tensor, like: Tensor, length: int = 4) -> Tensor:
    """Rules that are functions inside of functions, as those of transformers."""
    if length > 1:
        import math

        length = math.ceil(length)
    rows = torch.arange(mask.shape[0], device=mask.device)[:, None, None]
    places = torch.arange(mask.shape[1], device=mask.device)
    queries, keys = places[None, :, None], places[None, None, :]
    allowed = torch.ones((), dtype=torch.bool, device=mask.device)
    for rule in (padding(mask), window(length)):
        allowed = allowed & rule(rows, queries, keys)
    return torch.zeros((), dtype=like.dtype, device=like.device).masked_fill(~allowed, -1e4)


def scored(layers: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """Reads parameters."""
    import math

    assert math.e > 2
    for layer in layers:
        x = layer(x).exp().sum(-1, keepdim=True).log() + x - 1
    return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out((q @ k.transpose(1, 2) + mask).softmax(-1) @ v)


class Masked(nn.Module):
    def __init__(self, has_scores: bool = False) -> None:
        super().__init__()
        self.has_scores = has_scores
        self.embed, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.first, self.second = Layer(), Layer()

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(tokens)
        attention_mask = create_mask(mask.bool(), x)
        x = self.first(x, attention_mask)
        x = self.second(x, attention_mask)
        if self.has_scores:
            x = scored([lambda x: x @ self.embed.weight.T], x)
        return self.norm(x)


def batch(rows: int = 3, length: int = 6) -> tuple[Tensor, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, :2] = 0
    return torch.randint(10, (rows, length)), mask


def test_a_mask_is_one_function_that_all_stages_call(tmp_path: Path) -> None:
    model = Masked()
    package = split(tmp_path, model, batch(), cut="second")
    text = source(package)
    assert text.count("def create_mask(") == 1
    assert text.count("attention_mask = create_mask(") >= 1
    assert '"""What create_mask of test_written_functions.py computes in this model."""' in text
    assert not differences(package, model, batch())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_padded_batch_of_another_size_trains_as_the_model(schedule: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Masked()
    package = split(tmp_path, model, batch(), cut="second")
    tokens, mask = batch(10, 9)
    mask[7, :5] = 0
    target = torch.randn(10, 9, 8)
    pipe = pipegraph.Pipeline(package, schedule, 3, F.mse_loss, kernels="eager")
    loss = F.mse_loss(model(tokens, mask), target)
    torch.testing.assert_close(pipe.step(tokens, mask, target=target).loss, loss.detach())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close({name: parameter.grad for name, parameter in pipe.named_parameters()}, gradients)


def test_another_dtype_has_the_same_function(tmp_path: Path) -> None:
    texts = []
    for dtype in (torch.float32, torch.bfloat16):
        package = split(tmp_path / str(dtype), Masked().to(dtype), batch(), cut="second")
        text = source(package)
        texts.append(text[text.index("def create_mask(") : text.index("class Layer")])
    assert texts[0] == texts[1]


def test_what_computes_with_parameters_stays_where_it_is(tmp_path: Path) -> None:
    model = Masked(has_scores=True)
    package = split(tmp_path, model, batch(), cut="second")
    assert "def scored(" not in "".join(path.read_text() for path in package.path.glob("[sb]*.py"))
    assert not differences(package, model, batch())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + (mask / mask.sum(-1, keepdim=True)) @ self.inner(x)


class Near(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size, self.first, self.second = 3, Attention(), Attention()

    @staticmethod
    def closeness(x: Tensor, size: int) -> Tensor:
        # how far two places are apart
        places = torch.arange(x.shape[1], device=x.device)
        return size / (size + (places[:, None] - places[None]).abs().to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.closeness(x, self.size)
        x = self.first(x, mask)
        return self.second(x, mask)


def test_parts_of_a_model_share_its_static_methods(tmp_path: Path) -> None:
    model, x = Near(), torch.randn(3, 6, 8)
    package = split(tmp_path, model, (x,), cut="second")
    text = source(package)
    assert text.count("mask = closeness(x, self.size)") == 2, text
    assert text.count("def closeness(x: Tensor, size: int) -> Tensor:\n    # how far two places are apart") == 1
    assert not differences(package, model, (x,))
