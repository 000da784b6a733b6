"""The example's Llama, with the weights of a model that has torchtitan's names and rotary pairs, computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.integrations import example_scripts

example = example_scripts.load("torchtitan_llama")

WIDTH, HEAD = example.CONFIG.hidden_size, example.CONFIG.hidden_size // example.HEADS
EPS = example.CONFIG.rms_norm_eps


def rotate(x: Tensor) -> Tensor:
    """Rotate pairs of adjacent numbers, as complex ones."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(x.shape[1]), frequencies)[:, None]
    rotated = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(rotated).flatten(-2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_linear = nn.Module()
        for name, heads in (("wq", example.HEADS), ("wk", example.KEY_HEADS), ("wv", example.KEY_HEADS)):
            self.qkv_linear.add_module(name, nn.Linear(WIDTH, heads * HEAD, bias=False))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        linear = self.qkv_linear
        query, key, value = (layer(x).unflatten(-1, (-1, HEAD)) for layer in (linear.wq, linear.wk, linear.wv))
        query, key, value = (tensor.transpose(1, 2) for tensor in (rotate(query), rotate(key), value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.wo(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = example.CONFIG.intermediate_size
        self.w1, self.w3 = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden, bias=False)
        self.w2 = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, EPS), nn.RMSNorm(WIDTH, EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(example.CONFIG.vocab_size, WIDTH)
        self.layers = nn.ModuleDict({str(layer): Block() for layer in range(2)})
        self.norm = nn.RMSNorm(WIDTH, EPS)
        self.add_module(head, nn.Linear(WIDTH, example.CONFIG.vocab_size, bias=False))
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.get_submodule(self.head)(self.norm(x))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("head", ["lm_head", "output"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_outputs_are_those_of_torchtitan_s_model(head: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Llama(head)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    pipe = example.pipeline(tmp_path / "checkpoint", tmp_path / "package")
    tokens = torch.randint(0, example.CONFIG.vocab_size, (4, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_close(pipe.eval(input_ids=tokens)["logits"], model(tokens), rtol=1e-4, atol=1e-5)
    printed = example_scripts.run("torchtitan_llama", 1, tmp_path / "checkpoint", tmp_path / "again")
    tokens = torch.arange(48).view(4, 12)
    expected = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert float(printed.split()[-1]) == pytest.approx(expected.item(), rel=1e-4)
