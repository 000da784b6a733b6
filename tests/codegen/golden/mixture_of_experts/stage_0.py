"""Stage 0 of 3 of Decoder (mixture_of_experts.py).  Stage0: the text of mixture_of_experts.py."""

from torch import Tensor, nn

from .blocks import Block


class Stage0(nn.Module):
    """tok_embeddings, layers.0.

    tokens i64[batch, tokens_1] → x f32[batch, tokens_1, 32], total f32[].
    32.0 k parameters, 2.3 MFLOP.
    """

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(97, 32)
        self.layers = nn.ModuleList([Block()])

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tok_embeddings(tokens)
        total = x.new_zeros(())
        x, balance = self.layers[0](x)
        total = total + balance
        return x, total
