"""The blocks that the stages of Decoder (mixture_of_experts.py) share.

Attention, RMSNorm, Expert, MixtureOfExperts, Block: the text of mixture_of_experts.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention (mixture_of_experts.py:23), as in layers.0.attention.

    x f32[batch, tokens_1, 32] → f32[batch, tokens_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.head_dim = 8
        self.wq = nn.Linear(32, 32, bias=False)
        self.wk = nn.Linear(32, 32, bias=False)
        self.wv = nn.Linear(32, 32, bias=False)
        self.wo = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class RMSNorm(nn.Module):
    """RMSNorm (mixture_of_experts.py:12), as in layers.0.attention_norm.

    x f32[batch, tokens_1, 32] → f32[batch, tokens_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.eps = 1e-06
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(variance + self.eps)).to(x.dtype)


class Expert(nn.Module):
    """Expert (mixture_of_experts.py:42), as in layers.0.feed_forward.experts.0.

    x f32[batch, tokens_1, 32] → f32[batch, tokens_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(32, 64, bias=False)
        self.w2 = nn.Linear(64, 32, bias=False)
        self.w3 = nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtureOfExperts(nn.Module):
    """``[batch, seq, width]`` → the same, and how unevenly the experts are used.

    MixtureOfExperts (mixture_of_experts.py:53), as in layers.0.feed_forward.
    x f32[batch, tokens_1, 32] → f32[batch, tokens_1, 32], f32[].
    """

    def __init__(self):
        super().__init__()
        self.top_k = 2
        self.num_experts = 4
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(4)])

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
    """Block (mixture_of_experts.py:75), as in layers.0.

    x f32[batch, tokens_1, 32] → f32[batch, tokens_1, 32], f32[].
    """

    def __init__(self):
        super().__init__()
        self.attention_norm = RMSNorm()
        self.attention = Attention()
        self.ffn_norm = RMSNorm()
        self.feed_forward = MixtureOfExperts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        out, balance = self.feed_forward(self.ffn_norm(x))
        return x + out, balance
