"""The attributes of a generated class: modules, parameters and buffers under the model's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from pipegraph.codegen.literals import literal
from pipegraph.codegen.names import attribute, is_number, is_plain, literal_text
from pipegraph.codegen.periods import told_apart
from pipegraph.graph.captured import StateEntry

# A row of modules with two constructors is listed up to this length.
_LISTED = 4
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass
class Tree:
    """A module that only holds others (and, rarely, state of its own); ``is_class`` for the generated class itself,
    ``model_class`` for the container of ``torch.nn`` that the model has there, if it is one."""

    children: dict[str, Tree | str] = field(default_factory=dict)
    state: dict[str, StateEntry] = field(default_factory=dict)
    is_class: bool = False
    model_class: type[nn.Module] | None = None

    @property
    def container(self) -> type[nn.Module]:
        """What it is written as: the model's own container where its keys allow, else a ModuleList for 0, 1, …, a
        ModuleDict for other numbers and non-names, and ``nn.Module`` for names."""
        names = [] if self.is_class or self.state else list(self.children)
        free = not any(hasattr(nn.ModuleDict, name) for name in names)
        if not names or not free:
            return nn.Module
        if self.model_class is nn.ModuleDict:
            return nn.ModuleDict
        if names == [str(index) for index in range(len(names))]:
            return self.model_class or nn.ModuleList
        return nn.Module if all(is_plain(name) for name in names) else nn.ModuleDict

    @property
    def is_indexed(self) -> bool:
        """Whether its children are elements of a ModuleList or a Sequential."""
        return self.container in (nn.ModuleList, nn.Sequential)

    def item(self, owner: str, name: str) -> str:
        """The expression for a child: ``owner[0]``, ``owner["0"]`` or ``owner.name``."""
        if self.container is nn.Module:
            return attribute(owner, name)
        return f"{owner}[{name if self.is_indexed else literal_text(name)}]"

    def at(self, path: Sequence[str]) -> Tree | str | None:
        """The holder or the constructor at a path."""
        here: Tree | str | None = self
        for name in path:
            here = here.children.get(name) if isinstance(here, Tree) else None
        return here


def build_tree(
    constructors: Mapping[str, str], state: Mapping[str, StateEntry], module_at: Callable[[str], nn.Module | None]
) -> Tree:
    """Arrange constructors and state by their names relative to the class; ``module_at`` gives the model's own module
    of a name."""
    root = Tree(is_class=True)
    for name, constructor in constructors.items():
        *above, last = name.split(".")
        _descend(root, above).children[last] = constructor
    for name, entry in state.items():
        *above, last = name.split(".")
        _descend(root, above).state[last] = entry
    for path in paths(root):
        here = root.at(path.split("."))
        if isinstance(here, Tree):
            module = module_at(path)
            here.model_class = next((each for each in _CONTAINERS if isinstance(module, each)), None)
    return root


def _descend(tree: Tree, path: Sequence[str]) -> Tree:
    for name in path:
        inner = tree.children.setdefault(name, Tree())
        assert isinstance(inner, Tree), f"{name} is a module of its own"
        tree = inner
    return tree


def paths(tree: Tree, prefix: str = "") -> Iterator[str]:
    """The names of all modules, relative to the class; an outer one stands before those in it."""
    for name, child in tree.children.items():
        yield f"{prefix}{name}"
        if isinstance(child, Tree):
            yield from paths(child, f"{prefix}{name}.")


def access(tree: Tree, path: Sequence[str], owner: str = "self") -> str:
    """The expression for what stands at a path: ``self.model.layers["4"].norm``."""
    here: Tree | str | None = tree
    for name in path:
        owner = here.item(owner, name) if isinstance(here, Tree) else attribute(owner, name)
        here = here.children.get(name) if isinstance(here, Tree) else None
    return owner


def assignments(tree: Tree, owner: str = "self") -> Iterator[str]:
    """The statements of ``__init__`` that make the attributes, in the model's order."""
    for name, entry in tree.state.items():
        yield _state(owner, name, entry)
    for name, child in tree.children.items():
        if tree.container is nn.Module:
            yield _module(owner, name, _holder(child) if isinstance(child, Tree) else child)
        if isinstance(child, Tree):
            yield from assignments(child, tree.item(owner, name))


def _module(owner: str, name: str, constructor: str) -> str:
    if is_plain(name):
        return f"{owner}.{name} = {constructor}"
    return f"{owner}.add_module({literal_text(name)}, {constructor})"


def _holder(tree: Tree) -> str:
    """The constructor of a holder; a container is made with its children."""
    if tree.container is nn.Module:
        return "nn.Module()"
    kind = f"nn.{tree.container.__name__}"
    items = {name: _holder(child) if isinstance(child, Tree) else child for name, child in tree.children.items()}
    each = _each([int(name) for name in items if is_number(name)], list(items.values()))
    if tree.is_indexed:
        name = "_" if len(set(items.values())) == 1 else "i"
        row = f"[{each} for {name} in range({len(items)})]" if each else f"[{', '.join(items.values())}]"
        if tree.container is nn.ModuleList:
            return f"{kind}({row})"
        return f"{kind}(*{row})" if each else f"{kind}({row[1:-1]})"
    if each:
        start, *_, end = map(int, items)
        return f"{kind}({{str(i): {each} for i in range({f'{start}, ' if start else ''}{end + 1})}})"
    inside = ", ".join(f"{literal_text(name)}: {constructor}" for name, constructor in items.items())
    return f"{kind}({{{inside}}})"


def _each(numbers: Sequence[int], constructors: Sequence[str]) -> str | None:
    """The one constructor of a row of modules, or of a long row the two that a test of ``i`` tells apart; None where
    they are not numbered in a row or more than that."""
    if len(numbers) != len(constructors) or len(numbers) < 2 or numbers != list(range(numbers[0], numbers[-1] + 1)):
        return None
    if len(set(constructors)) == 1:
        return constructors[0]
    test = told_apart(numbers, constructors) if len(constructors) > _LISTED else None
    if test is None:
        return None
    other = next(each for each in constructors if each != test[1])
    return f"{test[1]} if {test[0].format('i')} else {other}"


def _state(owner: str, name: str, entry: StateEntry) -> str:
    sizes = ", ".join(map(str, entry.shape)) if entry.shape else "()"
    dtype = "" if entry.dtype == torch.float32 else f", dtype={literal(entry.dtype)}"
    tensor = f"torch.empty({sizes}{dtype})"
    if entry.kind == "parameter":
        differentiable = entry.dtype.is_floating_point or entry.dtype.is_complex
        parameter = f"nn.Parameter({tensor})" if differentiable else f"nn.Parameter({tensor}, requires_grad=False)"
        if is_plain(name):
            return f"{owner}.{name} = {parameter}"
        return f"{owner}.register_parameter({literal_text(name)}, {parameter})"
    persistent = "" if entry.persistent else ", persistent=False"
    return f"{owner}.register_buffer({literal_text(name)}, {tensor}{persistent})"
