"""What each call of a module was handed, under which names, and what it returned, as it happened during export.

A graph holds operations only. A value in it carries ``meta["handed"]`` and ``meta["returned"]``: for each call that
took it as an argument, or gave it back, where it stood there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer, get_proxy_slot
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class ArgumentPlace:
    """An argument of a call: its place among all the tensors handed over, and the name of the parameter of ``forward``
    (None for a part of a tuple, which has none)."""

    order: int
    name: str | None


@dataclass(frozen=True)
class ResultPlace:
    """A result of a call: its place among all the tensors returned and, where ``forward`` returns a tuple of so many,
    its index there (None for a part of a part)."""

    order: int
    index: int | None
    count: int


def argument_place(node: fx.Node, call: str) -> ArgumentPlace | None:
    """Where a value stood among the arguments of a call; None where it was none, or nothing is known of the call."""
    found: ArgumentPlace | None = node.meta.get("handed", {}).get(_name(call))
    return found


def result_place(node: fx.Node, call: str) -> ResultPlace | None:
    """Where a value stood in what a call returned; None where it was not returned, or nothing is known of the call."""
    found: ResultPlace | None = node.meta.get("returned", {}).get(_name(call))
    return found


def parameter_names(node: fx.Node) -> Iterator[tuple[str, str]]:
    """(FQN of the module, name of the parameter) for each call that took a value, in the order of the calls."""
    for call, place in node.meta.get("handed", {}).items():
        if place.name:
            yield call.partition("@")[0], place.name


def sorted_by_place(
    values: Sequence[fx.Node], places: Iterable[ArgumentPlace | ResultPlace | None]
) -> tuple[fx.Node, ...]:
    """Values in the order of their places; those without one come last, as they were."""
    known = [
        (sys.maxsize if place is None else place.order, value) for value, place in zip(values, places, strict=True)
    ]
    return tuple(value for _, value in sorted(known, key=lambda each: each[0]))


def copy_places(source: fx.Node, target: fx.Node) -> None:
    """Let ``target``, which takes the place of ``source``, stand for it in every call, or be another node of it."""
    for key in ("handed", "returned"):
        if key in source.meta:
            target.meta[key] = {**source.meta[key], **target.meta.get(key, {})}


@contextmanager
def record_calls() -> Iterator[None]:
    """Mark the values of every call of a module while a model is exported.

    Private interface: ``_ModuleStackTracer.call_module``, through which export runs each module (``fx.Tracer``
    documents the method for tracers of one's own, which export does not take). Hooks on the modules, the public way,
    would change what some of them do: ``nn.TransformerEncoderLayer`` asks for them.
    """
    before = _ModuleStackTracer.call_module

    def recorded(
        tracer: _ModuleStackTracer,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = _name(next(reversed(tracer.module_stack), ""))
            _mark(tracer, "handed", call, _arguments(module, args, kwargs))
            result = forward(*args, **kwargs)
            _mark(tracer, "returned", call, _results(result))
            return result

        return before(tracer, module, run, args, kwargs)

    setattr(_ModuleStackTracer, "call_module", recorded)  # noqa: B010 (mypy takes no other form)
    try:
        yield
    finally:
        setattr(_ModuleStackTracer, "call_module", before)  # noqa: B010


def plain_containers(tree: Any) -> Any:
    """Lists and dicts only: a named tuple becomes a list, a dataclass or a ``ModelOutput`` a dict."""
    if isinstance(tree, Mapping):
        return {str(key): plain_containers(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain_containers(value) for value in tree]
    if is_dataclass(tree) and not isinstance(tree, type):
        return {entry.name: plain_containers(getattr(tree, entry.name)) for entry in fields(tree)}
    return tree


def _name(call: str) -> str:
    """A call as the tracer and as the finished graph name it, without the name of the root that each puts first."""
    return call.removeprefix("_export_root").removeprefix("L__self__").lstrip(".")


def _mark(tracer: _ModuleStackTracer, key: str, call: str, values: Iterator[tuple[torch.Tensor, Any]]) -> None:
    for tensor, place in values:
        # A tensor that no operation gave, and no argument of the model, has no node.
        proxy = getattr(get_proxy_slot(tensor, tracer, None), "proxy", None)
        if proxy is not None:
            # Of a value that stands there twice, the first.
            proxy.node.meta.setdefault(key, {}).setdefault(call, place)


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
