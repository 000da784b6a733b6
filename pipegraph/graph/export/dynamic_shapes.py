"""The sizes of inputs that may vary: as a user asks for them, and as far as an exported program lets them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from torch.export import Dim

from pipegraph.errors import CaptureError, nearest
from pipegraph.graph.symbolic_size import FixedSize, InputDimension, SizeLimits
from pipegraph.torch_private.pytrees import pytree

BATCH = "batch"
"""The name of the size that is cut into microbatches."""

_FORM = 'dynamic_shapes={"tokens": {0: "batch", 1: torch.export.Dim("length", max=4096)}}'


@dataclass(frozen=True)
class SizeNames:
    """Names of sizes of inputs, in place of the usual ones. Two dimensions of one name are one size.

    Attributes:
        by_dimension: dimension → the name of its size.
        by_user: whether the user named sizes, and so says which of them are the same.
    """

    by_dimension: Mapping[InputDimension, str] = field(default_factory=dict)
    by_user: bool = False

    def with_rows(self, dimensions: Iterable[InputDimension]) -> SizeNames:
        """The same, with the name of the batch for the rows of inputs."""
        return replace(self, by_dimension={**self.by_dimension, **dict.fromkeys(dimensions, BATCH)})


USUAL_NAMES: Final = SizeNames()


@dataclass(frozen=True)
class WantedSizes:
    """Which sizes of inputs may vary, and their names.

    Attributes:
        fixed: the dimensions with fixed sizes; None for all.
        names: of sizes.
        bounds: name of a size → its smallest and its largest value; None for no bound.
        places: dimension that has to vary → its expression: ``tokens.shape[1]``.
        fixed_rows: the dimensions of rows that are fixed because the model fixes the rows of another input.
    """

    fixed: frozenset[InputDimension] | None = frozenset()
    names: SizeNames = USUAL_NAMES
    bounds: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    places: Mapping[InputDimension, str] = field(default_factory=dict)
    fixed_rows: frozenset[InputDimension] = frozenset()

    def with_fixed_rows(self, rows: frozenset[InputDimension]) -> WantedSizes:
        """The same with a number of rows that does not vary."""
        return replace(self, fixed=(self.fixed or frozenset()) | rows, fixed_rows=rows)

    def limited(self, limits: SizeLimits, fixed: Mapping[InputDimension, FixedSize]) -> SizeLimits:
        """Limits with the bounds that the user gave.

        Raises:
            CaptureError: a size that has to vary does not.
        """
        for dimension, size in fixed.items():
            if dimension in self.places:
                why = size.line or size.reason
                raise CaptureError(
                    f"dynamic_shapes lets {self.places[dimension]} vary, but it is always {size.size}: {why}",
                    "without this dimension, or torch.export.Dim.AUTO, which lets it vary if the model does.",
                )
        lowest, highest = dict(limits.lowest), dict(limits.highest)
        for name, (low, high) in self.bounds.items():
            captured = limits.captured.get(name)
            if captured is not None and not (low or 0) <= captured <= (high if high is not None else captured):
                raise CaptureError(
                    f"dynamic_shapes says that {name} is from {low or 1} to {high}, but the example has {captured}.",
                    "an example within the bounds.",
                )
            if low is not None and low > 1:
                lowest[name] = max(lowest.get(name, 1), low)
            if high is not None:
                highest[name] = min(highest.get(name, high), high)
        return replace(limits, lowest=lowest, highest=highest)


def wanted_sizes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    rows: Sequence[InputDimension] = (),
) -> WantedSizes:
    """Read ``dynamic_shapes``.

    Args:
        model, args, kwargs: the model and the inputs of its example.
        rows: the dimensions that are declared to have the rows of the batch.
        dynamic_shapes: None lets every size vary that the model lets vary; False fixes all. Else as ``torch.export``
            takes it: for each argument, by its name or in the order of ``args``, the dimensions that vary, each with
            a ``Dim``, ``Dim.AUTO`` or a name; nested as the arguments are. All other dimensions are fixed.

    Raises:
        CaptureError: it does not fit the arguments.
    """
    if dynamic_shapes is None:
        return WantedSizes(names=SizeNames().with_rows(rows))
    if dynamic_shapes is False:
        return WantedSizes(fixed=None)
    by_name = dict(kwargs)
    names = argument_names(model, args)
    if isinstance(dynamic_shapes, Mapping):
        by_name = {**dict(zip(names, args, strict=False)), **by_name}
        unknown = next((name for name in dynamic_shapes if name not in by_name), None)
        if unknown is not None:
            hint = nearest(str(unknown), by_name)
            raise CaptureError(
                f"dynamic_shapes names {unknown!r}, which is not an argument of the example.{hint}",
                f"{', '.join(by_name)}.",
            )
        specs = [dynamic_shapes.get(name) for name in names]
        keyword_specs = {name: dynamic_shapes.get(name) for name in kwargs}
    elif isinstance(dynamic_shapes, (tuple, list)) and len(dynamic_shapes) == len(args):
        specs, keyword_specs = list(dynamic_shapes), dict.fromkeys(kwargs)
    else:
        raise CaptureError(f"dynamic_shapes does not have an entry for each of {len(args)} arguments.", f"{_FORM}.")
    entries = [*zip(names, args, specs, strict=True), *((name, kwargs[name], keyword_specs[name]) for name in kwargs)]
    tensor_specs = [tensor for entry in entries for tensor in _tensors(*entry)]
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(tensor_specs) != len(positions):
        raise CaptureError(
            "dynamic_shapes cannot describe tensors in containers other than tuples, lists and dicts.",
            "capture without it, which lets every size vary that the model lets vary.",
        )
    wanted_by_dimension = [
        ((position, dim), f"{place}.shape[{dim}]", dim_specs.get(dim))
        for position, (place, tensor, dim_specs) in zip(positions, tensor_specs, strict=True)
        for dim in range(tensor.dim())
    ]
    return _sizes_from_specs(wanted_by_dimension, rows, first=(positions[0], 0) if positions else (0, 0))


def argument_names(model: nn.Module, args: tuple[Any, ...]) -> list[str]:
    """The names of positional arguments; ``args[0]`` where the model has none."""
    try:
        names = list(inspect.signature(model.forward).bind(*args).arguments)
    except (TypeError, ValueError):
        names = []
    return names if len(names) == len(args) else [f"args[{index}]" for index in range(len(args))]


def _tensors(place: str, value: Any, spec: Any) -> Iterator[tuple[str, torch.Tensor, Mapping[int, Any]]]:
    """(Place, tensor, dimension → what is wanted) for the tensors of an argument, in order."""
    if isinstance(value, torch.Tensor):
        yield place, value, _by_dimension(place, value, spec)
    elif isinstance(value, Mapping):
        specs = spec if isinstance(spec, Mapping) else {}
        for name, inner in value.items():
            yield from _tensors(f"{place}[{name!r}]", inner, specs.get(name))
    elif isinstance(value, (tuple, list)):
        entries = spec if isinstance(spec, (tuple, list)) and len(spec) == len(value) else [None] * len(value)
        for index, (inner, inner_spec) in enumerate(zip(value, entries, strict=True)):
            yield from _tensors(f"{place}[{index}]", inner, inner_spec)


def _by_dimension(place: str, tensor: torch.Tensor, spec: Any) -> Mapping[int, Any]:
    if spec is None:
        return {}
    if isinstance(spec, (tuple, list)) and len(spec) == tensor.dim():
        return dict(enumerate(spec))
    if isinstance(spec, Mapping) and all(isinstance(dim, int) and 0 <= dim < tensor.dim() for dim in spec):
        return spec
    raise CaptureError(f"dynamic_shapes has {spec!r} for {place}, which has {tensor.dim()} dimensions.", f"{_FORM}.")


def _sizes_from_specs(
    specs: Iterable[tuple[InputDimension, str, Any]], rows: Sequence[InputDimension], first: InputDimension
) -> WantedSizes:
    fixed: set[InputDimension] = set()
    names: dict[InputDimension, str] = {}
    bounds: dict[str, tuple[int | None, int | None]] = {}
    places: dict[InputDimension, str] = {}
    for dimension, place, spec in specs:
        name = spec if isinstance(spec, str) else getattr(spec, "__name__", None)
        if spec is None or isinstance(spec, int) or spec == Dim.STATIC:
            fixed.add(dimension)
        elif isinstance(name, str):
            if not name.isidentifier():
                raise CaptureError(
                    f"dynamic_shapes calls {place} {name!r}, which is not a Python identifier.", f"{_FORM}."
                )
            names[dimension] = name
            places[dimension] = place
            bounds[name] = (getattr(spec, "min", None), _upper(getattr(spec, "max", None)))
        elif spec == Dim.DYNAMIC:
            places[dimension] = place
        elif spec != Dim.AUTO:
            raise CaptureError(f"dynamic_shapes has {spec!r} for {place}.", f"{_FORM}.")
    for dimension in rows or (() if BATCH in names.values() else (first,)):
        if (name := names.get(dimension, BATCH)) != BATCH:  # whatever the user calls it, it is cut into microbatches
            bounds[BATCH] = bounds.pop(name)
            names |= {named_dimension: BATCH for named_dimension in names if names[named_dimension] == name}
    declared = dict(rows)
    for (position, dim), name in names.items():
        if name == BATCH and declared.get(position, dim) != dim:
            raise CaptureError(
                f"dynamic_shapes calls {places[position, dim]} {BATCH}, and batch_dims says that the rows lie along "
                f"dimension {declared[position]}.",
                "one of the two, or another name in dynamic_shapes.",
            )
    size_names = SizeNames(names, by_user=bool(names)).with_rows(row for row in rows if row not in fixed)
    return WantedSizes(frozenset(fixed), size_names, bounds, places)


def _upper(bound: Any) -> int | None:
    """The largest size; None if the bound is torch's value for no bound."""
    return bound if isinstance(bound, int) and bound < 2**31 else None
