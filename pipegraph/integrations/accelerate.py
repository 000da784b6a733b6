"""accelerate with a pipeline: the ranks of one pipeline are one process to it, as data-parallel ranks are several."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import Tensor

from pipegraph.errors import ArgumentError, PipegraphError
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.rank_grid import DATA


class PipelineAccelerator(Accelerator):
    """An `Accelerator` for the training loop of a pipeline.

        accelerator = PipelineAccelerator(pipe)
        optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
        for batch in loader:
            result = pipe.step(batch["input_ids"], target=batch["labels"])
            accelerator.clip_grad_norm_(pipe.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    - ``prepare`` gives every data-parallel rank its share of a data loader, and all ranks of one pipeline the same.
      A model passes through it unchanged. A scheduler does one step for each step of its optimizer.
    - ``clip_grad_norm_`` clips by the norm of the whole model's gradients.
    - ``gather`` and ``gather_for_metrics`` have the values of each share once.
    - `step` has done the backward: there is no ``backward``. The precision is that of the pipeline.

    Args:
        pipe: the pipeline.
        kwargs: those of `Accelerator`.

    Raises:
        ArgumentError: ``mixed_precision`` is asked for.
    """

    def __init__(self, pipe: Pipeline, **kwargs: Any) -> None:
        self.pipe = pipe
        # Before accelerate keeps it for all accelerators of the process.
        precision = kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if str(precision) != "no":
            raise ArgumentError(
                f"mixed_precision={str(precision)!r} would change nothing: a pipeline computes in its own precision.",
                'Pipeline(…, precision="bf16"), and an accelerator without mixed_precision.',
            )
        super().__init__(**kwargs)

    @property
    def num_processes(self) -> int:
        """The number of data-parallel ranks."""
        return self.pipe.dp_size

    @property
    def process_index(self) -> int:
        """The place of this process among the data-parallel ranks."""
        return self.pipe.dp_rank

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Return a model as it is: a pipeline reduces its gradients itself."""
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler so that it follows its optimizer: one step for each, for any number of ranks."""
        optimizers = [optimizer for optimizer in self._optimizers if optimizer.optimizer is scheduler.optimizer]
        prepared = AcceleratedScheduler(
            scheduler,
            optimizers or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=True,
        )
        self._schedulers.append(prepared)
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> NoReturn:
        raise PipegraphError(
            "there is no backward to call: a step of the pipeline runs forward and backward.",
            "pipe.step(inputs, target=labels), and no accelerator.backward().",
        )

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip as `Pipeline.clip_grad_norm_` does. Collective. ``parameters`` are those of the pipeline."""
        self.unscale_gradients()
        return self.pipe.clip_grad_norm_(float(max_norm), float(norm_type))

    def gather(self, tensor: Any) -> Any:
        """Gather tensors [rows, …] from the data-parallel ranks: in the order of their shares. Collective."""
        gathered = super().gather(tensor)
        count = self.state.num_processes
        if count == 1:
            return gathered
        grid = self.pipe.grid
        ranks = grid.line(torch.distributed.get_rank(), *DATA)

        def shares(gathered_tensor: Tensor) -> Tensor:
            parts = gathered_tensor.chunk(count)
            return torch.cat([parts[rank] for rank in ranks])

        return recursively_apply(shares, gathered)
