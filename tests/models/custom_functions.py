"""Models with ``torch.autograd.Function``s whose backward is not the derivative of their forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LEVELS = 5
FACTOR = 0.5


def halved(x: Tensor) -> Tensor:
    return x * FACTOR


def half_of(levels: int) -> float:
    return (levels - 1) / 2


class RoundStraightThrough(torch.autograd.Function):
    """A straight-through estimator, as in finite scalar quantization."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Round to the levels."""
        half = half_of(LEVELS)
        return (torch.tanh(x) * half).round() / half  # between -1 and 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * half_of(LEVELS)


class ReverseGradient(torch.autograd.Function):
    """The gradient reversal of a domain classifier."""

    @staticmethod
    def forward(x: Tensor, strength: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.neg() * ctx.strength, None


class AddAuxiliaryLoss(torch.autograd.Function):
    """Returns its argument, and adds a gradient to the scores of a router."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scores: Tensor, weight: float) -> Tensor:
        ctx.save_for_backward(scores)
        ctx.weight = weight
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (scores,) = ctx.saved_tensors
        return gradient, ctx.weight * scores if ctx.needs_input_grad[1] else None, None


class BalanceBatch(torch.autograd.Function):
    """An auxiliary loss of the whole batch: how far the mean of the scores of each expert is from that of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scores: Tensor) -> Tensor:
        ctx.save_for_backward(scores)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (scores,) = ctx.saved_tensors
        return gradient, (scores.mean(0) - scores.mean()).expand_as(scores)


class AddLoss(torch.autograd.Function):
    """Returns its argument, and lets a loss have a gradient of 1, as DeepSeek does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        assert loss.numel() == 1
        ctx.dtype = loss.dtype
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones(1, dtype=ctx.dtype, device=gradient.device)


class SparseMixer(torch.autograd.Function):
    """The multiplier of PhiMoE, which estimates the gradient of the choice of an expert."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, multiplier: Tensor, selected: Tensor, masked_gates: Tensor, mask_for_one: Tensor
    ) -> Tensor:
        ctx.save_for_backward(multiplier, selected, masked_gates)
        return multiplier * mask_for_one

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        multiplier, selected, masked_gates = ctx.saved_tensors
        scaled = gradient * multiplier
        of_scores = masked_gates * scaled.mul(-1)
        of_scores.scatter_add_(dim=-1, index=selected, src=scaled)
        return of_scores, None, None, None, None


class Quantizer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(RoundStraightThrough.apply(self.encode(x)))


class DomainClassifier(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.strength = 0.25
        self.features, self.classify = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.classify(ReverseGradient.apply(self.features(x).relu(), self.strength))


class Balanced(nn.Module):
    """Two experts, each multiplied by a gate."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        gates = scores.softmax(-1)
        mixed = sum(expert(x) * gates[..., index : index + 1] for index, expert in enumerate(self.experts))
        return AddAuxiliaryLoss.apply(mixed, scores, 0.01)


class BatchBalanced(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(width, 2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        return BalanceBatch.apply(self.expert(x) * scores.softmax(-1)[..., :1], scores)


class WithLoss(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(width, 2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        loss = (scores.mean(0) ** 2).sum().view(1)
        return AddLoss.apply(self.expert(x) * scores[..., :1], loss)


class Mixed(nn.Module):
    """A mixture of experts with the routing of PhiMoE."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        _, selected = scores.max(dim=-1, keepdim=True)
        gates = scores.softmax(dim=-1)
        multiplier = gates.gather(dim=-1, index=selected)
        mask_for_one = torch.where(multiplier > 0.3, 1.0, 0.9).type_as(gates)
        multiplier = SparseMixer.apply(scores, multiplier, selected, gates, mask_for_one)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        index = selected[..., None].expand(*selected.shape, outputs.shape[-1])
        return outputs.gather(-2, index).squeeze(-2) * multiplier


def stack(kind: type[nn.Module], count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(count)))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Quantizer(), DomainClassifier(), Balanced(), Mixed())


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


_generator = torch.Generator().manual_seed(0)
example_inputs = (torch.randn(4, 5, 8, generator=_generator),)
example_target = torch.randn(4, 5, 8, generator=_generator)
