"""What stages take and return once their parameters are divided: the whole on every rank, or a part on each.

With sequence parallelism each rank has a part of the sequence also between stages, and sends that part alone. It is
found by running the stages without memory, one after the other; what a stage returns is what the next ones take.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec import structs
from torch import Tensor, nn

from pipegraph.errors import ArgumentError, PipegraphError
from pipegraph.kernels.internals import fake_tensors
from pipegraph.package import Manifest, Value
from pipegraph.runtime.running_modules import failed_in, running_modules
from pipegraph.runtime.wiring import torch_dtype, zeros_for

Shapes = dict[str, list[int]]
"""value → its shape on a rank"""


def divided_boundaries(
    stages: Mapping[int, nn.Module], manifest: Manifest, size: int, gather_text: Callable[[str], Sequence[str]]
) -> Manifest:
    """The manifest with the shapes that values have on each of `size` ranks which divide the stages.

    Args:
        gather_text: gives a text to all ranks of this pipeline, and returns those of all. Collective.

    Raises:
        ArgumentError: a stage does not run, as with a number of heads that does not divide, or returns something else
            than the whole or a part along one dimension, or the model's own output is a part; on every rank.
    """
    sizes = divisible_sizes(manifest, size)
    shapes: Shapes = {name: list(value.shape_at(sizes)) for name, value in manifest.values.items()}
    for index in range(len(manifest.stages)):
        problem, returned = None, Shapes()
        if index in stages:
            try:
                returned = _run(index, stages[index], manifest, shapes)
                for name, output_shape in returned.items():
                    _check(manifest.values[name], output_shape, manifest.values[name].shape_at(sizes), index, size)
            except ArgumentError as error:
                problem = str(error)
        for text in gather_text(json.dumps([problem, returned])):
            problem, returned = json.loads(text)
            if problem is not None:
                raise ArgumentError(problem)
            shapes |= returned
    values, conditions = {}, list(manifest.conditions)
    for name, value in manifest.values.items():
        shape = [
            dimension if local_size == full_size else _part(dimension, size)
            for dimension, local_size, full_size in zip(value.shape, shapes[name], value.shape_at(sizes), strict=True)
        ]
        pairs = zip(value.shape, shape, strict=True)
        conditions += [f"({old}) % {size} == 0" for old, new in pairs if old != new and isinstance(old, str)]
        values[name] = structs.replace(value, shape=tuple(shape))
    if values == manifest.values:
        return manifest
    varying = {name: structs.replace(named_size, captured=sizes[name]) for name, named_size in manifest.sizes.items()}
    return structs.replace(manifest, values=values, sizes=varying, conditions=tuple(dict.fromkeys(conditions)))


def _run(index: int, stage: nn.Module, manifest: Manifest, shapes: Shapes) -> Shapes:
    """Run a stage without memory on inputs of these shapes. Return the shapes of its outputs."""
    entry, values = manifest.stages[index], manifest.values
    device = next((parameter.device for parameter in stage.parameters()), torch.device("cpu"))
    with fake_tensors(), torch.no_grad():
        input_values = [values[name] for name in entry.inputs]
        inputs = [zeros_for(value, shapes[value.name], torch_dtype(value), device) for value in input_values]
        with running_modules(stage) as running:
            try:
                returned = stage(*inputs)
            except PipegraphError:
                raise
            except Exception as error:  # whatever an operation raises on a part of a tensor
                raise ArgumentError(_refusal(index, running, error)) from error
    outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
    named = zip(entry.outputs, outputs, strict=False)
    return {name: list(output.shape) for name, output in named if isinstance(output, Tensor)}


def _refusal(index: int, running: list[str], error: Exception) -> str:
    where = failed_in(running)
    style = f"a style for {running[-1]} that fits what it takes" if where else "styles that fit each other"
    return (
        f"stage {index} does not run with its parameters divided along tp{where}: "
        f"{type(error).__name__}: {str(error).splitlines()[0]}\n"
        f'Try: {style}, as "rowwise" fits what "colwise" returns, and all others what "colwise_gather_output" does; '
        "or a tp that divides the numbers of heads, key-value heads and features."
    )


def _check(value: Value, shape: Sequence[int], full: Sequence[int], index: int, size: int) -> None:
    """Raise ArgumentError unless a value is the whole, or a part that may cross to another stage."""
    differing = [place for place, pair in enumerate(zip(shape, full, strict=False)) if pair[0] != pair[1]]
    if len(shape) == len(full) and not differing:
        return
    is_part = len(shape) == len(full) and len(differing) == 1 and shape[differing[0]] * size == full[differing[0]]
    if is_part and any(consumer > index for consumer in value.consumers) and value.batch_dim != differing[0]:
        return
    raise ArgumentError(
        f"stage {index} returns {value.name} as {list(shape)} on each of {size} ranks, and the whole is {list(full)}."
        f'\nTry: a style that gathers, such as "colwise_gather_output", for the module that makes it. Only between '
        f"stages may a value be a part, along one dimension other than the batch."
    )


def _part(dimension: int | str, size: int) -> int | str:
    return dimension // size if isinstance(dimension, int) else f"({dimension}) // {size}"


def divisible_sizes(manifest: Manifest, size: int) -> dict[str, int]:
    """Sizes near the captured ones that so many ranks can divide evenly, where that is allowed."""
    return {name: _divisible(named_size.captured, named_size.max, size) for name, named_size in manifest.sizes.items()}


def _divisible(captured: int, most: int | None, size: int) -> int:
    """A size near the captured one that can be divided evenly."""
    above = math.ceil(captured / size) * size
    return above if most is None or above <= most else max(size, captured // size * size)
