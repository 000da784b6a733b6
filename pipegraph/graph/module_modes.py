"""The mode of each module after ``model.train()`` and ``model.eval()``, which a model may override."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

Modes = Mapping[nn.Module, bool]
"""Whether each module is in training mode."""


class ModuleModes(NamedTuple):
    """The modes of all modules.

    Attributes:
        training: after ``model.train()``.
        evaluation: after ``model.eval()``.
    """

    training: Modes
    evaluation: Modes

    def mode_pair(self, module: nn.Module) -> tuple[bool, bool]:
        """The mode of one module after both."""
        return self.training[module], self.evaluation[module]


def modes_of(model: nn.Module) -> ModuleModes:
    """Return the modes of all modules. The model is left in its mode."""
    modules = list(model.modules())
    if not any(map(_overrides, modules)):
        return ModuleModes(dict.fromkeys(modules, True), dict.fromkeys(modules, False))
    modes = {module: module.training for module in modules}
    try:
        model.train()
        training = {module: module.training for module in modules}
        model.eval()
        return ModuleModes(training, {module: module.training for module in modules})
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def _overrides(module: nn.Module) -> bool:
    """Whether a module has its own ``train`` or ``eval``."""
    attributes, cls = vars(module), type(module)
    return (
        "train" in attributes
        or "eval" in attributes
        or cls.train is not nn.Module.train
        or cls.eval is not nn.Module.eval
    )
