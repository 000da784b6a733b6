"""One model of the zoo: captured, split, written, trained for one step, and compared with plain autograd."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.cost.model_output import output_tensors
from pipegraph.graph.sources import load
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import Package
from pipegraph.workflows.verify import Verification, verify
from tests.equal_work import equal_work_shared
from tests.zoo.architectures import CONFIGURATIONS
from tests.zoo.handwritten import HANDWRITTEN

NAMES = (*CONFIGURATIONS, *HANDWRITTEN)
STAGES = 3
BATCH, TOKENS = 2, 12


@dataclass(frozen=True)
class Visit:
    """A model's package, and one training step of it, compared with a step of the model."""

    name: str
    model: nn.Module
    package: Package
    verification: Verification


def visit(name: str, folder: Path) -> Visit:
    """Split ``name`` into STAGES stages under ``folder``, train it for one step in this process, and compare."""
    source, package = split_in_stages(name, folder)
    return Visit(name, source.model, package, verify(package, source))


def split_in_stages(name: str, folder: Path) -> tuple[ModelSource, Package]:
    """A model, and its package in STAGES stages under ``folder``."""
    source = _source(name, folder)
    with equal_work_shared():
        captured = pipegraph.capture(source.model, source.args, source.kwargs)
    plan = pipegraph.plan(captured, stages=STAGES, balance="uniform")
    return source, pipegraph.write_package(plan, folder / "package", source=source)


def loss_fn(output: Any, target: Any = None) -> Tensor:
    """A weighted mean of every output: after a normalisation, the gradient of a plain mean is all rounding."""
    outputs = [tensor.float().flatten() for tensor in output_tensors(output).values() if tensor.is_floating_point()]
    return torch.stack([(values * torch.linspace(-1, 1, len(values))).mean() for values in outputs]).sum()


def _source(name: str, folder: Path) -> ModelSource:
    if name in CONFIGURATIONS:
        (folder / "config.json").write_text(json.dumps({"architectures": [name], **CONFIGURATIONS[name]}))
        loaded = load(f"hf:{folder}", batch=BATCH, seq=TOKENS)
        model, args, kwargs = loaded.model, loaded.args, loaded.kwargs
    else:
        torch.manual_seed(0)
        model, args = HANDWRITTEN[name]()
        kwargs = {}
    return ModelSource(name, "", model, args, kwargs, loss_fn)
