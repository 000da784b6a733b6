"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipegraph.cli.parsing import parse_memory

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="file.py, file.py:NAME, or hf:DIR_OR_CONFIG.json.", show_default=False)
]
PackageArgument = Annotated[
    Path, typer.Argument(metavar="OUT", help="The folder that `pipegraph split` wrote.", show_default=False)
]
BatchOption = Annotated[
    int | None, typer.Option(metavar="B", min=1, help="Rows of a microbatch, for hf: models.", show_default=False)
]
SequenceOption = Annotated[
    int | None, typer.Option("--seq", metavar="T", min=1, help="Tokens per row, for hf: models.", show_default=False)
]
ScheduleOption = Annotated[str, typer.Option(metavar="NAME", help="Order of the work: 1f1b, gpipe, …")]
PlannedScheduleOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default=False,
        help="Order of the work: 1f1b, gpipe, …, or a CSV file. [default: the package's plan, else 1f1b]",
    ),
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(
        metavar="M",
        min=1,
        show_default=False,
        help="Microbatches of a step. [default: the package's plan, else as many as stages]",
    ),
]
MemoryOption = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE", parser=parse_memory, show_default=False, help="What a rank has: 80GiB, 16GB, 500MB, bytes."
    ),
]
HardwareOption = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="Profile that prices the model: h100, …, or what calibrate wrote.")
]
DeviceOption = Annotated[str, typer.Option(metavar="cpu|cuda", help="What --balance measured runs on.")]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="DIR",
        show_default=False,
        help="Folder of a Hugging Face checkpoint to read the weights from: each rank its own. [default: OUT's]",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
# Read by `main`, which also meets the errors of parsing.
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
