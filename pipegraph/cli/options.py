"""The options of all commands in one table, and what makes commands of dataclasses with their fields."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, get_type_hints

import typer
from typer.core import TyperCommand

from pipegraph.errors import nearest
from pipegraph.units import parse_bytes, parse_rank_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from pipegraph.graph.sources.model_source import ModelSource

# ---- values of options -----------------------------------------------------------------------------------------------


def parse_memory(text: str) -> int:
    """Read a size as `pipegraph.units.parse_bytes` does. Raises typer.BadParameter."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_rank_memory(text: str) -> int | tuple[int, ...]:
    """Read sizes as `pipegraph.units.parse_rank_bytes` does. Raises typer.BadParameter."""
    try:
        return parse_rank_bytes(text)
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


def complete_schedule(incomplete: str) -> list[str]:
    """Return the schedules whose names begin with ``incomplete``, for the shell."""
    from pipegraph.schedule import names

    return [name for name in names() if name.startswith(incomplete)]


# ---- table of options ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """How the command line shows and reads an option. Its type and its default are those of a command's field.

    Attributes:
        metavar: the name of its value; empty for a flag.
        help: its text. A default that another value decides is part of it.
        min, max: the limits of a number.
        parser: reads the value.
        flags: its names, if they are not that of the field. A required field without them is an argument.
        complete: returns values for the shell.
    """

    metavar: str
    help: str
    min: float | None = None
    max: float | None = None
    parser: Callable[[str], Any] | None = None
    flags: tuple[str, ...] = ()
    complete: Callable[[str], list[str]] | None = None


_OUT: Final = ("--out", "-o")
_PLANNED: Final = "[default: the plan's, else 1]"

OPTION_GROUPS: Final[dict[str, dict[str, Option]]] = {
    "Model, batches and weights": {
        "model": Option("MODEL", "file.py, file.py:NAME, or hf:DIR_OR_CONFIG.json."),
        "run.model": Option(
            "MODEL",
            "Take data, loss_fn, metrics, optimizer and scheduler from here; without data example_inputs and "
            "example_target. [default: seeded inputs, the loss that the model returns or else a mean square, AdamW]",
        ),
        "out": Option("OUT", "The folder that `pipegraph split` wrote.", parser=parse_folder),
        "export.checkpoint": Option(
            "CHECKPOINT", "The folder that run --checkpoint or pipe.save wrote, or one of the step-… folders in it."
        ),
        "schedule.name": Option(
            "NAME",
            "1f1b, zb-v, …; a CSV file; or search, which looks for the fastest order.",
            complete=complete_schedule,
        ),
        "folder": Option("DIR", "A run's folder, or the one given to --profile: then its newest run."),
        "other_folder": Option("OTHER", "The run that it is compared with, likewise."),
        "plan_file": Option("FILE", "Cut where `pipegraph plan -o FILE` says.", flags=("--plan",)),
        "batch": Option("B", "Rows of a microbatch. [default: the example's, 1 for hf:]", min=1),
        "seq": Option("T", "Tokens per row. [default: the example's, 128 for hf:]", min=1),
        "batch_dim": Option(
            "NAME=DIM|whole|list",
            "Role of an input: the dimension of its rows, or whole or list. Once for each; others are inferred.",
        ),
        "attention_mask": Option("", "For hf: the stages take a mask, and so padded batches."),
        "weights": Option(
            "DIR",
            "Folder of a Hugging Face or torch.distributed.checkpoint checkpoint: each rank reads its own weights. "
            "[default: OUT's]",
        ),
        "split.weights": Option(
            "DIR", "Write the weights of this checkpoint, one stage at a time. [default: the model's own]"
        ),
        "rename": Option(
            "PATTERN=NEW",
            "Replace a regular expression in the names of --weights, ^module[.]=. Once for each.",
        ),
        "rows": Option("NAME=N", "Take N rows of a tensor of --weights that another tool padded. Once for each."),
        "check_weights": Option(
            "",
            "Compare the files of weights with their digests; without it, changed ones are taken as they are.",
            flags=("--check-weights/--no-check-weights",),
        ),
        "pipeline": Option("N", "Which pipeline of a mesh, from 0 on."),
    },
    "Stages": {
        "points": Option(
            "FQN,…",
            "Modules that start a stage, in the model's order; layers.3:end starts one after layers.3, layer@2 one at "
            "its second call. Or Megatron's layout of the stages: 'Et*3|(tt|)*4,L'.",
        ),
        "stages": Option("N", "Cut into N stages at the best places.", min=1),
        "balance": Option(
            "WHAT",
            "With --stages, what to balance: time, measured (here), auto (layers measured here within seconds, the "
            "rest as time), flops, parameters, memory, uniform (equally many segments), type:REGEX (layers of a "
            "class). [default: time]",
        ),
        "plan.balance": Option("time|measured|auto", "Where times are from."),
        "recompute": Option(
            "R",
            "none, min-cut, block, offload; auto: chosen with the cuts; or for modules: 'layers.*=block,*.mlp=none'.",
        ),
        "plan.recompute": Option(
            "R",
            "What a backward computes again, as for split; several to compare: none,block, or --recompute once more. "
            "[default: none,min-cut,block]",
        ),
        "relay_skips": Option(
            "", "Hand a value for a later stage on through the stages in between, as torch's PipelineStage needs it."
        ),
        "no_weights": Option("", "Write no weights: `pipegraph run --weights DIR` reads a checkpoint's."),
    },
    "Schedule": {
        "schedule": Option(
            "NAME",
            "Order of the work: 1f1b, gpipe, …, or a CSV file. [default: the package's plan, else 1f1b]",
            complete=complete_schedule,
        ),
        "split.schedule": Option("NAME", "Order of the work: 1f1b, gpipe, …", complete=complete_schedule),
        "plan.schedule": Option(
            "NAME,…", "Schedules to compare. [default: all of them]", parser=partial(parse_names, option="--schedule")
        ),
        "microbatches": Option(
            "M", "Microbatches of a step. [default: the package's plan, else as many as stages]", min=1
        ),
        "split.microbatches": Option("M", "Microbatches of a step.", min=1),
        "schedule.microbatches": Option("M", "Microbatches of a step.", min=1),
        "plan.microbatches": Option(
            "M,…",
            "Microbatches of a step. [default: 2 and 4 a rank]",
            parser=partial(parse_numbers, option="--microbatches"),
        ),
        "stages_per_rank": Option(
            "V,…",
            "Stages on a rank. [default: 1 or 2, 4 if these are few]",
            parser=partial(parse_numbers, option="--stages-per-rank"),
        ),
        "chunks": Option("V", "Stages of a rank. [default: the schedule's own]", min=1),
        "times": Option(
            "FILE",
            'JSON with seconds per stage: {"forward": […], "input_grad": […], "weight_grad": […], "hop": 0.0}. '
            "[default: F, I and W take 1 each]",
        ),
        "memory_limit": Option("N", "Saved activations that a rank may hold, each of one stage and microbatch.", min=1),
        "placement": Option("loop|v", "Where search places the stages. [default: loop]"),
        "effort": Option("X", "Scales how long search looks: 1 is some ten seconds. [default: 1]", min=0.0),
        "join": Option(
            "", "One B for I and W if nothing waits for that. search does so by itself.", flags=("--join-backwards",)
        ),
        "sharded": Option("", "All stages are sharded: draw where their parameters are gathered."),
        "resident": Option("N", "How many sharded stages of a rank may be whole at a time. [default: all]", min=1),
    },
    "Ranks": {
        "split.ranks": Option(
            "N", "Ranks, for schedules with any number of stages on a rank. [default: as the schedule has it]", min=1
        ),
        "plan.ranks": Option("N", "Ranks that hold the stages.", min=1),
        "schedule.ranks": Option("P", "Ranks that hold the stages.", min=1),
        "calibrate.ranks": Option(
            "N",
            "Processes whose links are measured; 1 assumes links through the host. [default: 2; 1 with one GPU]",
            min=1,
            max=1024,
        ),
        "devices": Option("N", "In place of --ranks: devices to divide into pp × dp_replicate × dp_shard × tp.", min=1),
        "global_batch": Option("ROWS", "With --devices: rows of a step, of all devices.", min=1),
        "nproc": Option(
            "N", "Processes to start; 1 runs every stage in this one. [default: the ranks of the schedule]", min=1
        ),
        "dp_replicate": Option(
            "N", f"Pipelines that train the model together, each with the whole of it. {_PLANNED}", min=1
        ),
        "dp_shard": Option("N", f"Ranks that share a stage's parameters, for batches of their own. {_PLANNED}", min=1),
        "tp": Option("N", f"Ranks that divide each layer, by the package's own tp_plan. {_PLANNED}", min=1),
        "mesh_order": Option("NAMES", "The dimensions of the mesh; ranks along the last are neighbours."),
    },
    "Devices": {
        "memory": Option(
            "SIZE",
            "What a rank has: 80GiB, 16GB, 500MB, bytes; 80GiB*4,40GiB*4 if ranks differ.",
            parser=parse_rank_memory,
        ),
        "hardware": Option(
            "NAME|FILE",
            "Profile that prices the model: h100, …, or what calibrate wrote; h100*4,a100*4 if ranks are unequal.",
        ),
        "run.hardware": Option(
            "NAME|FILE",
            "Profile whose links a step is predicted with; stages keep the package's times. [default: the one that "
            "priced the package]",
        ),
        "device": Option("cpu|cuda", "What --balance measured and auto run on."),
        "run.device": Option("cpu|cuda", "Where to run; with cuda, a GPU per rank."),
        "calibrate.device": Option("cpu|cuda", "What to measure; with cuda, a GPU per rank."),
        "threads": Option(
            "N",
            "Threads of a rank. [default: as `pipegraph run` starts them: OMP_NUM_THREADS, or cores ÷ ranks]",
            min=1,
            max=1024,
        ),
    },
    "Training": {
        "steps": Option(
            "K",
            "Steps to run, those before a checkpoint included; times are measured from the second one on. "
            "[default: until MODEL's data ends; without data 1, with --profile 4]",
            min=1,
        ),
        "profile": Option(
            "DIR",
            "Record every step but the first, which warms up, in a new folder in DIR: a trace for each rank. With "
            "MODEL's data, three steps, and the scalars of all.",
        ),
        "checkpoint": Option(
            "DIR",
            "Save the run in DIR on its way, at its end and at SIGTERM; continue from the newest checkpoint there.",
        ),
        "checkpoint_every": Option(
            "K",
            "Steps from one checkpoint to the next. [default: 100]",
            min=1,
            flags=("--checkpoint-every", "--save-every"),
        ),
        "keep": Option("N", "How many checkpoints stay. [default: 3]", min=1),
        "learning_rate": Option(
            "LR",
            "AdamW's learning rate; 0 leaves the weights as they are. Not with MODEL's optimizer. [default: 0.001]",
            min=0.0,
        ),
        "kernels": Option("NAME", "inductor (compiled), eager (divided, uncompiled) or autograd."),
        "precision": Option(
            "NAME",
            "bf16 or fp16 (float32 parameters, computed with in 16 bits), bf16-true, fp16-true or fp32. "
            "[default: the package's dtypes]",
        ),
        "seed": Option(
            "N",
            "Draw dropout and other random numbers from this seed, alike for every split and number of processes. "
            "[default: torch's generators]",
        ),
        "strict": Option("", "Fail if a stage cannot be compiled, in place of leaving it to autograd."),
        "dynamic": Option(
            "WHEN",
            "Compile kernels for all sizes from the second shape on (auto), from the first step (true), or not "
            "(false).",
        ),
        "cuda_graphs": Option(
            "", "Launch the kernels of each action at once, for more memory: faster where a GPU waits for the host."
        ),
        "timeout": Option(
            "SECONDS",
            "How long a rank waits for another one before the run fails; longer than a step. [default: 1800]",
            min=0.1,
        ),
        **dict.fromkeys(
            ("plan.precision", "split.precision"),
            Option(
                "fp32|bf16|…",
                "The dtypes that the model is trained in: those of run, bf16-master (an optimizer with float32 copies "
                "of bfloat16 parameters) or fp8. [default: the model's own]",
            ),
        ),
        "optimizer": Option("NAME", "The optimizer whose state counts: adamw, sgd, sgd-momentum, muon or adafactor."),
        "optimizer_bytes": Option("BYTES", "Of another optimizer: bytes of its state for each parameter.", min=0),
        "zero1": Option("", "Let the ranks along dp_replicate divide the optimizer's state (ZeRO-1)."),
        "recalibrate": Option(
            "FILE",
            "Write here the profile that priced the package, corrected by what was measured: a new file, or that "
            "profile's own.",
        ),
    },
    "Output": {
        "split.out": Option("OUT", "Folder to write. [default: build/NAME]", flags=_OUT),
        "plan.out": Option("FILE", "Write the best plan, for split --plan.", flags=_OUT),
        "calibrate.out": Option("FILE", "Write the profile here, as JSON.", flags=_OUT),
        "merge.out": Option("FILE", "The merged trace: trace.json.gz.", flags=_OUT),
        "export.folder": Option("DIR", "A new folder to write.", flags=_OUT),
        "shard_size": Option(
            "SIZE",
            "The largest size of a file, and about the memory that a rank needs. [default: 5GB]",
            parser=parse_memory,
        ),
        "operations": Option("", "Keep the operations and kernels below the actions."),
        "html": Option("FILE", "Write a page, for any browser."),
        "report.html": Option("FILE", "Write a page with the timeline, for any browser."),
        "svg": Option("FILE", "Write a picture of it."),
        "schedule.svg": Option("FILE", "Write a picture of it over time."),
        "csv": Option("FILE", "Write its actions, as torch reads them."),
        "dry_run": Option("", "Show the stages and write nothing."),
        "check": Option("", "Write nothing; print a diff, and exit with 1 if OUT would change."),
        "overwrite": Option("", "Replace the file if it exists."),
        "split.overwrite": Option("", "Replace a package that pipegraph wrote."),
        "plan.overwrite": Option("", "Replace FILE even if it is not a plan."),
        "export.overwrite": Option("", "Replace what an earlier export wrote there."),
        "report.overwrite": Option("", "Replace the page if it exists."),
        "verbose": Option("", "Print the layout of the stages as well, as --points reads it."),
        "wide": Option("", "Show all columns, and no line broken, however wide the terminal is."),
        "json": Option("", "Print the result as JSON."),
        # `main` reads it, because it also handles errors of parsing.
        "debug": Option("", "Show the traceback of an error."),
    },
}
"""Title in the help → name of a field → the option. ``command.name`` is that of one command, which others show in
another way."""

OPTIONS: Final = {name: option for options in OPTION_GROUPS.values() for name, option in options.items()}

# ---- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """A command: a field for each option, with its type and default, and its help as docstring.

    Attributes:
        explicit: the names of the options that the user wrote.
        usual: the fields of the options that are used the most, which come first in the help of a command with many.
    """

    usual: ClassVar[tuple[str, ...]] = ()
    json: bool = False
    debug: bool = False
    explicit: frozenset[str] = frozenset()

    @abstractmethod
    def run(self) -> None:
        """Do the work and print the result. Raises typer.Exit with another exit code than 0."""


def add_command(app: typer.Typer, name: str, command: type[Command]) -> None:
    """Add a command to those of the command line. `OPTIONS` has to have all its fields."""

    def call(context: typer.Context, **options: Any) -> None:
        sources = {option: context.get_parameter_source(option) for option in options}
        explicit = frozenset(option for option, source in sources.items() if source and source.name != "DEFAULT")
        command(**options, explicit=explicit).run()

    types, common = get_type_hints(command), [field.name for field in fields(Command)]
    option_fields = [field for field in fields(command) if field.name != "explicit"]
    option_fields.sort(key=lambda field: field.name in common)  # these come last in the help
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [context, *(_parameter(name, field, types[field.name]) for field in option_fields)]
    )
    call.__annotations__ = {}
    app.command(name, help=command.__doc__, cls=_grouping(name, command))(call)


_MANY: Final = 12
"""A command with more options shows them in groups."""


def _grouping(name: str, command: type[Command]) -> type[TyperCommand]:
    """Return typer's class of a command, with a help whose options stand in groups."""

    class GroupedCommand(TyperCommand):
        def format_options(self, ctx: Any, formatter: Any) -> None:
            params = [(param, record) for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
            number = sum(param.param_type_name == "option" for param, _ in params)
            params.sort(key=lambda pair: command.usual.index(pair[0].name) if pair[0].name in command.usual else number)
            groups: dict[str, list[tuple[str, str]]] = {
                title: [] for title in ("Arguments", "Options", "Usual options", *OPTION_GROUPS)
            }
            for param, record in params:
                groups[_title(name, command, param, number)].append(record)
            for title, records in groups.items():
                if records:
                    with formatter.section(title):
                        formatter.write_dl(records)

    return GroupedCommand


def _title(name: str, command: type[Command], param: Any, number: int) -> str:
    """Return the title under which the help shows a parameter.

    Args:
        name: of the command.
        number: how many options it has.
    """
    if param.param_type_name == "argument":
        return "Arguments"
    if number <= _MANY:
        return "Options"
    if param.name in command.usual:
        return "Usual options"
    titles = (
        title for title, options in OPTION_GROUPS.items() if {f"{name}.{param.name}", param.name} & options.keys()
    )
    return next(titles, "Output")


def _parameter(command: str, field: Field[Any], kind: Any) -> inspect.Parameter:
    """Return the parameter that typer makes an option of."""
    option = OPTIONS.get(f"{command}.{field.name}") or OPTIONS[field.name]
    form: dict[str, Any] = {
        "metavar": option.metavar or None,
        "help": option.help,
        "min": option.min,
        "max": option.max,
        "parser": option.parser,
        "autocompletion": option.complete,
    }
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    if field.default is MISSING and not option.flags:
        info: Any = typer.Argument(**form, show_default=False)
    else:
        info = typer.Option(*(option.flags or (f"--{field.name.replace('_', '-')}",)), **form)
        if option.parser is not None:
            kind = str | None  # typer would read one value for each entry of a list
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


# ---- checks of several commands --------------------------------------------------------------------------------------

_DEVICES: Final = "cpu", "cuda"
_ALSO: Final = {"gpu": "cuda", "nvidia": "cuda"}


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


def opened_weights(
    folder: Path | None, rename: Sequence[str] | None, rows: Sequence[str] | None
) -> Path | Mapping[str, Tensor] | None:
    """Return the checkpoint of ``--weights``, its names as ``--rename`` and ``--rows`` say; None without one.

    Raises:
        typer.BadParameter: an option has another form, or there is no ``--weights``.
        PipegraphError: the folder has no checkpoint.
    """
    from pipegraph.runtime.checkpoint.weights import Weights, open_weights

    if folder is None:
        if rename or rows:
            raise typer.BadParameter("it is about --weights.\nTry: --weights DIR", param_hint="--rename / --rows")
        return None
    if not (rename or rows):
        return open_weights(folder)
    # A pattern may hold a "=", and a name none.
    patterns = dict(_parse_pair(text, "--rename", "^module[.]=", last=True) for text in rename or ())
    counts = dict(_parse_pair(text, "--rows", "lm_head.weight=32000") for text in rows or ())
    if wrong := next((count for count in counts.values() if not count.isdecimal() or int(count) < 1), None):
        raise typer.BadParameter(f"{wrong!r} is not a number of rows.\nTry: lm_head.weight=32000", param_hint="--rows")
    return Weights(folder, rename=patterns, rows={name: int(count) for name, count in counts.items()})


def _parse_pair(text: str, option: str, example: str, last: bool = False) -> tuple[str, str]:
    """Read ``NAME=VALUE``, cut at its first or last ``=``. Raises typer.BadParameter for another form."""
    name, equals, value = text.rpartition("=") if last else text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} has no name before a =.\nTry: {example}", param_hint=option)
    return name, value


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
