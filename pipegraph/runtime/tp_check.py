"""Whether stages compute with divided parameters what they computed before.

A plan may divide what the model takes apart itself, such as a layer that makes query, key and value in one: then a rank
takes a part of the query for a key. All shapes fit, and nothing fails. So each stage runs twice on the same random
inputs, before and after, and what its modules return is compared, with what their linear layers take.

whole stage   ─ run ─▶ values of each module ─┐
divided stage ─ run ─▶ values of each module ─┴─▶ the first module that differs
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn

from pipegraph.device import Device
from pipegraph.kernels.sharded import is_sharded
from pipegraph.package import Manifest, Value
from pipegraph.runtime.wiring import from_memory, random_for, shape_in_memory
from pipegraph.torch_private.pytrees import pytree

# ---- running modules -------------------------------------------------------------------------------------------------
# Which module of a stage is running.


@contextmanager
def running_modules(stage: nn.Module) -> Iterator[list[str]]:
    """A context around a call of a stage, with the names of the modules that are running, the outermost first.

    After an error they are those in which it was raised.
    """
    names: list[str] = []

    def begins(name: str, module: nn.Module, args: Any) -> None:
        names.append(name)

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        names.pop()

    handles = []
    for name, module in stage.named_modules():
        # Before the hooks of styles, which may refuse what the module takes.
        handles.append(module.register_forward_pre_hook(partial(begins, name), prepend=True))
        handles.append(module.register_forward_hook(ends))
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def failed_in(names: list[str]) -> str:
    """``, in layers.0.mlp.down`` for the innermost of them; empty if it is the stage itself."""
    return f", in {names[-1]}" if names and names[-1] else ""


# ---- tp check --------------------------------------------------------------------------------------------------------


_COMPARED: Final = 4096
"""the number of elements of a tensor that are compared, at random positions"""
_FINE: Final = 0.1
_COARSE: Final = 0.3
"""The allowed difference of a value relative to its norm, for dtypes of 32 bits or more and for smaller ones. A wrong
division makes it about 1, and rounding far less; but rounding may change the expert that a router chooses for a token,
more often in smaller dtypes."""

Key = tuple[str, str, int, int]
"""(module, "takes" or "returns", number of the call, number of the tensor)"""


@dataclass(frozen=True)
class _Sample:
    """Some elements of a tensor, and of this rank's part along the last dimension."""

    shape: torch.Size
    numbers: Tensor
    part: Tensor | None
    tolerance: float


@dataclass(frozen=True)
class _FunctionCall:
    """A call of a ``torch.autograd.Function`` of a package."""

    function: Any
    args: tuple[Any, ...]

    @property
    def lengths(self) -> list[int | None]:
        """The last dimension of each argument that is a tensor of floats."""
        return [value.shape[-1] if _is_float(value) and value.dim() else None for value in self.args]


class DivisionCheck:
    """Runs stages before they are divided, and compares them later with what they are then.

    Forwards are compared, whose derivatives are then equal as well. The backward of a Function need not be the
    derivative of its forward: if ranks give it parts of a tensor, it is tried on parts.

    Args:
        stages: of this process, whole.
        manifest: before the division.
        sizes: of the package, at which to run.
        place: of this rank among those that will divide the stages.
        ranks: how many these are.
        parts: of each stage, the modules of which each rank is to take a part of a tensor → its dimension.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        manifest: Manifest,
        sizes: Mapping[str, int],
        place: int,
        ranks: int,
        parts: Mapping[int, Mapping[str, int]],
    ) -> None:
        self._parts = parts
        self._manifest, self._sizes, self._place, self._ranks = manifest, sizes, place, ranks
        self._samples: dict[int, dict[Key, _Sample]] = {}
        self._calls: dict[int, list[_FunctionCall]] = {}
        for index, stage in stages.items():
            try:
                self._samples[index], self._calls[index] = self._run(index, stage, manifest)
            except Exception as error:  # whatever the model raises on inputs that nobody chose
                warnings.warn(
                    f"stage {index} does not run on random inputs ({type(error).__name__}: "
                    f"{str(error).partition(chr(10))[0]}), so that nobody knows whether tp_plan divides it rightly.\n"
                    "Try: one step with tp = 1 and one with tp = 2, and compare their losses.",
                    stacklevel=2,
                )

    def problem(self, stages: Mapping[int, nn.Module], manifest: Manifest) -> str | None:
        """Say which module of the divided stages computes something else; None if none does. Collective along `tp`.

        Args:
            manifest: with the shapes that values have on a rank.
        """
        problems = []
        for index, references in self._samples.items():  # all on every rank, also after a problem: they communicate
            with running_modules(stages[index]) as running:
                try:
                    samples, calls = self._run(index, stages[index], manifest)
                except Exception as error:  # which the whole stage did not raise; other ranks must hear of it
                    problems.append(
                        f"stage {index} does not run with its parameters divided along tp{failed_in(running)}: "
                        f"{type(error).__name__}: {error}\n"
                        "Try: another style for that module, or a parallelize_fn."
                    )
                    continue
            undivided_names = (
                name for name in self._parts[index] if _is_whole(references, samples, (name, "takes", 0, 0))
            )
            problems += [
                _sentence_of_whole(index, name, self._parts[index][name]) for name in islice(undivided_names, 1)
            ]
            differing = (
                key for key, sample in samples.items() if key in references and _differ(references[key], sample)
            )
            problems += [_sentence(index, *key[:2]) for key in islice(differing, 1)]
            mixing = (
                call.function.__name__
                for whole, call in zip(self._calls[index], calls, strict=False)
                if whole.lengths != call.lengths and _mixes_features(whole, call)
            )
            problems += [_sentence_of_function(index, name) for name in islice(mixing, 1)]
        return problems[0] if problems else None

    def _run(self, index: int, stage: nn.Module, manifest: Manifest) -> tuple[dict[Key, _Sample], list[_FunctionCall]]:
        device = next((parameter.device for parameter in stage.parameters()), torch.device("cpu"))
        generator = torch.Generator().manual_seed(index)
        names = manifest.stages[index].inputs
        inputs = [self._input(name, manifest.values[name], generator).to(device) for name in names]
        samples: dict[Key, _Sample] = {}
        report, parts = partial(self._take, samples), self._parts[index]
        calls: list[_FunctionCall] = []
        with (
            _in_evaluation_mode(stage, device),
            torch.no_grad(),
            _reported(stage, report, parts),
            _functions_reported(stage, calls),
        ):
            stage(*inputs)
        return samples, calls

    def _input(self, name: str, local_value: Value, generator: torch.Generator) -> Tensor:
        """Random numbers for a value, the same on every rank: the whole, or this rank's part of it."""
        value = self._manifest.values[name]
        shape = value.shape_at(self._sizes)
        tensor = from_memory(value, random_for(value, shape_in_memory(value, shape), generator))
        for dim, (length, all_of_it) in enumerate(zip(local_value.shape_at(self._sizes), shape, strict=True)):
            if length != all_of_it:
                tensor = tensor.narrow(dim, self._place * length, length)
        return tensor

    def _take(self, samples: dict[Key, _Sample], name: str, verb: str, number: int, values: Any) -> None:
        for place, value in enumerate(pytree.tree_leaves(values)):
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() and not is_sharded(value):
                last = value.shape[-1] if value.dim() else 0
                part = None
                if verb == "takes" and last % self._ranks == 0:
                    part = _sampled_numbers(value.chunk(self._ranks, -1)[self._place])
                tolerance = _FINE if value.dtype.itemsize >= torch.float32.itemsize else _COARSE
                samples[name, verb, number, place] = _Sample(value.shape, _sampled_numbers(value), part, tolerance)


def _is_whole(references: Mapping[Key, _Sample], samples: Mapping[Key, _Sample], key: Key) -> bool:
    """Whether a value is on each rank all of what it is in the whole model: some heads are not, or some tokens."""
    return key in references and key in samples and references[key].shape == samples[key].shape


def _differ(reference: _Sample, sample: _Sample) -> bool:
    """Whether a value is another one. Parts whose place in the whole is not known are not compared."""
    if reference.shape == sample.shape:
        expected = reference.numbers
    elif (
        reference.part is not None
        and sample.numbers.shape == reference.part.shape
        and reference.shape[:-1] == sample.shape[:-1]
    ):
        expected = reference.part
    else:
        return False
    matches = (expected == sample.numbers) | (expected.isnan() & sample.numbers.isnan())
    apart = torch.where(matches, 0.0, expected - sample.numbers)
    usual = torch.where(expected.isfinite(), expected, 0.0).norm()
    return not bool(apart.norm() <= reference.tolerance * usual)


def _sentence(index: int, name: str, verb: str) -> str:
    module = f"{name} of stage {index}" if name else f"stage {index}"
    return (
        f"under tp_plan {module} {verb} other numbers than in the whole model: a tensor is divided along a dimension "
        "which the model itself takes apart, such as query, key and value in one.\n"
        'Try: for the layer that makes it "packed_colwise" if it makes two tensors of equal size, else '
        '"colwise_gather_output", followed by "rowwise_split_input".'
    )


def _sentence_of_whole(index: int, name: str, dim: int) -> str:
    return (
        f"tp_plan gives {name} of stage {index} a style for a part of a tensor on each rank, and each rank gives it "
        "the whole: gradients of its parameters would be added up over the ranks, too large.\n"
        'Try: no style for it, or "replicate"; or in front of it a style that divides what it takes, such as '
        f"RowwiseParallel(output_layouts=Shard({dim}))."
    )


def _sentence_of_function(index: int, name: str) -> str:
    return (
        f"under tp_plan {name} of stage {index} is applied to a part of a tensor on each rank, and its backward reads "
        "all of it.\n"
        'Try: "colwise_gather_output" for the layer before it; or tp = 1.'
    )


_GRADIENT_SCALES: Final = (1.0, 1e3)  # some backwards cut a large gradient off


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not is_sharded(value)


def _mixes_features(whole: _FunctionCall, call: _FunctionCall) -> bool:
    """Return whether the gradients of a Function for two parts next to each other are not those of the parts; True if
    it does not run on random values."""
    is_part = [length != part for length, part in zip(whole.lengths, call.lengths, strict=True)]
    generator = torch.Generator().manual_seed(0)

    def random(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

    shared = [random(value) if _is_float(value) else value for value in call.args]
    parts = [[random(value) if part else value for value, part in zip(shared, is_part, strict=True)] for _ in range(2)]
    joined = [torch.cat(pair, -1) if part else pair[0] for *pair, part in zip(*parts, is_part, strict=True)]

    def gradients(args: Sequence[Any], arriving: Tensor) -> list[Tensor]:
        leaves = [value.clone().requires_grad_() if _is_float(value) else value for value in args]
        inputs = [leaf for leaf, part in zip(leaves, is_part, strict=True) if part]
        grads = torch.autograd.grad(call.function.apply(*leaves), inputs, arriving, allow_unused=True)
        return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(inputs, grads, strict=True)]

    try:
        with torch.enable_grad():
            for scale in _GRADIENT_SCALES:
                arriving = [random(call.function.apply(*part)) * scale for part in parts]
                of_parts = zip(*map(gradients, parts, arriving), strict=True)
                of_joined = gradients(joined, torch.cat(arriving, -1))
                if not all(
                    torch.allclose(torch.cat(pair, -1), grad) for pair, grad in zip(of_parts, of_joined, strict=True)
                ):
                    return True
    except Exception:  # whatever a Function raises on values that it was not written for
        return True
    return False


def _sampled_numbers(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor, at the same positions for every tensor of the same length."""
    flat = tensor.detach().reshape(-1)
    if len(flat) > _COMPARED:
        places = torch.randint(len(flat), (_COMPARED,), generator=torch.Generator().manual_seed(0))
        flat = flat[places.to(flat.device)]
    return flat.cpu().double()


@contextmanager
def _reported(stage: nn.Module, report: Any, module_names: Container[str]) -> Iterator[None]:
    """Report what modules return, and what linear layers and others take, as the code around them sees it."""
    calls: dict[str, int] = {}

    def report_inputs(name: str, module: nn.Module, args: Any) -> None:
        report(name, "takes", calls.get(name, 0), args)

    def returned(name: str, module: nn.Module, args: Any, output: Any) -> None:
        report(name, "returns", calls.get(name, 0), output)
        calls[name] = calls.get(name, 0) + 1

    handles = []
    for name, module in stage.named_modules():
        if isinstance(module, nn.Linear) or name in module_names:
            handles.append(module.register_forward_pre_hook(partial(report_inputs, name), prepend=True))
        handles.append(module.register_forward_hook(partial(returned, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _functions_reported(stage: nn.Module, calls: list[_FunctionCall]) -> Iterator[None]:
    """Add the calls of the Functions of a package, in their order."""
    modules = {sys.modules[type(module).__module__] for module in stage.modules()}
    values = (value for module in modules for value in vars(module).values() if isinstance(value, type))
    functions: set[Any] = {
        value
        for value in values
        if issubclass(value, torch.autograd.Function) and value.__module__.partition(".")[0] != "torch"
    }

    def apply(function: Any, original: Callable[..., Any], *args: Any) -> Any:
        calls.append(_FunctionCall(function, args))
        return original(*args)

    for function in functions:
        function.apply = partial(apply, function, function.apply)
    try:
        yield
    finally:
        for function in functions:
            del function.apply


@contextmanager
def _in_evaluation_mode(stage: nn.Module, device: torch.device) -> Iterator[None]:
    """Without dropout, and without a trace in modes, buffers and random numbers."""
    modes = [(module, module.training) for module in stage.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in stage.buffers()]
    stage.eval()
    try:
        with Device(device).fork_rng():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, saved_buffer in buffers:
                buffer.copy_(saved_buffer)
