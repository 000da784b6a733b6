"""Stage 1 of 3 of UNet (unet.py).  Stage1: the text of unet.py."""

from torch import Tensor, nn

from .blocks import DoubleConvolution, Up


class Stage1(nn.Module):
    """down.2, bottom, up.0.

    x f32[batch, 32, images_2 // 4, images_3 // 4] → x f32[batch, 64, images_2 // 4, images_3 // 4].
    420.9 k parameters, 58.7 MFLOP.
    """

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleDict({"2": DoubleConvolution(32, 64)})
        self.pool = nn.MaxPool2d(2, stride=2)
        self.bottom = DoubleConvolution(64, 128)
        self.up = nn.ModuleList([Up(128, 64)])

    def forward(self, x: Tensor) -> Tensor:
        x_1 = self.down["2"](x)
        x = self.pool(x_1)
        x = self.bottom(x)
        return self.up[0](x, x_1)
