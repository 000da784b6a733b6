"""Stage 0 of 3 of VisionTransformer (vision_transformer.py).  Stage0: the text of vision_transformer.py."""

from torch import Tensor, nn

from .blocks import Block, PatchEmbedding


class Stage0(nn.Module):
    """patch_embed, blocks.0 … blocks.1.

    images f32[batch, 3, images_2, images_3] → x f32[batch, images_2 // 4 * (images_3 // 4) + 1, 32].
    27.3 k parameters, 1.6 MFLOP.
    images.shape[1] is 3 in every batch (vision_transformer.py:23).
    """

    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbedding()
        self.blocks = nn.ModuleList([Block(drop_prob=0.0), Block(drop_prob=0.05)])

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        for block in self.blocks:
            x = block(x)
        return x
