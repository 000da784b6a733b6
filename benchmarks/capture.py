"""What a capture takes, next to one plain export of the same model with the same sizes left open.

python -m benchmarks.capture [MODEL …] [--rounds 3] [--json]

Both run in one process, in turns, with one thread and parameters without memory; the figures are medians of CPU
seconds. Llama 3.1 with 405 B parameters and DeepSeek-V3 have all their layers.
"""

from __future__ import annotations

import gc
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.planner_scale import MODELS
from pipegraph.graph.capture import capture_source
from pipegraph.graph.export.isolation import fake_parameters
from pipegraph.graph.sources import load
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.torch_private.pytrees import pytree

FILES = {"U-Net": "examples/unet.py", "Transformer": "examples/transformer.py"}


@dataclass(frozen=True)
class CaptureMeasurement:
    """Median CPU seconds of one export and of one capture, and the operations of the captured graph."""

    model: str
    export_seconds: float
    capture_seconds: float
    operations: int

    @property
    def ratio(self) -> float:
        return self.capture_seconds / self.export_seconds


def source_of(model: str, seq: int) -> ModelSource:
    """The model of a configuration with two rows of a microbatch, or of an example."""
    if model in FILES:
        return load(FILES[model])
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(MODELS[model]))
        return load(f"hf:{config}", weights=False, batch=2, seq=seq)


def export(source: ModelSource) -> None:
    """Export a model with every size of its inputs left open, on fake tensors in the place of its parameters."""
    with fake_parameters(source.model, source.args, source.kwargs) as (args, kwargs):
        shapes = torch.export.ShapesCollection()
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                shapes[leaf] = tuple(torch.export.Dim.AUTO for _ in leaf.shape)
        dynamic_shapes = shapes.dynamic_shapes(source.model, args, kwargs)
        torch.export.export(source.model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)


def seconds_of(function: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()  # what the other one left behind
    begin = time.process_time()
    result = function()
    return time.process_time() - begin, result


def measure(model: str, rounds: int, seq: int) -> CaptureMeasurement:
    """Export and capture a model in turns."""
    source = source_of(model, seq)
    export_seconds, capture_seconds, operations = [], [], 0
    for _ in range(rounds):
        export_seconds.append(seconds_of(lambda: export(source))[0])
        seconds, captured = seconds_of(lambda: capture_source(source))
        capture_seconds.append(seconds)
        operations = len(captured.nodes)
    return CaptureMeasurement(model, statistics.median(export_seconds), statistics.median(capture_seconds), operations)


def main(
    models: Annotated[list[str] | None, typer.Argument(help="By default, all.", metavar="[MODEL …]")] = None,
    rounds: int = 3,
    seq: Annotated[int, typer.Option(help="Tokens of a row of the large models.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure the models, one after the other."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    measurements = [measure(model, rounds, seq) for model in models or (*MODELS, *FILES)]
    if as_json:
        print(json.dumps([asdict(measurement) for measurement in measurements], indent=1))
        return
    table = Table("model", "operations", "export, CPU s", "capture, CPU s", "capture ÷ export")
    for measurement in measurements:
        figures = (
            f"{measurement.export_seconds:.2f}",
            f"{measurement.capture_seconds:.2f}",
            f"{measurement.ratio:.2f}",
        )
        table.add_row(measurement.model, str(measurement.operations), *figures)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
