"""The tree of modules in a class: expressions of modules, ``self.layers[0].norm``, and statements that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import nn

from pipegraph.codegen.names.identifiers import is_number, is_plain
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Attribute,
    Collection,
    Expression,
    FunctionCall,
    Literal,
    Name,
    Subscript,
    Template,
    attribute,
    call,
    conditional,
    literal,
    method,
    string,
)
from pipegraph.codegen.syntax.loop_index import separating_test
from pipegraph.codegen.syntax.statements import Assign, Evaluate, RegisterConstant, Statement
from pipegraph.graph.captured import StateEntry

_OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
_COPIES = "[{} for _ in {}]"  # the template of equal modules
_FEW_COPIES = 4  # that may stand one by one
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, *_OF_PARAMETERS)
# Bytes of an element → whole numbers of that width. A complex128 is 16 of them; without dimensions it has no such view.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.uint8}


@dataclass
class ModuleTree:
    """A module that only holds other modules (and, rarely, parameters and buffers).

    Attributes:
        children: trees of the same kind, or the constructors of modules, by name.
        state: parameters and buffers by name.
        is_class: whether it is the generated class itself.
        model_class: the container of ``torch.nn`` at the same place in the model, if there is one.
    """

    children: dict[str, ModuleTree | FunctionCall] = field(default_factory=dict)
    state: dict[str, StateEntry] = field(default_factory=dict)
    is_class: bool = False
    model_class: type[nn.Module] | None = None

    @property
    def container(self) -> type[nn.Module]:
        """Its class in generated source.

        It is the model's own container if the names of the children allow that. Otherwise it is a ModuleList for 0, 1,
        …, a ModuleDict for all other names, and a ParameterDict for parameters alone. It is a ``nn.Module`` if it has
        buffers, or names that a dict has itself. Of the generated class itself it is the base.
        """
        if self.is_class:
            is_free = not any(hasattr(nn.ModuleDict, name) for name in (*self.children, *self.state))
            return nn.Module if all(map(is_plain, self.children)) or not is_free else nn.ModuleDict
        names = [] if self.state else list(self.children)
        if self.state or self.model_class in _OF_PARAMETERS:
            are_parameters = all(entry.kind == "parameter" for entry in self.state.values())
            if self.children or not are_parameters or any(hasattr(nn.ParameterDict, name) for name in self.state):
                return nn.Module
            is_listed = list(self.state) == [str(index) for index in range(len(self.state))]
            return nn.ParameterList if is_listed and self.model_class is nn.ParameterList else nn.ParameterDict
        if not names or any(hasattr(nn.ModuleDict, name) for name in names):
            return nn.Module
        if self.model_class is nn.ModuleDict:
            return nn.ModuleDict
        if names == [str(index) for index in range(len(names))]:
            return self.model_class or nn.ModuleList
        return nn.ModuleDict

    @property
    def is_indexed(self) -> bool:
        """Whether its children, or its parameters, are elements of a list."""
        return self.container in (nn.ModuleList, nn.Sequential, nn.ParameterList)

    @property
    def elements(self) -> list[str]:
        """The names of its children, or of its parameters if it is a container of these."""
        return list(self.state if self.container in _OF_PARAMETERS else self.children)

    def child(self, owner: Expression, name: str) -> Expression:
        """The expression for a child: ``owner[0]``, ``owner["0"]`` or ``owner.name``."""
        is_container_of_model = self.model_class is not None and not self.is_class
        if self.container is nn.Module or (is_plain(name) and not is_container_of_model):
            return attribute(owner, name)
        return Subscript(owner, (Literal(name, is_number=True) if self.is_indexed else string(name),))

    def at(self, path: Sequence[str]) -> ModuleTree | FunctionCall | None:
        """The tree or the constructor at a path."""
        tree: ModuleTree | FunctionCall | None = self
        for name in path:
            tree = tree.children.get(name) if isinstance(tree, ModuleTree) else None
        return tree

    def access(self, path: Sequence[str]) -> Expression:
        """The expression of the module at a path: ``self.model.layers["4"].norm``."""
        tree: ModuleTree | FunctionCall | None = self
        owner: Expression = SELF
        for name in path:
            owner = tree.child(owner, name) if isinstance(tree, ModuleTree) else attribute(owner, name)
            tree = tree.children.get(name) if isinstance(tree, ModuleTree) else None
        return owner

    def paths(self, prefix: str = "") -> Iterator[str]:
        """The names of all modules, relative to the class; each before those inside it."""
        for name, child in self.children.items():
            yield f"{prefix}{name}"
            if isinstance(child, ModuleTree):
                yield from child.paths(f"{prefix}{name}.")


def build_tree(
    constructors: Mapping[str, FunctionCall],
    state: Mapping[str, StateEntry],
    module_at: Callable[[str], nn.Module | None],
) -> ModuleTree:
    """Arrange constructors and state by their names relative to the class.

    Args:
        module_at: returns the model's own module of a name.
    """
    root = ModuleTree(is_class=True)
    for name, constructor in constructors.items():
        *above, last = name.split(".")
        _descend(root, above).children[last] = constructor
    for name, entry in state.items():
        *above, last = name.split(".")
        _descend(root, above).state[last] = entry
    for path in root.paths():
        tree = root.at(path.split("."))
        if isinstance(tree, ModuleTree):
            module = module_at(path)
            tree.model_class = next((container for container in _CONTAINERS if isinstance(module, container)), None)
    return root


def _descend(tree: ModuleTree, path: Sequence[str]) -> ModuleTree:
    for name in path:
        inner = tree.children.setdefault(name, ModuleTree())
        assert isinstance(inner, ModuleTree), f"{name} is a separate module"
        tree = inner
    return tree


# Up to this number, modules of two classes are listed one by one.
_LISTED = 4
# From this number on, equal modules among others are a comprehension.
_REPEATED = 3
_INDEX = Name("i")


def init_statements(tree: ModuleTree, owner: Expression = SELF) -> Iterator[Statement]:
    """The statements of ``__init__`` that make modules, parameters and buffers, in the model's order."""
    for name, entry in tree.state.items() if tree.container not in _OF_PARAMETERS else ():
        yield _register_state(owner, name, entry)
    names = list(tree.children)
    constructors = [_container(child) if isinstance(child, ModuleTree) else child for child in tree.children.values()]
    for start, stop in _runs(constructors, names):
        is_update = tree.is_class and tree.container is nn.ModuleDict and stop - start >= _REPEATED
        if is_update:
            yield Evaluate(method(owner, "update", _numbered(constructors[start], list(map(int, names[start:stop])))))
        for name, constructor in zip(names[start:stop], constructors[start:stop], strict=True):
            if not is_update and (tree.is_class or tree.container is nn.Module):
                yield _register_module(tree, owner, name, constructor)
            child = tree.children[name]
            if isinstance(child, ModuleTree):
                yield from init_statements(child, tree.child(owner, name))


def _register_module(tree: ModuleTree, owner: Expression, name: str, constructor: Expression) -> Statement:
    if is_plain(name) or tree.container is nn.ModuleDict:
        return Assign((tree.child(owner, name),), constructor)
    return Evaluate(method(owner, "add_module", string(name), constructor))


def _register_state(owner: Expression, name: str, entry: StateEntry) -> Statement:
    if entry.kind != "parameter":
        options = {} if entry.persistent else {"persistent": literal(False)}
        registered = method(owner, "register_buffer", string(name), _new_tensor(entry), **options)
        has_bits = entry.dtype.itemsize < 16 or entry.shape
        if entry.kind == "constant" and not entry.follows_model and _is_differentiable(entry) and has_bits:
            bits = literal(_BITS[entry.dtype.itemsize])
            return RegisterConstant(registered, Attribute(owner, name), literal(entry.dtype), bits)
        return Evaluate(registered)
    if is_plain(name):
        return Assign((Attribute(owner, name),), _new_parameter(entry))
    return Evaluate(method(owner, "register_parameter", string(name), _new_parameter(entry)))


def _is_differentiable(entry: StateEntry) -> bool:
    return entry.dtype.is_floating_point or entry.dtype.is_complex


def _new_parameter(entry: StateEntry) -> FunctionCall:
    options = {} if _is_differentiable(entry) else {"requires_grad": literal(False)}
    return call("nn.Parameter", _new_tensor(entry), **options)


def _new_tensor(entry: StateEntry) -> FunctionCall:
    """The value that a parameter is made with, if it is one number. All others are initialised, or read, afterwards."""
    sizes = [literal(size) for size in entry.shape] or [literal(())]
    dtype = {} if entry.dtype == torch.float32 else {"dtype": literal(entry.dtype)}
    number = None if entry.initialisation is None else entry.initialisation.constant
    if number is None:
        return call("torch.empty", *sizes, **dtype)
    if number in (0, 1):
        return call("torch.ones" if number else "torch.zeros", *sizes, **dtype)
    return call("torch.full", literal(entry.shape), literal(number), **dtype)


def _container(tree: ModuleTree) -> FunctionCall:
    """The constructor of a module that holds others; a list or a dict is made with its children."""
    if tree.container is nn.Module:
        return call("nn.Module")
    items = {
        name: _container(child) if isinstance(child, ModuleTree) else child for name, child in tree.children.items()
    }
    if tree.container in _OF_PARAMETERS:
        items = {name: _new_parameter(entry) for name, entry in tree.state.items()}
    if tree.container is nn.ParameterDict:
        every = dictionary(items)
        # It sorts the names of a dictionary that is not said to be in order.
        return call("nn.ParameterDict", every if list(items) == sorted(items) else call("OrderedDict", every))
    numbers = [int(name) for name in items if is_number(name)]
    element = _element(numbers, list(items.values()))
    kind = f"nn.{tree.container.__name__}"
    if tree.container is nn.Sequential:
        return call(kind, *repeated_sequence(items))
    if tree.is_indexed:
        every = Collection(_in_order(list(items.values())), "[]") if element is None else _comprehension(element, items)
        return call(kind, every)
    return call(kind, dictionary(items) if element is None else _numbered(element, numbers))


def sequence(children: Mapping[str, Expression]) -> tuple[Expression, ...]:
    """The arguments of the constructor of a ``nn.Sequential``: modules, or a dictionary of them if they have names."""
    if list(children) == [str(index) for index in range(len(children))]:
        return _in_order(list(children.values()))
    return (call("OrderedDict", dictionary(children)),)


def dictionary(items: Mapping[str, Expression]) -> Expression:
    """A dictionary by name, in braces: ``{"1": Embed(), **{str(i): Block() for i in range(2, 6)}}``."""
    entries: list[Expression] = []
    names, values = list(items), list(items.values())
    for start, stop in _runs(values, names):
        if stop - start < _REPEATED or not is_number(names[start]):
            entries += [Template("{}: {}", (string(names[at]), values[at])) for at in range(start, stop)]
        else:
            entries.append(Template("**{}", (_numbered(values[start], list(map(int, names[start:stop]))),)))
    return Collection(tuple(entries), "{}")


def _in_order(values: Sequence[Expression]) -> tuple[Expression, ...]:
    """The elements of a list: ``Embed(), *[Block() for _ in range(6)], Head()``."""
    elements: list[Expression] = []
    for start, stop in _runs(values):
        count = stop - start
        if count < _REPEATED:
            elements += values[start:stop]
        else:
            elements.append(Template(f"*{_COPIES}", (values[start], call("range", literal(count)))))
    return tuple(elements)


def _runs(values: Sequence[Expression], names: Sequence[str] = ()) -> Iterator[tuple[int, int]]:
    """(Start, stop) of each run of equal values; with names, of those that are numbered one after the other."""
    start = 0
    for at in range(1, len(values) + 1):
        if at < len(values) and values[at] == values[start]:
            pair = names[at - 1 : at + 1]
            if not pair or (all(map(is_number, pair)) and int(pair[1]) == int(pair[0]) + 1):
                continue
        if start < at:
            yield start, at
        start = at


def repeated_sequence(children: Mapping[str, FunctionCall]) -> tuple[Expression, ...]:
    """The same, with a comprehension for equal modules: ``*[Block() for _ in range(6)]``."""
    numbers = [int(name) for name in children if is_number(name)]
    element = _element(numbers, list(children.values()))
    if element is None:
        return sequence(children)
    if numbers[0] == 0:
        return (Template("*{}", (_comprehension(element, children),)),)
    return (call("OrderedDict", _numbered(element, numbers)),)


def _numbered(element: Expression, numbers: Sequence[int]) -> Expression:
    """``{str(i): Block() for i in range(2, 6)}``."""
    first, *_, last = numbers
    counted = call("range", *([literal(first)] if first else []), literal(last + 1))
    return Template("{{str(i): {} for i in {}}}", (element, counted))


def _comprehension(element: Expression, children: Mapping[str, FunctionCall]) -> Expression:
    template = _COPIES if len(set(children.values())) == 1 else f"[{{}} for {_INDEX.name} in {{}}]"
    return Template(template, (element, call("range", literal(len(children)))))


def _element(numbers: Sequence[int], constructors: Sequence[FunctionCall]) -> Expression | None:
    """The expression that makes each module of a comprehension: ``Block()`` or, for many modules of two classes,
    ``Block() if i % 2 else Other()``.

    None if the modules are not numbered consecutively, if no test of ``i`` separates their constructors, or if only the
    first or only the last module differs from the others.
    """
    if len(numbers) != len(constructors) or len(numbers) < 2 or numbers != list(range(numbers[0], numbers[-1] + 1)):
        return None
    if len(set(constructors)) == 1:
        return constructors[0]
    is_one_apart = len(set(constructors[1:])) == 1 or len(set(constructors[:-1])) == 1
    separation = separating_test(numbers, constructors) if len(constructors) > _LISTED and not is_one_apart else None
    if separation is None:
        return None
    test, chosen = separation
    other_constructor = next(constructor for constructor in constructors if constructor != chosen)
    return conditional(chosen, test.expression(_INDEX), other_constructor)


def expanded(node: Any) -> Any:
    """An expression with the copies of short comprehensions one by one: ``[Block(), Block()]``."""
    if isinstance(node, Template) and node.template == _COPIES:
        return _copies(node.operands) or node
    node = node.rebuilt(expanded)
    if isinstance(node, Collection) and node.brackets == "[]":
        return replace(node, items=tuple(item for entry in node.items for item in _elements(entry)))
    return node


def _elements(entry: Expression) -> Sequence[Expression]:
    """The elements for which an element of a list stands: those of ``*[Block() for _ in range(2)]``."""
    copies = _copies(entry.operands) if isinstance(entry, Template) and entry.template == f"*{_COPIES}" else None
    return [entry] if copies is None else copies.items


def _copies(operands: Sequence[Expression]) -> Collection | None:
    """The copies of a comprehension as a list; None if they are more than a few."""
    element, times = operands
    assert isinstance(times, FunctionCall)
    count = times.arguments[0].value.text
    is_short = count.isdigit() and int(count) <= _FEW_COPIES
    return Collection((expanded(element),) * int(count), "[]") if is_short else None


# ---- state access ----------------------------------------------------------------------------------------------------
# Expressions of the modules, parameters and buffers of a stage: ``self.layers[0].norm``.


def module_access(tree: ModuleTree, fqn: str) -> Expression:
    """The expression of a module of the stage; ``self.get_submodule("…")`` for an item inside a block."""
    return _plain_access(tree, fqn) or method(SELF, "get_submodule", string(fqn))


def parameter_access(tree: ModuleTree, fqn: str, is_buffer: bool = False) -> Expression:
    """The expression of a parameter or buffer of the stage; ``self.get_parameter("…")`` for one inside a block."""
    owner, _, name = fqn.rpartition(".")
    if is_plain(name) and (module := _plain_access(tree, owner)) is not None:
        return Attribute(module, name)
    return method(SELF, "get_buffer" if is_buffer else "get_parameter", string(fqn))


def _plain_access(tree: ModuleTree, fqn: str) -> Expression | None:
    """The expression of a module as attributes; None for an item inside a block, ``layers.0.heads.1``."""
    path = fqn.split(".") if fqn else []
    inside: list[str] = []
    while path and tree.at(path) is None:
        inside.insert(0, path.pop())
    return reduce(Attribute, inside, tree.access(path)) if all(map(is_plain, inside)) else None
