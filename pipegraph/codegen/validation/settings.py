"""The settings in which stages are compared: both modes, several sizes, and two floating dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.errors import PackageError
from pipegraph.graph.captured import Captured
from pipegraph.graph.nodes import OTHER_DTYPE, shape_of
from pipegraph.graph.symbolic_size import SizeLimits, SymbolicSize
from pipegraph.package.sizes import holds

_FURTHEST = 64
"""How far from the size of the capture another one is looked for."""


@dataclass(frozen=True)
class Setting:
    """One setting of a run.

    Attributes:
        training: whether in training mode.
        sizes: of inputs, by name; those that are left out are as in the capture.
        is_converted: whether the model is converted to another floating dtype.
    """

    training: bool
    sizes: Mapping[str, int] = field(default_factory=dict)
    is_converted: bool = False

    def __str__(self) -> str:
        mode = "training mode" if self.training else "evaluation mode"
        sizes = "".join(f", {name} {size}" for name, size in self.sizes.items())
        return f"{mode}{sizes}{', in another dtype' if self.is_converted else ''}"

    def number(self, value: Any) -> Any:
        """An argument of the captured graph, with a number for a dynamic size."""
        if not isinstance(value, SymbolicSize):
            return value
        return value.at({symbol: self.sizes.get(str(symbol), size) for symbol, size in value.symbols.items()})

    def dtype(self, node: fx.Node) -> torch.dtype:
        """The dtype of a captured tensor."""
        dtype: torch.dtype = node.meta["val"].dtype
        return node.meta.get(OTHER_DTYPE, dtype) if self.is_converted else dtype

    def fake(self, node: fx.Node) -> Tensor:
        """A fake tensor with the shape, dtype and order of dimensions of a captured one."""
        value = node.meta["val"]
        shape = tuple(int(self.number(size)) for size in shape_of(node))
        strides, step = [0] * len(shape), 1
        for dim in reversed(range(value.dim()) if value.is_contiguous() else value.dim_order()):
            strides[dim] = step
            step *= max(1, shape[dim])
        return torch.empty_strided(shape, strides, dtype=self.dtype(node), device=value.device)


def settings_of(captured: Captured, at_other_sizes: bool = True) -> Iterator[list[Setting]]:
    """Yield both modes, each at the sizes of the capture and at other sizes, and once another floating dtype.

    Of several settings in a list, the first that the captured graph takes counts: it may name sizes that the model
    takes only as a multiple of some number.

    Args:
        at_other_sizes: False if a variant is compared at other sizes.
    """
    modes = _modes(captured)
    alternatives = list(other_sizes(captured.sizes)) if at_other_sizes else []
    for training in modes:
        yield [Setting(training)]
        if alternatives:
            yield [Setting(training, sizes) for sizes in alternatives]
    if any(OTHER_DTYPE in node.meta for node in captured.graph.nodes):
        yield [Setting(modes[0], is_converted=True)]


def settings_of_variant(captured: Captured) -> Iterator[list[Setting]]:
    """Yield both modes, each at sizes that differ from the capture where the model takes them, as `settings_of` does.

    A variant is a capture with another number of iterations of a loop. Its first capture is compared at its own sizes.
    """
    for training in _modes(captured):
        alternatives = [Setting(training, sizes) for sizes in other_sizes(captured.sizes)]
        yield [*alternatives, Setting(training)]


def _modes(captured: Captured) -> tuple[bool, ...]:
    return (True, False) if captured.training else (False,)


def other_sizes(limits: SizeLimits) -> Iterator[dict[str, int]]:
    """Yield other values for the dynamic sizes, as far as the conditions of the model allow them.

    The first values are near the captured ones, with other differences and ratios between sizes. Multiples follow.
    """
    for multiple in (0, 2, 3):
        sizes = _others_near(limits, multiple)
        if sizes:
            yield sizes


def _others_near(limits: SizeLimits, multiple: int) -> dict[str, int]:
    """Another value for each size: near that of the capture, or at first a multiple of it."""
    sizes = dict(limits.captured)
    alternatives: dict[str, int] = {}
    for name, captured in limits.captured.items():
        near = chain.from_iterable((captured + away, captured - away) for away in range(1, _FURTHEST))
        candidates = [size for size in (multiple * captured, *near, 2 * captured, 3 * captured) if size > 0]
        allowed = [size for size in candidates if _is_allowed({**sizes, name: size}, limits)]
        unlike = (size for size in allowed if not _is_alike(name, size, alternatives, limits.captured))
        candidate = next(unlike, next(iter(allowed), None))
        if candidate is not None:
            sizes[name] = alternatives[name] = candidate
    return alternatives


def _is_alike(name: str, size: int, alternatives: Mapping[str, int], captured: Mapping[str, int]) -> bool:
    """Return whether a size and another one differ as they do in the capture, or have the same ratio."""
    return any(
        size - candidate == captured[name] - captured[peer] or size * captured[peer] == candidate * captured[name]
        for peer, candidate in alternatives.items()
    )


def _is_allowed(sizes: Mapping[str, int], limits: SizeLimits) -> bool:
    if any(size < limits.lowest.get(name, 1) for name, size in sizes.items()):
        return False
    if any(size > limits.highest.get(name, size) for name, size in sizes.items()):
        return False
    try:
        return all(holds(condition, sizes) for condition in limits.conditions)
    except PackageError:  # it divides by a size that would be 0
        return False
