"""Parameters and buffers that a model reads through a list, a dict or a closure, and not as attributes of a module.

While a model is traced other tensors stand for them in the modules. Whatever holds the tensor itself would give its
values at capture to every stage, without a gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class ReadFromModules(TorchFunctionMode):
    """Lets each function of torch have what stands in the modules for the parameters and buffers of a model.

    Args:
        model: with its own parameters and buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._owners: dict[int, tuple[Tensor, nn.Module, str]] = {}
        for module in model.modules():
            for tensors in (module.named_parameters, module.named_buffers):
                for name, tensor in tensors(recurse=False, remove_duplicate=False):
                    self._owners.setdefault(id(tensor), (tensor, module, name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._items(args), **{name: self._item(value) for name, value in (kwargs or {}).items()})

    def _items(self, values: Any) -> Any:
        return [self._item(value) for value in values]

    def _item(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            owner = self._owners.get(id(value))
            return value if owner is None else getattr(owner[1], owner[2])
        if type(value) in (list, tuple):
            return type(value)(self._items(value))
        return value
