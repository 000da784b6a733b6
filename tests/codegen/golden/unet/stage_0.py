"""Stage 0 of 3 of UNet (unet.py)."""

from torch import nn

from .blocks import DoubleConvolution


class Stage0(nn.Module):
    """down.0 … down.1.

    images f32[2, 3, 32, 32] → skip f32[2, 16, 32, 32], skip_1 f32[2, 32, 16, 16], x f32[2, 32, 8, 8].
    16.8 k parameters, 25.4 MFLOP.
    """

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([DoubleConvolution(3, 16), DoubleConvolution(16, 32)])
        self.pool = nn.MaxPool2d(2, stride=2)

    def forward(self, images):
        skip = self.down[0](images)
        x = self.pool(skip)
        skip_1 = self.down[1](x)
        x = self.pool(skip_1)
        return skip, skip_1, x
