"""A U-Net: every level on the way down hands its result to the same level on the way up, past the stages between.

pipegraph split examples/unet.py --points down.2,up.1 -o build/unet
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 4


class DoubleConvolution(nn.Sequential):
    """Two 3 × 3 convolutions that keep height and width."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels, kernel_size=3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(inplace=True),
        )


class Up(nn.Module):
    """Doubles height and width, joins the skip connection, and convolves."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose2d(channels_in, channels, kernel_size=2, stride=2)
        self.convolution = DoubleConvolution(2 * channels, channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.convolution(torch.cat([skip, self.upsample(x)], dim=1))


class UNet(nn.Module):
    """Images ``[batch, 3, height, width]`` → logits ``[batch, CLASSES, height, width]``; sides divide by 8."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            DoubleConvolution(channels_in, channels)
            for channels_in, channels in zip([3, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = DoubleConvolution(4 * width, 8 * width)
        self.up = nn.ModuleList(Up(2 * channels, channels) for channels in reversed(widths))
        self.head = nn.Conv2d(width, CLASSES, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return UNet()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


_generator = torch.Generator().manual_seed(0)

# One microbatch: two images of 32 × 32.
example_inputs = (torch.randn(2, 3, 32, 32, generator=_generator),)
example_target = torch.randint(CLASSES, (2, 32, 32), generator=_generator)
