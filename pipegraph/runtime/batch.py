"""What the caller passed to a step: bound to the model's inputs, and checked against the manifest."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pipegraph.errors import BatchError, closest, nearest
from pipegraph.package import CALLER, Manifest, Value
from pipegraph.package.sizes import BATCH, holds
from pipegraph.runtime.step_data import NO_TARGET, StepRequest
from pipegraph.runtime.wiring import dtype_name, torch_dtype
from pipegraph.torch_private.pytrees import pytree
from pipegraph.units import format_number_of

# ---- step sizes ------------------------------------------------------------------------------------------------------
# The sizes of a step: those that the caller's tensors show, and those of all microbatches.
#
# inputs of a rank ─▶ ShownSizes ─▶ sizes of microbatches ─▶ merged with those of other ranks ─▶ StepSizes


SizeItems = tuple[tuple[str, int], ...]
"""(name, size) for the sizes of a microbatch, in the order of the manifest"""

SizesCache = Callable[[SizeItems], "MicrobatchSizes"]


@dataclass(frozen=True)
class MicrobatchSizes:
    """The sizes of one microbatch. Microbatches of equal sizes share one, also those of different steps."""

    items: SizeItems
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)  # reading takes time

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.items)

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a value in this microbatch."""
        shape = self._shapes.get(value.name)
        if shape is None:
            shape = self._shapes[value.name] = value.shape_at(self.sizes)
        return shape


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a step.

    Attributes:
        microbatches: the sizes of each microbatch.
    """

    microbatches: tuple[MicrobatchSizes, ...]

    @classmethod
    def even(cls, sizes: Mapping[str, int], microbatches: int) -> StepSizes:
        """The sizes of a batch that is cut into microbatches as evenly as possible."""
        tables = microbatch_tables(ShownSizes(sizes), microbatches)
        return cls(tuple(MicrobatchSizes(tuple(table.items())) for table in tables))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The rows of the whole batch, and the sizes that all microbatches have in common."""
        first = self.microbatches[0].sizes
        if self.is_even:
            common = dict(first)
        else:
            common = {
                name: size
                for name, size in first.items()
                if all(microbatch.sizes[name] == size for microbatch in self.microbatches)
            }
        if BATCH in first:
            common[BATCH] = sum(microbatch.sizes[BATCH] for microbatch in self.microbatches)
        return common

    @cached_property
    def rows(self) -> int | None:
        """The rows of the whole batch; None if the model fixes them."""
        return self.sizes.get(BATCH)

    @cached_property
    def weights(self) -> list[float]:
        """The share of each microbatch in the mean over the rows of the batch."""
        if self.rows is None:
            return [1 / len(self.microbatches)] * len(self.microbatches)
        return [microbatch.sizes[BATCH] / self.rows for microbatch in self.microbatches]

    @cached_property
    def is_even(self) -> bool:
        """Whether all microbatches have the same sizes."""
        first = self.microbatches[0]
        return all(microbatch is first or microbatch == first for microbatch in self.microbatches)

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over the rows of the batch of one number for each microbatch [microbatches]."""
        if self.is_even:
            return numbers.mean()
        return (numbers * torch.tensor(self.weights, dtype=numbers.dtype, device=numbers.device)).sum()

    def lengths(self, value: Value) -> list[int]:
        """The length of each microbatch along the dimension in which a value is cut."""
        assert value.batch_dim is not None
        return [microbatch.shape(value)[value.batch_dim] for microbatch in self.microbatches]

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a value for the whole batch. Its other dimensions are those in the first microbatch."""
        shape = list(self.microbatches[0].shape(value))
        if value.batch_dim is not None:
            shape[value.batch_dim] = sum(self.lengths(value))
        return tuple(shape)

    def __str__(self) -> str:
        return describe_tables([microbatch.sizes for microbatch in self.microbatches])


@dataclass(frozen=True)
class ShownSizes:
    """The sizes that the tensors show which a rank was given.

    Attributes:
        batch_sizes: those of tensors of the whole batch, by name.
        lists: for each microbatch, those of the tensors in lists; empty if there are no lists.
    """

    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    lists: tuple[Mapping[str, int], ...] = ()


def microbatch_tables(known_sizes: ShownSizes, microbatches: int, min_rows: int = 1) -> list[dict[str, int]]:
    """The sizes of each microbatch, as far as they are known.

    Rows are cut as evenly as possible: 10 rows in 4 microbatches are 3, 3, 2 and 2. A batch with too few rows for that
    number has fewer microbatches.

    Args:
        microbatches: the requested number.
        min_rows: of a microbatch.

    Raises:
        BatchError: the batch has too few rows for one microbatch, or for those of lists.
    """
    batch_sizes, count = known_sizes.batch_sizes, len(known_sizes.lists) or microbatches
    rows = batch_sizes.get(BATCH)
    if rows is None or any(BATCH in sizes for sizes in known_sizes.lists):
        return [{**batch_sizes, **sizes} for sizes in known_sizes.lists] or [dict(batch_sizes) for _ in range(count)]
    least = max(min_rows, 1)
    if rows < least:
        raise BatchError(
            f"the batch has {format_number_of('row', rows)}, and a microbatch of this package takes {least} or more.",
            f"{format_number_of('row', least)} or more.",
        )
    if known_sizes.lists and rows < least * count:
        raise BatchError(
            f"lists of {count} microbatches were passed, and the whole tensors have rows for {rows // least}.",
            "lists alone.",
        )
    count = min(count, rows // least)
    lists: Sequence[Mapping[str, int]] = known_sizes.lists or [{}] * count
    return [{**batch_sizes, **sizes, BATCH: part} for sizes, part in zip(lists, even_rows(rows, count), strict=True)]


def step_sizes(tables: Sequence[Mapping[str, int]], names: Sequence[str], shared: SizesCache) -> StepSizes | None:
    """The sizes of a step from those of its microbatches; None if one of them is not known.

    Args:
        names: all sizes, in the order of the manifest.
        shared: returns the same object for equal sizes.
    """
    if any(name not in table for table in tables for name in names):
        return None
    return StepSizes(tuple(shared(tuple((name, table[name]) for name in names)) for table in tables))


def even_rows(rows: int, microbatches: int) -> list[int]:
    """The rows of each microbatch if they are cut as evenly as possible, the larger ones first."""
    fewer, remainder = divmod(rows, microbatches)
    return [fewer + 1] * remainder + [fewer] * (microbatches - remainder)


def sizes_of_inputs(manifest: Manifest, shapes: Iterable[tuple[str, Sequence[int]]]) -> dict[str, int]:
    """The sizes that the shapes of inputs show, as far as an input has one as a dimension. The first input decides.

    Args:
        shapes: (input, its shape, with the number of dimensions that it has in the manifest).
    """
    sizes: dict[str, int] = {}
    for name, shape in shapes:
        for dimension, size in zip(manifest.values[name].shape, shape, strict=True):
            if dimension in manifest.sizes:
                sizes.setdefault(str(dimension), size)
    return sizes


def describe_tables(tables: Sequence[Mapping[str, int]]) -> str:
    """The sizes of microbatches: ``2 microbatches of [2, 1] rows, seq [8, 16]``."""
    rows = [table.get(BATCH, -1) for table in tables]
    text = format_number_of("microbatch", len(tables))
    if rows and min(rows) >= 0:
        text += f" of {rows} rows"
    for name in tables[0]:
        column = [table.get(name, -1) for table in tables]
        if name != BATCH and max(column) >= 0:
            text += f", {name} {column[0] if len(set(column)) == 1 else column}"
    return text


# ---- targets ---------------------------------------------------------------------------------------------------------
# The target of a step, cut into microbatches along its rows.


def cut_target(
    target: Any,
    microbatches: int,
    device: torch.device | None,
    lengths: Mapping[int, Sequence[int]],
    name: str = "target",
    owner: str = "the batch",
    dims: Sequence[int] = (0,),
) -> Sequence[Any]:
    """Cut the target's tensors along their rows, on `device` if given. Everything else repeats in each microbatch.

    Containers keep their class, but a Mapping that torch's pytree does not know becomes a dict. Raises BatchError for
    another container that holds tensors, and for a tensor whose rows are not the batch's: the loss would broadcast it
    in silence.

    Args:
        lengths: rows that the batch may have, in its inputs and outputs → those of each microbatch.
        name, owner: of the target and of what has its rows, in messages.
        dims: along which the rows of a tensor may lie. The first that it has with such a length counts.
    """
    leaves, spec = pytree.tree_flatten_with_path(_with_plain_mappings(target))
    cuts = [
        _cut_leaf(leaf, microbatches, device, lengths, f"{name}{pytree.keystr(path)}", owner, dims)
        for path, leaf in leaves
    ]
    if spec.is_leaf():
        return cuts[0]
    return [pytree.tree_unflatten([cut[index] for cut in cuts], spec) for index in range(microbatches)]


def join_target(targets: Sequence[Any], lengths: Collection[int], dims: Sequence[int]) -> Any:
    """Join the targets of microbatches. What has no rows is the same for all of them.

    Args:
        lengths: rows that the batch may have.
        dims: along which the rows of a tensor may lie, as in `cut_target`.
    """

    def joined(*parts: Any) -> Any:
        first = parts[0]
        if not isinstance(first, Tensor) or first.dim() == 0 or len(parts) == 1:
            return first
        along = (dim for dim in dims if dim < first.dim())
        dim = next((dim for dim in along if sum(part.shape[dim] for part in parts) in lengths), 0)
        return torch.cat(parts, dim)

    return pytree.tree_map(joined, *targets)


def placed(tensor: Tensor, device: torch.device | None, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on `device` if given, and in this dtype.

    Only what goes to a GPU is not waited for: whatever reads it there comes later in the same stream.
    """
    return tensor.to(device, dtype, non_blocking=device is not None and device.type != "cpu")


def check_strided(label: str, tensor: Tensor) -> None:
    """Raise BatchError for a tensor that cannot be cut along a dimension, or has no numbers."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind, dense = ("nested", "to_padded_tensor(0)") if tensor.is_nested else ("sparse", "to_dense()")
        raise BatchError(f"{label} is a {kind} tensor, which is not cut into microbatches.", f"{label}.{dense}.")
    if tensor.is_meta:
        raise BatchError(f"{label} is on the device meta: it has no numbers.", "a tensor on a CPU or a GPU.")


def _with_plain_mappings(target: Any) -> Any:
    def plain(leaf: Any) -> Any:
        return {key: pytree.tree_map(plain, item) for key, item in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(plain, target)


def _cut_leaf(
    leaf: Any,
    microbatches: int,
    device: torch.device | None,
    lengths: Mapping[int, Sequence[int]],
    where: str,
    owner: str,
    dims: Sequence[int],
) -> Sequence[Any]:
    if not isinstance(leaf, Tensor):
        if _holds_tensors(leaf):
            raise BatchError(
                f"{where} is a {type(leaf).__name__} that holds tensors, which cannot be cut.",
                "a dict, a list, a tuple or a named tuple of them.",
                is_of_target=True,
            )
        return [leaf] * microbatches
    check_strided(where, leaf)
    tensor = placed(leaf, device)
    if tensor.dim() == 0:
        return [tensor] * microbatches
    dim = next((dim for dim in dims if dim < tensor.dim() and tensor.shape[dim] in lengths), None)
    if dim is None:
        rows, place = " or ".join(map(str, sorted(lengths))), next((dim for dim in dims if dim < tensor.dim()), 0)
        along = f" along dimension {place}" if place else ""
        raise BatchError(
            f"{where} has {tensor.shape[place]} rows{along}, and {owner} has {rows}: the loss would pair the wrong "
            f"ones.",
            f"a target with {rows} rows, one for each of {owner}; or, if they lie along another dimension, "
            'capture with batch_dims={"target": DIM}.',
            is_of_target=True,
        )
    return tensor.split(list(lengths[tensor.shape[dim]]), dim)


def _holds_tensors(leaf: Any) -> bool:
    slots = getattr(leaf, "__slots__", ())
    names = [slots] if isinstance(slots, str) else [*slots]
    members = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name, None) for name in names)]
    if isinstance(leaf, (list, tuple, set, frozenset)):
        members += leaf
    return any(isinstance(item, Tensor) for item in pytree.tree_leaves(members))


# ---- model arguments -------------------------------------------------------------------------------------------------
# The arguments of the model, in the structure that they had at capture: bound to the names of values, and filled.


def bind_arguments(manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the caller passed, by the names of values, without what is None or left out.

    Raises BatchError for an argument that the model did not have at capture, or of another structure.
    """
    positional, keyword = list(args), dict(kwargs)
    if len(positional) > len(manifest.args):
        raise BatchError(
            f"{len(positional)} positional arguments were passed; {_signature(manifest)}.",
            f"{len(manifest.args)} of them, and target= for the loss.",
        )
    by_place = [structure for structure in manifest.args[: len(positional)] if isinstance(structure, str)]
    for structure in manifest.args[len(positional) :]:  # a positional argument may be passed by its name
        positional.append(keyword.pop(structure, None) if isinstance(structure, str) else None)
    for name in keyword:
        if name in by_place:
            raise BatchError(f"{name} was passed twice, by its place and by its name.", "one of the two.")
        if name not in manifest.kwargs:
            argument_names = [*manifest.kwargs, *(argument for argument in manifest.args if isinstance(argument, str))]
            raise BatchError(
                f"there is no argument {name!r}; {_signature(manifest)}.{nearest(name, argument_names)}",
                f"{closest(name, argument_names) or ', '.join(argument_names)}.",
            )
    passed = [
        (f"argument {i}", structure, item)
        for i, (structure, item) in enumerate(zip(manifest.args, positional, strict=True))
    ]
    passed += [(f"argument {name!r}", manifest.kwargs[name], item) for name, item in keyword.items()]
    by_name: dict[str, Any] = {}
    for where, structure, item in passed:
        for name, leaf in _leaves(where, structure, item):
            if manifest.values[name].is_constant:
                _check_constant(manifest.values[name], leaf)
            elif leaf is not None:
                by_name[name] = leaf
    return by_name


def fill_structure(structure: Any, leaves: Mapping[str, Any]) -> Any:
    """The nested structure with each name replaced by its leaf."""
    if isinstance(structure, Mapping):
        return {key: fill_structure(item, leaves) for key, item in structure.items()}
    if isinstance(structure, (list, tuple)):
        return type(structure)(fill_structure(item, leaves) for item in structure)
    return None if structure is None else leaves[structure]


def _leaves(where: str, structure: Any, passed: Any) -> Iterator[tuple[str, Any]]:
    """(name, what was passed) for every name in the structure."""
    if isinstance(structure, str):
        yield structure, passed
    elif structure is None:
        if passed is not None:
            raise BatchError(
                f"{where} was None when the model was captured.", "leave it out, or capture the model with it."
            )
    elif isinstance(structure, Mapping):
        if is_dataclass(passed) and not isinstance(passed, (type, Mapping)):  # a ModelOutput has no keys for None
            passed = {entry.name: getattr(passed, entry.name) for entry in fields(passed)}
        if passed is not None and (not isinstance(passed, Mapping) or passed.keys() != structure.keys()):
            description = sorted(passed) if isinstance(passed, Mapping) else type(passed).__name__
            raise BatchError(
                f"{where} is {description}; it was a dict of {sorted(structure)} when the model was captured.",
                "such a dict.",
            )
        for key, item in structure.items():
            yield from _leaves(f"{where}[{key!r}]", item, None if passed is None else passed[key])
    else:
        if passed is not None and (not isinstance(passed, (tuple, list)) or len(passed) != len(structure)):
            description = f"{len(passed)} items" if isinstance(passed, (tuple, list)) else type(passed).__name__
            raise BatchError(
                f"{where} is {description}; it had {len(structure)} items when the model was captured.",
                "the same number of items.",
            )
        for i, item in enumerate(structure):
            yield from _leaves(f"{where}[{i}]", item, None if passed is None else passed[i])


def _check_constant(value: Value, passed: Any) -> None:
    if passed is not None and (type(passed) is not type(value.constant) or passed != value.constant):
        raise BatchError(
            f"{value.name} is {passed!r}; it was {value.constant!r} when the model was captured, and the stages were "
            f"written for that.",
            f"{value.constant!r}, or capture the model again with the other.",
        )


def _signature(manifest: Manifest) -> str:
    names = [item if isinstance(item, str) else "…" for item in manifest.args] + [
        f"{name}=" for name in manifest.kwargs
    ]
    return f"the model was captured with ({', '.join(names)})"


# ---- batch -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepBatch:
    """The arguments of a step: tensors of the whole batch, or lists with one tensor for each microbatch.

    Attributes:
        inputs: by name, without those that are None.
        target: None if it was left out.
        count: the number of microbatches in lists; None without lists.
    """

    inputs: Mapping[str, Any]
    target: Any
    count: int | None

    @property
    def requires_grad(self) -> bool:
        """Whether the gradient of an input is asked for."""
        return any(tensor.requires_grad for name in self.inputs for _, tensor in self.tensors(name))

    def tensors(self, name: str) -> list[tuple[str, Any]]:
        """The tensors of an input, with their names in messages."""
        value = self.inputs.get(name)
        if isinstance(value, list):
            return [(f"{name}[{index}]", item) for index, item in enumerate(value)]
        return [(name, value)]


def bind_batch(manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any], request: StepRequest) -> StepBatch:
    """Bind arguments to inputs. Raises BatchError for arguments and lists that do not fit together."""
    inputs = bind_arguments(manifest, args, kwargs)
    target = None if request.target is NO_TARGET else request.target
    lists = [(name, len(value)) for name, value in (*inputs.items(), ("target", target)) if isinstance(value, list)]
    for name, length in lists:
        first, count = lists[0]
        if length != count:
            raise BatchError(
                f"{first} is a list of {count} microbatches, and {name} one of {length}.", "lists of equal lengths."
            )
        if length == 0 or request.microbatches not in (None, length):
            request_text = "" if length == 0 else f", and microbatches={request.microbatches} was given"
            raise BatchError(
                f"{name} is a list of {length} microbatches{request_text}.", "one item for each microbatch."
            )
    return StepBatch(inputs, target, lists[0][1] if lists else None)


def known_sizes(manifest: Manifest, batch: StepBatch) -> ShownSizes:
    """The sizes that the inputs show. Their tensors have to be checked by `check_tensors` before."""
    shapes = [(name, value.shape) for name, value in batch.inputs.items() if not isinstance(value, list)]
    lists = [(name, value) for name, value in batch.inputs.items() if isinstance(value, list)]
    by_microbatch = [[(name, tensors[index].shape) for name, tensors in lists] for index in range(batch.count or 0)]
    return ShownSizes(
        sizes_of_inputs(manifest, shapes), tuple(sizes_of_inputs(manifest, table) for table in by_microbatch)
    )


def check_tensors(manifest: Manifest, batch: StepBatch, inputs: Sequence[str], cast_from: torch.dtype | None) -> None:
    """Raise BatchError unless these inputs are tensors with the dtypes and the numbers of dimensions of the manifest.

    Args:
        cast_from: tensors of this dtype are cast to that of the manifest.
    """
    for name in inputs:
        for label, tensor in batch.tensors(name):
            _check_tensor(manifest.values[name], label, tensor, cast_from)


def check_batch(manifest: Manifest, batch: StepBatch, step: StepSizes, microbatches: int) -> None:
    """Raise BatchError unless the inputs have the shapes of a step of these sizes, and roles that allow it.

    Args:
        microbatches: the requested number.
    """
    for sizes in dict.fromkeys(step.microbatches):
        _check_limits(manifest, sizes.sizes)
    several = len(step.microbatches) > 1
    for name, tensors in batch.inputs.items():
        value = manifest.values[name]
        if isinstance(tensors, list):
            _check_list(value, tensors, step)
            continue
        if several:
            _check_role(manifest, value, len(step.microbatches))
        if tensors.shape != step.shape(value) or not _is_common(value, step):
            raise BatchError(_wrong_shape(value, tensors, step, microbatches))


def _check_role(manifest: Manifest, value: Value, count: int) -> None:
    """Raise BatchError for a whole tensor that must not be cut into several microbatches."""
    if value.batch_role == "list":
        raise BatchError(
            f"{value.name} has the role list, and one tensor was passed for {count} microbatches.",
            f"a list with one tensor for each microbatch, {value.name}=[…, …]; or microbatches=1.",
        )
    mixing = manifest.batch.mixing
    if mixing and value.batch_role == "rows":
        further = f", and {format_number_of('more operator', len(mixing) - 1)}" if len(mixing) > 1 else ""
        name, _, dim = manifest.batch.suggestion.partition("=")
        role = f"{name}={dim}" if dim else f"{value.name}=DIM|whole|list"
        python = f'batch_dims={{"{name}": {dim}}}' if dim else "batch_dims="
        raise BatchError(
            f"{mixing[0]} mixes the rows of a batch{further}, so that {count} microbatches of a batch do not give its "
            "result.",
            f"declare a role when the model is captured, with {python} or --batch-dim {role}; or pass lists of "
            "microbatches; or microbatches=1.",
        )


def _is_common(value: Value, step: StepSizes) -> bool:
    """Whether all microbatches agree in the shape of a whole tensor, apart from its rows."""
    if step.is_even:
        return True
    dim = value.batch_dim
    shapes = (microbatch.shape(value) for microbatch in step.microbatches)
    return len({shape if dim is None else (*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) == 1


def _place_of(manifest: Manifest, size: str) -> str:
    """Where a size is among the inputs: ``dimension 1 of tokens``."""
    shapes = ((value.name, value.shape) for value in manifest.values.values() if value.producer == CALLER)
    places = (f"dimension {shape.index(size)} of {name}" for name, shape in shapes if size in shape)
    return next(places, "a size of the inputs")


def _check_limits(manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Raise BatchError for sizes that the model does not take, or for which it may take another branch."""
    for name, size in sizes.items():
        limits = manifest.sizes[name]
        if size < limits.min or (limits.max is not None and size > limits.max):
            most = f"to {limits.max}" if limits.max is not None else "or more"
            raise BatchError(
                f"{name}, {_place_of(manifest, name)}, is {size}; the stages are the model for {limits.min} {most}.",
                f"{limits.min} {most}, or capture the model with {name} {size}, if it takes that.",
            )
    for condition in manifest.conditions:
        if not holds(condition, sizes):
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise BatchError(
                f"the stages are the model where {condition}, and a microbatch has {listed}.",
                "other sizes, or capture the model with these.",
            )


def _check_list(value: Value, tensors: Sequence[Tensor], step: StepSizes) -> None:
    """Raise BatchError unless each tensor has the shape of its microbatch."""
    for index, (tensor, sizes) in enumerate(zip(tensors, step.microbatches, strict=True)):
        if tensor.shape != sizes.shape(value):
            raise BatchError(
                f"{value.name}[{index}] has the shape {list(tensor.shape)}; with the other inputs of microbatch "
                f"{index} ({_listed(sizes)}) it is {list(sizes.shape(value))}.",
                "that shape.",
            )


def _check_tensor(value: Value, label: str, tensor: Any, cast_from: torch.dtype | None) -> None:
    """Raise BatchError unless this is a tensor of the input's number of dimensions and its dtype, or of one that is
    cast to it."""
    if not isinstance(tensor, Tensor):
        text = "missing" if tensor is None else reprlib.repr(tensor)
        raise BatchError(f"{label} is {text}, and the model takes a tensor.", f"a tensor like {value}.")
    check_strided(label, tensor)
    if tensor.dim() != len(value.shape):
        raise BatchError(
            f"{label} has the shape {list(tensor.shape)}; the captured microbatch is {value}.",
            f"a tensor with {format_number_of('dimension', len(value.shape))}.",
        )
    dtype = torch_dtype(value)
    if tensor.dtype != dtype and not (tensor.dtype == cast_from and dtype.is_floating_point):
        raise BatchError(f"{label} is {dtype_name(tensor)}; the plan has {value}.", f"{label}.to(torch.{value.dtype}).")


def _listed(sizes: MicrobatchSizes) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items)


def _wrong_shape(value: Value, tensor: Tensor, step: StepSizes, microbatches: int) -> str:
    problem, batch = f"{value.name} has the shape {list(tensor.shape)}", step.shape(value)
    dim = value.batch_dim
    if not _is_common(value, step):
        return (
            f"{problem} in place of a list, and the sizes of the microbatches differ: {step}.\n"
            f"Try: a list with one tensor for each microbatch."
        )
    if dim is None or [*tensor.shape[:dim], *tensor.shape[dim + 1 :]] != [*batch[:dim], *batch[dim + 1 :]]:
        sizes = ", ".join(f"{name} {size}" for name, size in step.sizes.items())
        captured = f"[{', '.join(map(str, value.shape))}]"
        return (
            f"{problem}; the captured microbatch is {captured}, and {microbatches} of them make {list(batch)}"
            f"{f' with {sizes}' if sizes else ''}.\nTry: that shape, or capture the model with another one."
        )
    rows, captured_rows = tensor.shape[dim], step.lengths(value)[0]
    if step.rows is not None:
        return (
            f"{problem}: {rows} rows, and another input has {step.rows}.\nTry: {list(batch)}; or, if these are "
            f'no rows of the batch, capture with another number of them, or with dynamic_shapes={{"{value.name}": '
            f'{{{dim}: "rows"}}, …}}.'
        )
    near = max(rows // captured_rows, 1)
    divides = near * captured_rows == rows
    alternative = f"microbatches={near}" if divides else f"{near * captured_rows} rows with microbatches={near}"
    text = (
        f"{problem}: {rows} rows for {microbatches} microbatches. The captured microbatch is {captured_rows} rows.\n"
        f"Try: {batch[dim]} rows, or {alternative}"
    )
    varying = next((at for at, size in enumerate(value.shape) if isinstance(size, str)), None)
    if varying is None:
        return f"{text}."
    shapes = f'dynamic_shapes={{"{value.name}": {{{varying}: "batch"}}}}'
    return f"{text}; or, if the batch is dimension {varying}, which varies, capture with {shapes}."
