"""Arguments and options that several commands share, and those of ``split``, which has many.

The values of options, such as devices, sizes of memory and lists, are read and checked here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipegraph.errors import nearest
from pipegraph.units import parse_bytes

if TYPE_CHECKING:
    from pipegraph.graph.sources.model_source import ModelSource

_DEVICES = "cpu", "cuda"
_ALSO = {"gpu": "cuda", "nvidia": "cuda"}


def check_device(device: str, count: int = 1, users: str = "ranks") -> None:
    """Raise typer.BadParameter if the device is unknown, or if there are fewer GPUs than users."""
    if device not in _DEVICES:
        near = nearest(_ALSO.get(device.casefold(), device), _DEVICES)
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda.{near}\nTry: cpu", param_hint="--device")
    if device == "cpu":
        return
    import torch

    present = torch.cuda.device_count()
    if present < count:
        need = f"{count} {users} need a GPU each, and there are {present} here" if count > 1 else "there is no GPU here"
        raise typer.BadParameter(f"{need}.\nTry: --device cpu", param_hint="--device")


def check_measured(device: str, balance: str | None) -> None:
    """Raise typer.BadParameter if layers cannot be measured on the device, or if the balance measures none."""
    check_device(device)
    if device != "cpu" and balance not in ("measured", "auto"):
        raise typer.BadParameter(
            "it belongs to --balance measured and auto, without which nothing runs.\n"
            "Try: --balance auto, or --hardware with the profile of a device.",
            param_hint="--device",
        )


def parse_memory(text: str) -> int:
    """Read a size as `pipegraph.units.parse_bytes` does. Raises typer.BadParameter."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_folder(text: str) -> Path:
    """Read the name of a folder. Raises typer.BadParameter for an empty one, which would be the working folder."""
    if not str(text):
        raise typer.BadParameter("the name of a folder is empty.\nTry: . for the folder you are in.")
    return Path(text)


def parse_names(text: str, option: str) -> list[str]:
    """Read ``1f1b,zb-v``, the value of an option. Raises typer.BadParameter for an empty name."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise typer.BadParameter(
            f"{text!r} has an empty name between its commas.\nTry: one comma between two names", param_hint=option
        )
    return names


def parse_numbers(text: str, option: str) -> list[int]:
    """Read ``8,16``, the value of an option. Raises typer.BadParameter for anything but whole numbers from 1 on."""
    names = parse_names(text, option)
    if not all(name.isdecimal() and int(name) > 0 for name in names):
        raise typer.BadParameter(
            f"{text!r} is not a list of whole numbers from 1 on.\nTry: 8, or 8,16", param_hint=option
        )
    return [int(name) for name in names]


def with_batch_dims(source: ModelSource, texts: Sequence[str] | None) -> ModelSource:
    """Return the source with the roles of ``--batch-dim`` added to those of the model file."""
    roles = dict(map(_parse_role, texts or ()))
    return replace(source, batch_dims={**(source.batch_dims or {}), **roles}) if roles else source


def _parse_role(text: str) -> tuple[str, int | str]:
    """Read ``mask=0``, ``table=whole`` or ``cu_seqlens=list``. Raises typer.BadParameter for another form."""
    name, equals, role = text.partition("=")
    is_dim = role.removeprefix("-").isdecimal()
    if not (name and equals and (is_dim or role in ("whole", "list"))):
        raise typer.BadParameter(
            f"{text!r} is not the name of an input and its role.\nTry: tokens=0, table=whole or cu_seqlens=list",
            param_hint="--batch-dim",
        )
    return name, int(role) if is_dim else role


def complete_schedule(incomplete: str) -> list[str]:
    """Return the schedules whose names begin with ``incomplete``, for the shell."""
    from pipegraph.schedule import names

    return [name for name in names() if name.startswith(incomplete)]


ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="file.py, file.py:NAME, or hf:DIR_OR_CONFIG.json.", show_default=False)
]
PackageArgument = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", parser=parse_folder, help="The folder that `pipegraph split` wrote.", show_default=False
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        metavar="B", min=1, help="Rows of a microbatch. [default: the example's, 1 for hf:]", show_default=False
    ),
]
AttentionMaskOption = Annotated[
    bool, typer.Option("--attention-mask", help="For hf: the stages take a mask, and so padded batches.")
]
BatchDimOption = Annotated[
    list[str] | None,
    typer.Option(
        "--batch-dim",
        metavar="NAME=DIM|whole|list",
        show_default=False,
        help="Role of an input: the dimension of its rows, or whole or list. Once for each; others are inferred.",
    ),
]
SequenceOption = Annotated[
    int | None,
    typer.Option(
        "--seq", metavar="T", min=1, help="Tokens per row. [default: the example's, 128 for hf:]", show_default=False
    ),
]
ScheduleOption = Annotated[
    str, typer.Option(metavar="NAME", autocompletion=complete_schedule, help="Order of the work: 1f1b, gpipe, …")
]
PlannedScheduleOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=complete_schedule,
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
DeviceOption = Annotated[str, typer.Option(metavar="cpu|cuda", help="What --balance measured and auto run on.")]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="DIR",
        show_default=False,
        help="Folder of a Hugging Face checkpoint to read the weights from: each rank its own. [default: OUT's]",
    ),
]
PointsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FQN,…",
        show_default=False,
        help="Modules that start a stage, in the model's order; layers.3:end starts one after layers.3, layer@2 one "
        "at its second call. Or Megatron's layout of the stages: 'Et*3|(tt|)*4,L'.",
    ),
]
StagesOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, show_default=False, help="Cut into N stages at the best places.")
]
PlanFileOption = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", show_default=False, help="Cut where `pipegraph plan -o FILE` says."),
]
BalanceOption = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        show_default=False,
        help="With --stages, what to balance: time, measured (here), auto (layers measured here within seconds, the "
        "rest as time), flops, parameters, memory, uniform (equally many segments), type:REGEX (layers of a class). "
        "[default: time]",
    ),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        show_default=False,
        help="Ranks, for schedules with any number of stages on a rank. [default: as the schedule has it]",
    ),
]
RecomputeOption = Annotated[
    str,
    typer.Option(
        metavar="R",
        help="none, min-cut, block, offload; auto: chosen with the cuts; or for modules: 'layers.*=block,*.mlp=none'.",
    ),
]
PackageOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="OUT", show_default=False, help="Folder to write. [default: build/NAME]"),
]
WrittenCheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="DIR",
        show_default=False,
        help="Write the weights of this Hugging Face checkpoint, one stage at a time. [default: the model's own]",
    ),
]
CheckWeightsOption = Annotated[
    bool,
    typer.Option(
        "--check-weights/--no-check-weights",
        help="Compare the files of weights with their digests; without it, changed ones are taken as they are.",
    ),
]
NoWeightsOption = Annotated[
    bool, typer.Option("--no-weights", help="Write no weights: `pipegraph run --weights DIR` reads a checkpoint's.")
]
AllowDerivativeOption = Annotated[
    bool,
    typer.Option(
        "--allow-derivative",
        help="Differentiate the forward of an autograd.Function whose own backward is another one.",
    ),
]
RelayOption = Annotated[
    bool,
    typer.Option(
        "--relay-skips",
        help="Hand a value for a later stage on through the stages in between, as torch's PipelineStage needs it.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the stages and write nothing.")]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Write nothing; print a diff, and exit with 1 if OUT would change.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace a package that pipegraph wrote.")]
WideOption = Annotated[
    bool, typer.Option("--wide", help="Show all columns, and no line broken, however wide the terminal is.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
# `main` reads it, because it also handles errors of parsing.
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
