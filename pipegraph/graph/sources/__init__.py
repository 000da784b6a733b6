"""Where models come from: a Python file, or a Hugging Face configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipegraph.graph.sources.huggingface import config_file, load_config
from pipegraph.graph.sources.model_file import load_file, model_file
from pipegraph.graph.sources.model_source import ModelSource


def find_source(model: str) -> Path:
    """Return the file of MODEL without running or reading it. Raises SourceError if it does not exist."""
    return config_file(model) if model.startswith("hf:") else model_file(model)


def load(
    model: str,
    weights: bool = True,
    batch: int | None = None,
    seq: int | None = None,
    attention_mask: bool = False,
) -> ModelSource:
    """Load MODEL of the command line.

    Args:
        model: ``file.py`` (a ``build_model`` or a ``model``, and ``example_inputs``), ``file.py:name``, or ``hf:``
            and a Hugging Face configuration file or its folder.
        weights: real parameters; otherwise they are on the meta device and cost no memory.
        batch, seq: rows and tokens of a microbatch; None for those of the example, which are 1 and 128 for ``hf:``.

        attention_mask: whether the inputs of ``hf:`` have a mask, so that stages take padded batches.

    Raises:
        SourceError: the file is missing or fails, or lacks a model or example inputs.
    """
    if model.startswith("hf:"):
        return load_config(model, weights=weights, batch=batch or 1, seq=seq or 128, attention_mask=attention_mask)
    return replace(load_file(model, weights), batch=batch, seq=seq)
