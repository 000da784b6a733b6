"""The blocks that the stages of Transformer (transformer.py) share."""

import torch
import torch.nn.functional as F
from torch import nn


class MultiheadAttention(nn.Module):
    """MultiheadAttention, as in layers.0.self_attn.  query f32[8, 128, 512] → f32[8, 128, 512]."""

    def __init__(self):
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(1536, 512))
        self.in_proj_bias = nn.Parameter(torch.empty(1536))
        self.out_proj = nn.Linear(512, 512)

    def forward(self, query):
        value = query.transpose(1, 0)
        linear = F.linear(value, self.in_proj_weight, self.in_proj_bias).unflatten(-1, [3, 512]).unsqueeze(0)
        linear = linear.transpose(0, -2).squeeze(-2).contiguous()
        linear_1 = linear[0].view(128, 64, 64).transpose(0, 1).view(8, 8, 128, 64)
        linear_2 = linear[1].view(128, 64, 64).transpose(0, 1).view(8, 8, 128, 64)
        linear = linear[2].view(128, 64, 64).transpose(0, 1).view(8, 8, 128, 64)
        attention = F.scaled_dot_product_attention(linear_1, linear_2, linear).permute(2, 0, 1, 3)
        linear = F.linear(attention.reshape(1024, 512), self.out_proj.weight, self.out_proj.bias)
        return linear.view(128, 8, 512).transpose(1, 0)


class MultiheadAttention2(nn.Module):
    """MultiheadAttention, as in layers.0.multihead_attn.

    query f32[8, 128, 512], h f32[8, 128, 512] → f32[8, 128, 512].
    """

    def __init__(self):
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(1536, 512))
        self.in_proj_bias = nn.Parameter(torch.empty(1536))
        self.out_proj = nn.Linear(512, 512)

    def forward(self, query, h):
        query = query.transpose(1, 0)
        key = h.transpose(1, 0)
        split_with_sizes, split_with_sizes_1 = self.in_proj_weight.split_with_sizes([512, 1024])
        split_with_sizes_2, split_with_sizes_3 = self.in_proj_bias.split_with_sizes([512, 1024])
        linear = F.linear(key, split_with_sizes_1, split_with_sizes_3).unflatten(-1, [2, 512]).unsqueeze(0)
        linear = linear.transpose(0, -2).squeeze(-2).contiguous()
        linear_1 = F.linear(query, split_with_sizes, split_with_sizes_2).view(128, 64, 64).transpose(0, 1)
        linear_1 = linear_1.view(8, 8, 128, 64)
        linear_2 = linear[0].view(128, 64, 64).transpose(0, 1).view(8, 8, 128, 64)
        linear = linear[1].view(128, 64, 64).transpose(0, 1).view(8, 8, 128, 64)
        attention = F.scaled_dot_product_attention(linear_1, linear_2, linear).permute(2, 0, 1, 3)
        linear = F.linear(attention.reshape(1024, 512), self.out_proj.weight, self.out_proj.bias)
        return linear.view(128, 8, 512).transpose(1, 0)


class TransformerDecoderLayer(nn.Module):
    """TransformerDecoderLayer, as in layers.0.  tgt f32[8, 128, 512] → f32[8, 128, 512]."""

    def __init__(self):
        super().__init__()
        self.self_attn = MultiheadAttention()
        self.multihead_attn = MultiheadAttention2()
        self.linear1 = nn.Linear(512, 2048)
        self.dropout = nn.Dropout(p=0.0)
        self.linear2 = nn.Linear(2048, 512)
        self.norm1 = nn.LayerNorm(512)
        self.norm2 = nn.LayerNorm(512)
        self.norm3 = nn.LayerNorm(512)
        self.dropout1 = nn.Dropout(p=0.0)
        self.dropout2 = nn.Dropout(p=0.0)
        self.dropout3 = nn.Dropout(p=0.0)

    def forward(self, tgt):
        x = self.norm1(tgt + self.dropout1(self.self_attn(tgt)))
        x = self.norm2(x + self.dropout2(self.multihead_attn(x, tgt)))
        return self.norm3(x + self.dropout3(self.linear2(self.dropout(F.relu(self.linear1(x))))))
