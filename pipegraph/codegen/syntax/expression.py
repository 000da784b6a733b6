"""Source text of an expression, and how arguments stand in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pipegraph.codegen.syntax.literals import literal

# Binding strengths of Python's operators; an operand of a weaker one is put into brackets.
ATOM, POWER, UNARY, PRODUCT, SUM, AND, XOR, OR, COMPARE = 20, 15, 14, 13, 12, 10, 9, 8, 7


@dataclass(frozen=True)
class Expression:
    """Source text and how strongly its outermost operator binds."""

    text: str
    strength: int = ATOM

    def within(self, strength: int) -> str:
        """The text as an operand of an operator of that strength."""
        return self.text if self.strength >= strength else f"({self.text})"


@dataclass(frozen=True)
class Writer:
    """What an expression needs from its surroundings.

    Attributes:
        value: the expression of an argument.
        device: an expression for the device of the stage, where an operation names one.
    """

    value: Callable[[fx.Node], Expression]
    device: str

    def argument(self, argument: Any) -> str:
        """An argument of any kind as it stands in a call."""
        if isinstance(argument, fx.Node):
            return self.value(argument).text
        if isinstance(argument, torch.device):
            return self.device
        if isinstance(argument, tuple):
            return f"({', '.join(map(self.argument, argument))}{',' if len(argument) == 1 else ''})"
        if isinstance(argument, list):
            return f"[{', '.join(map(self.argument, argument))}]"
        return literal(argument)

    def operand(self, argument: Any, strength: int) -> str:
        """An argument as an operand."""
        if isinstance(argument, fx.Node):
            return self.value(argument).within(strength)
        text = literal(argument)
        return f"({text})" if text.startswith("-") and (strength > POWER or strength == SUM + 1) else text

    def call(self, name: str, positional: Sequence[Any], named: dict[str, Any]) -> Expression:
        """``name(positional…, named=…)``."""
        parts = [*map(self.argument, positional), *(f"{key}={self.argument(value)}" for key, value in named.items())]
        return Expression(f"{name}({', '.join(parts)})")

    def method(self, owner: Any, name: str, positional: Sequence[Any], named: dict[str, Any]) -> Expression:
        """``owner.name(…)``."""
        return self.call(f"{self.operand(owner, ATOM)}.{name}", positional, named)


Form = Callable[[fx.Node, dict[str, Any], Writer], Expression | None]
"""Writes an operation: takes its node, its arguments by name and a writer; gives None where it cannot say that use."""
