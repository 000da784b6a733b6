"""The names of a stage's random numbers. They do not depend on the cuts, or on the stage's own modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import fx

from pipegraph.graph.captured import Captured, runs_in_training
from pipegraph.graph.nodes import arguments_of, path_of
from pipegraph.torch_private.operators import OpOverload


def draw_names(captured: Captured, nodes: Sequence[fx.Node], called: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The names of a stage's draws by the module of the stage that makes them, in the order of training.

    The name of a draw is the module of the model that makes it, and the number of draws that the module makes before.
    Modules whose draws are exactly those with their own name, from 0 on, are left out.

    Args:
        captured: the model.
        nodes: the operations of the stage, in order.
        called: the modules that the stage calls.
    """
    names: dict[fx.Node, str] = {}
    counts: Counter[str] = Counter()
    for node in filter(draws_in_training, captured.nodes):
        module = path_of(node)[-1][1] if path_of(node) else ""
        names[node] = f"{module}#{counts[module]}"
        counts[module] += 1
    draws: dict[str, list[str]] = {}
    for node in nodes:
        if node in names:
            module = next((fqn for _, fqn in reversed(path_of(node)) if fqn in called), "")
            draws.setdefault(module, []).append(names[node])
    return {
        module: tuple(module_draws)
        for module, module_draws in draws.items()
        if module_draws != [f"{module}#{number}" for number in range(len(module_draws))]
    }


def draws_in_training(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers in training mode."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    arguments = arguments_of(node)
    probability = arguments.get("dropout_p", 0.0 if "query" in arguments else arguments.get("p", 1.0))
    return runs_in_training(node) and probability != 0 and arguments.get("train", True) is not False
