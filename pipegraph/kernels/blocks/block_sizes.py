"""The sizes of a call of a block, apart from the expressions that the caller has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipegraph.kernels.symbolic.internals import evaluate, expression, is_symbolic, placeholder_symbol
from pipegraph.kernels.symbolic.symbolic_sizes import contiguous_strides, dimensions


@dataclass(frozen=True)
class Layout:
    """Sizes and strides of a tensor: numbers, and expressions of the symbols that stand for the block's sizes."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of a call's arguments.

    Two calls with equal layouts run the same code, whatever their sizes: the caller's `seq // 2` is as good as `seq`.

    Attributes:
        layouts: of each argument, its `Layout`, the symbol of a size, or None for what is neither.
        symbols: what stands for the block's sizes in the layouts.
        values: what the sizes are in the caller.
    """

    layouts: tuple[Any, ...]
    symbols: tuple[Any, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> BlockSizes:
        """Return those of the flattened arguments."""
        names = _Names()
        shapes = [names.of_all(leaf.shape) if isinstance(leaf, Tensor) else names.of(leaf) for leaf in leaves]
        layouts = [
            Layout(shape, names.strides(leaf, shape))
            if isinstance(leaf, Tensor)
            else shape
            if is_symbolic(leaf)
            else None
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        return cls(tuple(layouts), tuple(names.symbols.values()), tuple(names.values))

    def at(self, layout: Any, values: Sequence[Any]) -> Any:
        """Return a layout, or a size, with other values for the block's sizes."""
        given = dict(zip(self.symbols, values, strict=True))
        if not isinstance(layout, Layout):
            return evaluate(layout, given)
        shape, strides = ([evaluate(each, given) for each in part] for part in (layout.shape, layout.strides))
        return Layout(tuple(shape), tuple(strides))


class _Names:
    """A symbol for each distinct expression among the caller's sizes."""

    def __init__(self) -> None:
        self.symbols: dict[Any, Any] = {}
        self.values: list[Any] = []

    def of(self, value: Any) -> Any:
        found = expression(value)
        if not is_symbolic(value) or isinstance(found, int):
            return found
        if found not in self.symbols:
            self.symbols[found] = placeholder_symbol(len(self.values))
            self.values.append(value)
        return self.symbols[found]

    def of_all(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(self.of, values))

    def strides(self, tensor: Tensor, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """The strides as expressions of the sizes' symbols. What does not follow from them is a symbol of its own."""
        if dimensions(contiguous_strides(tensor.shape)) == dimensions(tensor.stride()):
            return contiguous_strides(shape)
        return tuple(map(self._stride, tensor.stride()))

    def _stride(self, value: Any) -> Any:
        found = expression(value)
        if isinstance(found, int):
            return found
        renamed = found.xreplace(self.symbols)
        return renamed if renamed.free_symbols <= {*self.symbols.values()} else self.of(value)
