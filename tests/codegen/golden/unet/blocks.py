"""The blocks that the stages of UNet (unet.py) share."""

import torch
from torch import nn


class DoubleConvolution(nn.Sequential):
    """DoubleConvolution (unet.py:15), as in down.0.  input f32[2, 3, 32, 32] → f32[2, 16, 32, 32]."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, bias=False),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
        )


class DoubleConvolution2(nn.Sequential):
    """DoubleConvolution (unet.py:15), as in down.1.  input f32[2, 16, 16, 16] → f32[2, 32, 16, 16]."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, bias=False),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
        )


class DoubleConvolution3(nn.Sequential):
    """DoubleConvolution (unet.py:15), as in down.2.  input f32[2, 32, 8, 8] → f32[2, 64, 8, 8]."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.GroupNorm(4, 64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1, bias=False),
            nn.GroupNorm(4, 64),
            nn.ReLU(),
        )


class DoubleConvolution4(nn.Sequential):
    """DoubleConvolution (unet.py:15), as in bottom.  input f32[2, 64, 4, 4] → f32[2, 128, 4, 4]."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(64, 128, 3, padding=1, bias=False),
            nn.GroupNorm(4, 128),
            nn.ReLU(),
            nn.Conv2d(128, 128, 3, padding=1, bias=False),
            nn.GroupNorm(4, 128),
            nn.ReLU(),
        )


class DoubleConvolution5(nn.Sequential):
    """DoubleConvolution (unet.py:15), as in up.0.convolution.  input f32[2, 128, 8, 8] → f32[2, 64, 8, 8]."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(128, 64, 3, padding=1, bias=False),
            nn.GroupNorm(4, 64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1, bias=False),
            nn.GroupNorm(4, 64),
            nn.ReLU(),
        )


class Up(nn.Module):
    """Up (unet.py:29), as in up.0.  x f32[2, 128, 4, 4], x_1 f32[2, 64, 8, 8] → f32[2, 64, 8, 8]."""

    def __init__(self):
        super().__init__()
        self.upsample = nn.ConvTranspose2d(128, 64, 2, stride=2)
        self.convolution = DoubleConvolution5()

    def forward(self, x, x_1):
        return self.convolution(torch.cat([x_1, self.upsample(x)], dim=1))


class DoubleConvolution6(nn.Sequential):
    """DoubleConvolution (unet.py:15), as in up.1.convolution.  input f32[2, 64, 16, 16] → f32[2, 32, 16, 16]."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(64, 32, 3, padding=1, bias=False),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, bias=False),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
        )


class Up2(nn.Module):
    """Up (unet.py:29), as in up.1.  x f32[2, 64, 8, 8], x_1 f32[2, 32, 16, 16] → f32[2, 32, 16, 16]."""

    def __init__(self):
        super().__init__()
        self.upsample = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.convolution = DoubleConvolution6()

    def forward(self, x, x_1):
        return self.convolution(torch.cat([x_1, self.upsample(x)], dim=1))


class DoubleConvolution7(nn.Sequential):
    """DoubleConvolution (unet.py:15), as in up.2.convolution.  input f32[2, 32, 32, 32] → f32[2, 16, 32, 32]."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(32, 16, 3, padding=1, bias=False),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, bias=False),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
        )


class Up3(nn.Module):
    """Up (unet.py:29), as in up.2.  x f32[2, 32, 16, 16], x_1 f32[2, 16, 32, 32] → f32[2, 16, 32, 32]."""

    def __init__(self):
        super().__init__()
        self.upsample = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.convolution = DoubleConvolution7()

    def forward(self, x, x_1):
        return self.convolution(torch.cat([x_1, self.upsample(x)], dim=1))
