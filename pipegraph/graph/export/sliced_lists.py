"""The names of modules that a model takes from a slice of a list, such as ``self.blocks[1:]``."""

from __future__ import annotations

import re
from typing import Final

from torch import fx, nn
from torch.export import ExportedProgram

_SLICE: Final = re.compile(r"slice\((-?\d+|None), (-?\d+|None), (-?\d+|None)\)")


def name_in_lists(program: ExportedProgram, model: nn.Module) -> None:
    """Name modules by their place in the model where ``torch.export`` has a slice: if something in them is shared.

    before:  blocks.slice(1, None, None).0
    after:   blocks.1
    """
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            stack = node.meta.get("nn_module_stack", {})
            if any("slice(" in fqn for fqn, _ in stack.values()):
                named = {call: (_name(fqn, model), kind) for call, (fqn, kind) in stack.items()}
                node.meta["nn_module_stack"] = {call: pair for call, pair in named.items() if pair[0] is not None}


def _name(fqn: str, model: nn.Module) -> str | None:
    """The name without slices; None for a slice itself, which is no module of the model."""
    parts: list[str] = []
    names: list[str] | None = None  # of what the last slice has
    for part in fqn.split("."):
        match, module = _SLICE.fullmatch(part), model.get_submodule(".".join(parts))
        if match is not None:
            every = [str(number) for number in range(len(module))] if names is None else names  # type: ignore[arg-type]
            names = every[slice(*(None if bound == "None" else int(bound) for bound in match.groups()))]
            continue
        # A slice of a list counts again; one of a Sequential has its names.
        parts.append(part if names is None or not isinstance(module, nn.ModuleList) else names[int(part)])
        names = None
    return ".".join(parts) if names is None else None
