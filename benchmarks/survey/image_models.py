"""Small models that see or make images and clouds of points, each written as a well-known repository of its kind."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.survey.survey_case import Inputs, Size, SurveyCase, images, rows


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale and shift [batch, length, dim] by what [batch, dim] say."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def timestep_embedding(t: Tensor, dim: int, max_period: int = 10000) -> Tensor:
    """Sines and cosines of [batch] timesteps, [batch, dim]."""
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(start=0, end=half, dtype=torch.float32) / half)
    args = t[:, None].float() * freqs.to(device=t.device)[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class DiTBlock(nn.Module):
    """A layer whose norms are scaled, shifted and gated by what is asked for."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def attn(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_a.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_a, scale_a))
        return x + gate_m.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_m, scale_m))


class DiT(nn.Module):
    """A diffusion transformer on patches, which drops labels in training."""

    def __init__(self, side: int = 12, patch: int = 2, channels: int = 4, dim: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.patch, self.channels, self.dim, self.classes = patch, channels, dim, 10
        self.x_embedder = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.t_embedder = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.y_embedder = nn.Embedding(self.classes + 1, dim)
        self.pos_embed = nn.Parameter(torch.randn(1, (side // patch) ** 2, dim), requires_grad=False)
        self.blocks = nn.ModuleList(DiTBlock(dim, 4) for _ in range(depth))
        self.norm_final = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.linear = nn.Linear(dim, patch * patch * channels)

    def unpatchify(self, x: Tensor) -> Tensor:
        c, p = self.channels, self.patch
        h = w = int(x.shape[1] ** 0.5)
        assert h * w == x.shape[1]
        x = torch.einsum("nhwpqc->nchpwq", x.reshape(x.shape[0], h, w, p, p, c))
        return x.reshape(x.shape[0], c, h * p, w * p)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        if self.training:
            drop = torch.rand(y.shape[0], device=y.device) < 0.1
            y = torch.where(drop, self.classes, y)
        c = self.t_embedder(timestep_embedding(t, self.dim).to(x.dtype)) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.unpatchify(self.linear(modulate(self.norm_final(x), shift, scale)))


class Generator(nn.Module):
    """Noise becomes an image, in a chain of transposed convolutions."""

    def __init__(self, nz: int = 12, ngf: int = 4, nc: int = 3) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.main(noise)


class ResnetBlock(nn.Module):
    """Two convolutions with the time between them."""

    def __init__(self, dim: int, dim_out: int, time_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_dim, dim_out * 2))
        self.conv1, self.conv2 = nn.Conv2d(dim, dim_out, 3, padding=1), nn.Conv2d(dim_out, dim_out, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, dim_out), nn.GroupNorm(4, dim_out)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.mlp(time)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(self.norm1(self.conv1(x)) * (scale + 1) + shift)
        return F.silu(self.norm2(self.conv2(h))) + self.res_conv(x)


class PixelAttention(nn.Module):
    """Every pixel of a small image sees every other."""

    def __init__(self, dim: int, heads: int = 4, dim_head: int = 8) -> None:
        super().__init__()
        self.scale, self.heads = dim_head**-0.5, heads
        self.norm = nn.GroupNorm(1, dim)
        self.to_qkv = nn.Conv2d(dim, heads * dim_head * 3, 1, bias=False)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, _c, h, w = x.shape
        q, k, v = (chunk.view(b, self.heads, -1, h * w) for chunk in self.to_qkv(self.norm(x)).chunk(3, dim=1))
        sim = torch.einsum("b h d i, b h d j -> b h i j", q * self.scale, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("b h i j, b h d j -> b h i d", sim.softmax(dim=-1), v)
        return x + self.to_out(out.permute(0, 1, 3, 2).reshape(b, -1, h, w))


class AttentionUNet(nn.Module):
    """The U-Net of denoising diffusion: skip connections by a stack, attention at every level."""

    def __init__(self, dim: int = 8, mults: tuple[int, ...] = (1, 2, 4), channels: int = 3) -> None:
        super().__init__()
        dims = [dim, *(dim * mult for mult in mults)]
        time_dim = dim * 4
        self.dim = dim
        self.init_conv = nn.Conv2d(channels, dim, 7, padding=3)
        self.time_mlp = nn.Sequential(nn.Linear(dim, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim))
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for inner, outer in pairwise(dims):
            self.downs.append(
                nn.ModuleList(
                    [ResnetBlock(inner, inner, time_dim), PixelAttention(inner), nn.Conv2d(inner, outer, 4, 2, 1)]
                )
            )
            self.ups.insert(
                0,
                nn.ModuleList(
                    [
                        nn.ConvTranspose2d(outer, inner, 4, 2, 1),
                        ResnetBlock(2 * inner, inner, time_dim),
                        PixelAttention(inner),
                    ]
                ),
            )
        self.mid = ResnetBlock(dims[-1], dims[-1], time_dim)
        self.final_conv = nn.Conv2d(dim, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.init_conv(x)
        t = self.time_mlp(timestep_embedding(time, self.dim).to(x.dtype))
        h = []
        for block, attention, downsample in self.downs:
            x = attention(block(x, t))
            h.append(x)
            x = downsample(x)
        x = self.mid(x, t)
        for upsample, block, attention in self.ups:
            x = torch.cat((upsample(x), h.pop()), dim=1)
            x = attention(block(x, t))
        return self.final_conv(x)


class VariationalAutoencoder(nn.Module):
    """A code drawn at random in training, its mean in evaluation."""

    def __init__(self, pixels: int = 48, hidden: int = 24, code: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(pixels, hidden), nn.Linear(hidden, code), nn.Linear(hidden, code)
        self.fc3, self.fc4 = nn.Linear(code, hidden), nn.Linear(hidden, pixels)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        if not self.training:
            return mu
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x.view(-1, 48)))
        mu, logvar = self.fc21(h), self.fc22(h)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(self.reparameterize(mu, logvar))))), mu, logvar


class Quantizer(nn.Module):
    """The nearest code of each place; gradients go past the choice."""

    def __init__(self, codes: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, dim)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, self.embedding.embedding_dim)
        codes = self.embedding.weight
        d = flat.pow(2).sum(dim=1, keepdim=True) + codes.pow(2).sum(dim=1) - 2 * flat @ codes.t()
        quantized = self.embedding(d.argmin(dim=1)).view(z.shape)
        loss = F.mse_loss(quantized.detach(), z) * 0.25 + F.mse_loss(quantized, z.detach())
        return (z + (quantized - z).detach()).permute(0, 3, 1, 2).contiguous(), loss


class VectorQuantizedAutoencoder(nn.Module):
    """Convolutions down, codes, convolutions up; returns the loss of the codes, too."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, dim, 4, 2, 1), nn.ReLU(), nn.Conv2d(dim, dim, 4, 2, 1))
        self.quantizer = Quantizer(16, dim)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(dim, dim, 4, 2, 1), nn.ReLU(), nn.Upsample(scale_factor=2))
        self.out = nn.Conv2d(dim, 3, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        quantized, loss = self.quantizer(self.encoder(x))
        return {"reconstruction": self.out(self.decoder(quantized)), "code_loss": loss}


class PointTransform(nn.Module):
    """A matrix for each cloud, near the identity."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.conv1, self.conv2 = nn.Conv1d(k, 16, 1), nn.Conv1d(16, 32, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(32)
        self.fc = nn.Linear(32, k * k)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 32)
        iden = torch.eye(self.k, device=x.device, dtype=x.dtype).flatten().repeat(x.size(0), 1)
        return (self.fc(x) + iden).view(-1, self.k, self.k)


class PointNet(nn.Module):
    """A class for each point of a cloud, from the point and from the whole cloud."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stn, self.fstn = PointTransform(3), PointTransform(16)
        self.conv1, self.conv2, self.conv3 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1), nn.Conv1d(48, classes, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n_pts = x.size()[2]
        trans = self.stn(x)
        x = torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        trans_feat = self.fstn(x)
        pointfeat = torch.bmm(x.transpose(2, 1), trans_feat).transpose(2, 1)
        x = self.bn2(self.conv2(pointfeat))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 32, 1).repeat(1, 1, n_pts)
        x = self.conv3(torch.cat([x, pointfeat], 1)).transpose(2, 1).contiguous()
        return F.log_softmax(x.view(-1, x.size(-1)), dim=-1).view(-1, n_pts, x.size(-1)), trans_feat


def _noisy_images(*size: int) -> Inputs:
    batch = size[0]
    return (torch.randn(*size), torch.randint(1000, (batch,))), {}


def _labelled(batch: int, size: Size) -> Inputs:
    (args, _) = _noisy_images(batch, 4, 12, 12)
    return (*args, torch.randint(10, (batch,))), {}


_ORIGIN = "written here"
_MULTIPLES_OF_8: tuple[Size, ...] = ((24, 40), (16, 24), (56, 40))

IMAGE_CASES = (
    SurveyCase("DiT", _ORIGIN, DiT, _labelled),
    SurveyCase(
        "DCGAN generator",
        _ORIGIN,
        Generator,
        lambda batch, size: ((torch.randn(batch, 12, *size),), {}),
        ((2, 3), (1, 1), (4, 3)),
    ),
    SurveyCase(
        "U-Net with attention",
        _ORIGIN,
        AttentionUNet,
        lambda batch, size: _noisy_images(batch, 3, *size),
        _MULTIPLES_OF_8,
    ),
    SurveyCase("VAE", _ORIGIN, VariationalAutoencoder, rows(48)),
    SurveyCase("VQ-VAE", _ORIGIN, VectorQuantizedAutoencoder, images(), ((28, 44), (20, 12), (52, 68))),
    SurveyCase(
        "PointNet", _ORIGIN, PointNet, lambda batch, size: ((torch.randn(batch, 3, *size),), {}), ((31,), (17,), (43,))
    ),
)
"""Images and clouds of points."""
