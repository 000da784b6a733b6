"""Changes of shape name no more sizes than they must, and give the shape that was captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipegraph.codegen.expressions.operator_spellings import (
    expand_sizes,
    flatten_dims,
    reshape_sizes,
    shortest_reshape,
    squeezed_first,
)
from tests.codegen.layers import Row, batch
from tests.codegen.parity import differences, split

pytestmark = pytest.mark.usefixtures("from_graph")

shapes = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
    """A shape, a second shape of the same number of elements, and the second as source has it, perhaps with −1."""
    source = draw(st.lists(st.sampled_from([0, 1, 1, 2, 2, 3, 4, 6]), max_size=4).map(tuple))
    factors = [prime for size in source for prime in {0: [0], 4: [2, 2], 6: [2, 3]}.get(size, [size])]
    factors = draw(st.permutations(factors)) if draw(st.booleans()) else factors
    target = [1] * draw(st.integers(0 if torch.Size(source).numel() == 1 else 1, 5))
    for factor, place in zip(factors, sorted(draw(st.lists(st.integers(0, 9), min_size=8, max_size=8))), strict=False):
        if target:
            target[place * len(target) // 10] *= factor
    sizes = list(target)
    if target and draw(st.booleans()):
        place = draw(st.integers(0, len(target) - 1))
        if torch.Size(target[:place] + target[place + 1 :]).numel():
            sizes[place] = -1
    return source, tuple(target), sizes


@given(reshapes())
def test_words_give_what_a_reshape_gives(case: tuple[tuple[int, ...], tuple[int, ...], list[int]]) -> None:
    source, target, sizes = case
    x = torch.arange(torch.Size(source).numel()).reshape(source)
    words = shortest_reshape(source, target, sizes) or ("reshape", [tuple(reshape_sizes(source, target, sizes))])
    method, arguments = words
    actual = getattr(x, method)(*arguments)
    assert actual.shape == target
    assert torch.equal(actual, x.reshape(target))


@given(reshapes())
def test_two_methods_give_what_a_reshape_gives(case: tuple[tuple[int, ...], tuple[int, ...], list[int]]) -> None:
    source, target, sizes = case
    x = torch.arange(torch.Size(source).numel()).reshape(source)
    if (methods := squeezed_first(source, target, sizes)) is not None:
        dims, (method, arguments) = methods
        assert torch.equal(getattr(x.squeeze(*dims), method)(*arguments), x.reshape(target))


@given(reshapes(), st.integers(2, 3))
def test_a_batch_that_stays_may_have_another_size(
    case: tuple[tuple[int, ...], tuple[int, ...], list[int]], factor: int
) -> None:
    source, target, sizes = case
    words = shortest_reshape((2, *source), (2, *target), [2, *sizes])
    x = torch.zeros(2 * factor, *source)
    if words is not None and source and (-1 not in sizes or target[sizes.index(-1)] != 1):
        assert getattr(x, words[0])(*words[1]).shape == (2 * factor, *target)


@given(shapes.filter(len), st.data())
def test_dimensions_that_are_merged(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(shape) - 1))
    end = data.draw(st.integers(start, len(shape) - 1))
    x = torch.zeros(shape)
    for last in (end, end - len(shape)):
        assert x.flatten(*flatten_dims(start, last, shape)).shape == x.flatten(start, end).shape


@given(shapes, shapes, st.data())
def test_sizes_that_an_expand_leaves(new: tuple[int, ...], old: tuple[int, ...], data: st.DataObject) -> None:
    source = tuple(1 if data.draw(st.booleans()) else size for size in old)
    assert torch.zeros(source).expand(expand_sizes(source, new + old)).shape == new + old


@pytest.mark.parametrize(
    ("before", "after", "given", "text"),
    [
        ((2, 12, 32), (2, 12, 4, 8), (2, 12, -1, 8), "unflatten(-1, (-1, 8))"),
        ((2, 12, 32), (2, 12, 4, 8), (2, -1, 4, 8), "unflatten(-1, (-1, 8))"),
        ((2, 12, 32), (2, 12, 4, 8), (2, 12, 4, -1), "unflatten(-1, (4, -1))"),
        ((2, 12, 96), (2, 12, 4, 3, 8), (2, 12, 4, 3, 8), "unflatten(-1, (-1, 3, 8))"),
        ((24, 32), (2, 12, 32), (2, 12, 32), "unflatten(0, (-1, 12))"),
        ((2, 12, 4, 8), (2, 12, 32), (2, 12, -1), "flatten(2)"),
        ((2, 12, 32), (24, 32), (-1, 32), "flatten(0, 1)"),
        ((2, 12, 32), (768,), (-1,), "flatten()"),
        ((2, 12), (2, 1, 12), (2, 1, 12), "unsqueeze(1)"),
        ((2, 12, 1), (2, 12), (2, 12), "squeeze(-1)"),
        # one sequence, and one head of keys: sizes that happen to be 1
        ((1, 12, 32), (12, 32), (-1, 32), "flatten(0, 1)"),
        ((12, 32), (1, 12, 32), (1, 12, 32), "unflatten(0, (-1, 12))"),
        ((12, 32), (1, 12, 32), (1, -1, 32), "unsqueeze(0)"),
        ((12, 32), (1, 12, 4, 8), (1, 12, 4, 8), "reshape(-1, 12, 4, 8)"),
        ((1, 12, 8), (1, 12, 1, 8), (1, 12, -1, 8), "unflatten(-1, (-1, 8))"),
        ((2, 2), (2, 1, 2), (2, 1, 2), "unsqueeze(1)"),
        # two changes at once
        ((4,), (1, 4, 1, 1), (1, -1, 1, 1), "reshape(1, -1, 1, 1)"),
        ((24, 32), (2, 12, 4, 8), (2, 12, 4, 8), "reshape(-1, 12, 4, 8)"),
        ((2, 6, 4), (2, 4, 6), (2, -1, 6), "reshape(-1, 4, 6)"),
        ((8, 3), (6, 4), (6, -1), "reshape(6, -1)"),
        # nothing in it
        ((0, 4), (0, 2, 2), (0, 2, 2), "unflatten(-1, (-1, 2))"),
        ((2, 0), (0, 5), (0, 5), "reshape(-1, 5)"),
        ((0,), (3, 0), (3, 0), "unflatten(-1, (3, 0))"),
    ],
)
def test_words(before: tuple[int, ...], after: tuple[int, ...], given: tuple[int, ...], text: str) -> None:
    method, arguments = shortest_reshape(before, after, given) or ("reshape", reshape_sizes(before, after, given))
    assert f"{method}({', '.join(map(str, arguments))})" == text


def test_a_size_of_one_is_taken_away_before_a_division() -> None:
    """A number of heads is left open, as in the source, and not the batch in its place."""
    assert squeezed_first((2, 1, 12, 64), (2, 12, 4, 16), (2, 12, -1, 16)) == ([1], ("unflatten", [-1, (-1, 16)]))
    assert squeezed_first((2, 3, 12, 64), (2, 36, 4, 16), (2, 36, -1, 16)) is None


class LatentAttention(nn.Module):
    """Keys of which a part is made for each head, and a part is the same for all (DeepSeek-V2)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.latent, self.key = nn.Linear(8, 24), nn.Linear(8, 6), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.query(x).view(b, t, -1, 6).transpose(1, 2)
        latent, shared = self.latent(x).split([4, 2], dim=-1)
        latent, shared = latent.view(b, 1, t, 4), shared.view(b, 1, t, 2)
        k = self.key(latent).view(b, t, -1, 4).transpose(1, 2)
        key = k.new_empty(*k.shape[:-1], 6)
        key[..., :4].copy_(k)
        key[..., 4:].copy_(shared.expand(-1, k.shape[1], -1, -1))
        return x + F.scaled_dot_product_attention(q, key, k[..., :2]).transpose(1, 2).reshape(b, t, -1)


def test_latent_attention_names_no_number_of_heads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Row([LatentAttention(), LatentAttention()])
    package = split(tmp_path, model, (batch(2, 5, 8),), cut="layers.1")
    assert differences(package, model, (batch(2, 5, 8),)) == []
    text = "".join(path.read_text() for path in package.path.glob("*.py"))
    assert "self.key(latent).squeeze(1).unflatten(-1, (-1, 4))" in text
    assert "k.new_empty(*k.shape[:-1], 6)" in text
    assert "expand" not in text
    stages = [package.load_stage(0), package.load_stage(1)]
    x = batch(3, 7, 8)
    torch.testing.assert_close(stages[1](stages[0](x)), model(x))


class Attention(nn.Module):
    """Attention of grouped heads under a mask, as models of language write it, on a batch and a length it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        mask = torch.ones(t, t, dtype=torch.bool).tril(1)[None, None].expand(b, 1, t, t)
        q = self.query(x).view(b, t, 4, 2).transpose(1, 2)
        k = self.key(x.reshape(b * t, 8)).view(b, t, 2, 2).transpose(1, 2)
        k = k[:, :, None].expand(b, 2, 2, t, 2).reshape(b, 4, t, 2)
        y = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
        return x + y.transpose(1, 2).contiguous().view(b, t, 8)


@pytest.mark.parametrize("size", [1, 2])
def test_a_class_runs_on_a_batch_of_another_size(size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Row([Attention(), Attention()])
    package = split(tmp_path, model, (batch(size, 5, 8),), cut="layers.1")
    assert differences(package, model, (batch(size, 5, 8),)) == []
    stages = [package.load_stage(0), package.load_stage(1)]
    x = batch(3, 5, 8)
    torch.testing.assert_close(stages[1](stages[0](x)), model(x))
