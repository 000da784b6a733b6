"""The names of a stage's random numbers: the same for every cut, wherever the stage's own modules draw them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import fx

from pipegraph.graph.captured import Captured, runs_in_training
from pipegraph.graph.internals import OpOverload
from pipegraph.graph.nodes import arguments_of, path_of


def draw_names(captured: Captured, nodes: Sequence[fx.Node], called: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The draws of a stage by the module of the stage that makes them, in the order in which it does in training.

    A draw is called after the module of the model that makes it, and by how many draws that makes before it. Left out
    are modules that draw what is called after themselves, from 0 on.

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
