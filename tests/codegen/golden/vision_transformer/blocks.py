"""The blocks that the stages of VisionTransformer (vision_transformer.py) share.

PatchEmbedding, DropPath, Attention, Mlp, Block, BlockStart: the text of vision_transformer.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    """Images ``[batch, 3, 12, 12]`` → a class token and one for each patch, ``[batch, 1 + patches, width]``.

    PatchEmbedding (vision_transformer.py:12), as in patch_embed.
    images f32[batch, 3, images_2, images_3] → f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32].
    """

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 32))
        self.pos_embed = nn.Parameter(torch.empty(1, 10, 32))
        self.proj = nn.Conv2d(3, 32, 4, stride=4)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.proj(images).flatten(2).transpose(1, 2)
        cls_token = self.cls_token.expand(images.shape[0], -1, -1)
        return torch.cat([cls_token, patches], dim=1) + self.pos_embed


class DropPath(nn.Module):
    """Zero for some rows in training, and what comes in otherwise.

    DropPath (vision_transformer.py:28), as in blocks.0.drop_path.
    """

    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        mask = x.new_empty(x.shape[0], 1, 1).bernoulli_(keep_prob)
        return x * mask / keep_prob


class Attention(nn.Module):
    """Attention (vision_transformer.py:43), as in blocks.0.attn.

    x f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32] → f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32].
    """

    def __init__(self):
        super().__init__()
        self.scale = (32 // 4) ** -0.5
        self.num_heads = 4
        self.qkv = nn.Linear(32, 96)
        self.proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(batch, tokens, -1)
        return self.proj(x)


class Mlp(nn.Module):
    """Mlp (vision_transformer.py:61), as in blocks.0.mlp.

    x f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32] → f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32].
    """

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(32, 128)
        self.fc2 = nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Block (vision_transformer.py:71), as in blocks.0.

    x f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32] → f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32].
    """

    def __init__(self, drop_prob):
        super().__init__()
        self.norm1 = nn.LayerNorm(32)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(32)
        self.mlp = Mlp()
        self.drop_path = DropPath(drop_prob=drop_prob)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class BlockStart(nn.Module):
    """Block (vision_transformer.py:71), a part of it, as in blocks.3.

    x f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32] → f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32],
    f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32].
    """

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(32)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(32)
        self.drop_path = DropPath(drop_prob=0.15000000000000002)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x, self.norm2(x)


class BlockEnd(nn.Module):
    """Block (vision_transformer.py:71), a part of it, as in blocks.3.

    layer_norm f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32], x f32[batch, images_2 // 4 * (images_3 // 4)
    + 1, 32] → f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32].
    """

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        self.drop_path = DropPath(drop_prob=0.15000000000000002)

    def forward(self, layer_norm: Tensor, x: Tensor) -> Tensor:
        return x + self.drop_path(self.mlp(layer_norm))
