"""Train a package and compare it with its reference, in one process with all stages or in one rank of many."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from torch import Tensor

from pipegraph import Pipeline
from tests.parity.cases import CASES, MODELS
from tests.parity.reference import named_tensors, optimizer

TOLERANCE = 1e-5
"""Relative to the largest value of a tensor."""

KERNELS = "eager"

Report = dict[str, Any]
"""`differences` (what → relative difference) and `copies` (tied weight → a digest for each of its names)."""


def train(package: Path, case_name: str, schedule: str, reference: dict[str, Any], kernels: str = KERNELS) -> Report:
    """Train as the reference was trained, on the same batches, and compare all that this process holds."""
    case = CASES[case_name]
    loss_fn = MODELS[case.model].loss
    pipe = Pipeline(package, schedule, microbatches=case.microbatches, loss_fn=loss_fn, kernels=kernels)
    for stage in pipe.stages.values():
        stage.train(case.training)
    descent = optimizer(pipe.parameters())
    differences: dict[str, float] = {}
    for number, step in enumerate(reference["steps"]):
        descent.zero_grad()
        batches = zip(step["batches"], step["losses"], step["outputs"], strict=True)
        for part, ((args, kwargs, target), loss, outputs) in enumerate(batches):
            result = pipe.step(*args, target=target, return_outputs=True, **kwargs)
            if result.loss is None:
                assert len(pipe.stages) == 1 and result.outputs is None
                continue
            differences[f"loss {number}.{part}"] = _difference(result.loss, loss)
            for name, output in named_tensors(result.outputs).items():
                differences[f"{name} {number}.{part}"] = _difference(output, outputs[name])
        for name, difference in _gradients(pipe, step["gradients"]).items():
            differences[f"gradient {name} {number}"] = difference
        descent.step()
    state, expected = pipe.state_dict(), reference["state"]
    floor = _floor(expected)
    differences |= {f"state {name}": _difference(tensor, expected[name], floor) for name, tensor in state.items()}
    return {"differences": differences, "copies": _copies(pipe, state)}


def expected_names(reference: dict[str, Any]) -> set[str]:
    """Everything that has to be compared, over all processes."""
    names = {f"state {name}" for name in reference["state"]}
    for number, step in enumerate(reference["steps"]):
        names |= {f"gradient {name} {number}" for name in step["gradients"]}
        for part, outputs in enumerate(step["outputs"]):
            names |= {f"loss {number}.{part}", *(f"{name} {number}.{part}" for name in outputs)}
    return names


def _gradients(pipe: Pipeline, expected: dict[str, Tensor | None]) -> dict[str, float]:
    """Differences by name; of several copies in this process the largest one."""
    floor = _floor(expected)
    differences: dict[str, float] = {}
    for stage in pipe.stages.values():
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            difference = _difference(parameter.grad, expected[name], floor)
            differences[name] = max(differences.get(name, 0.0), difference)
    return differences


def _copies(pipe: Pipeline, state: dict[str, Tensor]) -> dict[str, list[str]]:
    manifest = pipe.package.manifest
    tied = {name for group in manifest.tied for name in group}
    copies: dict[str, list[str]] = {}
    for name in sorted(tied & state.keys()):
        digest = hashlib.sha256(state[name].contiguous().numpy().tobytes()).hexdigest()
        copies.setdefault(manifest.stored_name(name), []).append(digest)
    return copies


def _difference(actual: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else float("inf")
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    largest = max(_largest(expected), floor)
    difference = _largest(actual.detach() - expected)
    return difference / largest if difference != 0 else 0.0


def _floor(tensors: dict[str, Tensor | None]) -> float:
    """A thousandth of the largest value: what is zero but for rounding (an attention's key bias) is compared to it."""
    return max(_largest(tensor) for tensor in tensors.values() if tensor is not None) / 1000


def _largest(tensor: Tensor) -> float:
    return max(abs(float(bound)) for bound in tensor.aminmax()) if tensor.numel() else 0.0
