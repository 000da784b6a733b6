"""The registry of kernels. A new kind of kernels is one more maker here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from pipegraph.arguments import argument, require_type
from pipegraph.errors import PipegraphError, closest, nearest
from pipegraph.kernels.autograd import AutogradKernels
from pipegraph.kernels.cuda_graphs import MakeRecorder
from pipegraph.kernels.interface import Dynamic, Loss, StageKernels
from pipegraph.recompute import DEFAULT, Recompute

if TYPE_CHECKING:
    from pipegraph.kernels.graphs.regions import Regions

Maker = Callable[[nn.Module, Sequence[bool], Sequence[bool], Loss | None], StageKernels]
"""(stage, which inputs need a gradient, for which outputs one arrives, the loss after the last stage) → kernels"""


@dataclass(frozen=True)
class VariantOptions:
    """How often the kernels of a stage are traced.

    Attributes:
        max_variants: how many variants of a stage are traced, for different modes, dtypes, branches on sizes and so
            on. Further ones are left to autograd, with a warning.
        strict: whether that, and a stage that cannot be traced, is an error instead.
        dynamic: whether kernels are for all sizes from the first call (True), for one shape each (False), or for one
            shape each until the second shape ("auto").
        recorder: makes what records kernels as CUDA graphs; None to launch them one by one.

    Raises:
        PipegraphError: an attribute has another value.
    """

    max_variants: int = 8
    strict: bool = False
    dynamic: Dynamic = "auto"
    recorder: MakeRecorder | None = None

    def __post_init__(self) -> None:
        require_type(self.max_variants, int, "max_variants is a whole number from 1 on", "max_variants=8")
        if self.max_variants < 1:
            raise PipegraphError(f"max_variants cannot be {self.max_variants}: a stage is traced at least once.", "8.")
        if not isinstance(self.dynamic, bool) and self.dynamic != "auto":
            raise PipegraphError(
                f"dynamic cannot be {self.dynamic!r}: kernels are for all sizes, for one shape each, or for all sizes "
                "from the second shape.",
                f"dynamic=True, dynamic=False or {argument('dynamic', 'auto')}.",
            )


MakeMakers = Callable[[Sequence["Recompute | Regions"], VariantOptions], list[Maker]]


def _autograd(recompute: Sequence[Recompute | Regions], variants: VariantOptions) -> list[Maker]:
    if variants.recorder is not None:
        raise PipegraphError(
            f"{argument('kernels', 'autograd')} leaves every stage to autograd, of which no CUDA graph is recorded.",
            f"{argument('kernels', 'inductor')}.",
        )
    if variants.strict:
        raise PipegraphError(
            'kernels="autograd" leaves every stage to autograd, which strict=True refuses.', "one of the two."
        )
    return [AutogradKernels] * len(recompute)


def _traced(name: str) -> MakeMakers:
    def makers(recompute: Sequence[Recompute | Regions], variants: VariantOptions) -> list[Maker]:
        from pipegraph.kernels.compilers import compiler, options  # which import torch's compiler
        from pipegraph.kernels.traced import TracedKernels

        shared = options(name, recompute[0])
        return [
            partial(
                TracedKernels,
                compiler=compiler(name),
                options=replace(shared, recompute=choice),
                max_variants=variants.max_variants,
                strict=variants.strict,
                dynamic=variants.dynamic,
                recorder=variants.recorder,
            )
            for choice in recompute
        ]

    return makers


_MAKERS: dict[str, MakeMakers] = {
    "inductor": _traced("inductor"),
    "eager": _traced("eager"),
    "autograd": _autograd,
}


_DYNAMIC: dict[str, Dynamic] = {"auto": "auto", "true": True, "false": False}


def named_dynamic(name: str) -> Dynamic:
    """Return what a name of the command line is for `VariantOptions.dynamic`. Raises PipegraphError for another one."""
    if name not in _DYNAMIC:
        raise PipegraphError(
            f"{argument('dynamic')} cannot be {name!r}. There are: {', '.join(_DYNAMIC)}.",
            f"{argument('dynamic', 'true')}, if rows or lengths vary.",
        )
    return _DYNAMIC[name]


def names() -> tuple[str, ...]:
    """Return the names of all kinds of kernels."""
    return tuple(_MAKERS)


def check_name(name: str) -> None:
    """Raise PipegraphError for a name that is not in `names()`."""
    if name not in _MAKERS:
        raise PipegraphError(
            f'No kernels are called "{name}".{nearest(name, _MAKERS)} There are: {", ".join(_MAKERS)}.',
            f"{argument('kernels', closest(name, _MAKERS) or 'inductor')}.",
        )


def makers(
    name: str, recompute: Sequence[Recompute | Regions], variants: VariantOptions = VariantOptions()
) -> list[Maker]:
    """Return what makes the kernels of each stage of a pipeline. The stages share equal blocks.

    Args:
        name: one of `names()`.
        recompute: what the backward of each stage computes again.
        variants: how often the kernels of a stage are traced.

    Raises:
        PipegraphError: an argument has another value.
    """
    check_name(name)
    return _MAKERS[name](recompute, variants)


def maker(name: str, recompute: Any = DEFAULT, **options: Any) -> Maker:
    """Return what makes the kernels of stages that recompute alike. The arguments are as for `makers` and `make`, and
    the attributes of `VariantOptions`."""
    (stage_maker,) = makers(name, [_parsed(recompute)], VariantOptions(**options))
    return stage_maker


def make(
    name: str,
    stage: nn.Module,
    input_gradients: Sequence[bool],
    output_gradients: Sequence[bool],
    loss: Loss | None = None,
    recompute: Any = DEFAULT,
) -> StageKernels:
    """Return the kernels of one stage.

    Args:
        name: one of `names()`.
        stage: the module.
        input_gradients: of each input, whether its gradient is wanted.
        output_gradients: of each output, whether a gradient arrives.
        loss: the last segment of the last stage.
        recompute: what `Recompute.parse` takes; or the regions of a stage whose operations have places of their own.
    """
    return maker(name, recompute)(stage, input_gradients, output_gradients, loss)


def _parsed(recompute: Any) -> Recompute | Regions:
    from pipegraph.kernels.graphs.regions import Regions

    return recompute if isinstance(recompute, Regions) else Recompute.parse(recompute)
