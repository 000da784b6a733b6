"""What makes the kernels of each stage, what their backwards compute again, and whether they are CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.arguments import argument, require_type
from pipegraph.errors import PipegraphError
from pipegraph.kernels import Loss, Maker, SizedKernels, StageKernels, VariantOptions, makers
from pipegraph.kernels.cuda_graphs import CudaGraphRecorder, MakeRecorder
from pipegraph.kernels.sharded import is_sharded
from pipegraph.package import Manifest, Package
from pipegraph.recompute import Recompute, parse_stages
from pipegraph.runtime.batch import fill_structure
from pipegraph.runtime.loss_reduction import LossFunction
from pipegraph.runtime.prepared_stages import PipelineOptions, PreparedStages
from pipegraph.runtime.random_numbers import StageDraws, seed_kernels
from pipegraph.runtime.rank_context import RankContext

# ---- stage kernels ---------------------------------------------------------------------------------------------------
# The kernels of this process's stages, with the loss after the last stage, their precision and random numbers.


def make_kernels(context: RankContext, makers: Mapping[int, Maker]) -> dict[int, StageKernels]:
    """Return the kernels of each stage of this process, made by the maker of its index.

    Raises:
        ArgumentError: `loss_fn` is not a function.
    """
    manifest, loss_fn, numbers = context.manifest, context.loss_fn, context.numbers
    precision = context.prepared.precision
    loss = None if loss_fn is None else packed_loss(manifest, context.stages.get(context.last), loss_fn)
    stage_kernels = {}
    for index, stage in context.stages.items():
        wiring = context.wiring[index]
        stage_loss = loss if index == context.last else None
        kernels = makers[index](stage, wiring.input_gradients, wiring.output_gradients, stage_loss)
        if isinstance(kernels, SizedKernels):
            kernels.name_dimensions([value.shape for value in wiring.inputs])
        if precision is not None:
            precision.apply_to(index, kernels)
        if numbers.seed is not None:
            # Replicas compute other rows of the same batch: those of a mesh, or of DistributedDataParallel.
            replica = context.data_rank + context.replicas.place(index)
            seed_kernels(kernels, StageDraws(numbers, manifest.stages[index], stage, replica))
        stage_kernels[index] = kernels
    return stage_kernels


def packed_loss(manifest: Manifest, last: nn.Module | None, loss_fn: LossFunction) -> Loss:
    """Return the loss of the last stage's outputs: `loss_fn` takes them in the model's own structure."""
    kinds = type(None) if isinstance(loss_fn, type) else Callable  # the class of a loss is not yet one
    require_type(loss_fn, kinds, "loss_fn is a function of output and target", "loss_fn=nn.MSELoss()")
    names = manifest.stages[-1].outputs

    def loss(outputs: Sequence[Tensor], target: Any) -> Any:
        structure = manifest.outputs_in(last is None or last.training)
        return loss_fn(fill_structure(structure, dict(zip(names, outputs, strict=True))), target)

    return loss


# ---- kernel makers ---------------------------------------------------------------------------------------------------


def stage_recompute(request: object, package: Package, stages: Mapping[int, nn.Module]) -> tuple[Recompute, ...]:
    """Return the recomputation in the backward of each stage of a package.

    Args:
        request: an argument for `pipegraph.recompute.parse_stages`; None for the choice in the package.
        package: the package. Other processes' stages are loaded on the meta device if a pattern matches no module here.
        stages: the stages of this process.

    Raises:
        ArgumentError: `request` has another type or value, or a pattern matches no module.
    """
    plan, of_package = package.manifest.prediction, request is None
    if request is None:
        request = package.manifest.recompute if plan is None else plan.recompute
    stage_rules = parse_stages(request, len(package.manifest.stages))
    for recompute in set(stage_rules):
        # A planned pattern, such as every eighth layer, is of the model: its own stages may have none of these.
        indices = [index for index, stage_rule in enumerate(stage_rules) if of_package or stage_rule == recompute]
        _check_names(recompute, indices, package, stages)
    return stage_rules


def stage_makers(
    options: PipelineOptions, recompute: Sequence[Recompute], prepared: PreparedStages, device: torch.device
) -> Mapping[int, Maker]:
    """Return what makes the kernels of each stage, by its index. Raises PipegraphError for impossible arguments.

    Args:
        recompute: of each stage.
        device: of the stages.
    """
    kernels = options.kernels
    recorder = graph_recorder(kernels, device, recompute, prepared.modules) if options.cuda_graphs else None
    names = [name for stage in prepared.manifest.stages for name in stage.parameters]
    recompute = tuple(stage_rule.with_layers(names) for stage_rule in recompute)
    require_type(kernels, (str, Callable), "kernels is a name, or a function that makes them", 'kernels="inductor"')
    if isinstance(kernels, str):
        variants = VariantOptions(options.max_variants, options.strict, options.dynamic, recorder)
        return dict(enumerate(makers(kernels, recompute, variants)))
    return dict.fromkeys(range(len(recompute)), kernels)


def check_has_graphs(device: str) -> None:
    """Raise PipegraphError unless a type of device has CUDA graphs."""
    if device != "cuda":
        raise PipegraphError(
            f"{argument('cuda_graphs', True)} records what a GPU does, and the stages are on {device}.",
            f"{argument('device', 'cuda')}, or leave it out.",
        )


def graph_recorder(
    kernels: str | Maker, device: torch.device, recompute: Sequence[Recompute], stages: Mapping[int, nn.Module]
) -> MakeRecorder:
    """Return what records the kernels of these stages as CUDA graphs.

    Raises:
        PipegraphError: it cannot be done with the rest.
    """
    check_has_graphs(device.type)
    if not isinstance(kernels, str):
        raise PipegraphError(
            f"{argument('cuda_graphs', True)} records kernels that pipegraph has traced, and {argument('kernels')} is "
            f"a function of yours.",
            f"{argument('kernels', 'inductor')}.",
        )
    if any(stage_rule.offloads for stage_rule in recompute):
        raise PipegraphError(
            f"{argument('cuda_graphs', True)} keeps what a forward saves in one place of the GPU's memory, and "
            f"{argument('recompute', 'offload')} moves it to the host.",
            f"{argument('recompute', 'min-cut')}.",
        )
    for index, stage in stages.items():
        divided = [name for name, parameter in stage.named_parameters() if is_sharded(parameter)]
        if divided:
            raise PipegraphError(
                f"{argument('cuda_graphs', True)} records no collectives, and {divided[0]} of stage {index} is divided "
                "between ranks.",
                "a mesh of pp and dp_replicate alone.",
            )
    return partial(CudaGraphRecorder, device)


def _check_names(
    recompute: Recompute, indices: Sequence[int], package: Package, stages: Mapping[int, nn.Module]
) -> None:
    names = {name for index in indices if index in stages for name in _called(stages[index])}
    if recompute.unmatched(names):
        other_stages = (package.load_stage(index, "meta", weights=False) for index in indices if index not in stages)
        recompute.check_names(names.union(*map(_called, other_stages)))


def _called(stage: nn.Module) -> Iterator[str]:
    """The names of the modules of a stage that are called."""
    for name, module in stage.named_modules():
        if name and type(module).forward is not nn.Module.forward:
            yield name
