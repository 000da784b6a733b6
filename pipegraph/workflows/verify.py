"""Compare a package with its model: its weights, one training step, and the outputs in evaluation mode after it.

The model is built again and runs as a whole. The stages of the package run one after the other in this process, on the
same rows in microbatches. The package's weights are never loaded into the model, so that other weights are detected.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike

from torch import Tensor

from pipegraph.cost.model_output import output_tensors
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import Manifest, Package
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.workflows.batch import at_asked_sizes, explain_model_mismatch
from pipegraph.workflows.model_steps import ModelSteps, first_step, roles
from pipegraph.workflows.reference_step import (
    ModelStep,
    StepTensors,
    TensorComparison,
    compare,
    compare_named,
    within_rounding,
)
from pipegraph.workflows.verification import Verification

_References = tuple[StepTensors, StepTensors]
"""The steps of the model on the whole batch and on each microbatch."""

_NUDGES = 3  # steps of the model with other last digits, if something differs


def verify(
    package: Package,
    source: ModelSource,
    weights: str | PathLike[str] | None = None,
    check_weights: bool = True,
) -> Verification:
    """Compare one step of a package with the same step of its model, and what both return in evaluation mode after it.

    The package computes two microbatches of rows that all differ, and the model the whole batch. If that is not
    possible, or not the same by design, the model computes each microbatch, and the result says so.

    If training is random, with dropout, the step runs in evaluation mode, too. What differs by more than the tolerance
    is compared with what the last digit of the weights and inputs changes in the model: rounding does as much.

    Args:
        package: as `pipegraph split` wrote it. One without weights gets the model's.
        source: the model, with real weights, its example inputs and loss. A microbatch has about the rows, and the
            tokens, that it asks for.
        weights: a Hugging Face checkpoint from which the package's weights are read instead.
        check_weights: as in `Pipeline`.

    Raises:
        SourceError: the model or its loss raises an error.
        BatchError: the package does not take the example inputs, or the model does not take a batch of these rows.
        PackageError: the package cannot be loaded.
    """
    source = at_asked_sizes(source)
    steps, whole_step = first_step(source, package.manifest)
    is_random = _is_random(steps.reference, whole_step)
    training = source.model.training and not is_random
    if source.model.training and not training:
        steps = replace(steps, evaluate=True)
        whole_step = steps.reference.run()
        is_random = _is_random(steps.reference, whole_step)
    pipeline, same_weights = _loaded(package, steps, weights, check_weights)
    step = _run_package(pipeline, steps)
    can_round = not is_random and _are_equal(same_weights)
    choice = _Choice(dims=steps.output_dims_of_step)
    comparisons = _compared(steps, choice, (whole_step, whole_step), step, can_round)
    if steps.has_whole_batch and (package.manifest.batch.per_microbatch or not _are_equal(comparisons)):
        parts = steps.by_microbatch.run()
        choice = _choice(package.manifest, steps, choice, (whole_step, parts), step)
        comparisons = _compared(steps, choice, (whole_step, parts), step, can_round)
    return Verification(
        training,
        (*same_weights, *comparisons),
        package.edited(),
        weights,
        is_random,
        steps.batch,
        choice.notes,
        roles(package.manifest) if choice.mixes_rows else "",
    )


def _is_random(step: ModelStep, first: StepTensors) -> bool:
    """Return whether another forward of the model gives other results."""
    again = step.run(backward=False, seed=1)
    return not _are_equal(compare_named("output", first.outputs, again.outputs))


def _loaded(
    package: Package, steps: ModelSteps, weights: str | PathLike[str] | None, check_weights: bool
) -> tuple[Pipeline, list[TensorComparison]]:
    """Return the pipeline of a package, and its weights compared with those of the model."""
    source = steps.source
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing weights, which are loaded below
        pipeline = Pipeline(
            package,
            schedule="gpipe",
            microbatches=len(steps.batch.rows),
            loss_fn=steps.loss_fn,
            loss_weight=steps.loss_weight,
            # A loss that is not a mean over rows is a note, and not an error.
            loss_over="batch" if source.training.loss_over == "batch" and steps.has_whole_batch else "microbatch",
            kernels="eager",
            weights=weights,
            check_weights=check_weights,
        )
    if weights is not None or package.has_weights:
        return pipeline, _compare_weights(source.model.state_dict(), pipeline.state_dict())
    with explain_model_mismatch(package.manifest, source):
        pipeline.load_state_dict(source.model.state_dict())
    return pipeline, []


def _run_package(pipeline: Pipeline, steps: ModelSteps) -> StepTensors:
    """Return what a step of the package computes."""
    if steps.evaluate:
        _set_evaluation_mode(pipeline)
    batch = copy.deepcopy(steps.batch.passed)
    with explain_model_mismatch(pipeline.package.manifest, steps.source):
        result = pipeline.step(*batch.args, target=batch.target, return_outputs=True, **batch.kwargs)
    gradients: dict[str, Tensor | None] = {}
    buffers: dict[str, Tensor] = {}
    for stage in pipeline.stages.values():
        gradients |= {name: parameter.grad for name, parameter in stage.named_parameters(remove_duplicate=False)}
        buffers |= dict(stage.named_buffers(remove_duplicate=False))
    assert result.loss is not None, "every stage runs in this process, the last one too"
    outputs = output_tensors(result.outputs)
    _set_evaluation_mode(pipeline)
    batch = copy.deepcopy(steps.batch.passed)
    evaluated = output_tensors(pipeline.eval(*batch.args, **batch.kwargs))
    return StepTensors(outputs, result.loss.detach(), gradients, buffers, evaluated)


def _compare_weights(reference: dict[str, Tensor], stages: dict[str, Tensor]) -> list[TensorComparison]:
    """Compare what the stages hold, in the order of the model. What it does not use no stage holds."""
    places = {name: place for place, name in enumerate(reference)}
    names = sorted(stages, key=lambda name: places.get(name, len(places)))
    return [compare("weight", name, stages[name], reference.get(name)) for name in names]


@dataclass(frozen=True)
class _Choice:
    """Which tensors of a step are compared with the model on each microbatch. The others are those of the whole batch.

    Attributes:
        dims: the batch dimension of each output, of the step and in evaluation mode.
        step: all tensors of the step, because the model mixes the rows of a microbatch by design.
        loss: the loss and its gradients, because the loss is not a mean over rows.
        notes: why.
        mixes_rows: whether the package returns what the model returns for each microbatch, and not for the whole batch.
    """

    dims: tuple[Mapping[str, int | None], Mapping[str, int | None]]
    step: bool = False
    loss: bool = False
    notes: tuple[str, ...] = ()
    mixes_rows: bool = False

    def tensors(self, references: _References, package: StepTensors) -> StepTensors:
        """The tensors that the package is compared with."""
        whole_step, parts = references
        chosen = whole_step
        if self.step:
            chosen = parts
        elif self.loss:
            chosen = replace(whole_step, loss=parts.loss, gradients=parts.gradients)
        of_step, of_evaluation = self.dims
        evaluated = [step.evaluated for step in references]
        return replace(
            chosen,
            outputs=_as_joined(chosen.outputs, [step.outputs for step in references], package.outputs, of_step),
            evaluated=_as_joined(chosen.evaluated, evaluated, package.evaluated, of_evaluation),
        )


def _choice(
    manifest: Manifest, steps: ModelSteps, plain: _Choice, references: _References, package: StepTensors
) -> _Choice:
    """Choose what the package is compared with, from both steps of the model."""
    whole_step, parts = references
    by_design = manifest.batch.per_microbatch
    step = replace(plain, step=True)
    if by_design:
        note = f"computed for each microbatch, and compared so: {', '.join(map(str, by_design))}"
        return replace(step, notes=(note,))
    if _are_equal(_compare(plain.tensors(references, package), package)):
        return plain
    outputs_of_batch, outputs_of_parts = (_rows(reference.outputs, plain.dims[0]) for reference in references)
    is_mean = compare("loss", "loss", parts.loss, whole_step.loss).equal
    if not is_mean and _are_equal(compare_named("output", outputs_of_batch, outputs_of_parts)):
        note = (
            f"the loss is not a mean over rows: {float(whole_step.loss):.6g} on the whole batch, and "
            f"{float(parts.loss):.6g} as the mean of microbatches, with which it is compared"
        )
        return replace(plain, loss=True, notes=(note,))
    equals_parts = _are_equal(_compare(step.tensors(references, package), package))
    if equals_parts and not manifest.batch.proof and not steps.evaluate:
        # A package of a version that did not look for them. In evaluation mode it computes the whole batch.
        note = "training mode depends on the rows of a microbatch, and is compared with the model on each"
        return replace(step, notes=(note,))
    return replace(plain, mixes_rows=_are_equal(compare_named("output", parts.outputs, package.outputs)))


def _rows(outputs: Mapping[str, Tensor], dims: Mapping[str, int | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in outputs.items() if dims.get(name) is not None}


def _as_joined(
    chosen: Mapping[str, Tensor],
    references: Iterable[Mapping[str, Tensor]],
    package: Mapping[str, Tensor],
    dims: Mapping[str, int | None],
) -> dict[str, Tensor]:
    """The outputs, of which those without rows are joined over microbatches as the package joins them."""
    outputs = dict(chosen)
    for name in outputs.keys() & package.keys():
        if dims.get(name) is None:
            tensors = [reference[name] for reference in references if name in reference]
            # Equal for all microbatches, such as a parameter that the model returns: it may come back as it is.
            tensors += [tensor[0] for tensor in tensors if tensor.dim() and bool((tensor == tensor[:1]).all())]
            outputs[name] = next((tensor for tensor in tensors if tensor.shape == package[name].shape), outputs[name])
    return outputs


def _compared(
    steps: ModelSteps, choice: _Choice, references: _References, package: StepTensors, can_round: bool
) -> list[TensorComparison]:
    """Compare the package with what was chosen, and if something differs, with what rounding changes in that."""
    reference = choice.tensors(references, package)
    comparisons = list(_compare(reference, package))
    if not can_round or _are_equal(comparisons):
        return comparisons
    return _within_rounding(comparisons, reference, (_nudged(steps, choice, package, seed) for seed in range(_NUDGES)))


def _nudged(steps: ModelSteps, choice: _Choice, package: StepTensors, seed: int) -> StepTensors:
    """A step of the model with other last digits."""
    whole_step = steps.reference.run(seed=seed, nudged=True)
    needs_parts = choice.step or choice.loss
    return choice.tensors(
        (whole_step, steps.by_microbatch.run(seed=seed, nudged=True) if needs_parts else whole_step), package
    )


def _compare(reference: StepTensors, package: StepTensors) -> Iterator[TensorComparison]:
    package_tensors = package.by_kind()
    for kind, tensors in reference.by_kind().items():
        if kind == "buffer":  # a constant of the model's code is a buffer of a stage only
            tensors = {name: tensors[name] for name in sorted(tensors.keys() & package_tensors[kind].keys())}
            package_tensors[kind] = {name: package_tensors[kind][name] for name in tensors}
        yield from compare_named(kind, tensors, package_tensors[kind])


def _are_equal(comparisons: Iterable[TensorComparison]) -> bool:
    return all(item.equal for item in comparisons)


def _within_rounding(
    comparisons: Iterable[TensorComparison], reference: StepTensors, nudged: Iterable[StepTensors]
) -> list[TensorComparison]:
    """Give what differs the tolerance of what steps of the model with other last digits change in it.

    A tensor that only the stages have, as an output that the model returns in training mode alone, has none.
    """
    rounding: dict[tuple[str, str], float] = {}
    for step in nudged:
        for item in _compare(reference, step):
            key = item.kind, item.name
            rounding[key] = max(rounding.get(key, 0.0), item.difference)
    return [
        item if item.equal else within_rounding(item, rounding.get((item.kind, item.name), 0.0)) for item in comparisons
    ]


def _set_evaluation_mode(pipeline: Pipeline) -> None:
    for stage in pipeline.stages.values():
        stage.eval()
