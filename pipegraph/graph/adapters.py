"""Adapters of PEFT: which parameters they have, and what the base model's checkpoint calls the others."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_COPY, _ORIGINAL, _BASE = "modules_to_save", "original_module", "base_layer"
"""Parts of names: a module that is trained as a whole, what it replaces, and a layer inside of an adapter."""


def base_model_of(model: nn.Module) -> nn.Module | None:
    """The model that a ``PeftModel`` adapts; None for any other model."""
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    base: nn.Module = model.get_base_model()
    return base


def base_names(model: nn.Module) -> dict[str, str | None]:
    """The names of ``state_dict()`` of an adapted model → the base model's own; None for a tensor of an adapter.

    ``base_model.model.layers.0.q_proj.base_layer.weight`` → ``layers.0.q_proj.weight``; a module that is trained as a
    whole, ``head.modules_to_save.default.weight``, starts as ``head.weight``.
    """
    base = base_model_of(model)
    assert base is not None, "an adapted model"
    prefix = next(f"{name}." for name, module in model.named_modules() if module is base)
    tuner = str(getattr(model.base_model, "prefix", "lora_"))
    return {name: _base_name(name, prefix, tuner) for name in model.state_dict()}


def _base_name(name: str, prefix: str, tuner: str) -> str | None:
    if not name.startswith(prefix):  # a prompt has parameters outside of the model
        return None
    parts: list[str] = []
    waiting = name.removeprefix(prefix).split(".")
    while waiting:
        part = waiting.pop(0)
        if part.startswith(tuner):
            return None
        if part == _COPY:
            waiting.pop(0)  # the name of the adapter
        elif part not in (_ORIGINAL, _BASE):
            parts.append(part)
    return ".".join(parts)


def zero_parameters(model: nn.Module) -> set[int]:
    """The ids of the parameters of adapters that PEFT starts with zeros, so that an adapter changes nothing at first:
    ``lora_B`` unless its configuration initialises it otherwise."""
    if base_model_of(model) is None:
        return set()
    configurations: dict[str, Any] = getattr(model, "peft_config", {})
    usual = {name for name, config in configurations.items() if getattr(config, "init_lora_weights", None) is True}
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if any(f".lora_B.{adapter}." in name for adapter in usual)
    }
