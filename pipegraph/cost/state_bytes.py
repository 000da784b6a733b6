"""Bytes of parameters, buffers and constants."""

from __future__ import annotations

from collections.abc import Iterable

from pipegraph.graph.captured import StateEntry


def parameter_bytes(state: Iterable[StateEntry], trained: bool = False) -> int:
    """Of parameters; of those that are ``trained``, which have a gradient."""
    parameters = (entry for entry in state if entry.kind == "parameter" and (entry.requires_grad or not trained))
    return sum(entry.numel * entry.dtype.itemsize for entry in parameters)


def buffer_bytes(state: Iterable[StateEntry]) -> int:
    """Of buffers and constants."""
    return sum(entry.numel * entry.dtype.itemsize for entry in state if entry.kind != "parameter")
