"""Stage 0 of 2 of Transformer (transformer.py).  Stage0: the text of transformer.py."""

from torch import Tensor, nn


class Stage0(nn.Module):
    """tok_embeddings, layers.0 … layers.3.

    tokens i64[batch, tokens_1] → h f32[batch, tokens_1, 512].
    21.9 M parameters, 36.5 GFLOP.
    """

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(10000, 512)
        self.layers = nn.ModuleDict(
            {str(i): nn.TransformerDecoderLayer(512, 8, dropout=0.0, batch_first=True) for i in range(4)}
        )

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, h)
        return h
