"""A pipeline in a Lightning Trainer, in one process or under torchrun.

class Classifier(PipelineModule):
    def training_step(self, batch, batch_index):
        inputs, labels = batch
        return self.pipeline_step(inputs, target=labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.pipe.parameters())

trainer = lightning.Trainer(strategy=PipelineStrategy(pipe), max_steps=1000)
trainer.fit(Classifier(pipe), loader)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn

from pipegraph.errors import ArgumentError, CheckpointError
from pipegraph.integrations.gradients import gradients_divided, known_loss
from pipegraph.runtime.checkpoint.folder import place_of
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.rank_grid import DATA

_PIPELINE: Final = "pipeline"
_TRAINER: Final = "trainer.ckpt"
_STAGES: Final = "stages"
_REDUCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "mean": lambda tensor: (tensor if tensor.is_floating_point() else tensor.float()).mean(0),
    "avg": lambda tensor: (tensor if tensor.is_floating_point() else tensor.float()).mean(0),
    "sum": lambda tensor: tensor.sum(0),
    "max": lambda tensor: tensor.amax(0),
    "min": lambda tensor: tensor.amin(0),
}
"""Lightning's names of reductions → over the first dimension, of which each data-parallel rank has a place."""


class PipelineModule(LightningModule):
    """A LightningModule whose model is a pipeline. Subclasses have ``training_step`` and ``configure_optimizers``.

    Optimization is automatic: accumulation, clipping, schedulers and callbacks are Lightning's.

    Args:
        pipe: the pipeline, with a ``loss_fn``.
    """

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        self.pipe = pipe
        self.stages = nn.ModuleDict({str(index): stage for index, stage in pipe.stages.items()})

    def pipeline_step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Do a step of the pipeline, with its backward. Return the loss, the same number on every rank.

        Args:
            args, kwargs: the model's inputs.
            target: the second argument of ``loss_fn``.
        """
        with gradients_divided(self.pipe, self.trainer.accumulate_grad_batches):
            return known_loss(self.pipe.step(*args, target=target, **kwargs).loss)

    def pipeline_loss(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Return the loss of a batch, without gradients, the same number on every rank: for ``validation_step``."""
        return known_loss(self.pipe.evaluate(*args, target=target, **kwargs).loss)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs on every rank, without gradients: for metrics and ``predict_step``."""
        return self.pipe.broadcast_outputs(self.pipe.eval(*args, **kwargs))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `pipeline_step` has done the backward."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: Lightning would clear gradients between ``training_step`` and the backward."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Do a step of the optimizer, and clear the gradients."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm of the whole model's gradients, or by value."""
        if not gradient_clip_val:
            return
        if gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(self.pipe.parameters(), gradient_clip_val)
        else:
            self.pipe.clip_grad_norm_(gradient_clip_val)


class PipelineStrategy(ParallelStrategy):
    """Processes of a pipeline in a Lightning Trainer: those of torchrun, or one.

    Samplers divide the data among data-parallel ranks, and give all ranks of one pipeline the same; as with Lightning's
    other strategies, they shuffle training data unless ``use_distributed_sampler=False``. A checkpoint is a folder:
    ``pipeline`` in it is one of `Pipeline.save`, from which any number of ranks resumes, and ``trainer.ckpt`` has the
    Trainer's own state.

    Args:
        pipe: that of the `PipelineModule`.
    """

    is_distributed = True  # Lightning then divides the data

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        self.pipe = pipe

    def setup(self, trainer: Trainer) -> None:
        """Check what the Trainer is asked for, and make the optimizers.

        Raises:
            ArgumentError: the precision is not the pipeline's; the module is not a `PipelineModule` of this pipeline;
                there are several optimizers; or the Trainer would start processes.
        """
        if type(self.precision_plugin) is not Precision:
            raise ArgumentError(
                f"precision={self.precision_plugin.precision!r} would change nothing: a pipeline computes in its own.",
                'Pipeline(…, precision="bf16"), and a Trainer without precision.',
            )
        if not isinstance(self.lightning_module, PipelineModule) or self.lightning_module.pipe is not self.pipe:
            raise ArgumentError(
                f"{type(self.lightning_module).__name__} is not a PipelineModule of the strategy's pipeline.",
                "class Model(PipelineModule), and Model(pipe) with the pipe of PipelineStrategy(pipe).",
            )
        super().setup(trainer)
        if len(self.optimizers) > 1:
            raise ArgumentError(
                f"configure_optimizers returns {len(self.optimizers)} optimizers, and a checkpoint has one.",
                "one optimizer with several groups of parameters.",
            )

    def setup_environment(self) -> None:
        """Check that each process is one of the pipeline's."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self.world_size != ranks or (self.parallel_devices is not None and len(self.parallel_devices) > ranks):
            raise ArgumentError(
                f"the Trainer has {self.world_size} processes on {len(self.parallel_devices or [])} devices, and the "
                f"pipeline {ranks}.",
                "torchrun with a process for each device, and Trainer(devices=…) with the processes of a machine.",
            )
        super().setup_environment()

    # ---- processes ---------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self.pipe.device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each data-parallel rank has a share of the samples."""
        return {"num_replicas": self.pipe.dp_size, "rank": self.pipe.dp_rank}

    def model_to_device(self) -> None:
        """Do nothing: the stages are on their device."""

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean of a tensor over data-parallel ranks, or its sum or maximum, for ``sync_dist=True``."""
        if not dist.is_initialized() or not isinstance(tensor, Tensor):
            return tensor
        gathered = self.all_gather(tensor.detach())
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower()
        if name not in _REDUCTIONS:
            raise ArgumentError(f"{reduce_op!r} is not a reduction over ranks.", f"one of {', '.join(_REDUCTIONS)}.")
        return _REDUCTIONS[name](gathered)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any of them, decide so."""
        decisions = [row[0] > 0 for row in self.pipe.gather([float(decision)], everywhere=True)]
        return False not in decisions if all else True in decisions

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of the data-parallel ranks, along a new first dimension; without ranks the tensor."""
        if not dist.is_initialized():
            return tensor
        local = tensor.to(self.root_device).contiguous()
        copies = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, local)
        rank = self.pipe.mesh_ranks[self.pipe.ranks[0]]
        return torch.stack([copies[data_rank] for data_rank in self.pipe.grid.line(rank, *DATA)])

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            self.pipe.gather([0.0], everywhere=True)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the module without the stages, such as that of metrics."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        return {name: value for name, value in state.items() if not name.startswith(f"{_STAGES}.")}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Nothing: the pipeline saves the state of its optimizer."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the pipeline and its optimizer into the folder, and the rest as a file in it. Collective."""
        folder = Path(self.broadcast(str(filepath)))
        optimizer = self.optimizers[0] if self.optimizers and "optimizer_states" in checkpoint else None
        # The one before it stays: a process that is killed now leaves the Trainer's state of that one.
        self.pipe.save(folder / _PIPELINE, optimizer, step=checkpoint["global_step"], keep=2)
        super().save_checkpoint(checkpoint, folder / _TRAINER, storage_options)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the Trainer's own state in a checkpoint, which `load_model_state_dict` reads the rest of."""
        folder = Path(checkpoint_path)
        if not (folder / _TRAINER).is_file():
            raise ArgumentError(
                f"{folder} is not a checkpoint of a PipelineStrategy.",
                f"a folder with {_TRAINER}; pipegraph.Weights reads the tensors of other checkpoints.",
            )
        checkpoint = super().load_checkpoint(folder / _TRAINER, weights_only)
        self._loaded_folder = place_of(folder / _PIPELINE, checkpoint["global_step"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read the stages, and the rest of the module. Collective."""
        assert self.lightning_module is not None
        keys = self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)
        missing = [name for name in keys.missing_keys if not name.startswith(f"{_STAGES}.")]
        if strict and (missing or keys.unexpected_keys):
            raise CheckpointError(
                f"the module lacks {keys.unexpected_keys}, and the checkpoint {missing}.",
                "the module that was saved, or strict_loading = False in it.",
            )
        self.pipe.load(self._loaded_folder)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read the stages again, with the state of the optimizer. Collective."""
        self.pipe.load(self._loaded_folder, self.optimizers[0])

    def teardown(self) -> None:
        """Leave the stages on their device: the pipeline is still of use."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()
