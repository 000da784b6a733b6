"""Styles of transformers that torch has none for: modules that compute with this rank's parts of their parameters.

experts.gate_up_proj   packed_colwise ─▶ its gate and its up divided alike ┐
experts.down_proj      rowwise                                             ├─ experts  moe_tp_experts: on parts alone,
                                                                           ┘           outputs added up over ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode

from pipegraph.errors import ArgumentError
from pipegraph.torch_private.dtensor import differentiable_part, packed_shard
from pipegraph.torch_private.modules import tensor_dicts
from pipegraph.torch_private.pytrees import pytree

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh
    from torch.distributed.tensor import Placement

_HALVES: Final = 2
"""how many parts a packed parameter has, one after the other: gate and up"""


class LocalParts(ParallelStyle):
    """Lets a module compute with this rank's parts of the module's parameters.

    Args:
        shares: whether the module's inputs are whole and its ranks work on shares, so that gradients of the inputs
            are added up over ranks.
        adds_up: whether its outputs are shares, too, and are added up.
    """

    def __init__(self, shares: bool = False, adds_up: bool = False) -> None:
        super().__init__()
        self.shares, self.adds_up = shares, adds_up

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dtensors: dict[str, Tensor | None] = {}
        module.register_forward_pre_hook(partial(self._enter, device_mesh, dtensors), with_kwargs=True)
        module.register_forward_hook(partial(self._leave, device_mesh, dtensors), always_call=True)
        return module

    def _enter(
        self, mesh: DeviceMesh, dtensors: dict[str, Tensor | None], module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        parameters, _ = tensor_dicts(module)
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                dtensors[name] = parameter
        parameters.update({name: differentiable_part(parameter) for name, parameter in dtensors.items()})

        def share(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            replicated_tensor = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
            return replicated_tensor.to_local(grad_placements=[Partial()])

        return pytree.tree_map(share, (args, kwargs)) if self.shares else (args, kwargs)

    def _leave(
        self, mesh: DeviceMesh, dtensors: dict[str, Tensor | None], module: nn.Module, args: Any, output: Any
    ) -> Any:
        parameters, _ = tensor_dicts(module)
        parameters.update(dtensors)
        dtensors.clear()

        def add_up(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            share = DTensor.from_local(value, mesh, [Partial()], run_check=False)
            return share.redistribute(placements=[Replicate()]).to_local()

        return pytree.tree_map(add_up, output) if self.adds_up else output  # None if its forward has raised


class PackedColwise(LocalParts):
    """Divides the outputs of a linear layer that makes two tensors at once, of each of which a rank gets its part."""

    def __init__(self) -> None:
        super().__init__(shares=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise NotImplementedError("packed_colwise is for linear layers, and for parameters such as gate_up_proj")
        for name, _ in list(module.named_parameters(recurse=False)):
            divide_parameter(module, name, "packed_colwise", device_mesh)
        return super()._apply(module, device_mesh)


class OtherEmbedding(ParallelStyle):
    """Divides the weight of an embedding with a custom class, such as one that scales the embeddings.

    Only the lookup uses the divided weight. All other operations of the module run on whole tensors.

    Args:
        dim: the dimension of the weight to divide: 0 for words, 1 for features.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
            raise NotImplementedError("it is for embeddings, which have a weight of words × features")
        divided = distribute_tensor(weight.detach(), device_mesh, [Shard(self.dim)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(divided, requires_grad=weight.requires_grad))
        lookups: list[_WholeLookups] = []
        module.register_forward_pre_hook(partial(self._enter, lookups))
        module.register_forward_hook(partial(self._leave, lookups), always_call=True)
        return module

    def _enter(self, lookups: list[_WholeLookups], module: nn.Module, args: Any) -> None:
        lookups.append(_WholeLookups())
        lookups[-1].__enter__()

    def _leave(self, lookups: list[_WholeLookups], module: nn.Module, args: Any, output: Any) -> None:
        lookups.pop().__exit__(None, None, None)


class _WholeLookups(TorchFunctionMode):
    """Lets `F.embedding` take whole indices and a divided weight, and return the whole."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = args[1] if func is F.embedding and len(args) > 1 else None
        if not isinstance(weight, DTensor):
            return func(*args, **(kwargs or {}))
        indices = DTensor.from_local(args[0], weight.device_mesh, [Replicate()], run_check=False)
        embeddings = func(indices, *args[1:], **(kwargs or {}))
        return embeddings.redistribute(placements=[Replicate()]).to_local()


class WholeBeforeHeads(ParallelStyle):
    """Adds up, over ranks, the gradient of the last features that a layer returns: the heads of each rank take all of
    them, as the part with positions of a key that all heads share (DeepSeek-V2, section 2.1).

    Args:
        leading_features: how many features come before them.
    """

    def __init__(self, leading_features: int) -> None:
        super().__init__()
        self.leading_features = leading_features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(self._leave, device_mesh))
        return module

    def _leave(self, mesh: DeviceMesh, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        latent, shared = output.tensor_split([self.leading_features], dim=-1)
        replicated_tensor = DTensor.from_local(shared, mesh, [Replicate()], run_check=False)
        return torch.cat([latent, replicated_tensor.to_local(grad_placements=[Partial()])], dim=-1)


class ShareOfIdentity(ParallelStyle):
    """Divides what a module takes by the number of ranks, because what it returns is added up over them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._divide, device_mesh.size()))
        return module

    def _divide(self, ranks: int, module: nn.Module, args: Any) -> Any:
        first, *other_args = args
        return first / ranks, *other_args


PARAMETER_STYLES: Final = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "replicate")
"""The styles that a parameter may have by itself, in a module whose style is "moe_tp_experts" or "local_params"."""


def divide_parameter(module: nn.Module, name: str, style: str, mesh: DeviceMesh) -> None:
    """Divide a parameter of a module, in place. Every rank has the whole, and takes its part.

    Raises:
        ArgumentError: the ranks do not divide it.
    """
    parameter = module.get_parameter(name)
    placement = _placement(parameter, style)
    if isinstance(placement, Replicate):
        return
    length, parts = parameter.shape[placement.dim], mesh.size() * (_HALVES if style.startswith("packed") else 1)
    if length % parts:
        raise ArgumentError(
            f"tp_plan divides dimension {placement.dim} of {name}, of shape {list(parameter.shape)}, into {parts} "
            f"parts.",
            f"a tp that divides {length // (parts // mesh.size())}.",
        )
    divided = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))


def _placement(parameter: Tensor, style: str) -> Any:
    """Return a parameter's placement. Its last dimensions are those of a linear layer's weight: outputs, inputs."""
    last = parameter.dim() - 1
    placements: Mapping[str, Placement] = {
        "colwise": Shard(max(last - 1, 0)),
        "rowwise": Shard(last) if last else Replicate(),
        "packed_colwise": packed_shard(max(last - 1, 0), _HALVES),
        "packed_rowwise": packed_shard(last, _HALVES) if last else Replicate(),
        "replicate": Replicate(),
    }
    return placements[style]
