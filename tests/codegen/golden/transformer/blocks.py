"""The blocks that the stages of Transformer (transformer.py) share."""

import torch.nn.functional as F
from torch import Tensor, nn


class TransformerDecoderLayer(nn.Module):
    """TransformerDecoderLayer, as in layers.0.  tgt f32[batch, tokens_1, 512] → f32[batch, tokens_1, 512]."""

    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(512, 8, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(512, 8, batch_first=True)
        self.linear1 = nn.Linear(512, 2048)
        self.dropout = nn.Dropout(p=0.0)
        self.linear2 = nn.Linear(2048, 512)
        self.norm1 = nn.LayerNorm(512)
        self.norm2 = nn.LayerNorm(512)
        self.norm3 = nn.LayerNorm(512)
        self.dropout1 = nn.Dropout(p=0.0)
        self.dropout2 = nn.Dropout(p=0.0)
        self.dropout3 = nn.Dropout(p=0.0)

    def forward(self, tgt: Tensor) -> Tensor:
        x = self.norm1(tgt + self.dropout1(self.self_attn(tgt, tgt, tgt, need_weights=False)[0]))
        x = self.norm2(x + self.dropout2(self.multihead_attn(x, tgt, tgt, need_weights=False)[0]))
        return self.norm3(x + self.dropout3(self.linear2(self.dropout(F.relu(self.linear1(x))))))
