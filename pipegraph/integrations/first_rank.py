"""Files that the first rank writes for all of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pipegraph.errors import CheckpointError, PipegraphError
from pipegraph.package.staged_folder import write_errors
from pipegraph.runtime.pipeline import Pipeline


def write_on_first_rank(pipe: Pipeline, folder: Path, staging: Path, write: Callable[[], None]) -> None:
    """Call a function on the first rank, and remove the folder that it read. Collective: the others wait.

    Args:
        pipe: the pipeline.
        folder: into which `write` writes.
        staging: a folder in it that all ranks have written, and that is removed also after an error.
        write: moves or converts what is in `staging`.

    Raises:
        CheckpointError: the files cannot be written; on every rank.
    """
    problem = ""
    if pipe.mesh_ranks[pipe.ranks[0]] == 0:
        try:
            with write_errors(folder):
                write()
        except PipegraphError as error:
            problem = str(error)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    for text in pipe.gather_text(problem, everywhere=True):
        if text:
            raise CheckpointError(text)
