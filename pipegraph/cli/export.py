"""``pipegraph export CHECKPOINT OUT -o DIR``: a checkpoint as safetensors that ``from_pretrained`` reads."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipegraph.cli.options import DebugOption, JsonOption, PackageArgument, parse_memory
from pipegraph.cli.output import print_json
from pipegraph.cli.progress_bar import progress
from pipegraph.units import format_bytes, format_number_of

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="The folder that run --checkpoint or pipe.save wrote, or one of the step-… folders in it.",
        show_default=False,
    ),
]
ExportOption = Annotated[
    Path, typer.Option("--out", "-o", metavar="DIR", show_default=False, help="A new folder to write.")
]
ShardSizeOption = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=parse_memory,
        show_default=False,
        help="The largest size of a file, and about the memory that a rank needs. [default: 5GB]",
    ),
]
ReplaceOption = Annotated[
    bool, typer.Option("--overwrite", show_default=False, help="Replace what an earlier export wrote there.")
]


def export(
    checkpoint: RunArgument,
    out: PackageArgument,
    folder: ExportOption,
    shard_size: ShardSizeOption = None,
    overwrite: ReplaceOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a checkpoint as safetensors files.

    The files have an index, and the names of the model's state_dict. For a Hugging Face model the names are those of a
    checkpoint, with config.json, and from_pretrained reads DIR. Under torchrun each rank writes its own files.

    \b
    Example:
      pipegraph export runs/text build/text -o build/text-weights
      torchrun --nproc-per-node 2 -m pipegraph export runs/text build/text -o build/text-weights
    """
    from pipegraph.package import Package
    from pipegraph.runtime.processes.launched_rank import record_failure

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        package = Package.open(out)
        with progress(f"reading {checkpoint}", quiet=not is_first):
            from pipegraph.workflows.export import SHARD_BYTES
            from pipegraph.workflows.export import export as write

            written = write(checkpoint, package, folder, shard_size or SHARD_BYTES, overwrite=overwrite)
    except Exception as error:
        record_failure(error)
        raise
    if not is_first:
        return
    if json:
        print_json({**asdict(written), "checkpoint": str(written.checkpoint), "folder": str(folder)})
        return
    files = format_number_of("file", len(written.files))
    print(f"wrote {folder}: {written.checkpoint.name}, {format_bytes(written.bytes)} in {files}")
    if written.is_huggingface and not written.has_config:
        print("The package has no config.json. Try: save it next to the weights, with model.config.save_pretrained")
