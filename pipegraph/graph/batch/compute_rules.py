"""Rules for operators that compute: element by element, over dimensions, on the last dimensions, as products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from pipegraph.graph.batch.operator_call import OperatorCall
from pipegraph.graph.batch.row_state import WHOLE, Content, NoRuleError, Rows, RowsMixError, State
from pipegraph.graph.batch.shape_rules import Rule, rows_of, source
from pipegraph.graph.internals import pytree


def elementwise(call: OperatorCall) -> State | tuple[State, ...]:
    """For a function of the elements at one place of all arguments."""
    return call.every(call.broadcast(call.tensors, call.shape))


def reduction(call: OperatorCall) -> State | tuple[State, ...]:
    """For one number, or one for each of ``keepdim``, from all elements along some dimensions."""
    if "other" in call.arguments:  # the larger of two elements
        return elementwise(call)
    state = rows_of(call)
    dims = call.dims("dim", source(call))
    if state.dim in dims:
        raise RowsMixError
    kept = call["keepdim"] is True
    before = 0 if kept else sum(dim < state.dim for dim in dims)
    return call.every(Rows(state.dim - before, state.inner, state.content))


def scan(call: OperatorCall) -> State | tuple[State, ...]:
    """For a result of the same dimensions that depends on all elements along one of them, the last by default."""
    state = rows_of(call)
    if call.dim("dim", source(call), -1) == state.dim:
        raise RowsMixError
    return call.every(state)


def order(call: OperatorCall) -> State | tuple[State, ...]:
    """For the order of the elements along a dimension. That of merged rows may be undone later, as experts do."""
    state = rows_of(call)
    if call.dim("dim", source(call), -1) == state.dim:
        raise NoRuleError
    return call.every(state)


def gated(call: OperatorCall) -> State | tuple[State, ...]:
    """For halves of a dimension that are multiplied."""
    return scan(call)


def linear(call: OperatorCall) -> State:
    """For a product with a weight, along the last dimension."""
    if call.with_rows(but="input"):
        raise NoRuleError
    return _on_last(call, lambda _: 1)


def on_last(count: int) -> Rule:
    """The rule for an operator that computes on the last ``count`` dimensions of every argument."""
    return lambda call: call.every(_on_last(call, lambda node: count))


def but_first(call: OperatorCall) -> State | tuple[State, ...]:
    """For an operator that computes on all dimensions but the first."""
    return call.every(_on_last(call, lambda node: len(call.shape_of(node)) - 1))


def normalized(call: OperatorCall) -> State | tuple[State, ...]:
    """For a normalization over the last dimensions, those of ``normalized_shape``."""
    return call.every(_on_last(call, lambda _: len(call["normalized_shape"])))


def convolution(call: OperatorCall) -> State:
    """For a convolution of ``[batch, channels, …]``."""
    if call.with_rows(but="input"):
        raise NoRuleError
    count = len(call.shape_of(call["weight"])) - 1
    return _on_last(call, lambda _: count)


def _on_last(call: OperatorCall, count: Callable[[Any], int]) -> State:
    """The rows of what is computed on the last dimensions of each argument, for all indices of those before them."""
    first = source(call)
    leading = len(call.shape_of(first)) - count(first)

    def positions() -> Iterator[tuple[Any, Callable[[int], int]]]:
        for node in call.with_rows():
            before = len(call.shape_of(node)) - count(node)
            state = call.state(node)
            assert isinstance(state, Rows)
            if state.dim >= before:
                raise RowsMixError
            yield node, lambda dim, before=before: dim + leading - before  # type: ignore[misc]

    return call.aligned(positions()) or WHOLE


def batch_norm(call: OperatorCall) -> State | tuple[State, ...]:
    """For a normalization of each channel: over the batch in training, which `RowProof` reports, and over none in
    evaluation."""
    state = rows_of(call)
    if call.with_rows(but="input") or state.dim == 1:
        raise NoRuleError
    return call.every(state)


def attention(call: OperatorCall) -> State | tuple[State, ...]:
    """For attention of ``[…, heads, tokens, width]``: the mask is broadcast to ``[…, heads, tokens, tokens]``."""
    return call.every(_on_last(call, lambda _: 2))


def product(call: OperatorCall) -> State:
    """For a product of matrices, or of their batches."""
    first, second = call.node.args[-2:] if call.name not in _SUMMED else call.node.args[1:3]
    state = _product(call, first, second)
    if call.name in _SUMMED and isinstance(state, Rows):
        places = ((call.node.args[0], len(call.shape) - len(call.shape_of(call.node.args[0]))),)
        added = call.aligned((node, lambda dim, offset=offset: dim + offset) for node, offset in places)  # type: ignore[misc]
        if added is not None and added.dim != state.dim:
            raise RowsMixError
    elif call.name in _SUMMED and call.rows(call.node.args[0]) is not None:
        raise NoRuleError
    return state


_SUMMED: Final = ("addmm", "baddbmm", "addmv")


def _product(call: OperatorCall, first: Any, second: Any) -> State:
    left, right = call.shape_of(first), call.shape_of(second)
    count = len(call.shape)
    vectors = (len(left) == 1) + (len(right) == 1)
    if vectors:
        if vectors == 2 or len(left) == 1:
            raise NoRuleError
        rows = call.rows(first)
        if rows is None or rows.dim == len(left) - 1 or call.rows(second) is not None:
            raise RowsMixError
        return rows

    def positions() -> Iterator[tuple[Any, Callable[[int], int]]]:
        for node, shape, kept in ((first, left, -2), (second, right, -1)):
            state = call.rows(node)
            if state is None:
                continue
            from_last = state.dim - len(shape)
            if from_last >= -2 and from_last != kept:
                raise RowsMixError  # summed over the rows
            yield node, lambda _, at=count + from_last: at  # type: ignore[misc]

    return call.aligned(positions()) or WHOLE


def einsum(call: OperatorCall) -> State:
    """For a sum of products: the letter of the rows has to be the same in all factors, and in the result."""
    equation = str(call["equation"]).replace(" ", "")
    if "..." in equation or "->" not in equation:
        raise NoRuleError
    inputs, result = equation.split("->")
    letters = {}
    for node, names in zip(call["tensors"], inputs.split(","), strict=True):
        rows = call.rows(node)
        if rows is not None and rows.content is not Content.UNIFORM:
            letters[names[rows.dim]] = rows
    if not letters:
        raise NoRuleError
    if len(letters) > 1 or not {*letters} <= {*result}:
        raise RowsMixError
    ((letter, rows),) = letters.items()
    return Rows(result.index(letter), rows.inner)


def recurrent(call: OperatorCall) -> tuple[State, ...]:
    """For a recurrent layer: its input is ``[time, batch, …]``, or ``[batch, time, …]`` with ``batch_first``, and its
    states are ``[layers, batch, …]``."""
    states = pytree.tree_leaves(call["hx"])
    is_batched = len(call.shape_of(source(call))) == 3
    batch = (0 if call["batch_first"] else 1) if is_batched else None
    for node, dim in ((source(call), batch), *((each, 1) for each in states)):
        rows = call.rows(node)
        if rows is not None and rows.dim != dim:
            raise RowsMixError
    if any(node not in (source(call), *states) for node in call.with_rows()):
        raise NoRuleError
    rows = call.rows(source(call))
    if rows is None or any(call.rows(node) is None for node in states):
        raise NoRuleError
    return (rows, *(Rows(1, rows.inner),) * ((call.results or 1) - 1))


def loss(call: OperatorCall) -> State:
    """For a loss: without ``reduction`` it has one number for each element, else it is one number for all rows."""
    if call["reduction"] != 0:
        raise RowsMixError
    if call.name in ("cross_entropy_loss", "nll_loss_nd"):
        state = rows_of(call)
        if state.dim != 0 or any(call.state(node) != state for node in call.with_rows()):
            raise NoRuleError
        return state
    return call.broadcast(call.tensors, call.shape)


def transform(call: OperatorCall) -> State | tuple[State, ...]:
    """For a Fourier transform along some dimensions."""
    state = rows_of(call)
    if call.name.endswith("fft") and call.name.rpartition("_")[2] in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
        dims = {call.dim("dim", source(call), -1)}
    elif call.name.endswith("2"):
        count = len(call.shape_of(source(call)))
        dims = call.dims("dim", source(call)) if "dim" in call.arguments else {count - 2, count - 1}
    else:
        dims = call.dims("dim", source(call))
    if state.dim in dims:
        raise RowsMixError
    return call.every(state)


def appended(call: OperatorCall) -> State:
    """For a result that has one more dimension, the last."""
    return rows_of(call)


_WINDOWS: Final = {
    f"{kind}{count}d{suffix}": on_last(count)
    for count in (1, 2, 3)
    for kind in [
        "max_pool",
        "avg_pool",
        "adaptive_avg_pool",
        "adaptive_max_pool",
        "lp_pool",
        "upsample_nearest",
        "_upsample_nearest_exact",
    ]
    for suffix in ("", "_with_indices")
}

COMPUTE_RULES: Final[dict[str, Rule]] = {
    **_WINDOWS,
    **{
        name: rule
        for names, rule in (
            ("sum mean amax amin prod all any var std var_mean std_mean logsumexp nansum nanmean norm", reduction),
            (
                "linalg_vector_norm argmax argmin max min median nanmedian mode kthvalue count_nonzero aminmax",
                reduction,
            ),
            ("softmax log_softmax _softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp", scan),
            ("renorm softmin", scan),
            ("sort topk argsort msort", order),
            ("glu", gated),
            ("linear", linear),
            ("layer_norm native_layer_norm rms_norm _fused_rms_norm", normalized),
            ("group_norm native_group_norm instance_norm grid_sampler grid_sampler_2d grid_sampler_3d", but_first),
            ("channel_shuffle native_channel_shuffle embedding_bag affine_grid_generator", but_first),
            ("batch_norm native_batch_norm _native_batch_norm_legit", batch_norm),
            ("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution", convolution),
            ("scaled_dot_product_attention", attention),
            ("upsample_linear1d", on_last(1)),
            (
                "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa col2im",
                on_last(2),
            ),
            ("upsample_trilinear3d pixel_shuffle pixel_unshuffle im2col", on_last(3)),
            ("bilinear cosine_similarity", on_last(1)),
            ("cdist linalg_inv linalg_inv_ex inverse cholesky linalg_cholesky linalg_solve linalg_qr", on_last(2)),
            ("linalg_det det logdet linalg_slogdet linalg_eigh linalg_svd matrix_exp linalg_matrix_power", on_last(2)),
            ("matmul bmm mm mv addmm baddbmm addmv", product),
            ("einsum", einsum),
            ("lstm gru rnn_tanh rnn_relu", recurrent),
            ("cross_entropy_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss kl_div", loss),
            ("binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss poisson_nll_loss", loss),
            ("one_hot", appended),
            (
                "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2",
                transform,
            ),
            ("fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift", transform),
            ("bucketize dropout native_dropout bernoulli normal alpha_dropout feature_dropout", elementwise),
            ("where masked_fill copy isin view_as_real view_as_complex real imag", elementwise),
        )
        for name in names.split()
    },
}
"""Operator → its rule. Operators that torch tags as pointwise have the rule `elementwise` without an entry."""
