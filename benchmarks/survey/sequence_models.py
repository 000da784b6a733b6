"""Small models of text, sound and tables, each written as a well-known repository of its kind writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.survey.survey_case import TOKENS, Inputs, Size, SurveyCase, token_numbers


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 96
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.1
    bias: bool = False


class CausalSelfAttention(nn.Module):
    """Attention whose query, key and value come from one projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPTBlock(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """GPT-2 with a tied head, which returns a loss as well."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)]),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _b, t = idx.size()
        assert t <= self.config.block_size, f"{t} tokens, and the block size is only {self.config.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def complex_positions(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    """Rotations of each position as complex numbers, [end, dim / 2]."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    freqs = torch.outer(torch.arange(end), freqs).float()
    return torch.polar(torch.ones_like(freqs), freqs)


def rotate_complex(x: Tensor, freqs: Tensor) -> Tensor:
    """Turn [batch, length, heads, dim] by its positions."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


class RootMeanSquare(nn.Module):
    """A norm that computes in float32, whatever it is given."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class ComplexRotaryLayer(nn.Module):
    """Grouped attention with keys turned as complex numbers, and a gated MLP."""

    def __init__(self, dim: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = heads, key_heads, dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, key_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, key_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)
        self.attention_norm, self.ffn_norm = RootMeanSquare(dim), RootMeanSquare(dim)

    def attend(self, x: Tensor, freqs: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        q = rotate_complex(self.wq(x).view(batch, length, self.heads, self.head_dim), freqs).transpose(1, 2)
        k = rotate_complex(self.wk(x).view(batch, length, self.key_heads, self.head_dim), freqs).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.key_heads, self.head_dim).transpose(1, 2)
        k, v = (tensor.repeat_interleave(self.heads // self.key_heads, dim=1) for tensor in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(q)
        return self.wo(torch.matmul(scores, v).transpose(1, 2).contiguous().view(batch, length, -1))

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attend(self.attention_norm(x), freqs, mask)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class ComplexRotaryLM(nn.Module):
    """A language model with complex rotary positions, and a mask made from the length of the input."""

    def __init__(self, vocabulary: int = 96, dim: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(ComplexRotaryLayer(dim, heads=4, key_heads=2) for _ in range(depth))
        self.norm = RootMeanSquare(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)
        self.freqs = complex_positions(dim // 4, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        _batch, length = tokens.shape
        h = self.tok_embeddings(tokens)
        freqs = self.freqs.to(h.device)[:length]
        mask = None
        if length > 1:
            mask = torch.full((length, length), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1).type_as(h)
        for layer in self.layers:
            h = layer(h, freqs, mask)
        return self.output(self.norm(h)).float()


class Retention(nn.Module):
    """Attention without a softmax: what lies back decays, at another rate in each head."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.gate, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm = nn.GroupNorm(heads, dim)
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-5 - torch.arange(heads).float())), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        index = torch.arange(n, device=x.device).to(self.decay)
        distance = (index[:, None] - index[None, :]).clamp(min=0)
        decay = torch.exp(self.decay[:, None, None] * distance).tril()
        scores = q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5 * decay
        scores = scores / scores.detach().abs().sum(dim=-1, keepdim=True).clamp(min=1)
        mixed = (scores @ v).transpose(1, 2).reshape(b * n, d)
        return self.out(F.silu(self.gate(x)) * self.norm(mixed).view(b, n, d))


class RetentionLM(nn.Module):
    """Layers of retention, its form for training."""

    def __init__(self, vocabulary: int = 96, dim: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.retentions = nn.ModuleList(Retention(dim, 4) for _ in range(depth))
        self.ffns = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i, (retention, ffn) in enumerate(zip(self.retentions, self.ffns, strict=True)):
            x = x + retention(self.norms[2 * i](x))
            x = x + ffn(self.norms[2 * i + 1](x))
        return self.head(x)


class LinearRecurrence(nn.Module):
    """A state that decays and gathers keys and values, stepped over time in a loop."""

    def __init__(self, vocabulary: int = 96, dim: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.projections = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(depth))
        self.decays = nn.ParameterList(nn.Parameter(torch.rand(dim)) for _ in range(depth))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for projection, decay in zip(self.projections, self.decays, strict=True):
            q, k, v = projection(x).chunk(3, dim=-1)
            state = x.new_zeros(x.size(0), x.size(2), x.size(2))
            outputs = []
            for t in range(x.size(1)):
                state = decay.sigmoid()[:, None] * state + k[:, t, :, None] * v[:, t, None, :]
                outputs.append(torch.einsum("bd,bde->be", q[:, t], state))
            x = x + torch.stack(outputs, dim=1)
        return self.head(x)


class GatedConvolution(nn.Module):
    """A dilated convolution that looks back alone, gated, with a way out and a way on."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.filter_gate = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(channels, 2 * channels, kernel_size=2, dilation=dilation)
        )
        self.residual, self.skip = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        signal, gate = self.filter_gate(F.pad(x, (self.dilation, 0))).chunk(2, dim=1)
        z = torch.tanh(signal) * torch.sigmoid(gate)
        return (x + self.residual(z)) * math.sqrt(0.5), self.skip(z)


class WaveNet(nn.Module):
    """Stacks of such convolutions, whose dilations double, and the sum of their ways out."""

    def __init__(self, levels: int = 64, channels: int = 16, layers: int = 3, stacks: int = 2) -> None:
        super().__init__()
        self.levels = levels
        self.start = nn.Conv1d(levels, channels, 1)
        self.blocks = nn.ModuleList(GatedConvolution(channels, 2**i) for _ in range(stacks) for i in range(layers))
        self.end = nn.Sequential(nn.ReLU(), nn.Conv1d(channels, channels, 1), nn.ReLU(), nn.Conv1d(channels, levels, 1))

    def forward(self, samples: Tensor) -> Tensor:
        x = self.start(F.one_hot(samples, self.levels).transpose(1, 2).to(self.start.weight.dtype))
        skips: Tensor | int = 0
        for block in self.blocks:
            x, skip = block(x)
            skips = skip + skips
        return self.end(skips)


class Tagger(nn.Module):
    """A word's tag from both directions of an LSTM, with the length before the batch."""

    def __init__(self, vocabulary: int = 96, dim: int = 16, tags: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, dim, num_layers=2, bidirectional=True, dropout=0.2)
        self.attention = nn.MultiheadAttention(2 * dim, 4)
        self.out = nn.Linear(2 * dim, tags)

    def forward(self, words: Tensor) -> Tensor:
        x, _ = self.lstm(self.embed(words.t()))
        mixed, _ = self.attention(x, x, x, key_padding_mask=words.eq(0), need_weights=False)
        return F.log_softmax(self.out(x + mixed), dim=-1).transpose(0, 1)


class ClickModel(nn.Module):
    """Numbers through an MLP, categories through tables, and the products of every two of them."""

    def __init__(self, tables: tuple[int, ...] = (11, 7, 23, 5), dim: int = 8, dense: int = 6) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(size, dim, mode="sum") for size in tables)
        self.bot_l = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, dim), nn.ReLU())
        pairs = (len(tables) + 1) * len(tables) // 2
        self.top_l = nn.Sequential(nn.Linear(dim + pairs, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def interact(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        batch_size, d = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense_x: Tensor, sparse_x: list[Tensor]) -> Tensor:
        x = self.bot_l(dense_x)
        ly = [table(indices) for table, indices in zip(self.emb_l, sparse_x, strict=True)]
        return self.top_l(self.interact(x, ly)).clamp(1e-6, 1 - 1e-6)


def _clicks(batch: int, size: Size) -> Inputs:
    return (torch.randn(batch, 6), [torch.randint(5, (batch, *size)) for _ in range(4)]), {}


def _with_targets(batch: int, size: Size) -> Inputs:
    return (torch.randint(96, (batch, *size)), torch.randint(96, (batch, *size))), {}


_ORIGIN = "written here"

SEQUENCE_CASES = (
    SurveyCase("nanoGPT", _ORIGIN, lambda: NanoGPT(GPTConfig()), _with_targets, TOKENS),
    SurveyCase("nanoGPT, generating", _ORIGIN, lambda: NanoGPT(GPTConfig()), token_numbers(96), TOKENS),
    SurveyCase("Llama, complex rotary", _ORIGIN, ComplexRotaryLM, token_numbers(96), TOKENS),
    SurveyCase("RetNet", _ORIGIN, RetentionLM, token_numbers(96), TOKENS),
    SurveyCase("linear recurrence", _ORIGIN, LinearRecurrence, token_numbers(96), TOKENS),
    SurveyCase("WaveNet", _ORIGIN, WaveNet, token_numbers(64), TOKENS),
    SurveyCase("LSTM tagger", _ORIGIN, Tagger, token_numbers(96), TOKENS),
    SurveyCase("DLRM", _ORIGIN, ClickModel, _clicks, TOKENS),
)
"""Text, sound and tables."""
