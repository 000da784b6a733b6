"""The table of operators: all that pipegraph knows about ATen operators beyond their schemas and tags."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import fx

from pipegraph.torch_private.operators import OpOverload, operator_name

MODE_ARGUMENTS = ("train", "training", "dropout_p")
"""Arguments of operators that say the mode, or follow it: the source writes ``self.training`` for them."""


class View(Enum):
    """How a view arranges all elements of its first argument; its other arguments are numbers."""

    RESHAPE = "in the same order"
    PERMUTE = "with the dimensions in another order"


class Loop(Enum):
    """How Inductor runs an operator that is not a view, if its tags do not say it."""

    CONSTANT = "where its result is read"
    ELEMENTWISE = "over the elements of its result"
    RANDOM = "over the elements of its result, each a random number"
    GATHER = "over the elements of its result, each read at an index"
    WINDOW = "over pixels, each read from or written to a window"
    REDUCTION = "over the elements of its argument"
    SCATTER = "over the elements that it writes at an index"
    MEMORY = "in a separate kernel that does little but read and write"


@dataclass(frozen=True)
class Operator:
    """The columns of a row. False, None and "" are the default of each: nothing is known.

    Attributes:
        view: how its result shows the first argument, for views that can be undone.
        may_copy: whether its result is a copy if the layout of the first argument does not allow a view.
        cast: whether it changes only the dtype or device, and gives its argument if there is nothing to change.
        keeps_values: whether every element of its result is an element of its first argument.
        identity: whether it gives its argument, or a copy of it, whatever the other arguments are.
        detaches: whether no gradient flows through it.
        check: whether it is a check that ``torch.export`` adds to a graph.
        elementwise: whether it is pointwise although torch does not tag it so.
        optional_dtype: whether it gives its argument's dtype without its argument ``dtype``, and computes in float32
            within if that dtype is smaller.
        factory: whether it takes a tensor for its shape, dtype and device alone.
        uninitialized: whether the values of its result are undefined.
        dropout: whether it drops values if its argument ``train`` says so.
        spelling: its Python source, as ``codegen/expressions/operator_spellings.py`` reads it; "F.name" is the
            function of that name in ``torch.nn.functional``.
        loop: how Inductor runs it.
        rate: the operator or kind of loop whose measured rate bounds its own, if that has another name.
        flops_like: the operator whose formula in ``torch.utils.flop_counter`` holds for it.
    """

    view: View | None = None
    may_copy: bool = False
    cast: bool = False
    keeps_values: bool = False
    identity: bool = False
    detaches: bool = False
    check: bool = False
    elementwise: bool = False
    optional_dtype: bool = False
    factory: bool = False
    uninitialized: bool = False
    dropout: bool = False
    spelling: str = ""
    loop: Loop | None = None
    rate: str = ""
    flops_like: str = ""


_ROWS: tuple[tuple[str, Operator], ...] = (
    # views, and what gives the same values in another shape or layout
    ("view unflatten", Operator(view=View.RESHAPE, keeps_values=True, spelling="reshape")),
    ("reshape", Operator(view=View.RESHAPE, keeps_values=True, may_copy=True, spelling="reshape")),
    ("flatten", Operator(view=View.RESHAPE, keeps_values=True, may_copy=True, spelling="flatten")),
    ("squeeze unsqueeze", Operator(view=View.RESHAPE, keeps_values=True)),
    ("transpose t", Operator(view=View.PERMUTE, keeps_values=True)),
    ("permute", Operator(view=View.PERMUTE, keeps_values=True, spelling="x.name(*sizes)")),
    ("view.dtype", Operator()),  # reads the bytes as another dtype
    ("numpy_T", Operator(spelling="x.T")),
    ("mT", Operator(spelling="x.mT")),
    ("mH matrix_H", Operator(spelling="x.mH")),
    ("reshape_as ravel", Operator(may_copy=True)),
    ("expand", Operator(keeps_values=True, spelling="expand")),
    ("slice", Operator(keeps_values=True, spelling="slice")),
    ("select", Operator(keeps_values=True, spelling="select")),
    ("contiguous", Operator(keeps_values=True, may_copy=True, elementwise=True)),
    ("clone", Operator(keeps_values=True)),
    ("repeat_interleave.self_int", Operator(keeps_values=True)),
    ("repeat", Operator(spelling="x.name(*sizes)", loop=Loop.ELEMENTWISE)),
    ("stack", Operator(spelling="stack", loop=Loop.ELEMENTWISE)),
    ("cat copy constant_pad_nd flip roll tril triu", Operator(loop=Loop.ELEMENTWISE)),
    ("slice_scatter select_scatter diagonal_scatter as_strided_scatter", Operator(loop=Loop.ELEMENTWISE)),
    # casts, copies and checks
    ("to", Operator(cast=True, keeps_values=True, elementwise=True, spelling="cast")),
    ("type_as", Operator(cast=True, spelling="cast")),
    ("_to_copy", Operator(cast=True, loop=Loop.ELEMENTWISE)),
    ("alias lift_fresh", Operator(identity=True)),
    ("lift_fresh_copy", Operator(identity=True, loop=Loop.ELEMENTWISE)),
    ("detach detach_", Operator(detaches=True)),
    ("_assert_tensor_metadata _assert_scalar", Operator(check=True)),
    ("_assert_async", Operator(check=True, loop=Loop.MEMORY)),
    ("sym_size", Operator(loop=Loop.MEMORY)),
    # new tensors
    ("zeros ones full new_zeros new_ones new_full", Operator(factory=True, spelling="filled", loop=Loop.CONSTANT)),
    ("arange", Operator(factory=True, spelling="arange", loop=Loop.CONSTANT)),
    ("zeros_like ones_like full_like eye iota scalar_tensor", Operator(factory=True, loop=Loop.CONSTANT)),
    ("zero", Operator(factory=True, spelling="torch.zeros_like", loop=Loop.CONSTANT)),
    ("empty new_empty", Operator(factory=True, uninitialized=True, spelling="filled", loop=Loop.CONSTANT)),
    ("empty_like", Operator(factory=True, uninitialized=True, loop=Loop.CONSTANT)),
    ("empty_strided new_empty_strided", Operator(factory=True, uninitialized=True, loop=Loop.CONSTANT)),
    ("inductor_seed inductor_seeds inductor_lookup_seed", Operator(loop=Loop.CONSTANT)),
    ("rand randn randint rand_like randn_like randint_like", Operator(factory=True, loop=Loop.RANDOM)),
    ("bernoulli native_dropout inductor_random inductor_randint", Operator(loop=Loop.RANDOM)),
    ("dropout feature_dropout alpha_dropout feature_alpha_dropout", Operator(dropout=True, spelling="dropout")),
    # arithmetic, comparisons, masks
    ("add", Operator(spelling="x + y")),
    ("sub", Operator(spelling="x - y")),
    ("rsub", Operator(spelling="y - x")),
    ("mul", Operator(spelling="x * y")),
    ("div", Operator(spelling="x / y")),
    ("matmul", Operator(spelling="x @ y")),
    ("remainder", Operator(spelling="x % y")),
    ("pow", Operator(spelling="x ** y")),
    ("__and__ bitwise_and", Operator(spelling="x & y")),
    ("__or__ bitwise_or", Operator(spelling="x | y")),
    ("__xor__ bitwise_xor", Operator(spelling="x ^ y")),
    ("eq", Operator(spelling="x == y")),
    ("ne", Operator(spelling="x != y")),
    ("lt", Operator(spelling="x < y")),
    ("le", Operator(spelling="x <= y")),
    ("gt", Operator(spelling="x > y")),
    ("ge", Operator(spelling="x >= y")),
    ("neg", Operator(spelling="-x")),
    ("bitwise_not", Operator(spelling="~x")),
    ("where masked_fill", Operator(elementwise=True)),
    # functions of each element
    ("reciprocal", Operator(rate="div")),
    ("sqrt", Operator(rate="rsqrt")),
    ("cos", Operator(rate="sin")),
    ("exp2 expm1 logsumexp", Operator(rate="exp")),
    ("log1p log2 log10", Operator(rate="log")),
    ("softplus", Operator(spelling="F.name", rate="log")),
    ("gelu", Operator(spelling="F.name", rate="erf")),
    ("gelu_backward", Operator(rate="erf")),
    ("silu", Operator(spelling="F.name", rate="sigmoid")),
    ("silu_backward", Operator(rate="sigmoid")),
    ("mish", Operator(spelling="F.name", rate="tanh")),
    ("relu relu6 leaky_relu elu celu selu glu hardswish hardsigmoid hardtanh softshrink", Operator(spelling="F.name")),
    ("log_sigmoid", Operator(spelling="F.logsigmoid")),
    # reductions and normalisations
    ("softmax log_softmax", Operator(optional_dtype=True, spelling="softmax")),
    ("sum mean", Operator(optional_dtype=True)),
    ("cumsum", Operator(optional_dtype=True, loop=Loop.MEMORY)),
    ("_softmax _log_softmax", Operator(loop=Loop.REDUCTION, rate="exp")),
    ("_softmax_backward_data _log_softmax_backward_data prepare_softmax_online", Operator(loop=Loop.REDUCTION)),
    ("var var_mean std", Operator(rate="var_mean")),
    ("layer_norm", Operator(spelling="layer_norm")),
    ("group_norm", Operator(spelling="group_norm")),
    ("batch_norm", Operator(spelling="batch_norm")),
    ("rms_norm", Operator(spelling="F.name")),
    ("native_layer_norm native_layer_norm_backward", Operator(loop=Loop.REDUCTION, rate="var_mean")),
    ("native_group_norm native_group_norm_backward", Operator(loop=Loop.REDUCTION, rate="var_mean")),
    ("native_batch_norm native_batch_norm_backward", Operator(loop=Loop.REDUCTION, rate="var_mean")),
    ("_native_batch_norm_legit_functional", Operator(loop=Loop.REDUCTION, rate="var_mean")),
    ("_fused_rms_norm _fused_rms_norm_backward", Operator(loop=Loop.REDUCTION, rate="var_mean")),
    # products and attention
    ("linear", Operator(spelling="linear")),
    ("conv1d conv2d conv3d bilinear cosine_similarity", Operator(spelling="F.name")),
    ("einsum", Operator(spelling="einsum")),
    ("split_with_sizes", Operator(spelling="split")),
    ("tensordot", Operator(spelling="tensordot")),
    ("cdist", Operator(spelling="cdist")),
    ("block_diag cartesian_prod meshgrid", Operator(spelling="torch.name(*tensors)")),
    ("stft", Operator(spelling="stft")),
    ("_grouped_mm", Operator(spelling="grouped_mm")),
    ("scaled_dot_product_attention", Operator(spelling="attention")),
    (
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable",
        Operator(flops_like="_scaled_dot_product_flash_attention"),
    ),
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward "
        "_scaled_dot_product_fused_attention_overrideable_backward",
        Operator(flops_like="_scaled_dot_product_flash_attention_backward"),
    ),
    # indices
    ("embedding", Operator(spelling="embedding", loop=Loop.GATHER)),
    ("index", Operator(spelling="index", loop=Loop.GATHER)),
    ("gather index_select _unsafe_index _unsafe_masked_index", Operator(loop=Loop.GATHER)),
    ("index_put_", Operator(spelling="x[indices] = y")),
    ("fill_ copy_", Operator(spelling="x[…] = y")),
    ("index_put _unsafe_index_put _unsafe_masked_index_put_accumulate", Operator(loop=Loop.SCATTER)),
    ("scatter scatter_add scatter_reduce index_add index_copy", Operator(loop=Loop.SCATTER)),
    ("embedding_dense_backward", Operator(loop=Loop.SCATTER)),
    ("one_hot", Operator(spelling="F.name")),
    ("sort topk nonzero bincount histc masked_select multinomial", Operator(loop=Loop.MEMORY)),
    ("searchsorted bucketize randperm cumprod logcumsumexp cummax cummin", Operator(loop=Loop.MEMORY)),
    ("cross_entropy_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss", Operator(spelling="loss")),
    ("binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss", Operator(spelling="loss")),
    ("soft_margin_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss", Operator(spelling="loss")),
    ("triplet_margin_loss hinge_embedding_loss cosine_embedding_loss", Operator(spelling="loss")),
    ("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward", Operator(loop=Loop.MEMORY)),
    ("embedding_bag", Operator(spelling="embedding_bag")),
    ("_embedding_bag _embedding_bag_backward _embedding_bag_dense_backward", Operator(loop=Loop.MEMORY)),
    # images
    ("im2col col2im", Operator(spelling="columns")),
    ("pad pixel_shuffle max_pool1d max_pool2d max_pool3d", Operator(spelling="F.name")),
    ("avg_pool1d avg_pool3d", Operator(spelling="F.name")),
    ("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", Operator(spelling="F.name")),
    ("avg_pool2d", Operator(spelling="F.name", loop=Loop.WINDOW)),
    ("avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward", Operator(loop=Loop.WINDOW)),
    ("max_pool2d_with_indices", Operator(spelling="max_pool", loop=Loop.WINDOW)),
    ("max_pool2d_with_indices_backward", Operator(loop=Loop.WINDOW)),
    ("max_pool1d_with_indices max_pool3d_with_indices", Operator(spelling="max_pool")),
    ("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", Operator(spelling="max_pool")),
    ("fractional_max_pool2d fractional_max_pool3d", Operator(spelling="max_pool")),
    ("max_unpool2d max_unpool3d", Operator(spelling="max_unpool")),
    ("_low_memory_max_pool_with_offsets _low_memory_max_pool_offsets_to_indices", Operator(loop=Loop.WINDOW)),
    ("upsample_nearest2d", Operator(spelling="interpolate nearest", loop=Loop.WINDOW)),
    ("upsample_bilinear2d", Operator(spelling="interpolate bilinear", loop=Loop.WINDOW)),
    ("upsample_nearest2d_backward upsample_bilinear2d_backward", Operator(loop=Loop.WINDOW)),
    ("upsample_nearest1d upsample_nearest3d", Operator(spelling="interpolate nearest")),
    (
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
        Operator(spelling="interpolate nearest-exact"),
    ),
    ("upsample_linear1d", Operator(spelling="interpolate linear")),
    ("upsample_trilinear3d", Operator(spelling="interpolate trilinear")),
    ("upsample_bicubic2d", Operator(spelling="interpolate bicubic")),
    ("_upsample_bilinear2d_aa", Operator(spelling="interpolate bilinear antialias")),
    ("_upsample_bicubic2d_aa", Operator(spelling="interpolate bicubic antialias")),
)

OPERATORS: dict[str, Operator] = {name: row for names, row in _ROWS for name in names.split()}
"""Each operator by its name, ``softmax``; one overload alone by the name of that, ``view.dtype``."""

_UNKNOWN = Operator()


def operator_of(node: fx.Node) -> Operator:
    """The row of the operator that a node calls; an empty one if the table does not have it."""
    return operator_of_target(node.target)


def operator_of_target(target: object) -> Operator:
    """The row of an operator; an empty one if the table does not have it."""
    # pipegraph's own are those of ATen under names that Inductor does not know.
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims", "pipegraph"):
        return _UNKNOWN
    name, overload = operator_name(target)
    return OPERATORS.get(f"{name}.{overload}") or OPERATORS.get(name, _UNKNOWN)
