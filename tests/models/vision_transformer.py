"""A vision transformer whose layers are skipped for some images in training, the later the more often."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 7


class PatchEmbedding(nn.Module):
    """Images ``[batch, 3, 12, 12]`` → a class token and one for each patch, ``[batch, 1 + patches, width]``."""

    def __init__(self, width: int, image: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (image // patch) ** 2, width))
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.proj(images).flatten(2).transpose(1, 2)
        cls_token = self.cls_token.expand(images.shape[0], -1, -1)
        return torch.cat([cls_token, patches], dim=1) + self.pos_embed


class DropPath(nn.Module):
    """Zero for some rows in training, and what comes in otherwise."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        mask = x.new_empty(x.shape[0], 1, 1).bernoulli_(keep_prob)
        return x * mask / keep_prob


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (width // num_heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(batch, tokens, width)
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, drop_prob: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.drop_path = DropPath(drop_prob)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """Images ``[batch, 3, 12, 12]`` → logits ``[batch, CLASSES]``."""

    def __init__(self, width: int = 32, depth: int = 5, num_heads: int = 4, drop_prob: float = 0.2) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding(width, image=12, patch=4)
        self.blocks = nn.ModuleList(Block(width, num_heads, drop_prob * index / (depth - 1)) for index in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


_generator = torch.Generator().manual_seed(0)
example_inputs = (torch.randn(3, 3, 12, 12, generator=_generator),)
example_target = torch.randint(CLASSES, (3,), generator=_generator)
