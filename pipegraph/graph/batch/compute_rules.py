"""Rules for operators that compute: element by element, over dimensions, on the last dimensions, as products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from pipegraph.graph.batch.row_call import Place, RowCall, moved_by
from pipegraph.graph.batch.row_state import INVARIANT, Content, NoRuleError, Rows, RowsMixError, State
from pipegraph.graph.batch.shape_rules import Rule, rows_of, source
from pipegraph.torch_private.pytrees import pytree


def elementwise(call: RowCall) -> State | tuple[State, ...]:
    """For a function of the elements at one place of all arguments."""
    return call.every(call.broadcast(call.tensors, call.shape))


def reduction(call: RowCall) -> State | tuple[State, ...]:
    """For one number, or one for each of ``keepdim``, from all elements along some dimensions."""
    if "other" in call.arguments:  # the larger of two elements
        return elementwise(call)
    state = rows_of(call)
    dims = call.dims("dim", source(call))
    if state.dim in dims:
        raise RowsMixError
    removed = 0 if call["keepdim"] is True else sum(dim < state.dim for dim in dims)
    return call.every(Rows(state.dim - removed, state.inner, state.content))


def scan(call: RowCall) -> State | tuple[State, ...]:
    """For a result of the same dimensions that depends on all elements along one of them, the last by default."""
    state = rows_of(call)
    if call.dim("dim", source(call), -1) == state.dim:
        raise RowsMixError
    return call.every(state)


def order(call: RowCall) -> State | tuple[State, ...]:
    """For the order of the elements along a dimension. That of merged rows may be undone later, as experts do."""
    state = rows_of(call)
    if call.dim("dim", source(call), -1) == state.dim:
        raise NoRuleError
    return call.every(state)


def gated(call: RowCall) -> State | tuple[State, ...]:
    """For halves of a dimension that are multiplied."""
    return scan(call)


def linear(call: RowCall) -> State:
    """For a product with a weight, along the last dimension."""
    if call.with_rows(but="input"):
        raise NoRuleError
    return _on_last(call, lambda _: 1, weights=True)


def on_last(count: int) -> Rule:
    """The rule for an operator that computes on the last ``count`` dimensions of every argument."""
    return lambda call: call.every(_on_last(call, lambda _: count))


def but_first(call: RowCall) -> State | tuple[State, ...]:
    """For an operator that computes on all dimensions but the first."""
    return call.every(_on_last(call, lambda node: max(len(call.shape_of(node)) - 1, 1)))


def normalized(call: RowCall) -> State | tuple[State, ...]:
    """For a normalization over the last dimensions, those of ``normalized_shape``."""
    return call.every(_on_last(call, lambda _: len(call["normalized_shape"]), weights=True))


def convolution(call: RowCall) -> State:
    """For a convolution of ``[batch, channels, …]``."""
    if call.with_rows(but="input"):
        raise NoRuleError
    count = len(call.shape_of(call["weight"])) - 1
    return _on_last(call, lambda _: count, weights=True)


def _on_last(call: RowCall, count: Callable[[Any], int], weights: bool = False) -> State:
    """The rows of a result computed on the last dimensions of each argument, for every index of the leading ones.

    Args:
        count: gives the number of these last dimensions of an argument.
        weights: whether the other arguments are weights.
    """
    first = source(call)
    leading = len(call.shape_of(first)) - count(first)

    def places() -> Iterator[tuple[Any, Place]]:
        for node in [first] if weights else call.tensors:
            leading_count = len(call.shape_of(node)) - count(node)
            yield node, _leading(leading_count, leading - leading_count)

    return call.aligned(places()) or INVARIANT


def _leading(count: int, offset: int) -> Place:
    """The place of the dimensions that an operator does not compute on, the first ones."""
    return lambda dim: dim + offset if dim < count else -1


def batch_norm(call: RowCall) -> State | tuple[State, ...]:
    """For a normalization of each channel: over the batch in training, which `RowProof` reports, and over none in
    evaluation."""
    state = rows_of(call)
    if call.with_rows(but="input") or state.dim == 1:
        raise NoRuleError
    return call.every(state)


def attention(call: RowCall) -> State | tuple[State, ...]:
    """For attention of ``[…, heads, tokens, width]``: the mask is broadcast to ``[…, heads, tokens, tokens]``."""
    return call.every(_on_last(call, lambda _: 2))


def product(call: RowCall) -> State:
    """For a product of matrices, or of their batches, to which ``addmm`` adds its first argument."""
    added = call.node.args[:1] if call.name.startswith(("add", "badd")) else ()
    first, second = call.node.args[len(added) : len(added) + 2]
    first_shape, second_shape, count = call.shape_of(first), call.shape_of(second), len(call.shape)
    if len(first_shape) == 1:
        raise NoRuleError
    places = [(first, _factor(len(first_shape), count + (len(second_shape) == 1), -2))]
    places.append((second, _factor(len(second_shape), count, -1) if len(second_shape) > 1 else lambda _: -1))
    places += [(node, moved_by(count - len(call.shape_of(node)))) for node in added]
    return call.aligned(places) or INVARIANT


def _factor(count: int, result: int, matrix_dim: int) -> Place:
    """The place of the dimensions of a factor: of its matrices only one is kept, and the other is summed over."""
    return lambda dim: -1 if dim - count >= -2 and dim - count != matrix_dim else dim - count + result


def einsum(call: RowCall) -> State:
    """For a sum of products: the letter of the rows has to be the same in all factors, and in the result."""
    equation = str(call["equation"]).replace(" ", "")
    if "..." in equation or "->" not in equation:
        raise NoRuleError
    inputs, result = equation.split("->")
    factors = [*zip(call["tensors"], inputs.split(","), strict=True)]
    return call.aligned(((node, _letters(names, result)) for node, names in factors), broadcasts=False) or INVARIANT


def _letters(names: str, result: str) -> Place:
    """The place of dimensions that an equation names."""
    return lambda dim: result.find(names[dim])


def recurrent(call: RowCall) -> tuple[State, ...]:
    """For a recurrent layer: its input is ``[time, batch, …]``, or ``[batch, time, …]`` with ``batch_first``, and its
    states are ``[layers, batch, …]``."""
    states = pytree.tree_leaves(call["hx"])
    is_batched = len(call.shape_of(source(call))) == 3
    batch = (0 if call["batch_first"] else 1) if is_batched else None
    for node, dim in ((source(call), batch), *((hidden, 1) for hidden in states)):
        rows = call.rows(node)
        if rows is not None and rows.dim != dim:
            raise RowsMixError
    if any(node not in (source(call), *states) for node in call.with_rows()):
        raise NoRuleError
    rows = call.rows(source(call))
    if rows is None or any(call.rows(node) is None for node in states):
        raise NoRuleError
    return (rows, *(Rows(1, rows.inner),) * ((call.results or 1) - 1))


def cell(call: RowCall) -> State | tuple[State, ...]:
    """For one step of a recurrent layer, of ``[batch, …]``."""
    tensors = [source(call), *pytree.tree_leaves(call["hx"])]
    if any(node not in tensors for node in call.with_rows()):
        raise NoRuleError
    state = call.aligned(((node, _leading(1, 0)) for node in tensors), broadcasts=False)
    return call.every(state or INVARIANT)


def bags(call: RowCall) -> State | tuple[State, ...]:
    """For sums of entries of a table, one for each row: the indices of all rows are one after the other, and offsets
    say where each row begins."""
    indices, offsets = call.state(call["indices"]), call.state(call["offsets"])
    if not isinstance(indices, Rows) or not isinstance(offsets, Rows) or call.rows(call["weight"]) is not None:
        raise NoRuleError
    step = call["offsets"].args[-1]
    if offsets.content is not Content.STARTS or indices.is_index or call.sizes.number(step) != indices.inner:
        raise NoRuleError
    return call.every(Rows(0))


def loss(call: RowCall) -> State:
    """For a loss: without ``reduction`` it has one number for each element, else it is one number for all rows."""
    if call["reduction"] != 0:
        raise RowsMixError
    if call.name in ("cross_entropy_loss", "nll_loss_nd"):
        state = rows_of(call)
        if state.dim != 0 or any(call.state(node) != state for node in call.with_rows()):
            raise NoRuleError
        return state
    return call.broadcast(call.tensors, call.shape)


def transform(call: RowCall) -> State | tuple[State, ...]:
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


def appended(call: RowCall) -> State:
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
            ("channel_shuffle native_channel_shuffle affine_grid_generator", but_first),
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
            ("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", cell),
            ("embedding_bag _embedding_bag", bags),
            ("cross_entropy_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss kl_div", loss),
            ("binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss poisson_nll_loss", loss),
            ("one_hot", appended),
            (
                "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2",
                transform,
            ),
            ("fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift", transform),
            ("bucketize dropout native_dropout bernoulli normal alpha_dropout feature_dropout", elementwise),
            ("where masked_fill copy isin real imag", elementwise),
            ("__and__ __or__ __xor__ __lshift__ __rshift__ bitwise_and bitwise_or bitwise_xor", elementwise),
        )
        for name in names.split()
    },
}
"""Operator → its rule. Operators that torch tags as pointwise have the rule `elementwise` without an entry."""
