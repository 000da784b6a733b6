"""Ranks compare the packages that they read: a rank with different source or weights would train another model.

Ranks may read different folders, such as a copy on each machine, and one copy may be old.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from os import PathLike

import torch
from torch import Tensor, nn

from pipegraph.errors import PackageError, first_names
from pipegraph.package import MANIFEST, ListedFile, Package
from pipegraph.runtime.checksums import checksum
from pipegraph.runtime.processes.agreement import check_agreement
from pipegraph.runtime.processes.rank_grid import DATA, DIMENSIONS, TENSOR
from pipegraph.runtime.processes.world import World, fingerprint


def open_package(package: Package | str | PathLike[str], world: World | None) -> Package:
    """Open a package. Collective. Raises PackageError as `Package.open` and `check_packages` do."""
    opened = package if isinstance(package, Package) else Package.open(package)
    if world is not None:
        check_packages(world, opened)
    return opened


def check_packages(world: World, package: Package) -> None:
    """Raise PackageError, on every rank, unless the manifest and the source of all ranks are equal. Collective."""
    names = sorted({*package.manifest.files, MANIFEST})
    digests = {name: ListedFile.read(package.path / name).digest for name in names if (package.path / name).is_file()}
    text = json.dumps(digests)
    if len({number for (number,) in world.gather([fingerprint(text.encode())], *DIMENSIONS)}) == 1:
        return
    texts = world.gather_text(text, *DIMENSIONS)
    usual = Counter(texts).most_common(1)[0][0]  # the first rank's, if several are as frequent
    stale = [rank for rank, digests_text in enumerate(texts) if digests_text != usual]
    expected, actual = json.loads(usual), json.loads(texts[stale[0]])
    different = [name for name in sorted({**expected, **actual}) if expected.get(name) != actual.get(name)]
    verb = "differs" if len(different) == 1 else "differ"
    raise PackageError(
        f"{first_names([world.grid.text(rank) for rank in stale], 4)} would run another package than "
        f"{world.grid.text(texts.index(usual))}: {first_names(different, 4)} {verb}.",
        "the same folder for every rank, or a new copy of it on every machine.",
    )


def check_loaded_weights(world: World, stages: Mapping[int, nn.Module]) -> None:
    """Raise ArgumentError, on all ranks that find it, unless ranks with the same stages loaded equal weights.

    Collective. Stages are as they were loaded, before ranks divide them.
    """
    if world.copies == 1:
        return
    texts = {
        f"the checksum of the weights of stage {index}": ", ".join(
            f"{name}:{_checksum(tensor)}" for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]
        )
        for index, stage in stages.items()
    }
    check_agreement(world, texts, *DATA, TENSOR)


@torch.no_grad()
def _checksum(tensor: Tensor) -> int:
    number = checksum(tensor, None)
    assert number is not None, "it is a tensor"
    return int(number)
