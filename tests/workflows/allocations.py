"""What actions allocate, operation by operation."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipegraph.schedule import Action, Kind


class Allocations(TorchDispatchMode):
    """Counts the memory of every tensor that an operation makes, for as long as it lives; as an observer, the most of
    it during each action beyond what there is as the action begins.

    Attributes:
        rises: by stage and kind.
        most: the most bytes since the last `begin`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rises: dict[tuple[int, Kind], int] = defaultdict(int)
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, Any] = {}
        self._now = self.most = self._baseline = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage(), inputs)
        return results

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        if key in self._sizes or key in inputs:
            return
        self._sizes[key] = storage.nbytes()
        self._refs[key] = weakref.ref(storage, lambda _: self._free(key))
        self._now += storage.nbytes()
        self.most = max(self.most, self._now)

    def _free(self, key: int) -> None:
        del self._refs[key]
        self._now -= self._sizes.pop(key)

    def begin(self, rank: int, action: Action) -> None:
        self._baseline = self.most = self._now

    def end(self, rank: int, action: Action, saved: Any) -> None:
        key = action.stage, action.kind
        self.rises[key] = max(self.rises[key], self.most - self._baseline)
