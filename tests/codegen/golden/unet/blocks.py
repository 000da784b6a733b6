"""The blocks that the stages of UNet (unet.py) share.  Up: the text of unet.py."""

import torch
from torch import Tensor, nn


class DoubleConvolution(nn.Sequential):
    """DoubleConvolution (unet.py:15), as in down.0.

    input f32[batch, 3, images_2, images_3] → f32[batch, 16, images_2, images_3].
    """

    def __init__(self, in_channels, out_channels):
        super().__init__(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, out_channels),
            nn.ReLU(),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, out_channels),
            nn.ReLU(),
        )


class Up(nn.Module):
    """Doubles height and width, joins the skip connection, and convolves.

    Up (unet.py:29), as in up.0.
    x f32[batch, 128, images_2 // 8, images_3 // 8], skip f32[batch, 64, images_2 // 4, images_3 // 4]
    → f32[batch, 64, images_2 // 4, images_3 // 4].
    """

    def __init__(self, channels_in, channels):
        super().__init__()
        self.upsample = nn.ConvTranspose2d(channels_in, channels, 2, stride=2)
        self.convolution = DoubleConvolution(channels_in, channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.convolution(torch.cat([skip, self.upsample(x)], dim=1))
