"""The tree of modules in a generated class, and the expressions that reach them: ``self.layers[0].norm``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from pipegraph.codegen.names.identifiers import attribute, is_plain, literal_text
from pipegraph.graph.captured import StateEntry

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
