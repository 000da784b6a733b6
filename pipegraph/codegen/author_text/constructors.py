"""The constructors of the modules that the author's text of a class reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn

from pipegraph.codegen.author_text.cut import UnwritableError
from pipegraph.codegen.expressions.module_tree import repeated_sequence
from pipegraph.codegen.expressions.torch_modules import module_constructor
from pipegraph.codegen.forward.items import Modules
from pipegraph.codegen.syntax.expressions import FunctionCall, call
from pipegraph.torch_private.modules import has_forward_hooks

CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)
"""Modules that have modules, and no ``forward``."""
_PARAMETERS = (nn.ParameterList, nn.ParameterDict)

Constructor = tuple[FunctionCall, Modules]
"""What makes a module, and the modules that it makes."""


@dataclass(frozen=True)
class ChildConstructors:
    """The constructors of the children of a module.

    Attributes:
        of_class: returns the constructor of a module that is not one of torch, by its FQN.
    """

    modules: Mapping[str, nn.Module]
    of_class: Callable[[str], Constructor]

    def below(self, fqn: str, names: set[str]) -> Iterator[tuple[str, Constructor]]:
        """Yield the constructor of each module that these children of a module, or children of them, need, by its FQN.

        Raises:
            UnwritableError: a child cannot be made.
        """
        for name in sorted(names):
            child = f"{fqn}.{name}" if fqn else name
            if child in self.modules:
                yield from self._child(child)

    def _child(self, fqn: str) -> Iterator[tuple[str, Constructor]]:
        module = self.modules[fqn]
        if isinstance(module, _PARAMETERS):
            return
        if type(module) in CONTAINERS:
            if not module._modules:
                yield fqn, (call(f"nn.{type(module).__name__}"), Modules(frozenset({fqn})))
            for name in module._modules:
                yield from self._child(f"{fqn}.{name}")
            return
        yield fqn, self._constructor(fqn)

    def _constructor(self, fqn: str) -> Constructor:
        module = self.modules[fqn]
        if has_forward_hooks(module) or "forward" in vars(module):
            raise UnwritableError(f"{fqn} has hooks")
        if type(module) is nn.Sequential:
            children = {name: self._constructor(f"{fqn}.{name}") for name in module._modules}
            parts = [modules for _, modules in children.values()]
            fqns, called, of_torch = (frozenset[str]().union(*(part[kind] for part in parts)) for kind in range(3))
            items = repeated_sequence({name: constructor for name, (constructor, _) in children.items()})
            return call("nn.Sequential", *items), Modules(fqns | {fqn}, called | {fqn}, of_torch)
        written = module_constructor(module)
        if written is None:
            return self.of_class(fqn)
        inner = frozenset(f"{fqn}.{name}" for name, _ in module.named_modules() if name)
        return written, Modules(inner | {fqn}, inner | {fqn}, inner | {fqn})


def state_names(module: nn.Module) -> set[str]:
    """The names of the parameters and buffers of a module, all names of a tensor that has several."""
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {name for name, _ in (*parameters, *buffers)}
