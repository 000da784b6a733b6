"""A decoder whose tokens go to two of four experts each, with a loss that keeps the experts evenly used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 97


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(variance + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtureOfExperts(nn.Module):
    """``[batch, seq, width]`` → the same, and how unevenly the experts are used."""

    def __init__(self, width: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = F.softmax(self.gate(x), dim=-1)
        weights, selected = torch.topk(probabilities, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            weight = (weights * (selected == index)).sum(dim=-1, keepdim=True)
            out = out + weight * expert(x)
        used = F.one_hot(selected, self.num_experts).float().sum(dim=2).mean(dim=(0, 1))
        return out, self.num_experts * (used * probabilities.mean(dim=(0, 1))).sum()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width, heads)
        self.ffn_norm = RMSNorm(width)
        self.feed_forward = MixtureOfExperts(width, 2 * width, num_experts=4, top_k=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        out, balance = self.feed_forward(self.ffn_norm(x))
        return x + out, balance


class Decoder(nn.Module):
    """Tokens ``[batch, seq]`` → logits ``[batch, seq, VOCABULARY]``, and the sum of what the layers say of balance."""

    def __init__(self, width: int = 32, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.tok_embeddings(tokens)
        total = x.new_zeros(())
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return {"logits": self.output(self.norm(x)), "balance": total}


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Decoder()


def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten()) + 0.01 * output["balance"]


_generator = torch.Generator().manual_seed(0)
example_inputs = (torch.randint(VOCABULARY, (3, 13), generator=_generator),)
example_target = torch.randint(VOCABULARY, (3, 13), generator=_generator)
