"""Stage 2 of 3 of UNet (unet.py)."""

from torch import Tensor, nn

from .blocks import Up


class Stage2(nn.Module):
    """up.1 … up.2, head.

    skip f32[batch, 16, images_2, images_3], skip_1 f32[batch, 32, images_2 // 2, images_3 // 2], x f32[batch,
    64, images_2 // 4, images_3 // 4] → output f32[batch, 4, images_2, images_3].
    45.1 k parameters, 61.1 MFLOP.
    """

    def __init__(self):
        super().__init__()
        self.up = nn.ModuleDict({"1": Up(64, 32), "2": Up(32, 16)})
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, skip: Tensor, skip_1: Tensor, x: Tensor) -> Tensor:
        x = self.up["1"](x, skip_1)
        x = self.up["2"](x, skip)
        return self.head(x)
