"""Calls of equal code run once; for the others the terms of the first one are made again with their own arguments.

A model of 126 equal layers is compared in the time of one, and every term of every layer is there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipegraph.codegen.validation.recorder import RecordedTerms, TermRecorder
from pipegraph.torch_private.pytrees import pytree

SMALLEST = 4
"""Calls of fewer operations are run, which takes no longer."""


@dataclass(frozen=True)
class _Result:
    """A result of a call: its layout, and whether a gradient flows through it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    term: int
    requires_grad: bool


@dataclass(frozen=True)
class KnownCall:
    """A call that was run: its terms, the terms of its arguments and state, its results and how they are nested."""

    region: RecordedTerms
    arguments: tuple[int, ...]
    results: tuple[_Result, ...]
    form: pytree.TreeSpec


@dataclass
class RepeatedCalls:
    """The calls that were run so far, by their code and the layouts of their arguments."""

    _calls: dict[Hashable, KnownCall | None] = field(default_factory=dict)

    def run(self, recorder: TermRecorder, code: Hashable, arguments: Sequence[Tensor], call: Callable[[], Any]) -> Any:
        """Return the results of a call, which is run unless one of the same code was.

        Args:
            recorder: of this run.
            code: what is equal for two calls that compute the same of their arguments.
            arguments: all tensors that it reads, its parameters and buffers included.
            call: runs it.
        """
        terms = tuple(map(recorder.term_of, arguments))
        layouts = tuple(
            (terms.index(term), *_layout(tensor), recorder.requires_grad(tensor), recorder.number_key(term))
            for tensor, term in zip(arguments, terms, strict=True)
        )
        key = code, layouts, torch.is_grad_enabled(), _autocast_of(arguments)
        recorded = self._calls.get(key)
        if recorded is not None:
            return _replayed(recorder, recorded, terms)
        if key in self._calls:  # its terms do not say all that it does
            return call()
        with recorder.region() as region:
            returned = call()
        results, form = pytree.tree_flatten(returned)
        self._calls[key] = None
        if _is_closed(recorder, region, results) and not region.gives(terms):
            self._calls[key] = KnownCall(region, terms, tuple(_result(recorder, result) for result in results), form)
        return returned


def _layout(tensor: Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _autocast_of(arguments: Sequence[Tensor]) -> Hashable:
    """What autocast does on the devices of tensors."""
    devices = sorted({tensor.device.type for tensor in arguments})
    return tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices)


def _result(recorder: TermRecorder, tensor: Tensor) -> _Result:
    return _Result(
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        recorder.term_of(tensor),
        recorder.requires_grad(tensor),
    )


def _is_closed(recorder: TermRecorder, region: RecordedTerms, results: Sequence[Any]) -> bool:
    """Return whether the terms of a call are all that it leaves: it writes into none of its arguments, and its results
    share no memory with them or with one another."""
    if not all(isinstance(result, Tensor) for result in results):
        return False
    memories = [recorder.memory_number(result) for result in results]
    is_new = all(recorder.is_new(result, region) for result in results)
    return is_new and len(set(memories)) == len(memories) and not region.writes_outside


def _replayed(recorder: TermRecorder, recorded: KnownCall, terms: Sequence[int]) -> Any:
    replayed = recorder.replay(recorded.region, dict(zip(recorded.arguments, terms, strict=True)))
    results = []
    for result in recorded.results:
        tensor = _new_tensor(result)
        recorder.restore(tensor, replayed[result.term], result.requires_grad)
        results.append(tensor)
    return pytree.tree_unflatten(results, recorded.form)


def _new_tensor(result: _Result) -> Tensor:
    """A tensor like a result. It is never a leaf that requires a gradient: operations may write into it."""
    if not result.requires_grad:
        return torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=result.device)
    with torch.enable_grad():
        tensor: Tensor = _Computed.apply(torch.empty((), device=result.device, requires_grad=True), result)
    return tensor


class _Computed(torch.autograd.Function):
    """Makes a tensor that autograd takes for the result of an operation."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, result: _Result) -> Tensor:
        return torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=result.device)
