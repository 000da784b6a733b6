"""Compare a package with its model: its weights, one training step, and the outputs in evaluation mode after it.

The model is built anew and runs as a whole, and the package's stages run one after the other in this process, both on
the model's example inputs. The package's weights are never loaded into the model, so that other weights are found.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from os import PathLike

from torch import Tensor

from pipegraph.cost.model_output import output_tensors
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.step_runner import LossFunction
from pipegraph.workflows.batch import explain_model_mismatch, source_loss
from pipegraph.workflows.reference_step import StepTensors, run_model
from pipegraph.workflows.tensor_comparison import TensorComparison, compare, compare_named, within_rounding
from pipegraph.workflows.verification import Verification

_NUDGES = 3  # steps of the model with other last digits, where something differs


def verify(
    package: Package,
    source: ModelSource,
    weights: str | PathLike[str] | None = None,
    check_weights: bool = True,
) -> Verification:
    """Compare one step of a package with the same step of its model, and what both return in evaluation mode after it.

    If training is random, with dropout, the step runs in evaluation mode, too. What differs by more than the tolerance
    is compared with what the last digit of the weights and inputs changes in the model: rounding does as much.

    Args:
        package: as `pipegraph split` wrote it. One without weights gets the model's.
        source: the model, with real weights, its example inputs and loss.
        weights: a Hugging Face checkpoint from which the package's weights are read instead.
        check_weights: as in `Pipeline`.
    """
    loss_fn = source_loss(source)
    reference = run_model(source, loss_fn)
    is_random = _is_random(source, loss_fn, reference)
    training = source.model.training and not is_random
    if source.model.training and not training:
        reference = run_model(source, loss_fn, evaluate=True)
        is_random = _is_random(source, loss_fn, reference, evaluate=True)
    found, same_weights = _run_package(package, source, loss_fn, not training, weights, check_weights)
    comparisons = list(_compare(reference, found))
    if not is_random and all(item.equal for item in same_weights) and not all(item.equal for item in comparisons):
        nudged = (run_model(source, loss_fn, not training, seed=seed, nudged=True) for seed in range(_NUDGES))
        comparisons = _within_rounding(comparisons, reference, nudged)
    return Verification(training, (*same_weights, *comparisons), package.edited(), weights, is_random)


def _is_random(source: ModelSource, loss_fn: LossFunction, first: StepTensors, evaluate: bool = False) -> bool:
    """Return whether another forward of the model gives other results."""
    again = run_model(source, loss_fn, evaluate, backward=False, seed=1)
    return not all(comparison.equal for comparison in compare_named("output", first.outputs, again.outputs))


def _run_package(
    package: Package,
    source: ModelSource,
    loss_fn: LossFunction,
    evaluate: bool,
    weights: str | PathLike[str] | None,
    check_weights: bool,
) -> tuple[StepTensors, list[TensorComparison]]:
    """Return what a step of the package makes, and its weights before that compared with the model's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing weights, which are loaded below
        pipeline = Pipeline(
            package,
            schedule="gpipe",
            microbatches=1,
            loss_fn=loss_fn,
            kernels="eager",
            weights=weights,
            check_weights=check_weights,
        )
    same_weights: list[TensorComparison] = []
    if weights is not None or package.has_weights:
        same_weights = _compare_weights(source.model.state_dict(), pipeline.state_dict())
    else:
        with explain_model_mismatch(package.manifest, source):
            pipeline.load_state_dict(source.model.state_dict())
    if evaluate:
        _set_evaluation_mode(pipeline)
    args, kwargs, target = copy.deepcopy((source.args, source.kwargs, source.example_target))
    with explain_model_mismatch(package.manifest, source):
        result = pipeline.step(*args, target=target, return_outputs=True, **kwargs)
    gradients: dict[str, Tensor | None] = {}
    buffers: dict[str, Tensor] = {}
    for stage in pipeline.stages.values():
        gradients |= {name: parameter.grad for name, parameter in stage.named_parameters(remove_duplicate=False)}
        buffers |= dict(stage.named_buffers(remove_duplicate=False))
    assert result.loss is not None, "every stage runs in this process, the last one too"
    outputs = output_tensors(result.outputs)
    _set_evaluation_mode(pipeline)
    args, kwargs = copy.deepcopy((source.args, source.kwargs))
    evaluated = output_tensors(pipeline.eval(*args, **kwargs))
    return StepTensors(outputs, result.loss.detach(), gradients, buffers, evaluated), same_weights


def _compare_weights(reference: dict[str, Tensor], found: dict[str, Tensor]) -> list[TensorComparison]:
    """Compare what the stages hold, in the order of the model. What it does not use no stage holds."""
    places = {name: place for place, name in enumerate(reference)}
    names = sorted(found, key=lambda name: places.get(name, len(places)))
    return [compare("weight", name, found[name], reference.get(name)) for name in names]


def _compare(reference: StepTensors, found: StepTensors) -> Iterator[TensorComparison]:
    others = found.by_kind()
    for kind, tensors in reference.by_kind().items():
        if kind == "buffer":  # a constant of the model's code is a buffer of a stage only
            tensors = {name: tensors[name] for name in sorted(tensors.keys() & others[kind].keys())}
            others[kind] = {name: others[kind][name] for name in tensors}
        yield from compare_named(kind, tensors, others[kind])


def _within_rounding(
    comparisons: Iterable[TensorComparison], reference: StepTensors, nudged: Iterable[StepTensors]
) -> list[TensorComparison]:
    """Give what differs the tolerance of what steps of the model with other last digits change in it."""
    rounding: dict[tuple[str, str], float] = {}
    for step in nudged:
        for item in _compare(reference, step):
            key = item.kind, item.name
            rounding[key] = max(rounding.get(key, 0.0), item.difference)
    return [item if item.equal else within_rounding(item, rounding[item.kind, item.name]) for item in comparisons]


def _set_evaluation_mode(pipeline: Pipeline) -> None:
    for stage in pipeline.stages.values():
        stage.eval()
