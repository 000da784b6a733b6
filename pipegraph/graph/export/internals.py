"""Private interfaces of torch that an export needs, each in a function that says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pipegraph.graph.internals import replaced


@contextmanager
def fixed_sizes_seen(see: Callable[[str, int], None]) -> Iterator[None]:
    """Call ``see`` when an export fixes a size of an input that might vary, while the code that fixes it runs.

    torch says which sizes are fixed, but not by which line of the model; the line that it logs is in torch.

    Args:
        see: takes the size as torch names it, ``L['tokens'].size()[1]``, and its value.
    """

    def replace(
        original: Callable[..., None], env: ShapeEnv, symbol: sympy.Symbol, to: sympy.Expr, reason: str
    ) -> None:
        if to.is_Integer:
            for source in env.var_to_sources.get(symbol, ()):
                see(_name(source), int(to))
        original(env, symbol, to, reason)

    with replaced(ShapeEnv, "_set_replacement", replace):
        yield


@contextmanager
def size_expressions_seen(see: Callable[[sympy.Basic, Callable[[sympy.Basic], list[str]]], None]) -> Iterator[None]:
    """Call ``see`` before an export evaluates a condition on sizes, while the code that needs it runs.

    torch simplifies the expression again at each evaluation, and does not limit its length. torch records guards
    outside of the method that is replaced here, so that it still records the line of the code that needs them.

    Args:
        see: takes the expression, and a function that returns torch's names of the sizes of a symbol.
    """

    def evaluate(original: Callable[..., Any], env: ShapeEnv, expression: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(expression, sympy.Basic):
            see(expression, lambda symbol: [_name(source) for source in env.var_to_sources.get(symbol, ())])
        return original(env, expression, *args, **kwargs)

    with replaced(ShapeEnv, "_maybe_evaluate_static", evaluate):
        yield


def _name(source: Any) -> str:
    name = source.name
    source_name: str = name() if callable(name) else name
    return source_name
