"""The variants of a stage for calls that differ in sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipegraph.errors import PipegraphError
from pipegraph.kernels.blocks.divided_function import reason_of
from pipegraph.kernels.stage_variant import StageCall, StageVariant
from pipegraph.kernels.symbolic_sizes import CallLayout, Dimension, Numbers, Shapes, call_layout
from pipegraph.kernels.trace_guard import MadeWhenCalled

Trace = Callable[[StageCall, CallLayout | None], StageVariant]
"""(a call, the layout of all calls like it or None for this shape alone) → a variant"""

STATIC = 2
"""How many shapes have kernels of their own. They are a little faster, and are made in less time."""


class FittingVariant(NamedTuple):
    """A variant and the sizes of a call that it is for. It is None for a call that is left to autograd.

    Attributes:
        refusal: why, if that has just been found.
    """

    variant: StageVariant | None
    numbers: Numbers = ()
    refusal: str | None = None


class ShapeVariants:
    """Static variants for the first two shapes, and from the third on symbolic ones, each for all sizes that fit it.

    There is more than one symbolic variant if the stage does different things for different sizes. If it cannot be
    traced with symbols, every shape has a static variant.

    Attributes:
        refusal: why the stage cannot be traced with symbols, or None.
        reasons: why shapes are left to autograd, each once.
    """

    def __init__(self) -> None:
        self.refusal: str | None = None
        self.reasons: dict[str, None] = {}
        self._static: dict[Any, StageVariant | None] = {}
        self._symbolic: list[StageVariant] = []
        self._call_shapes: list[Shapes] = []

    @property
    def every(self) -> list[StageVariant | None]:
        """The variants traced until now; None for a shape that is left to autograd."""
        return [*self._static.values(), *self._symbolic]

    @property
    def is_full(self) -> bool:
        """Whether all variants exist that different sizes alone need: static ones, and one for all other sizes."""
        return len(self.every) > STATIC

    @property
    def is_refused(self) -> bool:
        """Whether the first shapes are left to autograd. No other shape is then traced."""
        return len(self._static) >= STATIC and not any(self.every)

    def find(self, call: StageCall) -> FittingVariant | None:
        """Return the variant for a call, if there is one."""
        key = call.shapes, call.strides
        if key in self._static:
            return FittingVariant(self._static[key])
        for variant in self._symbolic:
            if (numbers := variant.match(call)) is not None:
                return FittingVariant(variant, numbers)
        return FittingVariant(None) if self.is_refused else None

    def add(self, call: StageCall, names: Sequence[Sequence[Dimension]], trace: Trace) -> FittingVariant:
        """Trace a variant for a call.

        Args:
            call: no variant is for it yet.
            names: what is known of the dimensions of each input.
            trace: raises PipegraphError for a stage or loss that is refused, MadeWhenCalled for one that cannot be
                traced yet, and anything for what cannot be traced.
        """
        self._call_shapes.append(call.shapes)
        if len(self._static) >= STATIC and self.refusal is None:
            try:
                return self._add_symbolic(call, names, trace)
            except (PipegraphError, MadeWhenCalled):
                raise
            except Exception as error:  # many operations take numbers alone
                self.refusal = reason_of(error)
        key = call.shapes, call.strides
        try:
            self._static[key] = trace(call, None)
        except (PipegraphError, MadeWhenCalled):
            raise
        except Exception as error:  # whatever an operation raises on a fake tensor
            self._static[key] = None
            self.reasons[reason_of(error)] = None
            return FittingVariant(None, refusal=reason_of(error))
        return FittingVariant(self._static[key])

    def _add_symbolic(self, call: StageCall, names: Sequence[Sequence[Dimension]], trace: Trace) -> FittingVariant:
        """Trace a variant for all sizes. Only if it does not take sizes of 1, as in this call, trace one for those."""
        dimension_names = call.named(names)
        general = call_layout(call.tensors, self._call_shapes, dimension_names)
        if general.match(call.tensors) != general.numbers and general.shapes not in map(_shapes, self._symbolic):
            self._symbolic.append(trace(call, general))
            if (numbers := self._symbolic[-1].match(call)) is not None:
                return FittingVariant(self._symbolic[-1], numbers)
        layout = call_layout(call.tensors, self._call_shapes, dimension_names, ones_as_sizes=False)
        if layout in (variant.layout for variant in self._symbolic):  # of this very call: another one would be equal
            raise RuntimeError("kernels that are compiled for a size do not take it")
        variant = trace(call, layout)
        if not variant.divided.hold(layout.numbers):
            raise RuntimeError("kernels that are traced for a size do not take it")
        self._symbolic.append(variant)
        return FittingVariant(variant, layout.numbers)

    def refused(self) -> ShapeVariants | None:
        """Return the shapes that are left to autograd, with the reasons; None without such shapes."""
        refused = ShapeVariants()
        refused._static = {key: None for key, variant in self._static.items() if variant is None}
        refused.reasons = self.reasons
        return refused if refused._static else None


def _shapes(variant: StageVariant) -> Any:
    return None if variant.layout is None else variant.layout.shapes
