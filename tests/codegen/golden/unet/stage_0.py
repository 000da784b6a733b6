"""Stage 0 of 3 of UNet (unet.py)."""

from torch import Tensor, nn

from .blocks import DoubleConvolution


class Stage0(nn.Module):
    """down.0 … down.1.

    images f32[batch, 3, images_2, images_3] → skip f32[batch, 16, images_2, images_3], skip_1 f32[batch, 32,
    images_2 // 2, images_3 // 2], x f32[batch, 32, images_2 // 4, images_3 // 4].
    16.8 k parameters, 25.4 MFLOP.
    images.shape[1] is 3 in every batch (unet.py:60).
    """

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([DoubleConvolution(3, 16), DoubleConvolution(16, 32)])
        self.pool = nn.MaxPool2d(2, stride=2)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        skip = self.down[0](images)
        x = self.pool(skip)
        skip_1 = self.down[1](x)
        x = self.pool(skip_1)
        return skip, skip_1, x
