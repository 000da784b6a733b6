"""The attributes of a generated class: modules, parameters and buffers under the model's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from pipegraph.codegen.literals import literal
from pipegraph.codegen.names import attribute, is_number, is_plain, literal_text
from pipegraph.graph.captured import State


@dataclass
class Tree:
    """A module that only holds others (and, rarely, state of its own); ``is_class`` for the generated class itself."""

    children: dict[str, Tree | str] = field(default_factory=dict)
    state: dict[str, State] = field(default_factory=dict)
    is_class: bool = False

    @property
    def is_dict(self) -> bool:
        """Whether it is written as ``nn.ModuleDict``: its children have numbers or other non-names for names."""
        names = {} if self.is_class else self.children
        free = not any(hasattr(nn.ModuleDict, name) for name in names)
        return bool(names) and free and not self.state and not all(is_plain(name) for name in names)

    def at(self, path: Sequence[str]) -> Tree | str | None:
        """The holder or the constructor at a path."""
        here: Tree | str | None = self
        for name in path:
            here = here.children.get(name) if isinstance(here, Tree) else None
        return here


def build_tree(constructors: Mapping[str, str], state: Mapping[str, State]) -> Tree:
    """Arrange constructors and state by their names relative to the class."""
    root = Tree(is_class=True)
    for name, constructor in constructors.items():
        *above, last = name.split(".")
        _descend(root, above).children[last] = constructor
    for name, entry in state.items():
        *above, last = name.split(".")
        _descend(root, above).state[last] = entry
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
        is_dict = isinstance(here, Tree) and here.is_dict
        owner = f"{owner}[{literal_text(name)}]" if is_dict else attribute(owner, name)
        here = here.children.get(name) if isinstance(here, Tree) else None
    return owner


def assignments(tree: Tree, owner: str = "self") -> Iterator[str]:
    """The statements of ``__init__`` that make the attributes, in the model's order."""
    for name, entry in tree.state.items():
        yield _state(owner, name, entry)
    for name, child in tree.children.items():
        if tree.is_dict:
            if isinstance(child, Tree):
                yield from assignments(child, f"{owner}[{literal_text(name)}]")
            continue
        yield _module(owner, name, _holder(child) if isinstance(child, Tree) else child)
        if isinstance(child, Tree):
            yield from assignments(child, attribute(owner, name))


def _module(owner: str, name: str, constructor: str) -> str:
    if is_plain(name):
        return f"{owner}.{name} = {constructor}"
    return f"{owner}.add_module({literal_text(name)}, {constructor})"


def _holder(tree: Tree) -> str:
    """The constructor of a holder; a ModuleDict is made with its children."""
    if not tree.is_dict:
        return "nn.Module()"
    items = {name: _holder(child) if isinstance(child, Tree) else child for name, child in tree.children.items()}
    numbers = [int(name) for name in items if is_number(name)]
    constructor = next(iter(items.values()))
    counted = len(numbers) == len(items) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1))
    if counted and set(items.values()) == {constructor}:
        first = f"{numbers[0]}, " if numbers[0] else ""
        return f"nn.ModuleDict({{str(i): {constructor} for i in range({first}{numbers[-1] + 1})}})"
    inside = ", ".join(f"{literal_text(name)}: {constructor}" for name, constructor in items.items())
    return f"nn.ModuleDict({{{inside}}})"


def _state(owner: str, name: str, entry: State) -> str:
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
