"""Special cases of single libraries of models: which, why, and when they can go."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pipegraph.torch_private.export import replaced
from pipegraph.torch_private.fake_tensors import register_grouped_mm


@contextmanager
def quirks() -> Iterator[None]:
    """A context around the capture of a model.

    transformers 5: its experts multiply groups by ``F.grouped_mm``, and by an operation of transformers while they are
    compiled in float32. Inductor calls ATen's ``grouped_mm`` for every dtype, so that stages run what the model runs
    without a compiler. This can go when ``_can_use_grouped_mm`` no longer asks for a compiler.
    """
    experts: Any = None
    if "transformers" in sys.modules:
        with suppress(ImportError):
            experts = importlib.import_module("transformers.integrations.moe")
    if not hasattr(experts, "_can_use_grouped_mm"):
        yield
        return
    register_grouped_mm()
    with replaced(experts, "_can_use_grouped_mm", lambda original, *arguments, **named: True):
        yield
