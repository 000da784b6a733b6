"""Stage 2 of 3 of Decoder (mixture_of_experts.py)."""

from torch import Tensor, nn

from .blocks import Block, RMSNorm


class Stage2(nn.Module):
    """layers.3, norm, output.

    x f32[batch, tokens_1, 32], total f32[] → logits f32[batch, tokens_1, 97], balance f32[].
    32.0 k parameters, 2.6 MFLOP.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"3": Block()})
        self.norm = RMSNorm()
        self.output = nn.Linear(32, 97, bias=False)

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.layers["3"](x)
        balance = total + balance
        return self.output(self.norm(x)), balance
