"""Stage 1 of 2 of Transformer (transformer.py)."""

from torch import Tensor, nn


class Stage1(nn.Module):
    """layers.4 … layers.7, norm, output.

    h f32[batch, tokens_1, 512] → output f32[batch, tokens_1, 10000].
    21.9 M parameters, 47.0 GFLOP.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(i): nn.TransformerDecoderLayer(512, 8, dropout=0.0, batch_first=True) for i in range(4, 8)}
        )
        self.norm = nn.LayerNorm(512)
        self.output = nn.Linear(512, 10000)

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers.values():
            h = layer(h, h)
        return self.output(self.norm(h))
