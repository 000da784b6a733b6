"""What ranks run in `test_transformers.py`: a save that fails on the first one."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.device_mesh import init_device_mesh

from pipegraph import Pipeline
from pipegraph.errors import CheckpointError
from pipegraph.integrations.transformers import save_pretrained


class FullDisk:
    """A configuration that cannot be written."""

    def save_pretrained(self, folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder))


def save(rank: int, package: str, folder: str) -> tuple[str, list[str]]:
    """The error of a save, and the files that are left of it."""
    pipe = Pipeline(package, "gpipe", 2, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), kernels="eager")
    try:
        save_pretrained(pipe, Path(folder), FullDisk())
    except CheckpointError as error:
        return str(error), sorted(path.name for path in Path(folder).iterdir() if path.name.startswith("."))
    raise AssertionError("it was saved")
