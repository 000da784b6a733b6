"""Compare a package with its model: its weights, one training step, and the outputs in evaluation mode after it.

The model is built again and runs as a whole. The stages of the package run one after the other in this process, on the
same rows in microbatches. The package's weights are never loaded into the model, so that other weights are detected.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan
from os import PathLike
from typing import Any

from torch import Tensor

from pipegraph.cost.model_output import output_tensors
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import Manifest, Package
from pipegraph.report.text import clip, table
from pipegraph.runtime.checkpoint.weights import weights_label
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.workflows.batch import at_asked_sizes, explain_model_mismatch
from pipegraph.workflows.reference_step import (
    ModelStep,
    ModelSteps,
    StepTensors,
    TensorComparison,
    VerificationBatch,
    compare,
    compare_named,
    first_step,
    roles,
    within_rounding,
)

# ---- verification ----------------------------------------------------------------------------------------------------
# The result of `verify`: everything that was compared, as text and as JSON.


_KINDS = ("weight", "output", "loss", "gradient", "buffer", "evaluation")
_WORST = 8  # names listed per verification
_SMALL = 100  # times its tolerance: a difference up to there may come from another order of sums


@dataclass(frozen=True)
class Verification:
    """Everything that was compared, in both modes or in evaluation mode alone.

    Attributes:
        training: whether the step ran in training mode.
        comparisons: of each kind in the order of the model.
        edited: generated files that are not as they were written.
        weights: the checkpoint that was read.
        is_random: whether the model itself returns something else each time, in evaluation mode too.
        nan_output: the first output of the model itself that has a nan; "" if none has.
        batch: what the step ran on.
        notes: what was not compared with the model on the whole batch, and why.
        roles: of the inputs, if the package computes what the model computes for each microbatch alone; else "".
    """

    training: bool
    comparisons: tuple[TensorComparison, ...]
    edited: tuple[str, ...] = ()
    weights: str | None = None
    is_random: bool = False
    nan_output: str = ""
    batch: VerificationBatch | None = None
    notes: tuple[str, ...] = ()
    roles: str = ""

    @property
    def equal(self) -> bool:
        return all(comparison.equal for comparison in self.comparisons)

    def of_kind(self, kind: str) -> tuple[TensorComparison, ...]:
        """Return the comparisons of one kind, the worst first."""
        matches = [comparison for comparison in self.comparisons if comparison.kind == kind]
        return tuple(sorted(matches, key=lambda match: (match.equal, not isnan(match.difference), -match.difference)))

    @property
    def different(self) -> tuple[TensorComparison, ...]:
        return tuple(item for kind in _KINDS for item in self.of_kind(kind) if not item.equal)

    def hint(self) -> str:
        """Return the likeliest reason for a difference, and one thing to try."""
        weights = [item for item in self.comparisons if item.kind == "weight"]
        changed = [item for item in weights if not item.equal]
        if changed and all(item.problem for item in changed):
            return (
                f"The package's weights are not of the model's types: {clip(changed[0].name)} is {changed[0]}.\n"
                "Try: build_model with the dtypes and sizes that were split, or split again."
            )
        if changed:
            holder = self.weights if self.weights is not None else "The package"
            first = f"{holder} holds other weights than the model: {clip(changed[0].name)} is the first that differs"
            advice = (
                "the checkpoint that MODEL is made from"
                if self.weights is not None
                else "seed build_model (torch.manual_seed) so that it builds the same model each time, and split again"
            )
            return f"{first}, of {len(changed)} that do and {len(weights)} in all.\nTry: {advice}."
        if self.edited:
            return f"Edited since they were written: {', '.join(self.edited)}.\nTry: undo the edits, or split again."
        if self.nan_output:
            return (
                f"The model itself computes nan for this batch, whose rows are derived from the example: its output "
                f"{clip(self.nan_output)} has one.\n"
                "Try: example_inputs with padding and masks as in training, for which the model computes no nan. A "
                "softmax over nothing but -inf is nan, as of a token that sees no other."
            )
        if self.is_random:
            return (
                "The model itself returns something else each time, in evaluation mode too: it draws random numbers.\n"
                "Try: draw them `if self.training:` alone, or make them once in __init__."
            )
        if self.roles:
            return (
                "The package returns what the model returns for each microbatch, and not for the whole batch: an input "
                f"has a wrong role, or the model mixes rows. Its inputs: {self.roles}.\n"
                "Try: split again with --batch-dim NAME=DIM, NAME=whole or NAME=list for the input with a wrong role."
            )
        if all(item.tolerance < item.difference <= _SMALL * item.tolerance for item in self.different):
            return (
                "The differences are small, as from sums in another order: a tensor that crosses stages arrives "
                "contiguous, and in the model it may have another layout of memory.\n"
                "Try: model.double() in build_model, and split again: differences that remain in float64 are not "
                "rounding."
            )
        return "Try: split again, as the model's source may have changed since."

    def __str__(self) -> str:
        rows = []
        for kind in _KINDS:
            matches = self.of_kind(kind)
            if matches:
                worst = matches[0]
                rows.append(
                    [kind, str(len(matches)), f"{worst.difference:.1e}", clip(worst.name) if not worst.equal else ""]
                )
        mode = "training and evaluation" if self.training else "evaluation"
        lines = [table(["what", "compared", "largest difference", "at"], rows), ""]
        if self.batch is not None:
            lines += [f"batch: {self.batch}", *(f"note: {note}" for note in self.notes)]
        if self.equal:
            within = f"{max(comparison.tolerance for comparison in self.comparisons):.0e}"
            return "\n".join([*lines, f"equal in {mode} mode, within {within} relative"])
        named = [f"  {item.kind} {clip(item.name)}: {item}" for item in self.different[:_WORST]]
        unlisted = len(self.different) - len(named)
        remainder = [f"  and {unlisted} more"] if unlisted > 0 else []
        return "\n".join([*lines, "DIFFERENT:", *named, *remainder])

    def to_dict(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "mode": "training" if self.training else "evaluation",
            "microbatches": None if self.batch is None else list(self.batch.rows),
            "notes": list(self.notes),
            "compared": {kind: len(self.of_kind(kind)) for kind in _KINDS if self.of_kind(kind)},
            "largest_difference": {
                kind: _number(self.of_kind(kind)[0].difference) for kind in _KINDS if self.of_kind(kind)
            },
            "different": [
                {"kind": item.kind, "name": item.name, "difference": _number(item.difference)}
                for item in self.different
            ],
        }


def _number(value: float) -> float | str:
    """Return what JSON can hold: it has neither infinity nor nan."""
    return value if isfinite(value) else str(value)


# ---- verify ----------------------------------------------------------------------------------------------------------


_References = tuple[StepTensors, StepTensors]
"""The steps of the model on the whole batch and on each microbatch."""

_NUDGES = 3  # steps of the model with other last digits, if something differs


def verify(
    package: Package,
    source: ModelSource,
    weights: str | PathLike[str] | Mapping[str, Tensor] | None = None,
    check_weights: bool = True,
) -> Verification:
    """Compare one step of a package with the same step of its model, and their outputs in evaluation mode after it.

    The package computes two microbatches of rows that all differ, and the model the whole batch. If that is not
    possible, or not the same by design, the model computes each microbatch, and the result says so.

    If training is random, with dropout, the step also runs in evaluation mode. A difference above the tolerance is
    compared with the effect of the last digit of the weights and inputs in the model: rounding has the same effect.

    Args:
        package: as `pipegraph split` wrote it. One without weights gets the model's.
        source: the model, with real weights, its example inputs and loss. A microbatch has about the number of
            rows and tokens that it asks for.
        weights: a checkpoint from which the package's weights are read instead, as in `Pipeline`.
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
        None if weights is None else weights_label(weights),
        is_random,
        _nan_output(whole_step),
        steps.batch,
        choice.notes,
        roles(package.manifest) if choice.mixes_rows else "",
    )


def _is_random(step: ModelStep, first: StepTensors) -> bool:
    """Return whether another forward of the model gives other results."""
    if _nan_output(first):
        return False
    again = step.run(backward=False, seed=1)
    return not _are_equal(compare_named("output", first.outputs, again.outputs))


def _nan_output(step: StepTensors) -> str:
    """Return the name of the first output with a nan; "" if none has."""
    return next((name or "output" for name, tensor in step.outputs.items() if bool(tensor.isnan().any())), "")


def _loaded(
    package: Package, steps: ModelSteps, weights: str | PathLike[str] | Mapping[str, Tensor] | None, check_weights: bool
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
    references: Sequence[Mapping[str, Tensor]],
    package: Mapping[str, Tensor],
    dims: Mapping[str, int | None],
) -> dict[str, Tensor]:
    """The outputs. Those without rows are of the microbatches, which the package computes, if these were run."""
    outputs = dict(chosen)
    for name in outputs.keys() & package.keys():
        if dims.get(name) is None:
            tensors = [reference[name] for reference in reversed(references) if name in reference]
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
