"""Small models of speech, robots, scenes and physics, each written as research code of its kind is."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.survey.survey_case import TOKENS, Inputs, Size, SurveyCase, images, rows

# ---- Tacotron 2: from letters to a spectrogram, frame by frame -------------------------------------------------------


class LocationLayer(nn.Module):
    """Features of where the attention was."""

    def __init__(self, n_filters: int, kernel_size: int, attention_dim: int) -> None:
        super().__init__()
        self.location_conv = nn.Conv1d(2, n_filters, kernel_size, padding=(kernel_size - 1) // 2, bias=False)
        self.location_dense = nn.Linear(n_filters, attention_dim, bias=False)

    def forward(self, attention_weights_cat: Tensor) -> Tensor:
        processed = self.location_conv(attention_weights_cat)
        return self.location_dense(processed.transpose(1, 2))


class LocationAttention(nn.Module):
    """Additive attention that sees its own earlier weights."""

    def __init__(self, rnn_dim: int, memory_dim: int, attention_dim: int) -> None:
        super().__init__()
        self.query_layer = nn.Linear(rnn_dim, attention_dim, bias=False)
        self.memory_layer = nn.Linear(memory_dim, attention_dim, bias=False)
        self.v = nn.Linear(attention_dim, 1, bias=False)
        self.location_layer = LocationLayer(n_filters=4, kernel_size=5, attention_dim=attention_dim)
        self.score_mask_value = -float("inf")

    def get_alignment_energies(self, query: Tensor, processed_memory: Tensor, attention_weights_cat: Tensor) -> Tensor:
        processed_query = self.query_layer(query.unsqueeze(1))
        processed_weights = self.location_layer(attention_weights_cat)
        energies = self.v(torch.tanh(processed_query + processed_weights + processed_memory))
        return energies.squeeze(-1)

    def forward(
        self, query: Tensor, memory: Tensor, processed_memory: Tensor, attention_weights_cat: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        alignment = self.get_alignment_energies(query, processed_memory, attention_weights_cat)
        alignment = alignment.masked_fill(mask, self.score_mask_value)
        weights = F.softmax(alignment, dim=1)
        context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
        return context, weights


class Prenet(nn.Module):
    """Two layers whose dropout is on in evaluation, too."""

    def __init__(self, in_dim: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        in_sizes = (in_dim, *sizes[:-1])
        self.layers = nn.ModuleList(
            nn.Linear(in_size, out_size, bias=False) for in_size, out_size in zip(in_sizes, sizes, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.layers:
            x = F.dropout(F.relu(linear(x)), p=0.5, training=True)
        return x


class Postnet(nn.Module):
    """Convolutions that correct the spectrogram."""

    def __init__(self, n_mels: int, dim: int, n_convolutions: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList()
        for i in range(n_convolutions):
            in_dim = n_mels if i == 0 else dim
            out_dim = n_mels if i == n_convolutions - 1 else dim
            self.convolutions.append(
                nn.Sequential(nn.Conv1d(in_dim, out_dim, kernel_size=5, padding=2), nn.BatchNorm1d(out_dim))
            )

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.convolutions) - 1):
            x = F.dropout(torch.tanh(self.convolutions[i](x)), 0.5, self.training)
        return F.dropout(self.convolutions[-1](x), 0.5, self.training)


class TextEncoder(nn.Module):
    """Convolutions and an LSTM in both directions."""

    def __init__(self, dim: int, n_convolutions: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv1d(dim, dim, kernel_size=5, padding=2), nn.BatchNorm1d(dim))
            for _ in range(n_convolutions)
        )
        self.lstm = nn.LSTM(dim, dim // 2, num_layers=1, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convolutions:
            x = F.dropout(F.relu(conv(x)), 0.5, self.training)
        outputs, _ = self.lstm(x.transpose(1, 2))
        return outputs


class SpectrogramDecoder(nn.Module):
    """Two LSTM cells with attention between them; a step makes a frame, and says whether it is the last."""

    def __init__(self, n_mels: int, encoder_dim: int, rnn_dim: int, prenet_dim: int) -> None:
        super().__init__()
        self.n_mels, self.rnn_dim, self.encoder_dim = n_mels, rnn_dim, encoder_dim
        self.p_attention_dropout = self.p_decoder_dropout = 0.1
        self.prenet = Prenet(n_mels, (prenet_dim, prenet_dim))
        self.attention_rnn = nn.LSTMCell(prenet_dim + encoder_dim, rnn_dim)
        self.attention_layer = LocationAttention(rnn_dim, encoder_dim, attention_dim=12)
        self.decoder_rnn = nn.LSTMCell(rnn_dim + encoder_dim, rnn_dim)
        self.linear_projection = nn.Linear(rnn_dim + encoder_dim, n_mels)
        self.gate_layer = nn.Linear(rnn_dim + encoder_dim, 1)

    def initialize_decoder_states(self, memory: Tensor, mask: Tensor) -> None:
        """Start of a sentence: nothing was said, and nothing looked at."""
        B, max_time, _ = memory.shape
        self.attention_hidden = memory.new_zeros(B, self.rnn_dim)
        self.attention_cell = memory.new_zeros(B, self.rnn_dim)
        self.decoder_hidden = memory.new_zeros(B, self.rnn_dim)
        self.decoder_cell = memory.new_zeros(B, self.rnn_dim)
        self.attention_weights = memory.new_zeros(B, max_time)
        self.attention_weights_cum = memory.new_zeros(B, max_time)
        self.attention_context = memory.new_zeros(B, self.encoder_dim)
        self.memory = memory
        self.processed_memory = self.attention_layer.memory_layer(memory)
        self.mask = mask

    def decode(self, decoder_input: Tensor) -> tuple[Tensor, Tensor]:
        """One frame."""
        cell_input = torch.cat((decoder_input, self.attention_context), -1)
        self.attention_hidden, self.attention_cell = self.attention_rnn(
            cell_input, (self.attention_hidden, self.attention_cell)
        )
        self.attention_hidden = F.dropout(self.attention_hidden, self.p_attention_dropout, self.training)

        attention_weights_cat = torch.stack((self.attention_weights, self.attention_weights_cum), dim=1)
        self.attention_context, self.attention_weights = self.attention_layer(
            self.attention_hidden, self.memory, self.processed_memory, attention_weights_cat, self.mask
        )
        self.attention_weights_cum = self.attention_weights_cum + self.attention_weights

        decoder_input = torch.cat((self.attention_hidden, self.attention_context), -1)
        self.decoder_hidden, self.decoder_cell = self.decoder_rnn(
            decoder_input, (self.decoder_hidden, self.decoder_cell)
        )
        self.decoder_hidden = F.dropout(self.decoder_hidden, self.p_decoder_dropout, self.training)

        hidden_and_context = torch.cat((self.decoder_hidden, self.attention_context), dim=1)
        return self.linear_projection(hidden_and_context), self.gate_layer(hidden_and_context)

    def forward(self, memory: Tensor, mels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Each frame is made from the true one before it; the first from zeros.
        go_frame = memory.new_zeros(memory.size(0), 1, self.n_mels)
        decoder_inputs = self.prenet(torch.cat((go_frame, mels.transpose(1, 2)), dim=1))
        self.initialize_decoder_states(memory, mask)

        mel_outputs, gate_outputs, alignments = [], [], []
        while len(mel_outputs) < decoder_inputs.size(1) - 1:
            mel_output, gate_output = self.decode(decoder_inputs[:, len(mel_outputs)])
            mel_outputs += [mel_output]
            gate_outputs += [gate_output.squeeze(1)]
            alignments += [self.attention_weights]
        return torch.stack(mel_outputs, dim=2), torch.stack(gate_outputs, dim=1), torch.stack(alignments, dim=1)


class Tacotron2(nn.Module):
    """Letters become a spectrogram; trained on the true frames."""

    def __init__(self, n_symbols: int = 40, n_mels: int = 8, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_symbols, dim)
        self.encoder = TextEncoder(dim, n_convolutions=3)
        self.decoder = SpectrogramDecoder(n_mels, encoder_dim=dim, rnn_dim=20, prenet_dim=12)
        self.postnet = Postnet(n_mels, dim=16, n_convolutions=4)

    def forward(self, text: Tensor, mels: Tensor) -> dict[str, Tensor]:
        encoder_outputs = self.encoder(self.embedding(text).transpose(1, 2))
        mel_outputs, gate_outputs, alignments = self.decoder(encoder_outputs, mels, mask=text.eq(0))
        mel_outputs_postnet = mel_outputs + self.postnet(mel_outputs)
        return {"mel": mel_outputs, "mel_postnet": mel_outputs_postnet, "gate": gate_outputs, "alignments": alignments}


# ---- PointNet++: a cloud of points, seen in ever larger groups -------------------------------------------------------


def square_distance(src: Tensor, dst: Tensor) -> Tensor:
    """Squared distances between [B, N, C] and [B, M, C], as [B, N, M]."""
    dist = -2 * torch.matmul(src, dst.permute(0, 2, 1))
    dist += torch.sum(src**2, -1).unsqueeze(-1)
    dist += torch.sum(dst**2, -1).unsqueeze(1)
    return dist


def index_points(points: Tensor, idx: Tensor) -> Tensor:
    """Rows idx [B, S] or [B, S, K] of points [B, N, C]."""
    B = points.shape[0]
    batch_indices = torch.arange(B, device=points.device).view(B, *[1] * (idx.dim() - 1)).expand_as(idx)
    return points[batch_indices, idx, :]


def farthest_point_sample(xyz: Tensor, npoint: int) -> Tensor:
    """Indices of points that are far from each other, [B, npoint]; the first point is always one."""
    B, N, _ = xyz.shape
    centroids = torch.zeros(B, npoint, dtype=torch.long, device=xyz.device)
    distance = torch.full((B, N), 1e10, device=xyz.device, dtype=xyz.dtype)
    farthest = torch.zeros(B, dtype=torch.long, device=xyz.device)
    batch_indices = torch.arange(B, device=xyz.device)
    for i in range(npoint):
        centroids[:, i] = farthest
        centroid = xyz[batch_indices, farthest, :].unsqueeze(1)
        dist = torch.sum((xyz - centroid) ** 2, -1)
        distance = torch.minimum(distance, dist)
        farthest = torch.max(distance, -1)[1]
    return centroids


def query_ball_point(radius: float, nsample: int, xyz: Tensor, new_xyz: Tensor) -> Tensor:
    """Indices of nsample points around each of new_xyz; if there are fewer, the first one is repeated."""
    B, N, _ = xyz.shape
    S = new_xyz.shape[1]
    group_idx = torch.arange(N, device=xyz.device).view(1, 1, N).repeat(B, S, 1)
    sqrdists = square_distance(new_xyz, xyz)
    group_idx[sqrdists > radius**2] = N
    group_idx = group_idx.sort(dim=-1)[0][:, :, :nsample]
    group_first = group_idx[:, :, :1].expand_as(group_idx)
    return torch.where(group_idx == N, group_first, group_idx)


class SetAbstraction(nn.Module):
    """Points that stand for their neighbours."""

    def __init__(self, npoint: int, radius: float, nsample: int, in_channel: int, mlp: tuple[int, ...]) -> None:
        super().__init__()
        self.npoint, self.radius, self.nsample = npoint, radius, nsample
        self.mlp_convs, self.mlp_bns = nn.ModuleList(), nn.ModuleList()
        last_channel = in_channel
        for out_channel in mlp:
            self.mlp_convs.append(nn.Conv2d(last_channel, out_channel, 1))
            self.mlp_bns.append(nn.BatchNorm2d(out_channel))
            last_channel = out_channel

    def sample_and_group(self, xyz: Tensor, points: Tensor | None) -> tuple[Tensor, Tensor]:
        new_xyz = index_points(xyz, farthest_point_sample(xyz.detach(), self.npoint))
        idx = query_ball_point(self.radius, self.nsample, xyz, new_xyz)
        # Each neighbour by its place from the centre
        grouped_xyz = index_points(xyz, idx) - new_xyz.unsqueeze(2)
        if points is None:
            return new_xyz, grouped_xyz
        return new_xyz, torch.cat([grouped_xyz, index_points(points, idx)], dim=-1)

    def forward(self, xyz: Tensor, points: Tensor | None) -> tuple[Tensor, Tensor]:
        new_xyz, new_points = self.sample_and_group(xyz, points)
        new_points = new_points.permute(0, 3, 2, 1)  # [B, C, nsample, npoint]
        for i, conv in enumerate(self.mlp_convs):
            bn = self.mlp_bns[i]
            new_points = F.relu(bn(conv(new_points)))
        new_points = torch.max(new_points, 2)[0]
        return new_xyz, new_points.permute(0, 2, 1)


class FeaturePropagation(nn.Module):
    """Back from few points to many, each from its three nearest."""

    def __init__(self, in_channel: int, mlp: tuple[int, ...]) -> None:
        super().__init__()
        self.mlp_convs, self.mlp_bns = nn.ModuleList(), nn.ModuleList()
        last_channel = in_channel
        for out_channel in mlp:
            self.mlp_convs.append(nn.Conv1d(last_channel, out_channel, 1))
            self.mlp_bns.append(nn.BatchNorm1d(out_channel))
            last_channel = out_channel

    def forward(self, xyz1: Tensor, xyz2: Tensor, points1: Tensor | None, points2: Tensor) -> Tensor:
        dists, idx = square_distance(xyz1, xyz2).sort(dim=-1)
        dists, idx = dists[:, :, :3], idx[:, :, :3]
        dist_recip = 1.0 / (dists.clamp(min=0) + 1e-8)
        weight = dist_recip / torch.sum(dist_recip, dim=2, keepdim=True)
        interpolated_points = torch.sum(index_points(points2, idx) * weight.unsqueeze(-1), dim=2)
        new_points = interpolated_points if points1 is None else torch.cat([points1, interpolated_points], dim=-1)
        new_points = new_points.permute(0, 2, 1)
        for i, conv in enumerate(self.mlp_convs):
            new_points = F.relu(self.mlp_bns[i](conv(new_points)))
        return new_points.permute(0, 2, 1)


class PointNet2(nn.Module):
    """A class for each point: two levels of groups up, and down."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.sa1 = SetAbstraction(npoint=8, radius=0.8, nsample=6, in_channel=3, mlp=(8, 16))
        self.sa2 = SetAbstraction(npoint=4, radius=1.6, nsample=4, in_channel=16 + 3, mlp=(16, 32))
        self.fp2 = FeaturePropagation(in_channel=32 + 16, mlp=(24,))
        self.fp1 = FeaturePropagation(in_channel=24, mlp=(24, 16))
        self.conv1, self.bn1 = nn.Conv1d(16, 16, 1), nn.BatchNorm1d(16)
        self.drop1 = nn.Dropout(0.5)
        self.conv2 = nn.Conv1d(16, classes, 1)

    def forward(self, xyz: Tensor) -> Tensor:
        l0_xyz = xyz.permute(0, 2, 1)
        l1_xyz, l1_points = self.sa1(l0_xyz, None)
        l2_xyz, l2_points = self.sa2(l1_xyz, l1_points)
        l1_points = self.fp2(l1_xyz, l2_xyz, l1_points, l2_points)
        l0_points = self.fp1(l0_xyz, l1_xyz, None, l1_points)
        x = self.drop1(F.relu(self.bn1(self.conv1(l0_points.permute(0, 2, 1)))))
        return F.log_softmax(self.conv2(x), dim=1).permute(0, 2, 1)


# ---- Diffusion policy: a U-Net over the steps of an action -----------------------------------------------------------


class SinusoidalPosEmb(nn.Module):
    """Sines and cosines of a timestep."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        half_dim = self.dim // 2
        emb = math.log(10000) / (half_dim - 1)
        emb = torch.exp(torch.arange(half_dim, device=x.device, dtype=x.dtype) * -emb)
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class Conv1dBlock(nn.Module):
    """Conv1d, GroupNorm, Mish."""

    def __init__(self, inp_channels: int, out_channels: int, kernel_size: int, n_groups: int = 4) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(inp_channels, out_channels, kernel_size, padding=kernel_size // 2),
            nn.GroupNorm(n_groups, out_channels),
            nn.Mish(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class ConditionalResidualBlock1D(nn.Module):
    """Two convolutions; what was observed scales and shifts the channels between them."""

    def __init__(self, in_channels: int, out_channels: int, cond_dim: int, kernel_size: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                Conv1dBlock(in_channels, out_channels, kernel_size),
                Conv1dBlock(out_channels, out_channels, kernel_size),
            ]
        )
        self.out_channels = out_channels
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(cond_dim, out_channels * 2), nn.Unflatten(-1, (-1, 1)))
        # The way around, if the number of channels changes
        self.residual_conv = nn.Conv1d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        out = self.blocks[0](x)
        embed = self.cond_encoder(cond)
        embed = embed.reshape(embed.shape[0], 2, self.out_channels, 1)
        scale = embed[:, 0, ...]
        bias = embed[:, 1, ...]
        out = scale * out + bias
        out = self.blocks[1](out)
        return out + self.residual_conv(x)


class ConditionalUnet1D(nn.Module):
    """Takes the noise from a robot's actions, with the timestep and what it saw."""

    def __init__(
        self,
        action_dim: int = 4,
        obs_dim: int = 5,
        obs_steps: int = 2,
        step_dim: int = 16,
        down_dims: tuple[int, ...] = (8, 16, 24),
    ) -> None:
        super().__init__()
        all_dims = [action_dim, *down_dims]
        in_out = list(pairwise(all_dims))
        cond_dim = step_dim + obs_dim * obs_steps
        self.diffusion_step_encoder = nn.Sequential(
            SinusoidalPosEmb(step_dim), nn.Linear(step_dim, step_dim * 4), nn.Mish(), nn.Linear(step_dim * 4, step_dim)
        )

        mid_dim = all_dims[-1]
        self.mid_modules = nn.ModuleList(
            [
                ConditionalResidualBlock1D(mid_dim, mid_dim, cond_dim),
                ConditionalResidualBlock1D(mid_dim, mid_dim, cond_dim),
            ]
        )
        self.down_modules = nn.ModuleList()
        for ind, (dim_in, dim_out) in enumerate(in_out):
            is_last = ind >= (len(in_out) - 1)
            self.down_modules.append(
                nn.ModuleList(
                    [
                        ConditionalResidualBlock1D(dim_in, dim_out, cond_dim),
                        ConditionalResidualBlock1D(dim_out, dim_out, cond_dim),
                        nn.Conv1d(dim_out, dim_out, 3, 2, 1) if not is_last else nn.Identity(),
                    ]
                )
            )
        self.up_modules = nn.ModuleList()
        for dim_in, dim_out in reversed(in_out[1:]):
            self.up_modules.append(
                nn.ModuleList(
                    [
                        ConditionalResidualBlock1D(dim_out * 2, dim_in, cond_dim),
                        ConditionalResidualBlock1D(dim_in, dim_in, cond_dim),
                        nn.ConvTranspose1d(dim_in, dim_in, 4, 2, 1),
                    ]
                )
            )
        start_dim = down_dims[0]
        self.final_conv = nn.Sequential(Conv1dBlock(start_dim, start_dim, 3), nn.Conv1d(start_dim, action_dim, 1))

    def forward(self, sample: Tensor, timestep: Tensor, global_cond: Tensor) -> Tensor:
        sample = sample.moveaxis(-1, -2)  # [B, T, C] -> [B, C, T]
        timesteps = timestep.expand(sample.shape[0])
        global_feature = self.diffusion_step_encoder(timesteps.to(sample.dtype))
        global_feature = torch.cat([global_feature, global_cond.flatten(start_dim=1)], axis=-1)

        x = sample
        h = []
        for resnet, resnet2, downsample in self.down_modules:
            x = resnet(x, global_feature)
            x = resnet2(x, global_feature)
            h.append(x)
            x = downsample(x)
        for mid_module in self.mid_modules:
            x = mid_module(x, global_feature)
        for resnet, resnet2, upsample in self.up_modules:
            x = torch.cat((x, h.pop()), dim=1)
            x = resnet(x, global_feature)
            x = resnet2(x, global_feature)
            x = upsample(x)
        return self.final_conv(x).moveaxis(-1, -2)


# ---- EfficientViT: attention without a softmax, at several scales ----------------------------------------------------


class ConvLayer(nn.Module):
    """A convolution, and a norm and an activation if they are asked for."""

    def __init__(
        self, dim: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, norm: bool = True, act: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, out, kernel, stride, kernel // 2, groups=groups, bias=not norm)
        self.norm = nn.BatchNorm2d(out) if norm else None
        self.act = nn.Hardswish() if act else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.act is not None:
            x = self.act(x)
        return x


class MBConv(nn.Module):
    """Wide inside: expand, mix each channel over its neighbours, contract."""

    def __init__(self, dim: int, out: int, stride: int = 1, expand_ratio: int = 4, fewer_norm: bool = False) -> None:
        super().__init__()
        mid = dim * expand_ratio
        self.inverted_conv = ConvLayer(dim, mid, norm=not fewer_norm)
        self.depth_conv = ConvLayer(mid, mid, 3, stride, groups=mid, norm=not fewer_norm)
        self.point_conv = ConvLayer(mid, out, act=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.point_conv(self.depth_conv(self.inverted_conv(x)))


class LiteMLA(nn.Module):
    """Attention whose kernel is a ReLU, so that its cost grows with the number of pixels and not with its square."""

    def __init__(self, dim: int, head_dim: int = 8, scales: tuple[int, ...] = (5,), eps: float = 1e-15) -> None:
        super().__init__()
        self.eps, self.dim = eps, head_dim
        total_dim = dim // head_dim * head_dim
        self.qkv = nn.Conv2d(dim, 3 * total_dim, 1, bias=False)
        self.aggreg = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 * total_dim, 3 * total_dim, scale, padding=scale // 2, groups=3 * total_dim, bias=False),
                nn.Conv2d(3 * total_dim, 3 * total_dim, 1, groups=3 * (dim // head_dim), bias=False),
            )
            for scale in scales
        )
        self.proj = ConvLayer(total_dim * (1 + len(scales)), dim, act=False)

    def relu_linear_att(self, qkv: Tensor) -> Tensor:
        B, _, H, W = qkv.size()
        qkv = qkv.float()
        qkv = torch.reshape(qkv, (B, -1, 3 * self.dim, H * W))
        q, k, v = qkv[:, :, 0 : self.dim], qkv[:, :, self.dim : 2 * self.dim], qkv[:, :, 2 * self.dim :]
        q, k = F.relu(q), F.relu(k)
        # The row of ones sums the weights, by which the output is divided.
        trans_k = k.transpose(-1, -2)
        v = F.pad(v, (0, 0, 0, 1), mode="constant", value=1)
        vk = torch.matmul(v, trans_k)
        out = torch.matmul(vk, q)
        out = out[:, :, :-1] / (out[:, :, -1:] + self.eps)
        return torch.reshape(out, (B, -1, H, W))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        multi_scale_qkv = [qkv]
        for op in self.aggreg:
            multi_scale_qkv.append(op(qkv))
        qkv = torch.cat(multi_scale_qkv, dim=1)
        out = self.relu_linear_att(qkv).to(x.dtype)
        return self.proj(out)


class EfficientViTBlock(nn.Module):
    """The whole image, then the neighbours."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.context_module = LiteMLA(dim)
        self.local_module = MBConv(dim, dim, fewer_norm=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.context_module(x)
        return x + self.local_module(x)


class EfficientViT(nn.Module):
    """A classifier: convolutions on the large image, linear attention on the small one."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 24), depths: tuple[int, ...] = (1, 2, 2)) -> None:
        super().__init__()
        self.input_stem = nn.ModuleList([ConvLayer(3, widths[0], 3, stride=2), MBConv(widths[0], widths[0])])
        self.stages = nn.ModuleList()
        dim = widths[0]
        for width, depth in zip(widths[1:], depths[1:], strict=True):
            blocks: list[nn.Module] = [MBConv(dim, width, stride=2)]
            for _ in range(depth):
                blocks.append(EfficientViTBlock(width))
            self.stages.append(nn.Sequential(*blocks))
            dim = width
        self.head = nn.Sequential(ConvLayer(dim, 2 * dim), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * dim, 5))

    def forward(self, x: Tensor) -> Tensor:
        stem, block = self.input_stem
        x = stem(x)
        x = x + block(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


# ---- Slot attention: the objects of an image -------------------------------------------------------------------------


def build_grid(resolution: tuple[int, int]) -> Tensor:
    """The place of each pixel, from the left, the top, the right and the bottom."""
    ranges = [torch.linspace(0.0, 1.0, steps=res) for res in resolution]
    grid = torch.stack(torch.meshgrid(*ranges, indexing="ij"), dim=-1).unsqueeze(0)
    return torch.cat([grid, 1.0 - grid], dim=-1)


class SoftPositionEmbed(nn.Module):
    """Adds a projection of each pixel's place."""

    def __init__(self, hidden_size: int, resolution: tuple[int, int]) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, hidden_size, bias=True)
        self.register_buffer("grid", build_grid(resolution))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.embedding(self.grid)


class SlotAttention(nn.Module):
    """Slots that compete for the pixels, in a few iterations."""

    def __init__(self, num_slots: int, dim: int, iters: int = 3, eps: float = 1e-8, hidden_dim: int = 24) -> None:
        super().__init__()
        self.num_slots, self.iters, self.eps = num_slots, iters, eps
        self.scale = dim**-0.5

        self.slots_mu = nn.Parameter(torch.randn(1, 1, dim))
        self.slots_log_sigma = nn.Parameter(torch.zeros(1, 1, dim))

        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)

        self.gru = nn.GRUCell(dim, dim)
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

        self.norm_input = nn.LayerNorm(dim)
        self.norm_slots = nn.LayerNorm(dim)
        self.norm_pre_ff = nn.LayerNorm(dim)

    def forward(self, inputs: Tensor) -> Tensor:
        b, _n, d = inputs.shape
        mu = self.slots_mu.expand(b, self.num_slots, -1)
        sigma = self.slots_log_sigma.exp().expand(b, self.num_slots, -1)
        slots = mu + sigma * torch.randn_like(mu)

        inputs = self.norm_input(inputs)
        k, v = self.to_k(inputs), self.to_v(inputs)

        for _ in range(self.iters):
            slots_prev = slots
            slots = self.norm_slots(slots)
            q = self.to_q(slots)

            dots = torch.einsum("bid,bjd->bij", q, k) * self.scale
            attn = dots.softmax(dim=1) + self.eps  # over the slots
            attn = attn / attn.sum(dim=-1, keepdim=True)
            updates = torch.einsum("bjd,bij->bid", v, attn)

            slots = self.gru(updates.reshape(-1, d), slots_prev.reshape(-1, d))
            slots = slots.reshape(b, -1, d)
            slots = slots + self.fc2(F.relu(self.fc1(self.norm_pre_ff(slots))))
        return slots


class SlotAttentionAutoEncoder(nn.Module):
    """An image of each slot, and a mask that says whose pixel it is."""

    def __init__(self, resolution: tuple[int, int] = (16, 12), num_slots: int = 5, dim: int = 16) -> None:
        super().__init__()
        self.resolution, self.num_slots = resolution, num_slots
        self.encoder_cnn = nn.Sequential(
            nn.Conv2d(3, dim, 5, padding=2), nn.ReLU(), nn.Conv2d(dim, dim, 5, padding=2), nn.ReLU()
        )
        self.encoder_pos = SoftPositionEmbed(dim, resolution)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.slot_attention = SlotAttention(num_slots, dim)
        self.decoder_initial_size = (resolution[0] // 4, resolution[1] // 4)
        self.decoder_pos = SoftPositionEmbed(dim, self.decoder_initial_size)
        self.decoder_cnn = nn.Sequential(
            nn.ConvTranspose2d(dim, dim, 5, stride=2, padding=2, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(dim, dim, 5, stride=2, padding=2, output_padding=1),
            nn.ReLU(),
            nn.Conv2d(dim, 4, 3, padding=1),
        )

    def spatial_broadcast(self, slots: Tensor) -> Tensor:
        """Each slot at each pixel of a small image."""
        slots = slots.reshape(-1, slots.shape[-1])[:, None, None, :]
        return slots.repeat(1, *self.decoder_initial_size, 1)

    def unstack_and_split(self, x: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
        unstacked = x.reshape(batch_size, -1, *x.shape[1:])
        channels, masks = torch.split(unstacked, [3, 1], dim=2)
        return channels, masks

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self.encoder_cnn(image).permute(0, 2, 3, 1)
        x = self.encoder_pos(x).flatten(1, 2)
        x = self.mlp(self.norm(x))
        slots = self.slot_attention(x)

        x = self.decoder_pos(self.spatial_broadcast(slots)).permute(0, 3, 1, 2)
        x = self.decoder_cnn(x)
        recons, masks = self.unstack_and_split(x, image.shape[0])
        masks = F.softmax(masks, dim=1)
        recon_combined = torch.sum(recons * masks, dim=1)
        return recon_combined, recons, masks, slots


# ---- NeRF: the colours that rays meet --------------------------------------------------------------------------------


class Embedder(nn.Module):
    """A place, and sines and cosines of it at frequencies that double."""

    def __init__(self, input_dims: int, num_freqs: int) -> None:
        super().__init__()
        self.freq_bands = [2.0**i for i in range(num_freqs)]
        self.out_dim = input_dims * (1 + 2 * num_freqs)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for freq in self.freq_bands:
            for fn in (torch.sin, torch.cos):
                outputs.append(fn(x * freq))
        return torch.cat(outputs, -1)


class RadianceField(nn.Module):
    """Density and colour of a place, seen from a direction."""

    def __init__(self, depth: int, width: int, input_ch: int, input_ch_views: int, skips: tuple[int, ...]) -> None:
        super().__init__()
        self.skips = skips
        self.pts_linears = nn.ModuleList(
            [nn.Linear(input_ch, width)]
            + [nn.Linear(width + input_ch if i in skips else width, width) for i in range(depth - 1)]
        )
        self.views_linear = nn.Linear(input_ch_views + width, width // 2)
        self.feature_linear = nn.Linear(width, width)
        self.alpha_linear = nn.Linear(width, 1)
        self.rgb_linear = nn.Linear(width // 2, 3)

    def forward(self, input_pts: Tensor, input_views: Tensor) -> Tensor:
        h = input_pts
        for i, linear in enumerate(self.pts_linears):
            h = F.relu(linear(h))
            if i in self.skips:
                h = torch.cat([input_pts, h], -1)
        alpha = self.alpha_linear(h)
        feature = self.feature_linear(h)
        h = F.relu(self.views_linear(torch.cat([feature, input_views], -1)))
        return torch.cat([self.rgb_linear(h), alpha], -1)


def raw2outputs(raw: Tensor, z_vals: Tensor, rays_d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Colour, depth, opacity and weights of each ray, from density and colour along it."""
    dists = z_vals[..., 1:] - z_vals[..., :-1]
    dists = torch.cat([dists, torch.full_like(dists[..., :1], 1e4)], -1)
    dists = dists * torch.norm(rays_d[..., None, :], dim=-1)
    rgb = torch.sigmoid(raw[..., :3])
    alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
    # How much light passes all places before this one
    passed = torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1)
    weights = alpha * torch.cumprod(passed, -1)[:, :-1]
    rgb_map = torch.sum(weights[..., None] * rgb, -2)
    depth_map = torch.sum(weights * z_vals, -1)
    acc_map = torch.sum(weights, -1)
    return rgb_map, depth_map, acc_map, weights


def sample_pdf(bins: Tensor, weights: Tensor, n_samples: int, det: bool) -> Tensor:
    """More places at large weights, [rays, n_samples]."""
    weights = weights + 1e-5
    pdf = weights / torch.sum(weights, -1, keepdim=True)
    cdf = torch.cumsum(pdf, -1)
    cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
    if det:
        u = torch.linspace(0.0, 1.0, steps=n_samples, device=bins.device, dtype=bins.dtype)
        u = u.expand([*cdf.shape[:-1], n_samples])
    else:
        u = torch.rand([*cdf.shape[:-1], n_samples], device=bins.device, dtype=bins.dtype)
    u = u.contiguous()
    inds = torch.searchsorted(cdf, u, right=True)
    below = torch.clamp(inds - 1, min=0)
    above = torch.clamp(inds, max=cdf.shape[-1] - 1)
    cdf_below, cdf_above = torch.gather(cdf, 1, below), torch.gather(cdf, 1, above)
    bins_below, bins_above = torch.gather(bins, 1, below), torch.gather(bins, 1, above)
    denom = cdf_above - cdf_below
    denom = torch.where(denom < 1e-5, torch.ones_like(denom), denom)
    t = (u - cdf_below) / denom
    return bins_below + t * (bins_above - bins_below)


class NeRF(nn.Module):
    """Rays through one field after the other; each takes more samples at what the one before it saw."""

    def __init__(
        self, n_samples: tuple[int, ...] = (8, 4, 6), width: int = 24, near: float = 2.0, far: float = 6.0
    ) -> None:
        super().__init__()
        self.n_samples, self.near, self.far = n_samples, near, far
        self.embed = Embedder(3, num_freqs=4)
        self.embed_dirs = Embedder(3, num_freqs=2)
        self.fields = nn.ModuleList(
            RadianceField(4, width, self.embed.out_dim, self.embed_dirs.out_dim, skips=(1,)) for _ in n_samples
        )

    def run_network(self, pts: Tensor, viewdirs: Tensor, network: nn.Module) -> Tensor:
        pts_flat = pts.reshape(-1, 3)
        dirs_flat = viewdirs[:, None].expand(pts.shape).reshape(-1, 3)
        outputs = network(self.embed(pts_flat), self.embed_dirs(dirs_flat))
        return outputs.reshape(*pts.shape[:-1], 4)

    def first_depths(self, rays_o: Tensor) -> Tensor:
        """Depths along each ray, in even intervals."""
        t_vals = torch.linspace(0.0, 1.0, steps=self.n_samples[0], device=rays_o.device, dtype=rays_o.dtype)
        z_vals = (self.near * (1.0 - t_vals) + self.far * t_vals).expand(rays_o.shape[0], self.n_samples[0])
        if self.training:
            # A random place in each interval
            mids = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
            upper = torch.cat([mids, z_vals[..., -1:]], -1)
            lower = torch.cat([z_vals[..., :1], mids], -1)
            z_vals = lower + (upper - lower) * torch.rand_like(z_vals)
        return z_vals

    def finer_depths(self, z_vals: Tensor, weights: Tensor, n_samples: int) -> Tensor:
        """The same depths, and more of them at large weights."""
        z_vals_mid = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
        z_samples = sample_pdf(z_vals_mid, weights[..., 1:-1], n_samples, det=not self.training)
        z_vals, _ = torch.sort(torch.cat([z_vals, z_samples.detach()], -1), -1)
        return z_vals

    def forward(self, rays_o: Tensor, rays_d: Tensor) -> dict[str, Tensor]:
        viewdirs = rays_d / torch.norm(rays_d, dim=-1, keepdim=True)
        z_vals = self.first_depths(rays_o)
        weights = torch.zeros_like(z_vals)
        rgb_maps: list[Tensor] = []
        for level, field in enumerate(self.fields):
            if level > 0:
                z_vals = self.finer_depths(z_vals, weights, self.n_samples[level])
            pts = rays_o[..., None, :] + rays_d[..., None, :] * z_vals[..., :, None]
            raw = self.run_network(pts, viewdirs, field)
            rgb_map, depth_map, acc_map, weights = raw2outputs(raw, z_vals, rays_d)
            rgb_maps.append(rgb_map)
        return {"rgb": rgb_maps[-1], "depth": depth_map, "acc": acc_map, "coarser_rgb": torch.stack(rgb_maps[:-1])}


# ---- FNO: convolutions of all the plane, by its Fourier transform ----------------------------------------------------


def compl_mul2d(inputs: Tensor, weights: Tensor) -> Tensor:
    """(batch, in, x, y), (in, out, x, y) -> (batch, out, x, y)"""
    return torch.einsum("bixy,ioxy->boxy", inputs, weights)


class SpectralConv2d(nn.Module):
    """Multiplies the lowest frequencies by weights of their own, and drops the others."""

    def __init__(self, in_channels: int, out_channels: int, modes1: int, modes2: int) -> None:
        super().__init__()
        self.out_channels, self.modes1, self.modes2 = out_channels, modes1, modes2
        scale = 1 / (in_channels * out_channels)
        shape = (in_channels, out_channels, modes1, modes2)
        self.weights1 = nn.Parameter(scale * torch.rand(*shape, dtype=torch.cfloat))
        self.weights2 = nn.Parameter(scale * torch.rand(*shape, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        batchsize = x.shape[0]
        x_ft = torch.fft.rfft2(x)
        out_ft = torch.zeros(
            batchsize, self.out_channels, x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat, device=x.device
        )
        out_ft[:, :, : self.modes1, : self.modes2] = compl_mul2d(
            x_ft[:, :, : self.modes1, : self.modes2], self.weights1
        )
        out_ft[:, :, -self.modes1 :, : self.modes2] = compl_mul2d(
            x_ft[:, :, -self.modes1 :, : self.modes2], self.weights2
        )
        return torch.fft.irfft2(out_ft, s=(x.size(-2), x.size(-1)))


class FNO2d(nn.Module):
    """A field, from the same field some time ago and the places of its points."""

    def __init__(self, modes: tuple[int, int] = (4, 3), width: int = 8, steps: int = 3) -> None:
        super().__init__()
        self.padding = 2  # the field does not repeat
        self.fc0 = nn.Linear(steps + 2, width)
        self.conv0, self.conv1, self.conv2, self.conv3 = (SpectralConv2d(width, width, *modes) for _ in range(4))
        self.w0, self.w1, self.w2, self.w3 = (nn.Conv2d(width, width, 1) for _ in range(4))
        self.fc1 = nn.Linear(width, 16)
        self.fc2 = nn.Linear(16, 1)

    def get_grid(self, x: Tensor) -> Tensor:
        batchsize, size_x, size_y = x.shape[0], x.shape[1], x.shape[2]
        gridx = torch.linspace(0, 1, size_x, device=x.device).reshape(1, size_x, 1, 1)
        gridy = torch.linspace(0, 1, size_y, device=x.device).reshape(1, 1, size_y, 1)
        gridx = gridx.repeat([batchsize, 1, size_y, 1])
        gridy = gridy.repeat([batchsize, size_x, 1, 1])
        return torch.cat((gridx, gridy), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((x, self.get_grid(x)), dim=-1)
        x = self.fc0(x).permute(0, 3, 1, 2)
        x = F.pad(x, [0, self.padding, 0, self.padding])

        x = F.gelu(self.conv0(x) + self.w0(x))
        x = F.gelu(self.conv1(x) + self.w1(x))
        x = F.gelu(self.conv2(x) + self.w2(x))
        x = self.conv3(x) + self.w3(x)

        x = x[..., : -self.padding, : -self.padding].permute(0, 2, 3, 1)
        return self.fc2(F.gelu(self.fc1(x)))


def _text_and_frames(batch: int, size: Size) -> Inputs:
    return (torch.randint(1, 40, (batch, *size)), torch.randn(batch, 8, 5)), {}


def _points(batch: int, size: Size) -> Inputs:
    return (torch.randn(batch, 3, *size),), {}


def _noisy_actions(batch: int, size: Size) -> Inputs:
    return (torch.randn(batch, *size, 4), torch.randint(100, (batch,)), torch.randn(batch, 2, 5)), {}


def _rays(batch: int, size: Size) -> Inputs:
    return (torch.randn(batch, 3), torch.randn(batch, 3)), {}


_ORIGIN = "written here"

RESEARCH_CASES = (
    SurveyCase("Tacotron 2", _ORIGIN, Tacotron2, _text_and_frames, TOKENS),
    SurveyCase("PointNet++", _ORIGIN, PointNet2, _points, ((31,), (17,), (43,))),
    SurveyCase("diffusion policy U-Net", _ORIGIN, ConditionalUnet1D, _noisy_actions, ((16,), (8,), (24,))),
    SurveyCase("EfficientViT", _ORIGIN, EfficientViT, images(), ((37, 41), (53, 47), (71, 67))),
    SurveyCase("Slot attention", _ORIGIN, SlotAttentionAutoEncoder, lambda batch, size: images()(batch, (16, 12))),
    SurveyCase("NeRF", _ORIGIN, NeRF, _rays),
    SurveyCase("FNO", _ORIGIN, FNO2d, rows(3), ((13, 17), (11, 9), (19, 23))),
)
"""Speech, robots, scenes and physics."""
