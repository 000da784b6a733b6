"""What a pipeline holds on this process: parameters and buffers under the model's names, and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.package import Manifest
from pipegraph.runtime import parameters
from pipegraph.runtime.checkpoint.checkpointer import Checkpointer
from pipegraph.runtime.checkpoint.saving import SaveRequest
from pipegraph.runtime.processes.faults import FaultGuard
from pipegraph.runtime.processes.world import LoneProcess, World
from pipegraph.runtime.random_numbers import RandomNumbers

if TYPE_CHECKING:
    from pipegraph.runtime.checkpoint.loading import Checkpoint


class PipelineState:
    """The part of `Pipeline` that is about its state.

    Args:
        manifest: the manifest of the package.
        stages: the stages of this process, as they run.
        device: the device of the stages.
        world: the processes of the pipeline.
        guard: the context for collective calls.
        numbers: the state that random numbers depend on.
    """

    def __init__(
        self,
        manifest: Manifest,
        stages: Mapping[int, nn.Module],
        device: torch.device,
        world: World | LoneProcess,
        guard: FaultGuard,
        numbers: RandomNumbers,
    ) -> None:
        self._manifest, self._local_stages, self._numbers = manifest, stages, numbers
        self._checkpointer = Checkpointer(manifest, stages, device, world, guard)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise PipegraphError(
            "a Pipeline cannot be copied or pickled: it holds kernels, and connections to other processes.\n"
            "Try: state_dict() for its weights, save() for a checkpoint, or another Pipeline of the same package."
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, each once, under the model's name. A tied weight has its first name."""
        return parameters.named_parameters(self._local_stages)

    def state_dict(self) -> dict[str, Any]:
        """The entries of the model's `state_dict()` that belong to this rank's stages."""
        return parameters.state_dict(self._local_stages)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load this rank's part of a state dict of the model."""
        parameters.load_state_dict(self._manifest, self._local_stages, state_dict)

    def save(
        self,
        folder: str | PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
        background: bool = False,
        keep: int | None = None,
        frozen: bool = True,
    ) -> Path:
        """Save a checkpoint as ``folder/step-00000123``, which is there whole or not at all. Collective.

            pipe.save("checkpoints", optimizer, step=step, extra={"scheduler": scheduler}, keep=3)

        In it are parameters and persistent buffers, a tied weight once, the optimizer's state and options, all under
        the model's names; `extra`; and the state of torch's random number generators on each rank. It is written with
        torch.distributed.checkpoint, each rank what it holds, into a folder that all ranks share.

        Args:
            folder: where the run's checkpoints are. Only one run saves into it.
            optimizer: over parameters of `pipe.parameters()`, on each rank the same class, groups and options.
            step: how many steps are done. A checkpoint of this step that is there already is replaced.
            extra: objects with `state_dict` and `load_state_dict`, such as a learning rate scheduler, a `GradScaler` or
                a data loader, and plain values; the same names on every rank. Values that differ between ranks are all
                saved.
            background: copy everything to CPU memory, and write it while steps continue. The next `save` or
                `load`, or `wait_for_save`, waits for it and raises its errors. The process does not end before it is
                done. A step that fails ends it, and the checkpoint before it is the newest.
            keep: how many checkpoints stay, this one and the newest before it; by default all.
            frozen: whether parameters that need no gradient are saved as well. Without them, as for adapters alone,
                `load` leaves those as they are that need none then.

        Returns:
            The checkpoint's folder. With `background` it is there later.

        Raises:
            CheckpointError: a rank cannot save, such as on a full disk; on every rank. Nothing is left of it, and the
                pipeline can continue.
            RuntimeFault: a rank is gone.
        """
        steps = self._numbers.steps
        request = SaveRequest(Path(folder), step, keep, background, optimizer, extra or {}, steps, frozen)
        return self._checkpointer.save(request)

    def prepare_save(self) -> None:
        """Connect the ranks for checkpoints now instead of at the first one. Collective.

        A rank that dies before the first checkpoint then ends it at once on the others, not after the timeout.
        """
        self._checkpointer.prepare()

    def wait_for_save(self) -> Path | None:
        """Wait until a checkpoint that is saved in the background is there. Collective.

        Returns:
            Its folder; None if none was being saved.

        Raises:
            CheckpointError: it could not be saved.
            RuntimeFault: a rank is gone.
        """
        return self._checkpointer.wait()

    def load(
        self,
        folder: str | PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Resume from the newest checkpoint that is whole. Collective.

            start = pipe.load("checkpoints", optimizer, extra={"scheduler": scheduler}).step

        It may have been saved with another number of stages or ranks, other cuts, schedule or mesh. All files are
        compared with their digests first; a warning names each damaged checkpoint, and the previous one is loaded.
        With `Pipeline(seed=)` random numbers continue as they were; without it, only if every dimension of the mesh
        has the same number of ranks as before.

        Args:
            folder: that of the run, or one of the ``step-…`` folders in it.
            optimizer: gets the saved state and options, if it has the class of the saved optimizer and the same
                parameters in its groups. Without it only the model is loaded.
            extra: the objects that were saved, under the same names; each takes its state with `load_state_dict`.
                Values that differ between ranks need the same ranks, or the same number of data-parallel ranks if the
                values are equal along each pipeline.

        Returns:
            The `step` and the `folder` of the checkpoint, and `extra`: the saved plain values; without the argument
            `extra`, also the states of the saved objects. A value that does not fit the ranks of this run is left out
            with a warning if `extra` does not name it.

        Raises:
            CheckpointError: there is no whole checkpoint, or it is of another model, another optimizer or other
                extras, with their names; on every rank. Nothing is changed then.
            RuntimeFault: a rank is gone.
        """
        checkpoint, self._numbers.steps = self._checkpointer.load(Path(folder), optimizer, extra)
        return checkpoint
