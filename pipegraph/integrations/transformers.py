"""The Trainer of Hugging Face with a pipeline as its model: `PipelineTrainer`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, Trainer, TrainingArguments

from pipegraph.errors import ArgumentError, BatchError, PipegraphError
from pipegraph.integrations.accelerate import PipelineAccelerator
from pipegraph.integrations.first_rank import write_on_first_rank
from pipegraph.integrations.gradients import gradients_divided, known_loss
from pipegraph.package import CONFIG, leaves
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.rank_grid import DATA
from pipegraph.workflows.export import export

IGNORED: Final = -100
"""The label of a position that has no loss."""
_CHECKPOINT: Final = "pipeline"
"""The folder, in one of the Trainer, of what `Pipeline.save` writes."""
_STAGING: Final = ".export"


# ---- loss of a causal language model ---------------------------------------------------------------------------------
# Pipeline(…, loss_fn=causal_lm_loss, loss_weight=count_causal_lm_labels)


def causal_lm_loss(output: Any, labels: Tensor) -> Tensor:
    """The sum of the cross entropies of the next tokens, in float32, as the loss of transformers' causal models.

    Args:
        output: the logits [rows, length, vocabulary], alone or as the first output, or under "logits".
        labels: [rows, length], -100 where none counts; the label of a position is the token there.
    """
    if isinstance(output, Mapping):
        output = output["logits"]
    logits = output[0] if isinstance(output, (tuple, list)) else output
    shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    return F.cross_entropy(logits.float().flatten(0, -2), shifted.flatten(), ignore_index=IGNORED, reduction="sum")


def count_causal_lm_labels(labels: Tensor) -> Tensor:
    """How many labels `causal_lm_loss` adds up."""
    return (labels[..., 1:] != IGNORED).sum()


# ---- model of the Trainer --------------------------------------------------------------------------------------------


class PipelineModel(nn.Module):
    """A pipeline as the Trainer sees its model: parameters and modes of this rank's stages. It is not called.

    Args:
        pipe: the pipeline.
        config: the configuration of the model; None without one.
    """

    main_input_name = "input_ids"
    accepts_loss_kwargs = False  # the Trainer passes the number of items to its training step, not to the model

    def __init__(self, pipe: Pipeline, config: Any) -> None:
        super().__init__()
        self.pipe, self.config = pipe, config
        self.generation_config = GenerationConfig() if config is None else GenerationConfig.from_model_config(config)
        names = [*input_names(pipe), "labels", "attention_mask"]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in dict.fromkeys(names)]
        self.forward = _Forward(inspect.Signature(parameters))  # by which the Trainer chooses the columns of a dataset

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's names."""
        return ((f"{prefix}.{name}" if prefix else name, value) for name, value in self.pipe.named_parameters())

    def add_model_tags(self, tags: Any) -> None:
        """Do nothing: trl has tags for a model card."""

    def train(self, mode: bool = True) -> PipelineModel:
        """Switch the mode of this rank's stages."""
        self.pipe.train(mode)
        self.training = mode
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this rank's parameters."""
        self.pipe.zero_grad(set_to_none)

    def to(self, *args: Any, **kwargs: Any) -> PipelineModel:
        """Return the model if the pipeline is on this device. Raises PipegraphError."""
        self.pipe.to(*args, **kwargs)
        return self


class _Forward:
    """In the place of a ``forward``: it has a signature alone."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.__signature__ = signature

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipegraphError(
            "the model of a PipelineTrainer is not called: its pipeline runs forward and backward together.",
            "override training_step or prediction_step, with self.pipe.step(…) and self.pipe.evaluate(…).",
        )


def input_names(pipe: Pipeline) -> list[str]:
    """The arguments of the model, by name."""
    manifest = pipe.package.manifest
    return [*(str(name) for name in leaves(manifest.args)), *manifest.kwargs]


# ---- trainer ---------------------------------------------------------------------------------------------------------

_REFUSED: Final = {
    "bf16": 'Pipeline(…, precision="bf16")',
    "fp16": 'Pipeline(…, precision="fp16")',
    "activation_checkpointing": 'Pipeline(…, recompute="block")',  # in older versions gradient_checkpointing
    "gradient_checkpointing": 'Pipeline(…, recompute="block")',
    "torch_compile": 'Pipeline(…, kernels="inductor"), which is the default',
    "fsdp": 'Pipeline(…, mesh=…) with a dimension "dp_shard"',
    "deepspeed": "Pipeline(…, mesh=…)",
    "label_smoothing_factor": "a loss_fn with label_smoothing",
    "neftune_noise_alpha": "the noise in the model",
    "auto_find_batch_size": "more microbatches",
    "use_liger_kernel": "kernels of the pipeline",
}
"""Arguments of training that would have no effect or a wrong one → what has it for a pipeline."""


class PipelineTrainer(Trainer):
    """transformers' `Trainer` with a pipeline as its model, in one process or under torchrun.

        pipe = pipegraph.Pipeline(
            "build/qwen2", schedule="1f1b", microbatches=4,
            loss_fn=causal_lm_loss, loss_weight=count_causal_lm_labels,
        )
        trainer = PipelineTrainer(pipe, TrainingArguments("runs", gradient_accumulation_steps=2), train_dataset=data)
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model("trained")  # from_pretrained("trained")

    Its losses, gradients and steps are those of the Trainer of the whole model. Batches are divided among data-parallel
    ranks; all ranks of one pipeline are given the same. Each rank's optimizer has the parameters of its stages. A
    checkpoint holds the model as `from_pretrained` reads it, and a folder of `Pipeline.save`, from which any number of
    ranks resumes. With another subclass of `Trainer`:

        class PipelineSFTTrainer(PipelineTrainer, SFTTrainer): ...

    Args:
        model: the pipeline, with a ``loss_fn``.
        args: as the Trainer takes them. Batch sizes are those of one pipeline.
        positional, kwargs: as the Trainer takes them.
        config: the model's configuration; by default that of the package.
        peft_config: that of the adapter, for a model of PEFT: its checkpoints hold the adapter alone, and
            ``save_model`` writes it as `PeftModel.from_pretrained` reads it.

    Raises:
        ArgumentError: an argument asks for something that the pipeline decides; or the model has adapters, and there
            is no ``peft_config``.
    """

    accelerator: PipelineAccelerator

    def __init__(
        self,
        model: Pipeline,
        args: TrainingArguments | None = None,
        *positional: Any,
        config: Any = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, Pipeline):
            raise ArgumentError(
                f"the model of a PipelineTrainer is a Pipeline, not a {type(model).__name__}.",
                'PipelineTrainer(pipegraph.Pipeline("build/model", …), …), or transformers.Trainer.',
            )
        _check_arguments(args, kwargs.get("compute_loss_func"))
        if config is None and (model.package.path / CONFIG).is_file():
            config = AutoConfig.from_pretrained(model.package.path)
        if (peft_config is None) == bool(model.package.manifest.checkpoint.adapters):
            raise ArgumentError(
                "peft_config is for a model with adapters, whose checkpoints hold nothing else.",
                'peft_config=model.peft_config["default"] of the model that was captured, or none for other models.',
            )
        self.pipe, self._peft_config = model, peft_config
        super().__init__(PipelineModel(model, config), args, *positional, **kwargs)
        if self.args.n_gpu > 1:
            raise ArgumentError(
                f"one process would use {self.args.n_gpu} GPUs, and the Trainer would replicate the pipeline there.",
                "torchrun with a process for each GPU, or CUDA_VISIBLE_DEVICES=0.",
            )
        if self.args.label_names is None:
            self.label_names = ["labels"]

    def create_accelerator_and_postprocess(self) -> None:
        """Use a `PipelineAccelerator`, with the options of the Trainer's own."""
        super().create_accelerator_and_postprocess()
        self.accelerator = PipelineAccelerator(self.pipe, dataloader_config=self.accelerator.dataloader_config)
        self.gather_function = self.accelerator.gather_for_metrics

    # ---- steps -------------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The batches of one step of the optimizer, and how many of their labels count, over all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        count_of = self.pipe.loss_weight
        if count_of is None or not batches:
            return batches, None
        local_count = math.fsum(float(count_of(batch["labels"])) for batch in batches)
        rows = self.pipe.gather([local_count], everywhere=True)
        ranks = self.pipe.grid.line(self.pipe.mesh_ranks[self.pipe.ranks[0]], *DATA)
        return batches, int(math.fsum(rows[rank][0] for rank in ranks))

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run a step of the pipeline. Return its share of the loss of the accumulated batches, on every rank."""
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()
        arguments, labels = self._arguments(inputs)
        count = self.current_gradient_accumulation_steps
        if num_items_in_batch is None and self.pipe.loss_weight is None and count > 1:
            with gradients_divided(self.pipe, count):
                result = self.pipe.step(**arguments, target=labels)
            loss = known_loss(result.loss) / count
        else:
            loss = known_loss(self.pipe.step(**arguments, target=labels, weight=num_items_in_batch).loss)
        return loss.to(self.args.device)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate a batch. Every rank has its loss, and its logits if they are asked for."""
        arguments, labels = self._arguments(inputs)
        keywords = {} if labels is None else {"target": self._counted_once(labels)}
        result = self.pipe.evaluate(**arguments, **keywords, return_outputs=not prediction_loss_only)
        loss = None if labels is None else known_loss(result.loss)
        if prediction_loss_only:
            return loss, None, None
        outputs = self.pipe.broadcast_outputs(result.outputs)
        if isinstance(outputs, Mapping):
            outputs = tuple(value for name, value in outputs.items() if name not in (ignore_keys or ()))
        logits = outputs[0] if isinstance(outputs, (tuple, list)) and len(outputs) == 1 else outputs
        return loss, logits, labels

    def _counted_once(self, labels: Any) -> Any:
        """Labels without those of rows that were repeated to fill the last batch of all data-parallel ranks."""
        state = self.accelerator.gradient_state
        is_filled = state.end_of_dataloader and state.remainder > 0 and self.pipe.dp_size > 1
        if not is_filled or self.pipe.loss_weight is None or not isinstance(labels, Tensor):
            return labels
        counted = labels.clone()
        counted[max(state.remainder - self.pipe.dp_rank * len(labels), 0) :] = IGNORED
        return counted

    def _arguments(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The arguments of the model in a batch, and its labels.

        Raises:
            BatchError: the batch has a mask, or another input, that the model was captured without.
        """
        prepared = dict(self._prepare_inputs(inputs))
        labels = prepared.pop("labels", None)
        names = input_names(self.pipe)
        mask = prepared.get("attention_mask")
        if mask is not None and "attention_mask" not in names and not bool(mask.all()):
            raise BatchError(
                "the batch is padded, and the package was captured without an attention_mask.",
                "the model split again with attention_mask among its example inputs; or batches without padding.",
            )
        unknown = sorted(prepared.keys() - {*names, "attention_mask"})
        if unknown:
            raise BatchError(
                f"the package takes no {', '.join(unknown)}, which the batch has.",
                "the model split again with it among its example inputs; or a data_collator that leaves it out.",
            )
        return {name: prepared[name] for name in names if name in prepared}, labels

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The parameters with weight decay, under the model's names: those that the Trainer of the whole model has."""
        names = {id(parameter): name for name, parameter in self.pipe.named_parameters()}
        decayed: list[str] = []
        for stage in self.pipe.stages.values():
            parameters = dict(stage.named_parameters(remove_duplicate=False))
            local_names = super().get_decay_parameter_names(stage)
            decayed += [names[id(parameters[name])] for name in local_names if id(parameters.get(name)) in names]
        return list(dict.fromkeys(decayed))

    def get_tp_size(self) -> int:
        """How many processes are given one batch."""
        return self.pipe.grid.size // self.pipe.dp_size if self.args.world_size > 1 else 1

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the model as `from_pretrained` reads it, or its adapter as PEFT does. Collective."""
        folder = Path(output_dir or self.args.output_dir)
        if self._peft_config is None:
            save_pretrained(self.pipe, folder, self.model.config)
        else:
            from pipegraph.integrations.peft import save_adapter

            save_adapter(self.pipe, folder, self._peft_config)
        if not self.args.should_save:
            return
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        extra = {"scheduler": self.lr_scheduler}
        folder, step, frozen = Path(output_dir) / _CHECKPOINT, self.state.global_step, self._peft_config is None
        self.pipe.save(folder, self._unwrapped_optimizer(), step=step, extra=extra, frozen=frozen)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            extra = {"scheduler": self.lr_scheduler}
            self.pipe.load(Path(checkpoint) / _CHECKPOINT, self._unwrapped_optimizer(), extra=extra)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.pipe.load(Path(resume_from_checkpoint) / _CHECKPOINT)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _unwrapped_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without accelerate's wrapper."""
        optimizer: Any = self.optimizer
        unwrapped: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        return unwrapped


def save_pretrained(pipe: Pipeline, folder: Path, config: Any = None) -> None:
    """Write the model's weights, and its configuration if there is one, as `from_pretrained` reads them. Collective.

    Other files of the folder stay. Raises CheckpointError and PackageError as `Pipeline.save` and `export` do; on every
    rank.
    """
    staging = folder / _STAGING
    pipe.save(staging / _CHECKPOINT, step=0)
    export(staging / _CHECKPOINT, pipe.package, staging / "weights", overwrite=True)

    def write() -> None:
        new = {path.name for path in (staging / "weights").iterdir()}
        for name in new:
            (staging / "weights" / name).replace(folder / name)
        for path in folder.glob("model*.safetensors*"):  # from_pretrained would read model.safetensors of another save
            if path.name not in new:
                path.unlink()
        if config is not None:
            config.save_pretrained(folder)

    write_on_first_rank(pipe, folder, staging, write)


def _check_arguments(args: TrainingArguments | None, compute_loss_func: Any) -> None:
    """Raise ArgumentError for an argument that a pipeline decides."""
    for name, instead in _REFUSED.items():
        if value := getattr(args, name, None):
            raise ArgumentError(f"{name}={value!r} is not for a pipeline.", f"{instead}, without {name}.")
    if compute_loss_func is not None:
        raise ArgumentError("compute_loss_func is not for a pipeline.", "Pipeline(…, loss_fn=…).")
