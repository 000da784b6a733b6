"""The precision of a pipeline: in which dtype it computes and sends, and in which it keeps and trains parameters."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from pipegraph.arguments import argument
from pipegraph.errors import ArgumentError, PipegraphError, closest, nearest
from pipegraph.kernels import LowPrecisionKernels, StageKernels
from pipegraph.package import Manifest
from pipegraph.runtime.wiring import torch_dtype, zeros_for
from pipegraph.torch_private.distributed import reporting_operations
from pipegraph.torch_private.pytrees import pytree
from pipegraph.torch_private.tensors import version_of as version

# ---- fp32 buffers ----------------------------------------------------------------------------------------------------
# Which buffers of a stage keep their dtype when the stage computes in 16 bits.
#
# Rounding harms those that the source casts to float32 before it computes with them, such as frequencies of rotary
# embeddings, and those that it adds up, such as counts and moving averages: these stop when a step is too small for 16
# bits. So a stage is run on fake tensors, with its buffers in 16 bits and again as they are. A buffer stays as
# it is if everything else has the same dtypes then. Source that asks for its dtype, `cos.to(self.inv_freq.dtype)`,
# means the one in which the stage computes, and is told that one.


_GET_DTYPE: Final[Any] = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
"""what `tensor.dtype` calls"""

Dtypes = list[tuple[Any, ...]]
"""The dtypes of what modules return, and of what operations are given that take only some mixtures of dtypes."""


def fp32_buffers(
    index: int, stage: nn.Module, manifest: Manifest, dtype: torch.dtype, computed: torch.dtype, norms: Collection[str]
) -> frozenset[str]:
    """Return the names of the buffers of a stage that stay as they are. Warns of others that a forward writes to.

    Args:
        stage: number `index`, before anything divides it.
        manifest: of the package.
        dtype: the dtype of the model.
        computed: the dtype in which it is computed.
        norms: the tensors that stay in float32 anyway.
    """
    buffers = {name for name, buffer in stage.named_buffers() if buffer.dtype == dtype}
    candidates = buffers - set(norms) if dtype != computed else set[str]()
    if not candidates:
        return frozenset()
    trial = _Trial(index, stage, manifest, dtype, computed, norms)
    try:
        trial.run(frozenset())
    except Exception as error:  # whatever the source raises on fake tensors
        warnings.warn(
            f"stage {index} does not run without data ({type(error).__name__}: {str(error).partition(chr(10))[0]}), so "
            f"that nobody knows which buffers its source casts: {', '.join(sorted(candidates))} are computed in "
            f"{str(computed).removeprefix('torch.')}.",
            stacklevel=2,
        )
        return frozenset()
    fp32_names = frozenset(candidates)
    if not trial.is_alike(fp32_names):
        kinds: dict[str, set[str]] = {}  # equal layers have equal ones
        for name in candidates:
            kinds.setdefault(re.sub(r"\d+", "*", name), set()).add(name)
        fp32_names = frozenset[str]().union(*(group for group in kinds.values() if trial.is_alike(group)))
        fp32_names = fp32_names if trial.is_alike(fp32_names) else frozenset()
    if lost := sorted(trial.written & candidates - fp32_names):
        warnings.warn(
            f"stage {index} adds up {', '.join(lost)} in {str(computed).removeprefix('torch.')}, which loses small "
            f"changes, because it computes with {'it' if len(lost) == 1 else 'them'} as well.\n"
            "Try: cast what is computed with, such as self.mean.to(x.dtype), in the source.",
            stacklevel=2,
        )
    return fp32_names


def answer_with_dtype(stage: nn.Module, names: Collection[str], dtype: torch.dtype) -> list[RemovableHandle]:
    """Let the source of the modules that hold buffers find a dtype where it asks these for theirs.

    Args:
        names: of the buffers.

    Returns:
        what takes it back.
    """
    of_modules: dict[str, list[str]] = {}
    for name in sorted(names):
        owner, _, buffer_name = name.rpartition(".")
        of_modules.setdefault(owner, []).append(buffer_name)
    handles = []
    for owner, buffers in of_modules.items():
        module, entered = stage.get_submodule(owner), list[_Answers]()
        handles.append(module.register_forward_pre_hook(partial(_enter, tuple(buffers), dtype, entered)))
        handles.append(module.register_forward_hook(partial(_leave, entered), always_call=True))
    return handles


class _Answers(TorchFunctionMode):
    """Answers a dtype where source asks a module's buffers for theirs."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self._module, self._names, self._dtype = module, names, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_DTYPE and any(getattr(self._module, name) is args[0] for name in self._names):
            return self._dtype
        return func(*args, **(kwargs or {}))


def _enter(names: tuple[str, ...], dtype: torch.dtype, entered: list[_Answers], module: nn.Module, args: Any) -> None:
    entered.append(_Answers(module, names, dtype))
    entered[-1].__enter__()


def _leave(entered: list[_Answers], module: nn.Module, args: Any, output: Any) -> None:
    entered.pop().__exit__(None, None, None)


class _Trial:
    """Runs of a stage on fake tensors.

    Attributes:
        written: the names of the buffers that a forward writes to.
    """

    def __init__(
        self,
        index: int,
        stage: nn.Module,
        manifest: Manifest,
        dtype: torch.dtype,
        computed: torch.dtype,
        norms: Collection[str],
    ) -> None:
        self._stage, self._model_dtype, self._computed, self._norms = stage, dtype, computed, norms
        self._values = [manifest.values[name] for name in manifest.stages[index].inputs]
        self._sizes = manifest.captured_sizes
        self._usual: Dtypes = []
        self.written: set[str] = set()

    def run(self, names: Collection[str]) -> None:
        """Run with some buffers as they are, and remember the dtypes."""
        self._usual = self._dtypes(names)

    def is_alike(self, names: Collection[str]) -> bool:
        """Whether other values have the dtypes that they had in `run`, if these buffers stay as they are."""
        try:
            return self._dtypes(names) == self._usual
        except Exception:  # such as a product of tensors of two dtypes
            return False

    def _dtypes(self, names: Collection[str]) -> Dtypes:
        named = [*self._stage.named_parameters(), *self._stage.named_buffers()]
        state = {name: self._without_memory(tensor, name in names or name in self._norms) for name, tensor in named}
        versions = {name: version(tensor) for name, tensor in state.items()}
        inputs = []
        for value in self._values:
            dtype = torch_dtype(value)
            cast = dtype == self._model_dtype and value.keeps_dtype is not True
            zeros = zeros_for(
                value, value.shape_at(self._sizes), self._computed if cast else dtype, torch.device("meta")
            )
            inputs.append(zeros)
        dtype_log: Dtypes = []
        handles = answer_with_dtype(self._stage, names, self._computed)
        handles += [
            module.register_forward_hook(partial(_note_returned, dtype_log, name))
            for name, module in self._stage.named_modules()
        ]
        try:
            with torch.device("meta"), torch.no_grad(), reporting_operations(partial(_note_mixture, dtype_log)):
                functional_call(self._stage, state, tuple(inputs))
        finally:
            for handle in handles:
                handle.remove()
        buffers = {name for name, _ in self._stage.named_buffers()}
        self.written = {name for name in buffers if version(state[name]) != versions[name]}
        return dtype_log

    def _without_memory(self, tensor: Tensor, is_kept: bool) -> Tensor:
        is_cast = tensor.dtype == self._model_dtype and not is_kept
        return torch.empty_like(tensor, dtype=self._computed if is_cast else tensor.dtype, device="meta")


def _note_returned(dtype_log: Dtypes, name: str, module: nn.Module, args: Any, output: Any) -> None:
    dtype_log.append((name, *(tensor.dtype for tensor in _tensors(output))))


def _note_mixture(dtype_log: Dtypes, operation: Any, arguments: Any) -> None:
    """Note an operation that takes floats of several dtypes, unless it takes any: kernels have less than meta has."""
    dtypes = [tensor.dtype for tensor in _tensors(arguments) if tensor.is_floating_point()]
    if len(set(dtypes)) > 1 and torch.Tag.pointwise not in operation.tags:
        dtype_log.append((str(operation), *dtypes))


def _tensors(values: Any) -> Sequence[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


# ---- precision -------------------------------------------------------------------------------------------------------


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
                f"{type(kernels).__name__} do not.",
                'kernels="inductor" or "eager", or a method compute_in(dtype, kept).',
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
            f"{', '.join(PRECISIONS)}.",
            f"{argument('precision', closest(str(name), PRECISIONS) or 'bf16')}.",
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
            "precision and the mp_policy of fsdp were both given, and each says in what dtype stages compute.",
            "one of them.",
        )
    if not precision.is_mixed:
        return options
    named = [named_module for index in stages if is_sharded for named_module in stages[index].named_modules()]
    norm = next((name for name, module in named if isinstance(module, _BATCH_NORMS)), None)
    if norm is not None:
        raise ArgumentError(
            f"in mixed precision a batch norm keeps float32, and fully_shard would gather {norm} in 16 bits.",
            "dp_replicate in place of dp_shard.",
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
                f"keep {mean.dtype if mean is not None else None}, does not run in it.",
                "dp_replicate in place of dp_shard, or an mp_policy without param_dtype.",
            ) from error
