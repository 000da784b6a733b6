"""``pipegraph export CHECKPOINT OUT -o DIR``: a checkpoint as safetensors that ``from_pretrained`` reads."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pipegraph.cli.options import Command
from pipegraph.cli.output import print_json
from pipegraph.cli.progress_bar import progress
from pipegraph.units import format_bytes, format_number_of


@dataclass(frozen=True, kw_only=True)
class ExportCommand(Command):
    """Write a checkpoint as safetensors files.

    The files have an index, and the names of the model's state_dict. For a Hugging Face model the names are those of a
    checkpoint, with config.json, and from_pretrained reads DIR. Under torchrun each rank writes its own files.

    \b
    Example:
      pipegraph export runs/text build/text -o build/text-weights
      torchrun --nproc-per-node 2 -m pipegraph export runs/text build/text -o build/text-weights
    """

    checkpoint: Path
    out: Path
    folder: Path
    shard_size: int | None = None
    overwrite: bool = False

    def run(self) -> None:
        from pipegraph.package import Package
        from pipegraph.runtime.processes.launched_rank import record_failure

        is_first = os.environ.get("RANK", "0") == "0"
        try:
            package = Package.open(self.out)
            with progress(f"reading {self.checkpoint}", quiet=not is_first):
                from pipegraph.workflows.export import SHARD_BYTES, export

                shard_bytes = self.shard_size or SHARD_BYTES
                result = export(self.checkpoint, package, self.folder, shard_bytes, overwrite=self.overwrite)
        except Exception as error:
            record_failure(error)
            raise
        if not is_first:
            return
        if self.json:
            print_json({**asdict(result), "checkpoint": str(result.checkpoint), "folder": str(self.folder)})
            return
        files = format_number_of("file", len(result.files))
        print(f"wrote {self.folder}: {result.checkpoint.name}, {format_bytes(result.bytes)} in {files}")
        if result.is_huggingface and not result.has_config:
            print("The package has no config.json. Try: save it next to the weights, with model.config.save_pretrained")
