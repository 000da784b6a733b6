"""Private interfaces of torch that ``codegen/`` uses: one function each, with the reason."""

from __future__ import annotations

from pipegraph.graph.internals import OpOverload


def defining_module(target: OpOverload) -> str | None:
    """Return the module in which ``torch.library.custom_op`` defined an operator; None if it was defined otherwise.

    ``OPDEFS`` is private. Publicly, nothing finds the definition of an operator by its name.
    """
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(target._schema.name)
    return definition._init_fn.__module__ if definition is not None else None
