"""Stage 2 of 3 of VisionTransformer (vision_transformer.py)."""

from torch import Tensor, nn

from .blocks import Block, BlockEnd


class Stage2(nn.Module):
    """blocks.3.mlp, blocks.4, norm, head.

    x f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32], layer_norm f32[batch, images_2 // 4 * (images_3 // 4)
    + 1, 32] → output f32[batch, 7].
    21.4 k parameters, 1.3 MFLOP.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"3": BlockEnd(), "4": Block(drop_prob=0.2)})
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor, layer_norm: Tensor) -> Tensor:
        x = self.blocks["3"](layer_norm, x)
        x = self.blocks["4"](x)
        return self.head(self.norm(x)[:, 0])
