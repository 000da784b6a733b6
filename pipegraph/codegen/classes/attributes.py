"""The statements of ``__init__``: modules, parameters and buffers under the model's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from pipegraph.codegen.forward.index_tests import separating_test
from pipegraph.codegen.forward.module_tree import ModuleTree
from pipegraph.codegen.names.identifiers import is_number, is_plain
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Attribute,
    Collection,
    Expression,
    FunctionCall,
    Name,
    Template,
    call,
    conditional,
    literal,
    method,
    string,
)
from pipegraph.codegen.syntax.statements import Assign, Evaluate, Statement
from pipegraph.graph.captured import StateEntry

# Modules of two classes are listed one by one up to this number.
_LISTED = 4
_INDEX = Name("i")


def init_statements(tree: ModuleTree, owner: Expression = SELF) -> Iterator[Statement]:
    """The statements that make the attributes of a class, in the model's order."""
    for name, entry in tree.state.items():
        yield _register_state(owner, name, entry)
    for name, child in tree.children.items():
        if tree.container is nn.Module:
            yield _register_module(owner, name, _container(child) if isinstance(child, ModuleTree) else child)
        if isinstance(child, ModuleTree):
            yield from init_statements(child, tree.child(owner, name))


def _register_module(owner: Expression, name: str, constructor: Expression) -> Statement:
    if is_plain(name):
        return Assign((Attribute(owner, name),), constructor)
    return Evaluate(method(owner, "add_module", string(name), constructor))


def _register_state(owner: Expression, name: str, entry: StateEntry) -> Statement:
    sizes = [literal(size) for size in entry.shape] or [literal(())]
    dtype = {} if entry.dtype == torch.float32 else {"dtype": literal(entry.dtype)}
    tensor = call("torch.empty", *sizes, **dtype)
    if entry.kind != "parameter":
        options = {} if entry.persistent else {"persistent": literal(False)}
        return Evaluate(method(owner, "register_buffer", string(name), tensor, **options))
    differentiable = entry.dtype.is_floating_point or entry.dtype.is_complex
    parameter = call("nn.Parameter", tensor, **({} if differentiable else {"requires_grad": literal(False)}))
    if is_plain(name):
        return Assign((Attribute(owner, name),), parameter)
    return Evaluate(method(owner, "register_parameter", string(name), parameter))


def _container(tree: ModuleTree) -> FunctionCall:
    """The constructor of a module that holds others; a list or a dict is made with its children."""
    if tree.container is nn.Module:
        return call("nn.Module")
    items = {
        name: _container(child) if isinstance(child, ModuleTree) else child for name, child in tree.children.items()
    }
    element = _element([int(name) for name in items if is_number(name)], list(items.values()))
    kind = f"nn.{tree.container.__name__}"
    if tree.is_indexed:
        if element is None and tree.container is nn.Sequential:
            return call(kind, *items.values())
        variable = "_" if len(set(items.values())) == 1 else _INDEX.name
        children: Expression = Collection(tuple(items.values()), "[]")
        if element is not None:
            children = Template(f"[{{}} for {variable} in {{}}]", (element, call("range", literal(len(items)))))
        return call(kind, children if tree.container is nn.ModuleList else Template("*{}", (children,)))
    if element is None:
        pairs = (Template("{}: {}", (string(name), item)) for name, item in items.items())
        return call(kind, Collection(tuple(pairs), "{}"))
    first, *_, last = map(int, items)
    counted = call("range", *([literal(first)] if first else []), literal(last + 1))
    return call(kind, Template("{{str(i): {} for i in {}}}", (element, counted)))


def _element(numbers: Sequence[int], constructors: Sequence[FunctionCall]) -> Expression | None:
    """The expression that makes each of several modules: their constructor or, of many, one of two by a test of ``i``.

    None if they are not numbered consecutively, or differ in another way.
    """
    if len(numbers) != len(constructors) or len(numbers) < 2 or numbers != list(range(numbers[0], numbers[-1] + 1)):
        return None
    if len(set(constructors)) == 1:
        return constructors[0]
    found = separating_test(numbers, constructors) if len(constructors) > _LISTED else None
    if found is None:
        return None
    test, chosen = found
    other = next(each for each in constructors if each != chosen)
    return conditional(chosen, test.of(_INDEX), other)
