"""Stage 1 of 3 of Decoder (mixture_of_experts.py)."""

from torch import Tensor, nn

from .blocks import Block


class Stage1(nn.Module):
    """layers.1 … layers.2.

    x f32[batch, tokens_1, 32], total f32[] → x f32[batch, tokens_1, 32], total f32[].
    57.7 k parameters, 4.6 MFLOP.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Block() for i in range(1, 3)})

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.layers["1"](x)
        total = total + balance
        x, balance = self.layers["2"](x)
        total = total + balance
        return x, total
