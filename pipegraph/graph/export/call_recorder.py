"""Record the arguments, their names and the results of every call of a module while a model is exported.

The metadata of the values holds the record: see ``graph/call_arguments.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from pipegraph.graph.call_arguments import ArgumentPlace, ResultPlace, recorded_name
from pipegraph.graph.captured import plain_containers
from pipegraph.graph.internals import current_call, module_calls_wrapped, pytree, traced_node


def record_calls() -> AbstractContextManager[None]:
    """Mark the arguments and results of every call of a module that ``torch.export`` traces inside."""
    return module_calls_wrapped(_run_recorded)


def _run_recorded(
    tracer: Any, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    call = recorded_name(current_call(tracer))
    _mark(tracer, "argument_of", call, _arguments(module, args, kwargs))
    result = forward(*args, **kwargs)
    _mark(tracer, "result_of", call, _results(result))
    return result


def _mark(tracer: Any, key: str, call: str, values: Iterator[tuple[torch.Tensor, Any]]) -> None:
    for tensor, place in values:
        node = traced_node(tracer, tensor)
        if node is not None:
            # The first place of a value that has several counts.
            node.meta.setdefault(key, {}).setdefault(call, place)


def _arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, ArgumentPlace]]:
    """The tensors among the arguments of a call, in the order of the parameters of ``forward``."""
    try:
        signature = inspect.signature(module.forward)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return
    order = 0
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        named = value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        for key, each in named.items():
            for tensor in _tensors(each):
                whole = tensor is each and kind is not inspect.Parameter.VAR_POSITIONAL
                yield tensor, ArgumentPlace(order, key if whole else None)
                order += 1


def _results(result: Any) -> Iterator[tuple[torch.Tensor, ResultPlace]]:
    parts = list(result) if isinstance(result, (tuple, list)) else [result]
    order = 0
    for index, part in enumerate(parts):
        for tensor in _tensors(part):
            yield tensor, ResultPlace(order, index if tensor is part else None, len(parts))
            order += 1


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(plain_containers(value)) if isinstance(leaf, torch.Tensor)]
