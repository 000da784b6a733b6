"""Tensor parallelism: which modules' parameters are divided between the ranks of a mesh dimension, and how.

{"layers.*.attention.q": "colwise", …} ─ names and ties ─▶ styles of torch ─ parallelize_module ─▶ stages of DTensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from pipegraph.arguments import for_asker, require_type
from pipegraph.errors import ArgumentError, closest, nearest
from pipegraph.kernels.sharded import is_sharded, is_style
from pipegraph.package import Manifest
from pipegraph.runtime.processes.rank_grid import TENSOR

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

Plan = Mapping[str, "str | ParallelStyle"]
"""Pattern of module names → a style: its name, or an object of `torch.distributed.tensor.parallel`."""

_OF_EXPERT_PARALLELISM: Final = ("grouped_gemm", "ep_dispatch_experts", "ep_router")
"""Styles of transformers that are not supported."""

_LATENT: Final = "mla_kv_a_proj"
"""The style of the layer whose output is a latent, from which kv_b_proj makes keys and values, and a part of the key
that all heads share."""

_EMBEDDING_DIMS: Final = {"embedding_rowwise": 0, "embedding_colwise": 1}
"""Styles of embeddings → the dimension of the weight that they divide."""


def check_plan(plan: Plan) -> None:
    """Raise ArgumentError if `plan` is not a plan, or names an unknown style."""
    example = 'tp_plan={"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}'
    require_type(plan, Mapping, "tp_plan has a style for each pattern of module names", example)
    for pattern, style in plan.items():
        if is_style(style):
            continue
        if style in _OF_EXPERT_PARALLELISM:
            raise ArgumentError(
                f'tp_plan gives {pattern} the style "{style}", which is not supported: it gives each rank some of the '
                "experts.",
                'a tp_plan with "moe_tp_experts", which gives each rank a part of every expert, or '
                "divide the module in a parallelize_fn.",
            )
        if style not in (styles := _style_names()):
            raise ArgumentError(
                f'tp_plan gives {pattern} the style "{style}", which does not exist.{nearest(str(style), styles)} '
                f"The styles are: {', '.join(styles)}, and the objects of torch.distributed.tensor.parallel."
            )


def require_plan(plan: Plan | None, size: int) -> None:
    """Raise ArgumentError if several ranks are to divide the model without a plan."""
    if size > 1 and not plan:
        plan_text = '{"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}'
        advice = for_asker(f"tp_plan={plan_text}.", f"tp_plan = {plan_text} in the model's file, and split it again.")
        raise ArgumentError(f"the mesh has {size} ranks along tp, and nothing says how they divide the model.", advice)


def module_names(stages: Mapping[int, nn.Module]) -> list[str]:
    """The names of all modules of stages, and of their parameters."""
    named = (
        name
        for stage in stages.values()
        for named_members in (stage.named_modules(), stage.named_parameters())
        for name, _ in named_members
    )
    return sorted({name for name in named if name})


def check_patterns(plan: Plan, names: Iterable[str]) -> None:
    """Raise ArgumentError for a pattern that no module or parameter of the model has."""
    names = sorted(set(names))
    for pattern in plan:
        if not any(matches(pattern, name) for name in names):
            near = closest(pattern, names)
            hint = f' Did you mean "{near}"?' if near is not None else ""
            raise ArgumentError(
                f"tp_plan has a style for {pattern}, and the model has no such module.{hint}",
                "a name that `pipegraph show` lists, with * in the place of numbers.",
            )


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is for a module. A * stands for one part of the name, or a piece of one."""
    parts, name_parts = pattern.split("."), name.split(".")
    return len(parts) == len(name_parts) and all(map(fnmatchcase, name_parts, parts))


def parallelize(stages: Mapping[int, nn.Module], plan: Plan, manifest: Manifest, mesh: DeviceMesh) -> None:
    """Divide the parameters of stages, in place, between the ranks of a mesh of one dimension.

    Each rank has the whole and takes its part, so that nothing is sent. An embedding without a style is divided by
    rows if it is tied to a head that is divided by rows.

    Raises:
        ArgumentError: a style does not fit its module.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    for index, stage in stages.items():
        chosen = {name: style for name, _ in stage.named_modules() if (style := _style_of(plan, name)) is not None}
        for group in manifest.tied:
            for name in group:
                owner = name.rpartition(".")[0]
                tied_styles = [
                    _style_of(plan, tied_name.rpartition(".")[0]) for tied_name in group if tied_name != name
                ]
                if owner not in chosen and _is_embedding(stage, owner) and any(map(_divides_rows, tied_styles)):
                    chosen[owner] = "embedding_rowwise"
        for name, _ in list(stage.named_parameters()):
            _divide_parameter(stage, name, _style_of(plan, name), mesh)
        for name, style in chosen.items():
            parallel_style = _module_style(name, style, stage) if isinstance(style, str) else style
            if parallel_style is None:
                continue
            _check_module(index, name, style, stage.get_submodule(name), mesh.size())
            try:
                parallelize_module(stage.get_submodule(name), mesh, parallel_style, src_data_rank=None)
            except NotImplementedError as error:
                kind = type(stage.get_submodule(name)).__name__
                raise ArgumentError(f"tp_plan gives {name}, of the class {kind}, a style not for it: {error}") from None


def divided_inputs(stage: nn.Module, plan: Plan) -> dict[str, int]:
    """The modules of a stage whose style takes a plain tensor for a part of a whole → along which dimension, but for
    norms of heads, which may be at another one."""
    styles = ((name, _style_of(plan, name)) for name, _ in stage.named_modules())
    return {name: dim for name, style in styles if (dim := _divided_dimension(style)) is not None}


def _divided_dimension(style: Any) -> int | None:
    from torch.distributed.tensor.parallel import SequenceParallel

    parallel_style = _styles()[style]() if isinstance(style, str) and style in _styles() else style
    return int(parallel_style.sequence_sharding[0].dim) if isinstance(parallel_style, SequenceParallel) else None


def tensor_ranks(stages: Mapping[int, nn.Module]) -> int:
    """Return how many ranks along `tp` divide the parameters of stages."""
    parameters: list[Any] = [parameter for stage in stages.values() for parameter in stage.parameters()]
    divided = [
        (parameter.device_mesh, names) for parameter in parameters if TENSOR in (names := mesh_dimensions(parameter))
    ]
    return max((mesh.shape[names.index(TENSOR)] for mesh, names in divided), default=1)


def mesh_dimensions(parameter: Any) -> tuple[str, ...]:
    """The dimensions of the mesh over which a parameter is laid out; none for a plain one."""
    return tuple(parameter.device_mesh.mesh_dim_names or ()) if is_sharded(parameter) else ()


def _divide_parameter(stage: nn.Module, name: str, style: Any, mesh: DeviceMesh) -> None:
    """Divide a parameter if it has a style."""
    from pipegraph.runtime.local_parts import PARAMETER_STYLES, divide_parameter

    if style is None:
        return
    if style not in PARAMETER_STYLES:
        raise ArgumentError(
            f"tp_plan gives {name} the style {style!r}, which is for modules, and it is a parameter.",
            f"one of {', '.join(PARAMETER_STYLES)}, or the name of its module.",
        )
    owner, _, attribute = name.rpartition(".")
    divide_parameter(stage.get_submodule(owner), attribute, style, mesh)


def _style_of(plan: Plan, name: str) -> Any:
    return next((style for pattern, style in plan.items() if matches(pattern, name)), None)


def _is_embedding(stage: nn.Module, name: str) -> bool:
    return isinstance(dict(stage.named_modules()).get(name), nn.Embedding)


def _divides_rows(style: Any) -> bool:
    return isinstance(style, str) and style.startswith("colwise")


def _check_module(index: int, name: str, style: Any, module: nn.Module, size: int) -> None:
    """Raise ArgumentError if the part of a linear layer that other layers compute with is not a whole one."""
    if not isinstance(module, nn.Linear) or style not in ("colwise", "rowwise"):
        return
    side, features = ("outputs", module.out_features) if style == "colwise" else ("inputs", module.in_features)
    if features % size:
        raise ArgumentError(
            f"tp_plan divides the {features} {side} of {name}, in stage {index}, and tp is {size}.",
            f"a tp that divides {features}.",
        )


def _module_style(name: str, style: str, stage: nn.Module) -> Any:
    """Return the style of a module by its name; None for one that leaves the module as it is."""
    from pipegraph.runtime.local_parts import LocalParts, OtherEmbedding, WholeBeforeHeads

    if style == _LATENT:
        return WholeBeforeHeads(_latent_features(name, stage))
    if style not in (styles := _styles()):
        raise ArgumentError(
            f'tp_plan gives {name} the style "{style}", which is for parameters, and it is a module.',
            f"the name of its parameter, such as {name}.weight.",
        )
    module = stage.get_submodule(name)
    if style in _EMBEDDING_DIMS and not isinstance(module, nn.Embedding | nn.Linear):  # which torch divides
        return OtherEmbedding(_EMBEDDING_DIMS[style])
    if style == "all_reduce" and any(map(is_sharded, module.parameters(recurse=False))):
        return LocalParts(shares=True, adds_up=True)  # whose outputs are shares because its own parameters are parts
    return styles[style]()


def _latent_features(name: str, stage: nn.Module) -> int:
    """How many features of a projection to a latent go through kv_b_proj; the others go to all heads."""
    layer_name = f"{name.rpartition('.')[0]}.kv_b_proj".removeprefix(".")
    projection = dict(stage.named_modules()).get(layer_name)
    if not isinstance(projection, nn.Linear):
        raise ArgumentError(
            f'tp_plan gives {name} the style "{_LATENT}", and there is no linear layer {layer_name} in its stage, from '
            "which it follows how many features go to all heads.",
            "a cut that leaves both in one stage, or divide the modules in a parallelize_fn.",
        )
    return projection.in_features


def _style_names() -> list[str]:
    from pipegraph.runtime.local_parts import PARAMETER_STYLES

    return list(dict.fromkeys((*_styles(), _LATENT, *PARAMETER_STYLES)))


def _styles() -> dict[str, Callable[[], Any]]:
    """What makes the styles of modules, by name. The names are those of transformers."""
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    from pipegraph.runtime.local_parts import LocalParts, PackedColwise, ShareOfIdentity

    def gathered() -> Any:
        return ColwiseParallel(output_layouts=Replicate())

    def replicated_input() -> Any:
        return RowwiseParallel(input_layouts=Replicate())

    return {
        "colwise": ColwiseParallel,
        "colwise_gather_output": gathered,
        "colwise_rep": gathered,
        "rowwise": RowwiseParallel,
        "rowwise_rep": replicated_input,
        "rowwise_split_input": replicated_input,
        "embedding_rowwise": replicated_input,
        "embedding_colwise": gathered,
        "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
        # A norm of each head, which gets some of the heads, at dimension 2.
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
        "all_reduce": lambda: PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
        "packed_colwise": PackedColwise,
        "moe_tp_experts": lambda: LocalParts(shares=True, adds_up=True),
        "moe_identity_expert": ShareOfIdentity,
        "local_params": LocalParts,
        "replicate": lambda: None,
    }
