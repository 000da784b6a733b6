"""Stage 1 of 3 of VisionTransformer (vision_transformer.py)."""

from torch import Tensor, nn

from .blocks import Block, BlockStart


class Stage1(nn.Module):
    """blocks.2, blocks.3.norm1, blocks.3.attn, blocks.3.norm2.

    x f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32] → x f32[batch, images_2 // 4 * (images_3 // 4) + 1,
    32], layer_norm f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32].
    17.1 k parameters, 1.1 MFLOP.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"2": Block(drop_prob=0.1), "3": BlockStart()})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks["2"](x)
        x, layer_norm = self.blocks["3"](x)
        return x, layer_norm
