"""Compare training and evaluation mode by running a model without memory.

That takes a fraction of the time of a second export, which shows the first difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipegraph.graph.export.fake_parameters import active_fake_mode, fake_parameters
from pipegraph.graph.internals import TorchDispatchMode, exporting, pytree, version_of


def same_in_both_modes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether both modes run the same operations on the same arguments; False also if a mode cannot be run.

    The model is left as it was.
    """
    try:
        return _operations(model, True, args, kwargs) == _operations(model, False, args, kwargs)
    except Exception:  # whatever the model raises on tensors without values
        return False


def _operations(model: nn.Module, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    with (
        _attributes_restored(model),
        fake_parameters(model, args, kwargs) as (fake_args, fake_kwargs),
        exporting(),
        warnings.catch_warnings(),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")  # the model's own were shown when it was exported
        for module in model.modules():
            module.training = training
        with active_fake_mode(model, fake_args, fake_kwargs), _OperationRecord() as record:
            model(*fake_args, **fake_kwargs)
    return record.operations


class _OperationRecord(TorchDispatchMode):
    """Lists the operations that run, with a description of their arguments; not questions such as the device of a
    tensor, which a dropout of nothing asks in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "prim":
            self.operations.append((func, pytree.tree_map(_described, (args, kwargs))))
        return func(*args, **kwargs)


def _described(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def _attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo what a run does to the attributes of modules: a cache that it fills would hold tensors without memory.

    Buffers are no fake tensors, because models read their values; their values (a batch norm counts its batches) are
    put back.
    """
    held: list[Any] = [vars(module) for module in model.modules()]
    held += [value for attributes in held for value in attributes.values() if type(value) in (dict, list, set)]
    before = [(container, type(container)(container)) for container in held]
    buffers = [(buffer, buffer.detach().clone(), version_of(buffer)) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values, version in buffers:
                if version_of(buffer) != version:
                    buffer.copy_(values)
        for container, contents in before:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)
