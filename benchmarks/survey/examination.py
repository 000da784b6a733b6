"""One model of the survey: split, and its stages compared with it at other sizes, in other dtypes and in both modes."""

from __future__ import annotations

import copy
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pipegraph
from benchmarks.survey.comparison import difference, rounding
from benchmarks.survey.source_counts import SourceCounts, count, numbers, products
from benchmarks.survey.survey_case import BATCH, Inputs, SurveyCase, floats_to
from pipegraph import PipegraphError, Pipeline, RuntimeFault
from pipegraph.codegen.package_writer import write_proved_package
from pipegraph.codegen.proof import Proof
from pipegraph.cost.model_output import output_tensors
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import Package
from pipegraph.workflows.verify import verify
from tests.zoo.visit import loss_fn

Tensors = dict[str, Tensor | None]
STAGES = 3
CLOSE = 1e-5
"""Relative. A larger difference is rounding only if the model differs from itself in float64 by no less."""
CHECKS = (
    "verify",
    "training",
    "gradients",
    "evaluation",
    "batch 5",
    "batch 1",
    "smaller",
    "larger",
    "bfloat16",
    "float16",
)
"""The checks of each model. ``smaller`` and ``larger`` are its two other sizes."""


class Verdict(Enum):
    """What came of a check."""

    COMPARED = auto()
    NOT_TAKEN = auto()
    """The model itself refuses, or has no such size."""
    REFUSED = auto()
    """pipegraph says that the stages are not the model there."""
    FAILED = auto()
    """The stages fail with another error."""
    DIFFERENT = auto()
    """``verify`` says that they differ."""
    WARNED = auto()
    """The numbers differ, and a warning at capture said that they may."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a check: a difference, or why nothing was compared."""

    verdict: Verdict
    difference: float = 0.0
    tolerance: float = 0.0
    message: str = field(default="", repr=False)

    @property
    def is_silent_error(self) -> bool:
        """Whether the stages gave a wrong number, and nothing said so."""
        return self.verdict is Verdict.COMPARED and not self.difference <= self.tolerance


@dataclass(frozen=True)
class Report:
    """All that was found for one model. One that could not be split has an error alone.

    Attributes:
        seconds: of capture, plan and write.
        literals: numbers of the source that come from the example's sizes.
        proof: how the source was compared with the captured graph.
    """

    case: SurveyCase
    error: str = ""
    outcomes: Mapping[str, CheckResult] = field(default_factory=dict)
    seconds: float = 0.0
    counts: SourceCounts | None = None
    literals: int = 0
    proof: Proof | None = None

    @property
    def has_silent_error(self) -> bool:
        return any(outcome.is_silent_error for outcome in self.outcomes.values())


def examine(case: SurveyCase, folder: Path) -> Report:
    """Split a model under ``folder``, and compare."""
    model = case.model()
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            package, proof = _split(model, case.arguments(), folder / "package")
    except Exception as error:  # a torch error as well: the survey continues with the next model
        return Report(case, error=_error_text(error))
    seconds = time.perf_counter() - begin
    # What pipegraph warned of is not silent; warnings of torch and of the model's own libraries say nothing of stages.
    is_warned = any(Path(pipegraph.__file__).parent in Path(warning.filename).parents for warning in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        examination = _Examination(case, model, package)
        outcomes = {name: examination.outcome(name) for name in CHECKS}
        literals = _literals(case, package, outcomes, folder)
    if is_warned:
        outcomes = {name: _warned(outcome) for name, outcome in outcomes.items()}
    return Report(case, "", outcomes, seconds, count(package.path), literals, proof)


class _Examination:
    """A model and its package under comparison; neither is changed."""

    def __init__(self, case: SurveyCase, model: nn.Module, package: Package) -> None:
        self._case, self._model, self._package = case, model, package
        self._step: tuple[dict[str, Tensors], ...] | None = None

    def outcome(self, name: str) -> CheckResult:
        """What a check of CHECKS gives."""
        checks: dict[str, Callable[[], CheckResult]] = {
            "verify": self._verify,
            "training": partial(self._trained, "step"),
            "gradients": partial(self._trained, "gradients"),
            "evaluation": self._evaluated_twice,
            "batch 5": lambda: self._evaluated(self._case.arguments(5)),
            "batch 1": lambda: self._evaluated(self._case.arguments(1)),
            "smaller": partial(self._at_size, 1),
            "larger": partial(self._at_size, 2),
            "bfloat16": lambda: self._evaluated(self._case.arguments(), torch.bfloat16),
            "float16": lambda: self._evaluated(self._case.arguments(), torch.float16),
        }
        return checks[name]()

    def _verify(self) -> CheckResult:
        """What the command says of the example, in both modes: without randomness, all of it."""
        source = ModelSource(
            self._case.name, "", self._model, *self._case.arguments(), loss_fn, rebuild=self._case.model
        )
        try:
            verification = verify(self._package, source)
        except Exception as error:
            return _refusal(error)
        # Comparisons have tolerances of their own.
        worst = max(
            verification.comparisons, key=lambda comparison: comparison.difference / (comparison.tolerance or 1e-30)
        )
        verdict = Verdict.COMPARED if verification.equal else Verdict.DIFFERENT
        return CheckResult(verdict, worst.difference, worst.tolerance)

    def _trained(self, part: str) -> CheckResult:
        """A step in training mode, drawing the same random numbers."""
        if self._step is None:
            try:
                reference = self._model_step()
            except Exception as error:
                return CheckResult(Verdict.NOT_TAKEN, message=_error_text(error))
            try:
                self._step = reference, self._package_step()
            except Exception as error:
                return _refusal(error)
        expected, actual = self._step
        return _compared(expected[part], actual[part], lambda: self._model_step(torch.float64)[part])

    def _evaluated_twice(self) -> CheckResult:
        """Evaluation mode, twice: the second time must not depend on the first."""
        inputs = self._case.arguments()
        model = self._case.model().eval()
        expected = [_evaluate(model, inputs) for _ in range(2)]
        try:
            pipe = self._pipeline()
            actual = [_evaluate(pipe.eval, inputs) for _ in range(2)]
        except Exception as error:
            return _refusal(error)
        results = [_compared(*pair, lambda: self._exact(inputs)) for pair in zip(expected, actual, strict=True)]
        return max(results, key=lambda result: result.difference)

    def _at_size(self, index: int) -> CheckResult:
        if not self._case.sizes:
            return CheckResult(Verdict.NOT_TAKEN, message="no size varies but the batch")
        return self._evaluated(self._case.arguments(index=index))

    def _evaluated(self, inputs: Inputs, dtype: torch.dtype = torch.float32) -> CheckResult:
        """Evaluation mode at other sizes, or in another dtype."""
        inputs = floats_to(dtype, inputs)
        try:
            reference = _evaluate(self._case.model(dtype).eval(), inputs)
        except Exception as error:
            return CheckResult(Verdict.NOT_TAKEN, message=_error_text(error))
        try:
            actual = _evaluate(self._pipeline(dtype).eval, inputs)
        except Exception as error:
            return _refusal(error)
        return _compared(reference, actual, lambda: self._exact(inputs))

    def _exact(self, inputs: Inputs) -> Tensors:
        """The model's outputs in float64 and evaluation mode."""
        return _evaluate(self._case.model().double().eval(), floats_to(torch.float64, inputs))

    def _pipeline(self, dtype: torch.dtype = torch.float32, train: bool = False) -> Pipeline:
        parallelize = None if dtype == torch.float32 else lambda stage: stage.to(dtype)
        pipe = Pipeline(self._package, microbatches=1, loss_fn=loss_fn, kernels="autograd", parallelize_fn=parallelize)
        for stage in pipe.stages.values():
            stage.train(train)
        return pipe

    def _model_step(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensors]:
        model = self._case.model(dtype)
        args, kwargs = floats_to(dtype, self._case.arguments())
        torch.manual_seed(2)
        output = model(*args, **kwargs)
        loss = loss_fn(output)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
        return {"step": {**output_tensors(output), "loss": loss, **_buffers(model)}, "gradients": gradients}

    def _package_step(self) -> dict[str, Tensors]:
        pipe, (args, kwargs) = self._pipeline(train=True), copy.deepcopy(self._case.arguments())
        torch.manual_seed(2)
        result = pipe.step(*args, return_outputs=True, **kwargs)
        stages = nn.ModuleList(pipe.stages.values())
        parameters = dict(pair for stage in stages for pair in stage.named_parameters(remove_duplicate=False))
        # A name that no stage has is that of a tied weight which a stage has under another one, or of an unused one.
        groups: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            groups.setdefault(parameter, []).append(name)
        gradients = {}
        for names in groups.values():
            matches = [name for name in names if name in parameters]
            for name in names:
                gradients[name] = parameters[name if name in parameters else matches[0]].grad if matches else None
        # A constant of the model's code is a buffer of a stage only, and a buffer that nothing reads one of the model.
        model_buffers = _buffers(self._model)
        buffers = {
            name: buffer for stage in stages for name, buffer in _buffers(stage).items() if name in model_buffers
        }
        return {
            "step": {**output_tensors(result.outputs), "loss": result.loss, **model_buffers, **buffers},
            "gradients": gradients,
        }


def _buffers(module: nn.Module) -> Tensors:
    return {f"buffer {name}": buffer for name, buffer in module.named_buffers(remove_duplicate=False)}


def _split(model: nn.Module, inputs: Inputs, folder: Path) -> tuple[Package, Proof]:
    captured = pipegraph.capture(model, *inputs)
    plan = pipegraph.plan(captured, stages=STAGES, balance="uniform")
    return write_proved_package(plan, folder, overwrite=True)


def _evaluate(call: Callable[..., Any], inputs: Inputs) -> Tensors:
    """The outputs of a call without gradients; random numbers are the same at each call."""
    args, kwargs = copy.deepcopy(inputs)
    torch.manual_seed(2)
    with torch.no_grad():
        return dict(output_tensors(call(*args, **kwargs)))


def _literals(case: SurveyCase, package: Package, outcomes: Mapping[str, CheckResult], folder: Path) -> int:
    """How many numbers of the source come from the example's sizes.

    A 3 may be the batch of 3, or the three parts of a projection. So the model is captured again at other sizes, and
    a number counts if it is a size of the example, or a product of its sizes, and is then missing. Sizes that
    the model itself fixes are its own numbers.
    """
    size = 1 if case.sizes and outcomes["smaller"].verdict is not Verdict.NOT_TAKEN else 0
    batch = 5 if outcomes["batch 5"].verdict is not Verdict.NOT_TAKEN else BATCH
    sizes = products({*([] if batch == BATCH else [BATCH]), *(case.sizes[0] if size else ())})
    suspects = {value for value in numbers(package.path) if value in sizes}
    if not suspects:
        return 0
    try:
        again = numbers(_split(case.model(), case.arguments(batch, size), folder / "again")[0].path)
    except PipegraphError:  # nothing to compare with: each of them may be a size
        again = Counter()
    return sum(times for value, times in (numbers(package.path) - again).items() if value in suspects)


def _compared(reference: Tensors, actual: Tensors, exact: Callable[[], Tensors]) -> CheckResult:
    """Compare. If the difference is not small, the model's own rounding error is the tolerance."""
    apart = difference(reference, actual)
    if apart <= CLOSE:
        return CheckResult(Verdict.COMPARED, apart, CLOSE)
    try:
        lost = rounding(reference, exact())
    except Exception:  # the model does not run in float64
        lost = 0.0
    # A model that draws other random numbers in float64 says nothing.
    return CheckResult(Verdict.COMPARED, apart, max(CLOSE, lost if lost < 0.1 else 0.0))


def _warned(outcome: CheckResult) -> CheckResult:
    if outcome.is_silent_error or outcome.verdict is Verdict.DIFFERENT:
        return CheckResult(Verdict.WARNED, outcome.difference, outcome.tolerance)
    return outcome


def _refusal(error: Exception) -> CheckResult:
    # A fault of a run carries an error of torch to the rank that waits for it.
    is_clear = isinstance(error, PipegraphError) and not isinstance(error, RuntimeFault)
    return CheckResult(Verdict.REFUSED if is_clear else Verdict.FAILED, inf, message=_error_text(error))


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
