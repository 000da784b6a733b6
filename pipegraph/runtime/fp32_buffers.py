"""Which buffers of a stage keep their dtype when the stage computes in 16 bits.

Rounding harms those that the source casts to float32 before it computes with them, such as the frequencies of rotary
embeddings, and those that it adds up, such as counts and moving averages: these stop when a step is too small for 16
bits. So a stage is run on fake tensors, with its buffers in 16 bits and again as they are. A buffer stays as
it is if everything else has the same dtypes then. Source that asks for its dtype, as in `cos.to(self.inv_freq.dtype)`,
means the one in which the stage computes, and is told that one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from pipegraph.kernels.internals import version
from pipegraph.package import Manifest
from pipegraph.runtime.internals import pytree, reporting_operations
from pipegraph.runtime.wiring import torch_dtype, zeros_for

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
