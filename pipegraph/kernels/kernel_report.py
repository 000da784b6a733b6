"""How often stages and blocks have been traced and compiled, and for which sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.interface import StageKernels
from pipegraph.kernels.traced import TracedKernels


@dataclass(frozen=True)
class KernelCount:
    """The kernels of a stage's own code, or of a block. Other modes and dtypes of the same code are counted separately.

    Attributes:
        name: the class of the module.
        stages: the stages in which it runs.
        static: the number of shapes that have their own kernels.
        symbolic: the number of kernels for dynamic sizes: 1, and one more for each branch on sizes.
        autograd: the number of shapes that are left to autograd.
        conditions: for each symbolic kernel, the conditions on its sizes.
        reasons: why shapes are left to autograd.
        inlined: the repeated modules that are compiled again at each call in the code, and why.
    """

    name: str
    stages: tuple[int, ...]
    static: int
    symbolic: int
    autograd: int
    conditions: tuple[tuple[str, ...], ...]
    reasons: tuple[str, ...] = ()
    inlined: tuple[str, ...] = ()

    @property
    def compilations(self) -> int:
        """How often the code was compiled."""
        return self.static + self.symbolic

    def __str__(self) -> str:
        where = f"{self.name} (stage {', '.join(map(str, self.stages))})"
        parts = [f"{self.static} static", f"{self.symbolic} symbolic"]
        parts += [f"{self.autograd} left to autograd"] if self.autograd else []
        conditions = [" and ".join(terms) for terms in self.conditions if terms]
        parts[-1] += f" ({'; '.join(self.reasons)})" if self.reasons else ""
        parts += self.inlined
        return f"{where}: {', '.join(parts)}{''.join(f'; for {condition}' for condition in conditions)}"


def kernels_report(kernels: Mapping[int, StageKernels]) -> list[KernelCount]:
    """Return the counts of all stages that are traced, and then of their blocks, each once."""
    counts: list[KernelCount] = []
    blocks: dict[Any, dict[DividedFunction, None]] = {}
    stages: dict[Any, dict[int, None]] = {}
    for stage, stage_kernels in kernels.items():
        if not isinstance(stage_kernels, TracedKernels):
            continue
        for variants in stage_kernels.by_kind:
            functions = [variant.divided for variant in variants.every if variant is not None]
            autograd_count = len(variants.every) - len(functions)
            counts.append(_count(stage_kernels.name, (stage,), functions, autograd_count, tuple(variants.reasons)))
            for block in (block for function in functions for block in _blocks(function)):
                blocks.setdefault(block.family, {})[block] = None
                stages.setdefault(block.family, {})[stage] = None
    return counts + [
        _count(next(iter(members)).name, tuple(stages[family]), list(members), 0) for family, members in blocks.items()
    ]


def _count(
    name: str, stages: tuple[int, ...], functions: list[DividedFunction], autograd: int, reasons: tuple[str, ...] = ()
) -> KernelCount:
    symbolic = [function for function in functions if function.sizes]
    inlined = {name: why for function in functions for name, why in function.inlined.items()}
    return KernelCount(
        name,
        stages,
        len(functions) - len(symbolic),
        len(symbolic),
        autograd,
        tuple(tuple(function.sizes.described()) for function in symbolic),
        reasons,
        tuple(f"{name} in it compiled at each call ({why})" for name, why in inlined.items()),
    )


def _blocks(function: DividedFunction) -> Iterator[DividedFunction]:
    for block in function.blocks:
        yield block
        yield from _blocks(block)
