"""The precision of a pipeline: in which dtype it computes and sends, and in which it keeps and trains parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from msgspec import structs
from torch import nn

from pipegraph.arguments import argument
from pipegraph.errors import ArgumentError, PipegraphError, closest, nearest
from pipegraph.kernels import LowPrecisionKernels, StageKernels
from pipegraph.package import Manifest
from pipegraph.runtime.fp32_buffers import answer_with_dtype, fp32_buffers


@dataclass(frozen=True)
class Precision:
    """What `Pipeline(precision=)` says.

    Attributes:
        stored: the dtype of parameters, as optimizers and checkpoints have them, and of their gradients.
        computed: the dtype of what kernels compute, and of what stages send to each other.
    """

    stored: torch.dtype
    computed: torch.dtype

    @property
    def is_mixed(self) -> bool:
        """Whether kernels compute with copies of the parameters."""
        return self.stored != self.computed


PRECISIONS: Final = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16),
    "bf16-true": Precision(torch.bfloat16, torch.bfloat16),
    "fp16-true": Precision(torch.float16, torch.float16),
}
"""By name. "true" is PyTorch Lightning's word for a model that has no float32 parameters."""


@dataclass(frozen=True)
class AppliedPrecision:
    """A precision that stages were converted to.

    Attributes:
        precision: the precision.
        uncast_names: of each stage, the names of the tensors that are computed with as they are.
        cast_from: the dtype of the model before, of which inputs are cast.
    """

    precision: Precision
    uncast_names: Mapping[int, frozenset[str]]
    cast_from: torch.dtype

    def apply_to(self, index: int, kernels: StageKernels) -> None:
        """Let the kernels of a stage compute with copies in fewer bits. Raises PipegraphError if they cannot."""
        if not self.precision.is_mixed:
            return
        if not isinstance(kernels, LowPrecisionKernels):
            raise PipegraphError(
                "precision= needs kernels that compute in another dtype than that of parameters, and those of "
                f"{type(kernels).__name__} do not.\n"
                'Try: kernels="inductor" or "eager", or a method compute_in(dtype, kept).'
            )
        kernels.compute_in(self.precision.computed, self.uncast_names[index])


_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def named_precision(name: object) -> Precision | None:
    """The precision of a name; None for the package's own dtypes. Raises ArgumentError for another name."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in PRECISIONS:
        raise ArgumentError(
            f"{argument('precision')} cannot be {name!r}.{nearest(str(name), PRECISIONS)} There are: "
            f"{', '.join(PRECISIONS)}.\nTry: {argument('precision', closest(str(name), PRECISIONS) or 'bf16')}."
        )
    return PRECISIONS[name]


def changes_dtypes(precision: str | None, manifest: Manifest) -> bool:
    """Whether stages compute, or keep their parameters, in other dtypes than those of the package."""
    requested_precision, dtype = named_precision(precision), model_dtype(manifest)
    return requested_precision is not None and (requested_precision.stored, requested_precision.computed) != (
        dtype,
        dtype,
    )


def model_dtype(manifest: Manifest) -> torch.dtype:
    """The dtype that most values of floats have: the model's own, but for what it computes in another one."""
    counts: Counter[str] = Counter()
    for value in manifest.values.values():
        if not value.is_constant and getattr(torch, value.dtype).is_floating_point:
            counts[value.dtype] += 1
    dtype: torch.dtype = getattr(torch, counts.most_common(1)[0][0]) if counts else torch.float32
    return dtype


def buffers_to_keep(
    precision: Precision, stages: Mapping[int, nn.Module], manifest: Manifest
) -> dict[int, frozenset[str]]:
    """Return, of each stage, the names of the buffers that keep the model's dtype.

    Args:
        stages: whole, before anything divides them.
    """
    dtype = model_dtype(manifest)
    return {
        index: fp32_buffers(index, stage, manifest, dtype, precision.computed, _names_of_norms(precision, stage))
        for index, stage in stages.items()
    }


def convert_stages(
    precision: Precision, stages: Mapping[int, nn.Module], manifest: Manifest, buffers: Mapping[int, Collection[str]]
) -> tuple[AppliedPrecision, Manifest]:
    """Give the tensors of stages that have the model's dtype the one that is stored, in place.

    In mixed precision batch norms keep float32 all along: their statistics are sums over many steps.

    Args:
        buffers: of each stage, those that keep their dtype.

    Returns:
        what the kernels of the stages need, and the manifest with the dtypes of computing, those of the caller's
            inputs included.
    """
    source_dtype = model_dtype(manifest)
    uncast_names: dict[int, frozenset[str]] = {}
    for index, stage in stages.items():
        names = {*_names_of_norms(precision, stage), *buffers[index]}
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            if tensor.dtype == source_dtype and name not in buffers[index]:
                tensor.data = tensor.data.to(precision.stored)  # in place: a tied weight stays one parameter
            if tensor.dtype != precision.stored:
                names.add(name)
        uncast_names[index] = frozenset(names)
        answer_with_dtype(stage, buffers[index], precision.computed)
    source_text, computed_text = (str(dtype).removeprefix("torch.") for dtype in (source_dtype, precision.computed))
    values = {
        name: structs.replace(value, dtype=computed_text)
        if value.dtype == source_text and value.keeps_dtype is not True
        else value
        for name, value in manifest.values.items()
    }
    return AppliedPrecision(precision, uncast_names, source_dtype), structs.replace(manifest, values=values)


def _names_of_norms(precision: Precision, stage: nn.Module) -> set[str]:
    """The names of the tensors of batch norms, in mixed precision."""
    norms = [module for module in stage.modules() if precision.is_mixed and isinstance(module, _BATCH_NORMS)]
    identities = {id(tensor) for module in norms for tensor in (*module.parameters(False), *module.buffers(False))}
    named = (*stage.named_parameters(), *stage.named_buffers())
    return {name for name, tensor in named if id(tensor) in identities}


def sharding_options(
    precision: Precision, options: Mapping[str, Any] | None, stages: Mapping[int, nn.Module], is_sharded: bool
) -> Mapping[str, Any] | None:
    """The options of `fully_shard`: in mixed precision parameters are gathered in the dtype of computing.

    Raises:
        ArgumentError: the caller has given a policy as well, or there is a batch norm, which is not computed in it.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if "mp_policy" in (options or {}):
        raise ArgumentError(
            "precision and the mp_policy of fsdp were both given, and each says in what dtype stages compute.\n"
            "Try: one of them."
        )
    if not precision.is_mixed:
        return options
    named = [named_module for index in stages if is_sharded for named_module in stages[index].named_modules()]
    norm = next((name for name, module in named if isinstance(module, _BATCH_NORMS)), None)
    if norm is not None:
        raise ArgumentError(
            f"in mixed precision a batch norm keeps float32, and fully_shard would gather {norm} in 16 bits.\n"
            "Try: dp_replicate in place of dp_shard."
        )
    policy = MixedPrecisionPolicy(
        param_dtype=precision.computed, reduce_dtype=precision.stored, cast_forward_inputs=False
    )
    return {**(options or {}), "mp_policy": policy}


def check_batch_norms(stage: nn.Module, policy: Any) -> None:
    """Raise ArgumentError for a batch norm that does not run: its statistics keep their dtype, and not its weight."""
    for name, module in stage.named_modules():
        weight, mean = getattr(module, "weight", None), getattr(module, "running_mean", None)
        if policy is None or policy.param_dtype is None or not isinstance(module, _BATCH_NORMS) or weight is None:
            continue
        scale = torch.zeros_like(weight, dtype=policy.param_dtype)
        statistics = None if mean is None else mean.clone()
        try:
            nn.functional.batch_norm(scale.expand(2, -1), statistics, statistics, scale, scale, training=True)
        except RuntimeError as error:
            raise ArgumentError(
                f"the mp_policy of fsdp computes in {policy.param_dtype}, and the batch norm {name}, whose statistics "
                f"keep {mean.dtype if mean is not None else None}, does not run in it.\n"
                "Try: dp_replicate in place of dp_shard, or an mp_policy without param_dtype."
            ) from error
