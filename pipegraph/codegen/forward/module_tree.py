"""The tree of modules in a generated class, and the expressions that reach them: ``self.layers[0].norm``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from pipegraph.codegen.names.identifiers import is_plain
from pipegraph.codegen.syntax.expressions import SELF, Expression, FunctionCall, Literal, Subscript, attribute, string
from pipegraph.graph.captured import StateEntry

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass
class ModuleTree:
    """A module that only holds others (and, rarely, state of its own).

    Attributes:
        children: other such modules, or the constructors of modules, by name.
        state: parameters and buffers by name.
        is_class: whether it is the generated class itself.
        model_class: the container of ``torch.nn`` that the model has there, if it is one.
    """

    children: dict[str, ModuleTree | FunctionCall] = field(default_factory=dict)
    state: dict[str, StateEntry] = field(default_factory=dict)
    is_class: bool = False
    model_class: type[nn.Module] | None = None

    @property
    def container(self) -> type[nn.Module]:
        """The class that it is written as: the model's own container if its keys allow that, else a ModuleList for 0,
        1, …, a ModuleDict for other numbers and non-names, and ``nn.Module`` for names."""
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

    def child(self, owner: Expression, name: str) -> Expression:
        """The expression for a child: ``owner[0]``, ``owner["0"]`` or ``owner.name``."""
        if self.container is nn.Module:
            return attribute(owner, name)
        return Subscript(owner, (Literal(name, is_number=True) if self.is_indexed else string(name),))

    def at(self, path: Sequence[str]) -> ModuleTree | FunctionCall | None:
        """The holder or the constructor at a path."""
        here: ModuleTree | FunctionCall | None = self
        for name in path:
            here = here.children.get(name) if isinstance(here, ModuleTree) else None
        return here

    def access(self, path: Sequence[str]) -> Expression:
        """The expression for what stands at a path: ``self.model.layers["4"].norm``."""
        here: ModuleTree | FunctionCall | None = self
        owner: Expression = SELF
        for name in path:
            owner = here.child(owner, name) if isinstance(here, ModuleTree) else attribute(owner, name)
            here = here.children.get(name) if isinstance(here, ModuleTree) else None
        return owner

    def paths(self, prefix: str = "") -> Iterator[str]:
        """The names of all modules, relative to the class; an outer one stands before those in it."""
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
        module_at: gives the model's own module of a name.
    """
    root = ModuleTree(is_class=True)
    for name, constructor in constructors.items():
        *above, last = name.split(".")
        _descend(root, above).children[last] = constructor
    for name, entry in state.items():
        *above, last = name.split(".")
        _descend(root, above).state[last] = entry
    for path in root.paths():
        here = root.at(path.split("."))
        if isinstance(here, ModuleTree):
            module = module_at(path)
            here.model_class = next((each for each in _CONTAINERS if isinstance(module, each)), None)
    return root


def _descend(tree: ModuleTree, path: Sequence[str]) -> ModuleTree:
    for name in path:
        inner = tree.children.setdefault(name, ModuleTree())
        assert isinstance(inner, ModuleTree), f"{name} is a module of its own"
        tree = inner
    return tree
