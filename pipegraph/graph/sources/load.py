"""MODEL of the command line: ``file.py``, ``file.py:name`` or ``hf:CONFIG``."""

from __future__ import annotations

from pipegraph.errors import SourceError
from pipegraph.graph.sources.huggingface import load_config
from pipegraph.graph.sources.model_file import load_file
from pipegraph.graph.sources.model_source import ModelSource


def load(model: str, weights: bool = True, batch: int | None = None, seq: int | None = None) -> ModelSource:
    """Load MODEL of the command line.

    Args:
        model: ``file.py`` (a ``build_model`` or a ``model``, and ``example_inputs``), ``file.py:name``, or ``hf:``
            and a Hugging Face configuration file or its folder.
        weights: real parameters; otherwise they are on the meta device and cost no memory.
        batch, seq: rows and tokens of a microbatch, for ``hf:`` only (default 1 and 128).

    Raises:
        SourceError: the file is missing or fails, or lacks a model or example inputs.
    """
    if model.startswith("hf:"):
        return load_config(model, weights=weights, batch=batch or 1, seq=seq or 128)
    if batch is not None or seq is not None:
        raise SourceError(
            f"--batch and --seq belong to hf: configurations; {model} gives its own example_inputs.\n"
            "Try: leave them out, or change example_inputs in the file."
        )
    return load_file(model, weights)
