"""Compare what a model returns for a batch with what it returns for its halves, where no rule decides.

rows that differ, masks that are not all ones ─┬─▶ model(batch) ─────────────────────┐
                                               └─▶ model(half), model(other half) ───┴─ equal: rows are independent

Random numbers, batch norm and updates of buffers are left out: each microbatch has its own by design.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipegraph.graph.batch_report import BatchRole
from pipegraph.torch_private.pytrees import pytree

# ---- distinct rows ---------------------------------------------------------------------------------------------------
# A batch of rows that all differ, derived from the example of a model: what shows whether rows are mixed up.
#
# An example often repeats one row, and its attention mask is often all ones. A batch of such rows computes the same
# values however it is cut. The rows here differ from those of the example and from one another, and are as valid:
#
#     tensor                          row of the batch
#     floats                          a row of the example plus noise, within the range of the example
#     floats of two values            as integers: they are a mask, or labels
#     floats of a single value        that value times seeded factors; zeros become small numbers
#     integers, booleans              a row of the example, rolled along its last dimension: each special token occurs
#                                     as often as before. Padding at the end of rows stays there
#     ones (an attention mask)        zeros in a tail of another length for each row, which is full in row 0; also if
#                                     the example has such tails
#     all False (a padding mask)      True in such a tail, also if the example has such tails
#     0, 1, 2, … in each row          unchanged: position ids


def distinct_rows(leaves: Sequence[Any], dims: Sequence[int | None], rows: int, seed: int = 0) -> list[Any]:
    """Return the leaves with a number of rows that differ from one another.

    Row ``r`` of every tensor is derived from row ``r % n`` of the ``n`` rows of the example. The result depends on the
    arguments alone, and shares no memory with them.

    Args:
        leaves: of the example. What is not a tensor is returned unchanged.
        dims: the batch dimension of each leaf; None for a leaf without rows, which is copied.
        rows: of the batch.
        seed: of the noise.

    Raises:
        ValueError: a tensor has another number of rows than the others, and not a multiple of it.
    """
    lengths = [
        leaf.shape[dim]
        for leaf, dim in zip(leaves, dims, strict=True)
        if isinstance(leaf, Tensor) and dim is not None and leaf.shape[dim]
    ]
    example = min(lengths, default=1)
    generator = torch.Generator().manual_seed(seed)
    return [
        _rows_of(leaf, dim, example, rows, generator) if isinstance(leaf, Tensor) else leaf
        for leaf, dim in zip(leaves, dims, strict=True)
    ]


def _rows_of(tensor: Tensor, dim: int | None, example: int, rows: int, generator: torch.Generator) -> Tensor:
    if dim is None or tensor.numel() == 0:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if tensor.shape[dim] % example:
        raise ValueError(f"a tensor has {tensor.shape[dim]} rows, and another one {example}")
    # Several entries for a row, as in [batch * heads, …], are one row: [batch, heads, …].
    first = tensor.detach().unflatten(dim, (example, -1)).movedim(dim, 0)
    batch = _distinct(first, rows, generator)
    joined = batch.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    return joined.requires_grad_(tensor.requires_grad)


def _distinct(example: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """The rows of one tensor, whose rows are along dimension 0."""
    repeated = example[torch.arange(rows, device=example.device) % len(example)]
    if example.is_complex():
        return repeated + _noise(repeated.abs().std(correction=0), repeated, generator)
    if example.is_floating_point():
        least, most = example.amin(), example.amax()
        if least == most and (most != 1 or _last_dim(example) is None):
            return _of_one_value(repeated, generator)
        if not bool(((example == least) | (example == most)).all()):
            return _with_noise(repeated, least, most, generator)
    elif _are_positions(example):
        return repeated
    if bool((example == 1).all()):
        return _with_tails(repeated, 0)
    if example.dtype == torch.bool and not bool(example.any()):
        return _with_tails(repeated, 1)
    padding = _padding(example)
    if padding is None:
        return _rolled(example, repeated)
    tokens = example[example != padding]
    if bool((tokens == tokens[0]).all()):  # a mask
        return _with_tails(torch.full_like(repeated, tokens[0].item()), padding)
    return _rolled_before(repeated, padding)


def _with_noise(repeated: Tensor, least: Tensor, most: Tensor, generator: torch.Generator) -> Tensor:
    """Rows plus noise of half their own scale, within the range of the example: a probability stays one."""
    values = repeated.float() if repeated.element_size() < 4 else repeated
    finite = torch.where(values.isfinite(), values, 0)
    inner = list(range(1, values.dim()))
    scale = finite.std(dim=inner, correction=0, keepdim=True) if finite[0].numel() > 1 else finite.std(correction=0)
    noisy = values + _noise(scale / 2, values, generator)
    return noisy.clamp(least.to(values.dtype), most.to(values.dtype)).to(repeated.dtype)


def _of_one_value(repeated: Tensor, generator: torch.Generator) -> Tensor:
    """Rows of one value, scaled by factors between 1/2 and 1; numbers between 0 and 1/2 for zeros."""
    factors = torch.rand(repeated.shape, generator=generator).to(repeated.device) / 2
    values = torch.where(repeated == 0, factors.to(repeated.dtype), repeated * (0.5 + factors).to(repeated.dtype))
    return torch.where(repeated.isfinite(), values, repeated)


def _noise(scale: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    dtype = torch.complex64 if like.is_complex() else torch.float32
    return scale * torch.randn(like.shape, generator=generator, dtype=dtype).to(like.device, like.dtype)


def _with_tails(repeated: Tensor, value: float) -> Tensor:
    """Rows with a value at the end, at another number of places in each row. Row 0 and the first place stay."""
    dim = _last_dim(repeated)
    if dim is None:
        return repeated
    rows, length = len(repeated), repeated.shape[dim]
    tails = torch.arange(rows, device=repeated.device) * max(1, length // rows) % length
    shape = [1] * repeated.dim()
    shape[0] = rows
    places = torch.arange(length, device=repeated.device).view([-1] + [1] * (repeated.dim() - 1 - dim))
    return torch.where(places >= length - tails.view(shape), torch.full_like(repeated, value), repeated)


def _rolled(example: Tensor, repeated: Tensor) -> Tensor:
    """Rows rolled along their last dimension, each by another number of places; rows of one entry in another order."""
    dim = _last_dim(repeated)
    if dim is None:
        number = torch.arange(len(repeated), device=repeated.device)
        return example[(number + 1 + number // len(example)) % len(example)]
    places = 1 + torch.arange(len(repeated)) % (repeated.shape[dim] - 1)
    return torch.stack([row.roll(int(by), dim - 1) for row, by in zip(repeated, places, strict=True)])


def _rolled_before(repeated: Tensor, padding: float) -> Tensor:
    """Rows of tokens with padding at the end: the tokens rolled, so that rows differ as far as they are long enough.

    A row that begins with padding may see nothing under a causal mask, and its softmax is nan.
    """
    values: set[tuple[float, ...]] = set()
    rows = []
    for row in repeated.flatten(1):
        length = int((row != padding).sum())
        for by in range(1, max(length, 2)):
            rolled = torch.cat([row[:length].roll(by), row[length:]])
            if tuple(rolled.tolist()) not in values:
                break
        values.add(tuple(rolled.tolist()))
        rows.append(rolled)
    return torch.stack(rows).view_as(repeated)


def _padding(example: Tensor) -> float | None:
    """The value that fills the ends of rows, two places or more of one of them, and that is nowhere else."""
    dim = _last_dim(example)
    if dim is None or example[0].numel() != example.shape[dim]:
        return None
    tokens = example.flatten(1)
    for value in tokens[:, -1].unique():
        is_padding = tokens == value
        lengths = is_padding.sum(1)
        at_end = torch.arange(tokens.shape[1], device=tokens.device) >= (tokens.shape[1] - lengths)[:, None]
        if bool((is_padding == at_end).all()) and 2 <= lengths.max() < tokens.shape[1]:
            return value.item()
    return None


def _last_dim(tensor: Tensor) -> int | None:
    """The last dimension inside a row that has more than one entry."""
    return next((dim for dim in range(tensor.dim() - 1, 0, -1) if tensor.shape[dim] > 1), None)


def _are_positions(tensor: Tensor) -> bool:
    """Return whether each row counts up by 1 along its last dimension."""
    if tensor.dtype == torch.bool or tensor.dim() < 2 or tensor.shape[-1] < 3:
        return False
    return bool((tensor[..., 1:] == tensor[..., :-1] + 1).all())


# ---- value proof -----------------------------------------------------------------------------------------------------


_TOLERANCE: Final = 1e-4
"""Relative, in float32: sums of another order differ by less, and other rows by more."""
_MOST_BYTES: Final = 2**28
"""Parameters on the meta device up to this size get random values for the comparison."""


def compare_halves(
    model: nn.Module,
    mode: Mapping[nn.Module, bool],
    example: tuple[tuple[Any, ...], dict[str, Any]],
    roles: Mapping[str, BatchRole],
) -> bool | None:
    """Return whether a model gives the same for a batch as for its halves, in both modes.

    Args:
        model: with real parameters, or small ones on the meta device.
        mode: whether each module is in training mode in the graph.
        example: the inputs of the capture.
        roles: of the tensors among them, in order.

    Returns:
        None if it cannot be computed: parameters have no values, or the model refuses the batch.
    """
    state = _values(model)
    leaves, form = pytree.tree_flatten(example)
    tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if state is None or any(leaves[at].is_meta for at in tensors):
        return None
    dims: list[int | None] = [None] * len(leaves)
    for at, role in zip(tensors, roles.values(), strict=True):
        dims[at] = role.dim
    rows = min((leaves[at].shape[dims[at]] for at in tensors if dims[at] is not None), default=1)

    def returned(half: int | None, seed: int = 0) -> list[Any]:
        """What the model returns for one half of the batch, or for all of it."""
        part = [
            leaf if dim is None or half is None else leaf.chunk(2, dim)[half]
            for leaf, dim in zip(batch, dims, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(part, form)
        values = {name: value.clone() for name, value in state.items()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _WithoutRandom():
            torch.manual_seed(seed)
            return pytree.tree_leaves(functional_call(model, values, args, kwargs))

    try:
        batch = distinct_rows(leaves, dims, 2 * max(rows, 2))
        modes = dict(mode), dict.fromkeys(mode, False)
        results = [_same_in_mode(model, flags, returned) for flags in modes[: 1 + (modes[0] != modes[1])]]
    except Exception:  # whatever the model raises for other rows
        return None
    return False if False in results else True if True in results else None


def _same_in_mode(model: nn.Module, flags: Mapping[nn.Module, bool], returned: Callable[..., list[Any]]) -> bool | None:
    """Whether the outputs of a batch are those of its halves; None if they are random in this mode."""
    fixed = {module: training and not isinstance(module, _PER_BATCH) for module, training in flags.items()}
    with _in_mode(model, fixed):
        outputs = list(zip(*(returned(half) for half in (None, 0, 1)), strict=True))
        if all(_is_joined(*tensors) for tensors in outputs if isinstance(tensors[0], Tensor)):
            return True
        pairs = zip(outputs, returned(None, seed=1), strict=True)
        is_random = any(isinstance(again, Tensor) and not _close(first[0], again) for first, again in pairs)
    return None if is_random else False


_PER_BATCH: Final = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)


@contextmanager
def _in_mode(model: nn.Module, flags: Mapping[nn.Module, bool]) -> Iterator[None]:
    flags_of_model = {module: module.training for module in model.modules()}
    try:
        for module in flags_of_model:
            module.training = flags.get(module, False)
        yield
    finally:
        for module, training in flags_of_model.items():
            module.training = training


def _is_joined(batch: Tensor, first: Tensor, second: Tensor) -> bool:
    """Return whether an output is those of the halves along some dimension, or the same for all, or one number that
    is the mean of theirs."""
    if batch.dim() == 0 and batch.is_floating_point():
        return _close(batch, (first + second) / 2)
    if batch.shape == first.shape == second.shape:
        return _close(batch, first) and _close(batch, second)
    differing = [dim for dim in range(batch.dim()) if batch.shape[dim] != first.shape[dim]]
    return len(differing) == 1 and _close(batch, torch.cat([first, second], differing[0]))


def _close(expected: Tensor, actual: Tensor) -> bool:
    if expected.shape != actual.shape:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, actual)
    scale = expected.abs().nan_to_num(0, 0, 0).max() if expected.numel() else torch.zeros(())
    epsilon = max(_TOLERANCE, 64 * torch.finfo(expected.dtype).eps)
    return bool(torch.allclose(expected, actual, rtol=0, atol=float(scale) * epsilon, equal_nan=True))


def _values(model: nn.Module) -> dict[str, Tensor] | None:
    """The parameters and buffers of a model; random ones for small parameters without values, else None."""
    state: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    missing = {name: tensor for name, tensor in state.items() if tensor.is_meta}
    if sum(tensor.nbytes for tensor in missing.values()) > _MOST_BYTES:
        return None
    generator = torch.Generator().manual_seed(0)
    for name, tensor in missing.items():
        values = torch.randn(tensor.shape, generator=generator) * tensor.shape[-1:].numel() ** -0.5
        state[name] = values.to(tensor.dtype)
    return {name: tensor.detach() for name, tensor in state.items()}


class _WithoutRandom(TorchFunctionMode):
    """Leaves dropout out, also that of functions, which a model calls with ``training=self.training``."""

    def __torch_function__(self, function: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is functional.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
            args = args[:4]
        return function(*args, **kwargs)


_DROPOUTS: Final = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
)
