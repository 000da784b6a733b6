"""The names of a model's tensors in a checkpoint of Hugging Face transformers, if they differ from the model's."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

# How a parameter is cut into stored tensors, as transformers prints it: along its first dimension, or one tensor for
# each index of the first dimension (experts), whole or cut along the second.
_CUTS = {("Chunk(dim=0)",), ("SplitModulelist(dim=0)",), ("Chunk(dim=1)", "SplitModulelist(dim=0)")}


def checkpoint_names(model: nn.Module) -> dict[str, Any]:
    """The entry ``checkpoint`` of a manifest; empty for a model that is not of transformers.

    ``base_model_prefix`` is what the names in a checkpoint of the base model lack. ``stored`` holds, for each name of
    ``state_dict()`` that ``save_pretrained`` does not write as it is, the names of its parts in the order in which they
    are joined; ``*`` stands for the index of the first dimension. No parts: only transformers can read it.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {}
    stored: dict[str, list[str]] = {}
    renamings, converters = _transforms(model)
    for name in model.state_dict():
        parts = _parts(name, renamings, converters)
        if parts != [name]:
            stored[name] = parts
    return {"base_model_prefix": model.base_model_prefix, "stored": stored}


def _transforms(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The renamings and the conversions that ``save_pretrained`` applies.

    transformers has no public interface for them; ``core_model_loading.revert_weight_conversion`` does the same to the
    tensors themselves.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter
    except ImportError:  # transformers 4 stores every tensor under its own name
        return [], []
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [each.reverse_transform() for each in reversed(mapping) if not isinstance(each, PrefixChange)]
    converters = [each for each in reverse if isinstance(each, WeightConverter)]
    return [each for each in reverse if each not in converters], converters


def _parts(name: str, renamings: list[Any], converters: list[Any]) -> list[str]:
    parts = [name]
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            if tuple(map(repr, converter.operations)) not in _CUTS:
                return []
            first = converter.target_patterns[0]
            parts = [renamed.replace(first, each) for each in converter.target_patterns]
            break
    for renaming in renamings:
        parts = [renaming.rename_source_key(part)[0] for part in parts]
    return parts
