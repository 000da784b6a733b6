"""The statement of a loop over modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from pipegraph.codegen.forward.items import AlternateCall, ModuleLoop
from pipegraph.codegen.forward.module_tree import ModuleTree
from pipegraph.codegen.syntax.expressions import (
    Conditional,
    Expression,
    Name,
    Slice,
    Subscript,
    call,
    method,
)
from pipegraph.codegen.syntax.literals import literal
from pipegraph.codegen.syntax.statements import For, If, Statement

Arguments = Sequence[Expression]


def loop_statement(
    loop: ModuleLoop,
    tree: ModuleTree,
    container: Sequence[str],
    names: tuple[str, str],
    iteration: Callable[[Expression, Arguments], Statement],
    arguments: Sequence[Arguments],
) -> For:
    """``for layer in self.layers: …``.

    Args:
        container: the path of what holds the modules.
        names: what a module and its number are called in the loop.
        iteration: the statement that calls a module with certain arguments.
        arguments: those of a call like the first one, and those of an alternate call.
    """
    module, number = map(Name, names)
    holder, owner = tree.at(container), tree.access(container)
    assert isinstance(holder, ModuleTree)
    numbers = [called.fqn.rpartition(".")[2] for called in loop.calls]
    first, last = int(numbers[0]), int(numbers[-1])
    everything, counted = list(holder.children) == numbers, loop.alternate is not None
    variables: tuple[Name, ...] = (number,)
    iterable: Expression = call("range", *([literal(first)] if first else []), literal(last + 1))
    called: Expression = module
    if holder.is_indexed and counted and everything:
        variables, iterable = (number, module), call("enumerate", owner)
    elif holder.is_indexed and counted:
        called = Subscript(owner, (number,))
    elif holder.is_indexed:
        stop = None if numbers[-1] == list(holder.children)[-1] else literal(last + 1)
        part = Slice(literal(first) if first else None, stop)
        variables, iterable = (module,), owner if everything else Subscript(owner, (part,))
    elif everything and not counted:
        variables, iterable = (module,), method(owner, "values" if holder.container is nn.ModuleDict else "children")
    elif holder.container is nn.ModuleDict:
        called = Subscript(owner, (call("str", number),))
    else:
        called = call("getattr", owner, call("str", number))
    body = _iteration(loop.alternate, number, lambda given: iteration(called, given), arguments)
    return For(tuple(variable.name for variable in variables), iterable, (body,))


def _iteration(
    alternate: AlternateCall | None,
    number: Name,
    statement: Callable[[Arguments], Statement],
    arguments: Sequence[Arguments],
) -> Statement:
    """One statement if the calls differ in one argument: ``x = layer(x, a if i % 2 else b)``; else one for each."""
    if alternate is None:
        return statement(arguments[0])
    test = alternate.test.of(number)
    first, other = arguments if alternate.holds_first else reversed(arguments)
    if differ_in_one(first, other):
        pairs = zip(first, other, strict=True)
        return statement([one if one == two else Conditional(one, test, two) for one, two in pairs])
    return If(test, (statement(first),), (statement(other),))


def differ_in_one(first: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two calls have the same arguments except for one."""
    return len(first) == len(other) and sum(one != two for one, two in zip(first, other, strict=True)) == 1
