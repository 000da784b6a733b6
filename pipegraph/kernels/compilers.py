"""How graphs become kernels: as they are, or compiled by Inductor."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

from torch import fx

from pipegraph.kernels import internals
from pipegraph.kernels.decompositions import decompositions
from pipegraph.kernels.differentiate import Options
from pipegraph.kernels.internals import Run
from pipegraph.kernels.program import Compiler


@functools.cache
def compiler(name: str) -> Compiler:
    """The compiler called so, which all stages of this process share."""
    if name == "inductor":
        missing = internals.compiler_is_missing()
        if missing is None:
            return Compiler(_inductor)
        warnings.warn(
            f'Inductor needs a C++ compiler; the stages run uncompiled, as with kernels="eager": {missing}',
            stacklevel=4,
        )
    return Compiler(_eager)


def options(name: str, recompute: str) -> Options:
    """How graphs for the compiler called so are made, for stages that share blocks."""
    return Options(recompute, functools.partial(decompositions, inductor=name == "inductor"))


def _eager(modules: Sequence[fx.GraphModule]) -> list[Run]:
    return [internals.boxed(module) for module in modules]


def _inductor(modules: Sequence[fx.GraphModule]) -> list[Run]:
    with internals.quiet():
        found = internals.compile_graphs(modules)
    for index, (module, run) in enumerate(zip(modules, found, strict=True)):
        if isinstance(run, Exception):
            reason = str(run).strip().partition("\n")[0]
            warnings.warn(
                f"Inductor cannot compile a part of a stage, which runs uncompiled: {type(run).__name__}: {reason}",
                stacklevel=2,
            )
            found[index] = internals.boxed(module)
    return found  # type: ignore[return-value]
