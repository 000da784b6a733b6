"""The rule for the operators of ``torch.autograd.Function``s, which no table has: rows are tried on values.

What a Function returns for a batch, and the gradients of its arguments, have to be those of the halves of the batch.
The gradient of an argument without rows, such as a weight, has to be the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, fx

from pipegraph.graph.batch.row_call import RowCall
from pipegraph.graph.batch.row_state import INVARIANT, Rows, RowsMixError, State
from pipegraph.graph.custom_functions import AppliedFunction
from pipegraph.graph.function_trials import (
    GRADIENT_SCALES,
    DrawsFixed,
    UnwritableFunctionError,
    are_close,
    arriving_gradient,
    gradients,
    run_on_samples,
)

_ROWS: Final = 4
_MOST: Final = 4  # the entries of a row along the dimension of the rows, and the repetitions of all rows


@dataclass(frozen=True)
class _Layout:
    """A dimension in which rows lie: ``repeats`` times all rows, each ``inner`` entries long."""

    dim: int
    repeats: int
    inner: int

    def half(self, tensor: Tensor, number: int) -> Tensor:
        """The first or the second half of the rows."""
        parts = tensor.unflatten(self.dim, (self.repeats, _ROWS, self.inner))
        return parts.narrow(self.dim + 1, number * _ROWS // 2, _ROWS // 2).flatten(self.dim, self.dim + 2)


def function_rows(call: RowCall, function: AppliedFunction) -> State | tuple[State, ...]:
    """The rows of what a Function returns.

    Raises:
        RowsMixError: it mixes rows, forward or backward, or runs on no values that are tried.
    """
    shapes = [list(call.shape_of(value)) for value in call.node.args]
    layouts: list[_Layout | None] = []
    inner_sizes: dict[int, int] = {}  # in the values that are tried → in the graph
    for value, shape in zip(call.node.args, shapes, strict=True):
        rows = call.rows(value)
        if rows is None:
            layouts.append(None)
            continue
        repeats, inner = shape[rows.dim] // (call.sizes.rows * rows.inner), min(rows.inner, _MOST)
        layouts.append(_Layout(rows.dim, min(repeats, _MOST), inner))
        shape[rows.dim] = min(repeats, _MOST) * _ROWS * inner
        inner_sizes.setdefault(inner, rows.inner)
    arguments = [value.meta["val"] if isinstance(value, fx.Node) else value for value in call.node.args]
    result_layouts = _tried(function, arguments, shapes, layouts)
    if result_layouts is None:
        raise RowsMixError
    states: list[State] = [
        INVARIANT if layout is None else _state(call, index, layout, inner_sizes)
        for index, layout in enumerate(result_layouts)
    ]
    return states[0] if function.results is None else tuple(states)


_layouts_of_results: dict[Hashable, list[_Layout | None] | None] = {}


def _tried(
    function: AppliedFunction, arguments: list[Any], shapes: list[list[int]], layouts: list[_Layout | None]
) -> list[_Layout | None] | None:
    """Where the rows of results are; None if rows are mixed, or the Function runs on no values."""
    kinds = (value.dtype if isinstance(value, Tensor) else repr(value) for value in arguments)
    key = function, *kinds, *map(tuple, shapes), *layouts
    if key not in _layouts_of_results:
        try:
            _layouts_of_results[key] = run_on_samples(
                function.function, arguments, shapes, lambda samples: _layouts(function, samples(1.0), layouts)
            )
        except UnwritableFunctionError:
            _layouts_of_results[key] = None
    return _layouts_of_results[key]


def _state(call: RowCall, index: int, layout: _Layout, inner_sizes: dict[int, int]) -> Rows:
    inner = inner_sizes.get(layout.inner)
    if inner is None:  # of a result that has all rows once
        inner = call.result_shape(index)[layout.dim] // call.sizes.rows
    return Rows(layout.dim, inner)


def _layouts(
    function: AppliedFunction, values: Sequence[Any], layouts: Sequence[_Layout | None]
) -> list[_Layout | None] | None:
    """Where the rows of results are; None if rows are mixed."""
    halves = [
        [
            _leaf(layout.half(value, number), value) if layout is not None else value
            for value, layout in zip(values, layouts, strict=True)
        ]
        for number in (0, 1)
    ]
    with DrawsFixed():
        results, *half_results = (_tensors(function.apply(*arguments)) for arguments in (values, *halves))
    argument_layouts = [layout for layout in layouts if layout is not None]
    result_layouts: list[_Layout | None] = []
    for result, *of_halves in zip(results, *half_results, strict=True):
        if all(are_close(result, half) for half in of_halves):
            result_layouts.append(None)
            continue
        layout = next(filter(_fits(result, of_halves), _candidates(result, of_halves[0], argument_layouts)), None)
        if layout is None:
            return None
        result_layouts.append(layout)
    pairs = [(result, layout) for result, layout in zip(results, result_layouts, strict=True) if result.requires_grad]
    differentiated = [
        layout
        for value, layout in zip(values, layouts, strict=True)
        if isinstance(value, Tensor) and value.requires_grad
    ]
    for scale in GRADIENT_SCALES:
        arriving = [arriving_gradient(result, scale) for result, _ in pairs]
        with DrawsFixed():
            of_batch = gradients(results, values, arriving)
            parts = [
                gradients(
                    of_half,
                    half,
                    [
                        gradient if layout is None else layout.half(gradient, number)
                        for gradient, (_, layout) in zip(arriving, pairs, strict=True)
                    ],
                )
                for number, (of_half, half) in enumerate(zip(half_results, halves, strict=True))
            ]
        if not all(map(_agree, of_batch, *parts, differentiated)):
            return None
    return result_layouts


def _agree(of_batch: Tensor | None, first: Tensor | None, second: Tensor | None, layout: _Layout | None) -> bool:
    """Return whether the gradient of an argument is that of the halves of a batch."""
    if of_batch is None or first is None or second is None:
        return of_batch is first is second
    if layout is None:
        return are_close(of_batch, first + second)
    return are_close(layout.half(of_batch, 0), first) and are_close(layout.half(of_batch, 1), second)


def _candidates(result: Tensor, half: Tensor, argument_layouts: Sequence[_Layout]) -> list[_Layout]:
    """The layouts that a result may have: those of arguments, or all rows once."""
    if result.dim() != half.dim():
        return []
    sizes = zip(result.shape, half.shape, strict=True)
    dims = [dim for dim, (size, half_size) in enumerate(sizes) if size == 2 * half_size and size % _ROWS == 0]
    layouts = [
        _Layout(dim, result.shape[dim] // (_ROWS * inner), inner)
        for dim in dims
        for inner in dict.fromkeys([*(layout.inner for layout in argument_layouts), result.shape[dim] // _ROWS])
        if result.shape[dim] % (_ROWS * inner) == 0
    ]
    return [layout for layout in layouts if layout.repeats]


def _fits(result: Tensor, halves: Sequence[Tensor]) -> Callable[[_Layout], bool]:
    return lambda layout: all(are_close(layout.half(result, number), half) for number, half in enumerate(halves))


def _leaf(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(like.requires_grad)


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)
