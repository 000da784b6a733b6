"""The pipeline of torchtitan: a ``pipelining_fn`` for its ``ModelSpec``, from torchtitan 0.3 on.

config = llama3_debugmodel()
config.model_spec = dataclasses.replace(config.model_spec, pipelining_fn=pipelining_fn)

torchtitan keeps its trainer, data, optimizers, checkpoints and metrics. The stages are pipegraph's: captured from the
whole model on the meta device, with no code in the model for absent layers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

import pipegraph
from pipegraph.errors import ArgumentError, PipegraphError
from pipegraph.schedule import Schedule

_PRECISIONS: Final = {"float32": None, "bfloat16": "bf16"}
_FOLDER: Final = "pipegraph"


class TorchtitanSchedule:
    """What torchtitan's trainer calls as its schedule. Every rank gives the batch, and gets the loss.

    Args:
        pipe: the pipeline, whose loss is a sum over tokens.
    """

    def __init__(self, pipe: pipegraph.Pipeline) -> None:
        self.pipe = pipe

    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[Tensor, ...]],
        kwarg_mbs: Sequence[Mapping[str, Any]],
        target_mbs: Sequence[Tensor],
        losses: list[Tensor],
        loss_kwargs: Mapping[str, Any],
        return_outputs: bool = False,
    ) -> None:
        """Do a training step over microbatches, and append its loss.

        Args:
            arg_mbs: positional inputs of each microbatch.
            kwarg_mbs: keyword inputs of each microbatch.
            target_mbs: labels of each microbatch.
            losses: gets this data-parallel rank's share of the loss, as torchtitan sums over these ranks.
            loss_kwargs: with ``global_valid_tokens``, the tokens that count in all accumulated batches of all ranks.
            return_outputs: not used; torchtitan asks for none.
        """
        args, kwargs = _joined(arg_mbs, kwarg_mbs)
        weight = loss_kwargs["global_valid_tokens"]
        result = self.pipe.step(*args, target=list(target_mbs), weight=weight, **kwargs)
        assert result.loss is not None
        losses.append(result.loss.detach() / self.pipe.dp_size)

    def eval(
        self,
        *,
        arg_mbs: Sequence[tuple[Tensor, ...]],
        kwarg_mbs: Sequence[Mapping[str, Any]],
        target_mbs: Sequence[Tensor],
        losses: list[Tensor],
    ) -> None:
        """Evaluate microbatches, and append the sum of their losses: this data-parallel rank's share of it."""
        args, kwargs = _joined(arg_mbs, kwarg_mbs)
        result = self.pipe.evaluate(*args, target=list(target_mbs), **kwargs)
        assert result.loss is not None
        assert result.weight is not None
        losses.append(result.loss.detach() * (result.weight / self.pipe.dp_size))


def pipelining_fn(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    device: torch.device,
    model_config: Any,
    parallelize_fn: Callable[..., nn.Module],
    loss_fn: Callable[..., Any],
    **options: Any,
) -> tuple[TorchtitanSchedule, list[nn.Module], bool, bool]:
    """Split torchtitan's model, and return its schedule and the stages of this rank. Collective.

    The first rank writes the package into ``dump_folder/pipegraph``. Data-parallel dimensions are those of
    `ParallelDims`; recompute and kernels are pipegraph's, instead of `ac_config`, `compile_config` and
    `parallelize_fn`.

    Args:
        model: on the meta device.
        parallel_dims: with pp, dp_replicate and dp_shard; the other dimensions have one rank.
        training: the batch size of a rank, the length of a sequence and the precision.
        parallelism: the schedule, the size of a microbatch and where to cut: ``module_fqns_per_model_part``,
            ``pipeline_parallel_layers_per_stage``, or by default where a step takes the least time.
        compile_config: not used: pipegraph compiles stages, unless `options` has ``kernels``.
        ac_config: not used: ``recompute`` in `options`.
        dump_folder: of the job, which all ranks see.
        device: of this rank.
        model_config: of the model.
        parallelize_fn: not used: pipegraph replicates and shards the stages.
        loss_fn: torchtitan's loss of logits and labels.
        options: further arguments of `Pipeline`, given by ``functools.partial``: ``kernels``, ``recompute``, ``seed``.

    Returns:
        The schedule, the stages, and twice True: each rank gives inputs and labels, and has the loss.

    Raises:
        ArgumentError: the configuration asks for what pipegraph does not do here.
        ScheduleError: the schedule is unknown, or cannot have these numbers.
        PipegraphError: the model cannot be captured or cut so; on every rank.
    """
    _check_configuration(parallel_dims, model_config, training, loss_fn)
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    schedule = _schedule_of(parallelism, parallel_dims.pp, len(model_config.layers), microbatches)
    folder = Path(dump_folder) / _FOLDER

    def split() -> None:
        rows = parallelism.pipeline_parallel_microbatch_size
        tokens = torch.zeros(rows, training.seq_len, dtype=torch.long)
        positions = torch.arange(training.seq_len).expand(rows, -1).contiguous()
        captured = pipegraph.capture(model, (tokens,), {"positions": positions})
        plan = pipegraph.plan(captured, schedule=schedule, microbatches=microbatches, **_cuts(parallelism, schedule))
        pipegraph.write_package(plan, folder, weights=False, overwrite=True)

    with warnings.catch_warnings():
        # Parameters get their values from the model's init_weights, or a checkpoint.
        warnings.filterwarnings("ignore", "(?s).*(holds no weights|start from guesses)")
        # Parameters on the meta device stay there. Buffers, such as rotary tables, get their values.
        model.init_weights(buffer_device=torch.device("cpu"))  # type: ignore[operator]
        _on_first_rank(split)
        pipe = pipegraph.Pipeline(
            folder,
            schedule,
            microbatches,
            lambda logits, labels: loss_fn(logits, labels)[0],
            mesh=_mesh(parallel_dims, device),
            loss_weight=lambda labels: (labels != IGNORE_INDEX).sum(),
            **{"precision": _PRECISIONS[training.mixed_precision_param], **options},
        )
    parts = list(pipe.stages.values())
    for part in parts:
        calls = _ModelPart(part, model)
        for name in ("init_weights", "to_empty", "state_dict", "load_state_dict"):
            setattr(part, name, getattr(calls, name))
    return TorchtitanSchedule(pipe), parts, True, True


# ---- configuration ---------------------------------------------------------------------------------------------------


def _check_configuration(parallel_dims: Any, model_config: Any, training: Any, loss_fn: Any) -> None:
    """Raise ArgumentError for what a pipeline of stages without torchtitan's own modules cannot do."""
    for name in ("tp", "cp", "ep"):
        if (ranks := getattr(parallel_dims, name)) > 1:
            raise ArgumentError(
                f"{name} has {ranks} ranks, and pipegraph's stages are not divided by torchtitan's {name}.",
                "data_parallel_shard_degree or pipeline_parallel_degree in its place.",
            )
    if isinstance(loss_fn, ChunkedLossWrapper):
        raise ArgumentError(
            "ChunkedLossWrapper calls lm_head in the loss, and here the last stage has it.",
            "config.loss = CrossEntropyLoss.Config(…).",
        )
    attention = getattr(getattr(model_config, "first_attention", None), "inner_attention", None)
    if isinstance(attention, (FlexAttention.Config, VarlenAttention.Config)):
        raise ArgumentError(
            f"{type(attention).__qualname__} takes masks that are not tensors, which no stage can send or receive.",
            "layer.attention.inner_attention = ScaledDotProductAttention.Config() for each layer of the configuration: "
            "causal attention over the whole sequence.",
        )
    if training.mixed_precision_param not in _PRECISIONS:
        raise ArgumentError(
            f"mixed_precision_param is {training.mixed_precision_param!r}.", f"one of {', '.join(_PRECISIONS)}."
        )


def _schedule_of(parallelism: Any, ranks: int, layers: int, microbatches: int) -> Schedule:
    """Return the schedule of a configuration, with the number of stages that it asks for.

    Raises:
        ScheduleError: an unknown schedule, or one that cannot have these numbers.
    """
    if parallelism.pipeline_parallel_schedule_csv:
        return pipegraph.schedule.read_csv(parallelism.pipeline_parallel_schedule_csv, transfers=False)
    stages = None
    if parallelism.module_fqns_per_model_part is not None:
        stages = len(parallelism.module_fqns_per_model_part)
    elif parallelism.pipeline_parallel_layers_per_stage is not None:
        first, last = (getattr(parallelism, f"pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last"))
        stages = math.ceil((layers + first + last) / parallelism.pipeline_parallel_layers_per_stage)
    if stages is not None and stages % ranks:
        raise ArgumentError(
            f"the configuration has {stages} stages on {ranks} ranks.",
            "module_fqns_per_model_part, or pipeline_parallel_layers_per_stage, with a multiple of the ranks.",
        )
    chunks = None if stages is None else stages // ranks
    return pipegraph.schedule.build(parallelism.pipeline_parallel_schedule, ranks, microbatches, chunks)


def _cuts(parallelism: Any, schedule: Schedule) -> dict[str, Any]:
    """Return where the configuration cuts, or into how many stages, as arguments of `pipegraph.plan`."""
    if parallelism.module_fqns_per_model_part is not None:
        return {"points": [names[0] for names in parallelism.module_fqns_per_model_part[1:]]}
    return {"stages": len(schedule.placement)}


def _mesh(parallel_dims: Any, device: torch.device) -> DeviceMesh:
    """Return a mesh of all ranks in torchtitan's order, with pipegraph's names of dimensions."""
    lengths = {"pp": parallel_dims.pp, "dp_replicate": parallel_dims.dp_replicate, "dp_shard": parallel_dims.dp_shard}
    used = {name: length for name, length in lengths.items() if name == "pp" or length > 1}
    return init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))


def _joined(
    arg_mbs: Sequence[tuple[Tensor, ...]], kwarg_mbs: Sequence[Mapping[str, Any]]
) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Return each input as a list with one tensor for each microbatch."""
    args = [list(tensors) for tensors in zip(*arg_mbs, strict=True)]
    return args, {name: [kwargs[name] for kwargs in kwarg_mbs] for name in kwarg_mbs[0]}


def _on_first_rank(function: Callable[[], None]) -> None:
    """Call a function on the first rank while the others wait. Raise its PipegraphError on every rank."""
    errors: list[tuple[str, str] | None] = [None]
    if dist.get_rank() == 0:
        try:
            function()
        except PipegraphError as error:
            errors = [(error.problem, error.advice)]
        except Exception as error:
            errors = [(f"{type(error).__name__}: {error}", "the error of rank 0.")]
            raise
        finally:
            dist.broadcast_object_list(errors, src=0)
    else:
        dist.broadcast_object_list(errors, src=0)
    if errors[0] is not None:
        raise PipegraphError(*errors[0])


# ---- parts of the model ----------------------------------------------------------------------------------------------


class _ModelPart:
    """What torchtitan calls on a part of a model, done by the model itself with the parameters of the part.

    Initial values and hooks of state dicts, such as those of fused projections, are those of torchtitan's modules. All
    other parameters of the model are on the meta device.

    Args:
        part: a stage.
        model: that was captured.
    """

    def __init__(self, part: nn.Module, model: nn.Module) -> None:
        self._part, self._model = part, model

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialize the parameters of the part."""
        with self._bound():
            self._model.init_weights(buffer_device=buffer_device)  # type: ignore[operator]

    def to_empty(self, *, device: torch.device | str, recurse: bool = True) -> nn.Module:
        """Do nothing: the part is on its device, and its buffers have their values."""
        return self._part

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The parameters and persistent buffers of the part, as the model saves them."""
        with self._bound():
            state = self._model.state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in state.items() if tensor.device.type != "meta"}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy the values of the part from a state dict that may have those of others too."""
        names = self.state_dict()
        missing = [name for name in names if name not in state_dict]
        if strict and missing:
            raise RuntimeError(f"the state dict lacks {', '.join(missing)}.")
        with self._bound():
            state = {name: value for name, value in state_dict.items() if name in names}
            return self._model.load_state_dict(state, strict=False)

    @contextmanager
    def _bound(self) -> Iterator[None]:
        """A context in which the model has the tensors of the part at their places."""
        tensors = {
            **dict(self._part.named_parameters(remove_duplicate=False)),
            **dict(self._part.named_buffers()),
        }
        places = [(self._model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in tensors]
        originals = [getattr(module, name) for module, name in places]
        try:
            for (module, name), tensor in zip(places, tensors.values(), strict=True):
                setattr(module, name, tensor)
            yield
        finally:
            for (module, name), tensor in zip(places, originals, strict=True):
                setattr(module, name, tensor)
