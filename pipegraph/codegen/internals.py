"""Private interfaces of torch that ``codegen/`` uses: one function each, with the reason."""

from __future__ import annotations

from torch import nn

from pipegraph.graph.internals import OpOverload


def defining_module(target: OpOverload) -> str | None:
    """The module in which ``torch.library.custom_op`` made an operator; publicly none is found by its name."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(target._schema.name)
    return definition._init_fn.__module__ if definition is not None else None


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its ``forward``; hooks can only be added and removed publicly."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
