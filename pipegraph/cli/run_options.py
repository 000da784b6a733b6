"""The options of ``run`` alone, and what is wrong with some of them together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

STEPS = 1
PROFILED_STEPS = 4
"""Steps without --steps and without data: of a plain run, and of one with --profile."""
_LARGEST_RATE = 3.4e38  # of a float32, in which an optimizer computes

ProcessesOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        show_default=False,
        help="Processes to start; 1 runs every stage in this one. [default: the ranks of the schedule]",
    ),
]
_PLANNED = "[default: the plan's, else 1]"
ReplicateOption = Annotated[
    int | None,
    typer.Option(
        "--dp-replicate",
        metavar="N",
        min=1,
        show_default=False,
        help=f"Pipelines that train the model together, each with the whole of it. {_PLANNED}",
    ),
]
ShardOption = Annotated[
    int | None,
    typer.Option(
        "--dp-shard",
        metavar="N",
        min=1,
        show_default=False,
        help=f"Ranks that share a stage's parameters, for batches of their own. {_PLANNED}",
    ),
]
TensorOption = Annotated[
    int | None,
    typer.Option(
        "--tp",
        metavar="N",
        min=1,
        show_default=False,
        help=f"Ranks that divide each layer, by the package's own tp_plan. {_PLANNED}",
    ),
]
MeshOrderOption = Annotated[
    str,
    typer.Option(
        "--mesh-order", metavar="NAMES", help="The dimensions of the mesh; ranks along the last are neighbours."
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        min=1,
        show_default=False,
        help="Steps to run, those before a checkpoint included; times are measured from the second one on. "
        "[default: until MODEL's data ends; without data 1, with --profile 4]",
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        show_default=False,
        help="Record every step but the first, which warms up, in a new folder in DIR: a trace for each rank. With "
        "MODEL's data, three steps, and the scalars of all.",
    ),
]
ExampleOption = Annotated[
    str | None,
    typer.Option(
        "--model",  # typer 0.27 makes --MODEL of it by itself
        metavar="MODEL",
        show_default=False,
        help="Take data, loss_fn, metrics, optimizer and scheduler from here; without data example_inputs and "
        "example_target. [default: seeded inputs, mean square, AdamW]",
    ),
]
LearningRateOption = Annotated[
    float | None,
    typer.Option(
        metavar="LR",
        min=0.0,
        show_default=False,
        help="AdamW's learning rate; 0 leaves the weights as they are. Not with MODEL's optimizer. [default: 0.001]",
    ),
]
RunFolderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        show_default=False,
        help="Save the run in DIR on its way, at its end and at SIGTERM; continue from the newest checkpoint there.",
    ),
]
CheckpointEveryOption = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        "--save-every",
        metavar="K",
        min=1,
        show_default=False,
        help="Steps from one checkpoint to the next. [default: 100]",
    ),
]
KeepOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, show_default=False, help="How many checkpoints stay. [default: 3]"),
]
KernelsOption = Annotated[
    str, typer.Option(metavar="NAME", help="inductor (compiled), eager (divided, uncompiled) or autograd.")
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default=False,
        help="bf16 or fp16 (float32 parameters, computed with in 16 bits), bf16-true, fp16-true or fp32. "
        "[default: the package's dtypes]",
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        show_default=False,
        help="Draw dropout and other random numbers from this seed, alike for every split and number of processes. "
        "[default: torch's generators]",
    ),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Fail if a stage cannot be compiled, in place of leaving it to autograd.")
]
CudaGraphsOption = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs",
        help="Launch the kernels of each action at once, for more memory: faster where a GPU waits for the host.",
    ),
]
RunDeviceOption = Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to run; with cuda, a GPU per rank.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0.1,
        show_default=False,
        help="How long a rank waits for another one before the run fails; longer than a step. [default: 1800]",
    ),
]
LinksOption = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        show_default=False,
        help="Profile whose links a step is predicted with; stages keep the package's times. [default: the one "
        "that priced the package]",
    ),
]
RecalibrateOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="Write here the profile that priced the package, corrected by what was measured: a new file, or that "
        "profile's own.",
    ),
]


def check_training(
    rate: float | None, kernels: str, precision: str | None, model: str | None, cuda_graphs: bool, device: str
) -> None:
    """Raise typer.BadParameter or PipegraphError for what no package could be trained with."""
    from pipegraph.graph.sources import find_source
    from pipegraph.kernels.registry import check_name
    from pipegraph.runtime.kernel_makers import check_has_graphs
    from pipegraph.runtime.precision import named_precision

    check_name(kernels)
    named_precision(precision)
    if cuda_graphs and device == "cpu":  # another name is checked with the package
        check_has_graphs(device)
    if model is not None:
        find_source(model)
    if rate is not None and not rate <= _LARGEST_RATE:
        raise typer.BadParameter(f"{rate} is not a learning rate.\nTry: 0.001", param_hint="--learning-rate")


def check_recalibrate(steps: int | None, kernels: str) -> None:
    """Raise typer.BadParameter if a run with these steps and kernels cannot correct a profile."""
    if kernels != "inductor":
        raise typer.BadParameter(
            f"a profile predicts compiled kernels, and {kernels} kernels cannot correct it.\nTry: leave --kernels out.",
            param_hint="--recalibrate",
        )
    if steps is not None and steps < 2:
        raise typer.BadParameter(
            "times are measured from the second step on, because the first one compiles.\nTry: --steps 5",
            param_hint="--recalibrate",
        )


def check_profile(steps: int | None) -> None:
    """Raise typer.BadParameter if a run of ``steps`` steps would record nothing."""
    if steps is not None and steps < 2:
        raise typer.BadParameter(
            f"{steps} step is too few: the first one warms up and is not recorded.\nTry: --steps {PROFILED_STEPS}",
            param_hint="--profile",
        )


def check_checkpoint(folder: Path | None, every: int | None, keep: int | None) -> None:
    """Raise typer.BadParameter if options of checkpoints are given without a folder."""
    if folder is None and (every is not None or keep is not None):
        raise typer.BadParameter(
            "they belong to --checkpoint.\nTry: --checkpoint DIR too", param_hint="--checkpoint-every / --keep"
        )
