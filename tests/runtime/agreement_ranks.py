"""What ranks do with packages of their own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import init_device_mesh
from torch.nn import functional as F

from pipegraph import Pipeline, StandaloneStages
from pipegraph.errors import PipegraphError
from pipegraph.package import Package
from pipegraph.workflows.export import export


def message(rank: int, folders: list[str], mesh: tuple[str, ...], weights: list[str] | None = None) -> str:
    """The error of a Pipeline over a package for each rank, or "" after a step."""
    shape = (len(folders),) if len(mesh) == 1 else (2, len(folders) // 2)
    over = None if mesh == ("pp",) else init_device_mesh("cpu", shape, mesh_dim_names=mesh)
    from_folder = None if weights is None else weights[rank]
    try:
        pipe = Pipeline(
            folders[rank],
            "gpipe" if "pp" in mesh else "interleaved-1f1b",
            2,
            kernels="autograd",
            loss_fn=F.mse_loss,
            mesh=over,
            weights=from_folder,
            check_weights=False,
        )
    except PipegraphError as error:
        return f"{type(error).__name__}: {error}"
    x = torch.ones(4, 8)
    pipe.step(x, target=x)
    return ""


def joint_errors(rank: int, folders: list[str], checkpoint: str, out: str) -> list[str]:
    """The errors of what else ranks do with a package together."""
    package, errors = Package.open(folders[rank]), []
    for work in (
        lambda: StandaloneStages(package, {rank: package.load_stage(rank)}),
        lambda: export(checkpoint, package, Path(out)),
    ):
        try:
            work()
        except PipegraphError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors
