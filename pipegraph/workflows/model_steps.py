"""The steps of a model that a package is compared with: on the whole batch, and microbatch after microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipegraph.cost.model_output import mean_square
from pipegraph.errors import BatchError, SourceError
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import CALLER, Manifest
from pipegraph.package.sizes import BATCH
from pipegraph.runtime.loss_reduction import LossFunction, LossReduction, LossWeight
from pipegraph.workflows.batch import Batch, explain_model_mismatch, source_loss
from pipegraph.workflows.reference_step import ModelStep, StepTensors
from pipegraph.workflows.training_functions import training_function
from pipegraph.workflows.verification_batch import (
    VerificationBatch,
    lists_of_microbatches,
    verification_batch,
    with_whole_inputs_as_rows,
)


@dataclass(frozen=True)
class ModelSteps:
    """Steps of a model on one batch.

    Attributes:
        loss_fn, loss_weight: of the model file.
        output_dims: as `ModelStep` has them.
        evaluate: whether the steps run in evaluation mode.
    """

    source: ModelSource
    batch: VerificationBatch
    loss_fn: LossFunction
    loss_weight: LossWeight | None
    output_dims: tuple[Mapping[str, int | None], Mapping[str, int | None]]
    evaluate: bool = False

    @property
    def has_whole_batch(self) -> bool:
        """Whether the whole batch has several microbatches."""
        return self.batch.whole_batch is not None and len(self.batch.rows) > 1

    @property
    def output_dims_of_step(self) -> tuple[Mapping[str, int | None], Mapping[str, int | None]]:
        """The batch dimension of each output, of the step and in evaluation mode after it."""
        in_training, in_evaluation = self.output_dims
        return (in_evaluation if self.evaluate else in_training), in_evaluation

    @property
    def reference(self) -> ModelStep:
        """The step on the whole batch or, if there is none, on each microbatch."""
        whole_batch = self.batch.whole_batch
        return self.by_microbatch if whole_batch is None else self._step([whole_batch], [1.0], [[whole_batch]])

    @property
    def by_microbatch(self) -> ModelStep:
        """The step on each microbatch. Gradients add up, and each loss has the weight of its rows."""
        microbatches, whole_batch = self.batch.microbatches, self.batch.whole_batch
        evaluation = [microbatches] if whole_batch is None else [[whole_batch], microbatches]
        return self._step(microbatches, self.batch.weights, evaluation)

    def _step(
        self, microbatches: Sequence[Batch], weights: Sequence[float], evaluation: Sequence[Sequence[Batch]]
    ) -> ModelStep:
        if self.loss_weight is not None:
            total = LossReduction(weight_of=self.loss_weight).weigh([batch.target for batch in microbatches])
            weights = [1 / max(total, 1.0) for _ in microbatches]
        return ModelStep(
            self.source, self.loss_fn, microbatches, weights, evaluation, self.output_dims_of_step, self.evaluate
        )


def first_step(source: ModelSource, manifest: Manifest) -> tuple[ModelSteps, StepTensors]:
    """Return the steps on a batch that the model takes, and what the first one computes.

    Raises:
        SourceError: the model or its loss raises an error, on its example too.
        BatchError: the model raises an error on a batch of rows as the manifest describes them.
    """
    with explain_model_mismatch(manifest, source):
        batch = verification_batch(source, manifest)
    dims = tuple(_dims(manifest, manifest.outputs_in(training)) for training in (True, False))
    steps = ModelSteps(source, batch, source_loss(source), training_function(source, "loss_weight"), (dims[0], dims[1]))
    try:
        return steps, steps.reference.run()
    except SourceError as error:
        if batch.whole_batch is None or len(batch.rows) == 1:
            raise
        reason = _reason_for_lists(steps, manifest, error)
    steps = replace(steps, batch=lists_of_microbatches(source, manifest, reason))
    return steps, steps.reference.run()


def roles(manifest: Manifest) -> str:
    """The roles of the inputs: ``tokens rows along dimension 0, table whole``."""
    inputs = (value for value in manifest.values.values() if value.producer == CALLER and not value.is_constant)
    return ", ".join(
        f"{value.name} rows along dimension {value.batch_dim}"
        if value.batch_role == "rows"
        else f"{value.name} {'as a list' if value.batch_role == 'list' else 'whole'}"
        for value in inputs
    )


def _reason_for_lists(steps: ModelSteps, manifest: Manifest, error: SourceError) -> str:
    """Why the model is compared on lists of microbatches after an error on the whole batch.

    Raises BatchError if a role of the manifest is the likely cause.
    """
    source, problem = steps.source, str(error).partition("\nTry: ")[0]
    rows = sum(steps.batch.rows)
    if _takes(steps, steps.batch.whole_batch):
        return f"the loss does not take {rows} rows"
    example = Batch(source.args, source.kwargs, source.example_target)
    if not _takes(steps, example):
        raise error
    rows_instead = with_whole_inputs_as_rows(source, manifest)
    if rows_instead is not None and _takes(steps, rows_instead[0]):
        names = ", ".join(rows_instead[1])
        raise BatchError(
            f"The model does not take {rows} rows beside {names} of the example, which pipeline.json gives whole to "
            f"every microbatch: {problem}\n"
            f"Its inputs: {roles(manifest)}.\n"
            f"Try: rows for {names}, as the model takes them: split again with --batch-dim {rows_instead[1][0]}=0."
        )
    if BATCH in manifest.sizes:
        raise BatchError(
            f"The model takes its example, and not {rows} rows of it, which pipeline.json allows: {problem}\n"
            f"Its inputs: {roles(manifest)}.\n"
            "Try: the right role for each input: split again with --batch-dim NAME=DIM, NAME=whole or NAME=list."
        )
    return f"the model does not take {rows} rows"


def _takes(steps: ModelSteps, batch: Batch | None) -> bool:
    """Return whether the forward of the model runs on a batch."""
    if batch is None:
        return False
    without_loss = replace(steps, loss_fn=mean_square, loss_weight=None)
    try:
        without_loss._step([batch], [1.0], []).run(backward=False)
    except SourceError:
        return False
    return True


def _dims(manifest: Manifest, structure: Any, path: str = "") -> dict[str, int | None]:
    """The batch dimension of each output, by its path as `output_tensors` names it."""
    if isinstance(structure, str):
        return {path: manifest.values[structure].batch_dim}
    items = structure.items() if isinstance(structure, Mapping) else enumerate(structure or ())
    dims: dict[str, int | None] = {}
    for key, item in items:
        dims |= _dims(manifest, item, f"{path}.{key}" if path else str(key))
    return dims
