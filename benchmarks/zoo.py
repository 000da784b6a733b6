"""Lines of source and parity of the zoo's models, each split in three and trained for one step in one process.

python -m benchmarks.zoo [--only llama] [--markdown] [--keep DIR]

Tiny configurations of Hugging Face architectures and hand-written models (`tests/zoo`). Lines are those of the whole
package; parity is the largest relative difference, over outputs, loss, every gradient and every buffer, between one
training step of the package and of the model under plain autograd. `--markdown` prints the table of docs/models.md.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.zoo.visit import NAMES, Visit, visit

HEADERS = ("model", "lines of source", "stages", "parity")


def main(
    only: Annotated[str, typer.Option(help="Models whose name contains this.")] = "",
    markdown: Annotated[bool, typer.Option(help="Print Markdown.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep the packages under this folder.")] = None,
) -> None:
    """Split, train and compare every model of the zoo."""
    warnings.simplefilter("ignore")  # Bloom's GELU has a backward of its own, equal to its forward's derivative
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        rows = (_row(visit(name, _model_folder(folder, name))) for name in NAMES if only.lower() in name.lower())
        if markdown:
            for row in (HEADERS, ("---", "---:", "---:", "---:"), *rows):
                print(f"| {' | '.join(row)} |")
            return
        table = Table(*HEADERS)
        for row in rows:
            table.add_row(*row)
    Console().print(table)


def _model_folder(folder: Path, name: str) -> Path:
    model_folder = folder / name.replace(" ", "_")
    model_folder.mkdir(parents=True)
    return model_folder


def _row(visited: Visit) -> tuple[str, ...]:
    stages = len(visited.package.manifest.stages)
    parity = f"{visited.difference:.1e}" if visited.difference else "exact"
    return visited.name, str(visited.lines), str(stages), parity if visited.verification.equal else f"**{parity}**"


if __name__ == "__main__":
    typer.run(main)
