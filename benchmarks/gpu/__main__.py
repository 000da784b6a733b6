"""The command: `python -m benchmarks.gpu -o gpu.md`, on a machine with a GPU that nothing else uses.

It prints tables in Markdown, under the device's name: F, I and W of a stage in bfloat16, compared with torch.compile's
forward and backward; what F keeps, predicted and counted; a step with all stages on the device, with and without copies
to CPU memory; the roofline's error for each distinct block; and F, I and W as CUDA graphs, for each `--length`. With
`--device cpu` it shows that it works.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.gpu import blocks, kernels, steps, tables
from benchmarks.gpu.setting import Setting


def report(settings: list[Setting], seconds: float) -> list[str]:
    """Measure, and return the tables. The last setting has the longest microbatch; it is the one of all tables."""
    last = settings[-1]
    parts = [f"## {last.title}"]
    parts.append(tables.kernels(kernels.compare(last)))
    parts.append(tables.memory(kernels.saved_memory(last)))
    parts.append(tables.steps(steps.measure_steps(last)))
    parts.extend(tables.blocks(name, errors) for name, errors in blocks.block_errors(last, seconds).items())
    parts.append(tables.graphs({setting.length: kernels.with_graphs(setting) for setting in settings}))
    return parts


def main(
    device: Annotated[str, typer.Option(metavar="cuda|cpu")] = "cuda",
    layers: Annotated[int, typer.Option(min=1, help="Of the stage that is measured.")] = 4,
    width: Annotated[int, typer.Option(min=64)] = 2048,
    rows: Annotated[int, typer.Option(min=1, help="Of a microbatch.")] = 2,
    length: Annotated[list[int] | None, typer.Option(help="Tokens of a row; may be given several times.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 30,
    seconds: Annotated[float, typer.Option(help="For the rounds of all blocks.")] = 30.0,
    profile: Annotated[
        list[str] | None, typer.Option(help="A hardware profile that predicts; may be given several times.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the tables here, too.")] = None,
) -> None:
    """Measure kernels, memory, steps, the roofline and CUDA graphs on one device."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("no GPU is here.\nTry: --device cpu --layers 1 --width 64, which shows that this works.")
    if device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="pipegraph-gpu-") as name:
        settings = [
            Setting(
                torch.device(device), layers, width, rows, tokens, rounds, tuple(profile or ()), Path(name, str(tokens))
            )
            for tokens in sorted(length or [128, 512, 2048])
        ]
        text = "\n\n".join(report(settings, seconds)) + "\n"
    typer.echo(text)
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    typer.run(main)
