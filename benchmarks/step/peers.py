"""The peers, set up by someone who knows them: torch.distributed.pipelining and DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleDualPipeV, ScheduleZBVZeroBubble

from benchmarks.step.contenders import Contender, own_code
from benchmarks.step.models import Case

TORCH_CLASSES: dict[str, Any] = {
    "1F1B": pipelining.Schedule1F1B,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "LoopedBFS": pipelining.ScheduleLoopedBFS,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
V = "ZBVZeroBubble", "DualPipeV"
"""torch refuses compiled stages under these, because they divide the backward; their loss is compiled all the same"""


class TorchPipeline(Contender):
    """A schedule of torch.distributed.pipelining over parts of the model.

    The loss function itself divides by the number of microbatches, so that torch need not divide all gradients.

    Args:
        compiled: whether the loss is compiled, and under schedules that allow it the stages.
        compiled_loss, joined_outputs: False and True are what a user gets by default.
        group: the pipeline's processes; by default all.
        prepare: shards, and compiles, a stage in place of compiling all of it.
    """

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        schedule: str,
        cuts: Sequence[str],
        compiled: bool = True,
        compiled_loss: bool = True,
        joined_outputs: bool = False,
        group: dist.ProcessGroup | None = None,
        prepare: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        modules = case.parts(model, cuts)
        count = len(modules)
        placement = [min(s, count - 1 - s) if schedule in V else s % ranks for s in range(count)]
        self._local_part = {index: modules[index] for index, place in enumerate(placement) if place == rank}
        self._first, self._last = 0 in self._local_part, count - 1 in self._local_part
        self._joined = joined_outputs
        # A divided backward goes through the compiled loss with retain_graph, which donated buffers do not allow.
        self._keeps_buffers = torch._functorch.config.patch(donated_buffer=False) if schedule in V else nullcontext()
        shapes = _boundaries(modules, case)
        if prepare is None:
            prepare = _compiled if compiled and schedule not in V else lambda module: module
        stages = [
            pipelining.PipelineStage(
                prepare(module),
                index,
                count,
                torch.device("cpu"),
                input_args=shapes[index],
                output_args=shapes[index + 1],
                group=group,
            )
            for index, module in self._local_part.items()
        ]
        kind = TORCH_CLASSES[schedule]
        argument = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        loss = _loss(case, case.microbatches, compiled and compiled_loss)
        self._schedule = kind(argument, case.microbatches, loss_fn=loss, scale_grads=False)

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        losses: list[Tensor] = []
        arguments = (inputs,) if self._first else ()
        options = {"target": targets, "losses": losses} if self._last else {}
        with self._keeps_buffers:
            self._schedule.step(*arguments, **options, return_outputs=self._joined)
        return torch.stack(losses).sum().item() if losses else None

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return [named for module in self._local_part.values() for named in module.named_parameters()]


class DeepSpeedPipeline(Contender):
    """DeepSpeed's pipeline engine (its one schedule is 1F1B) over two parts of the model, with gloo on the CPU."""

    def __init__(self, case: Case, model: nn.Module, cuts: Sequence[str], compiled: bool = True) -> None:
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()))
        import deepspeed
        from deepspeed.pipe import PipelineModule
        from deepspeed.utils import logger

        logger.setLevel("ERROR")
        self._count = case.microbatches
        modules = case.parts(model, cuts)
        self._local_part = modules[dist.get_rank()]
        stages = [_OneTensor(*pair) for pair in zip(modules, _boundaries(modules, case), strict=False)]
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        pipeline = PipelineModule(
            [_compiled(stage) if compiled else stage for stage in stages],
            num_stages=len(modules),
            loss_fn=_loss(case, 1, compiled),
            partition_method="uniform",
            activation_checkpoint_interval=0,
        )
        self._optimizer = _KeepsGradients(self._local_part.parameters())
        self._engine, *_ = deepspeed.initialize(
            model=pipeline,
            optimizer=self._optimizer,
            config={
                "train_micro_batch_size_per_gpu": case.rows,
                "gradient_accumulation_steps": case.microbatches,
                "gradient_clipping": 0.0,  # by default to a norm of 1
                "steps_per_print": 10**9,
            },
            dist_init_required=False,
        )

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        microbatches = zip(inputs.chunk(self._count), targets.chunk(self._count), strict=True)
        loss = self._engine.train_batch(microbatches)  # which every rank is told
        for parameter, gradient in self._optimizer.kept:
            parameter.grad = gradient
        self._optimizer.kept = []
        return loss.item() if dist.get_rank() == 0 else None

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._local_part.named_parameters()


class _OneTensor(nn.Module):
    """A stage for DeepSpeed, with its values in one tensor each way: for several it would run the backward for each."""

    def __init__(self, stage: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.stage, self._shapes = stage, [tensor.shape for tensor in inputs]

    def forward(self, packed: Tensor) -> Tensor:
        if len(self._shapes) == 1:
            values = (packed,)
        else:
            parts = packed.split([shape.numel() for shape in self._shapes])
            values = tuple(part.view(shape) for part, shape in zip(parts, self._shapes, strict=True))
        outputs = self.stage(*values)
        return torch.cat([output.flatten() for output in outputs]) if isinstance(outputs, tuple) else outputs


class _KeepsGradients(torch.optim.Optimizer):
    """Changes nothing. The engine drops gradients at the end of a step, and contenders are compared by them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.kept: list[tuple[nn.Parameter, Tensor | None]] = []

    def step(self, closure: Any = None) -> None:
        self.kept = [(parameter, parameter.grad) for group in self.param_groups for parameter in group["params"]]


def _compiled(module: nn.Module) -> Any:
    """Return a stage under torch.compile, with a separate code object."""
    module.forward = MethodType(own_code(type(module).forward), module)
    return torch.compile(module, dynamic=False)


def _loss(case: Case, divisor: int, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return case.loss(outputs, targets) / divisor

    return torch.compile(own_code(loss), dynamic=False) if compiled else loss


def _boundaries(modules: Sequence[nn.Module], case: Case) -> list[tuple[Tensor, ...]]:
    """Return what goes into each stage, and what comes out of the last. Told this, torch need not run stages for it."""
    boundaries: list[tuple[Tensor, ...]] = [(case.microbatch()[0],)]
    with torch.no_grad():
        for module in modules:
            outputs = module(*boundaries[-1])
            boundaries.append(outputs if isinstance(outputs, tuple) else (outputs,))
    return [tuple(tensor.requires_grad_(tensor.is_floating_point() and at > 0) for tensor in values)
            for at, values in enumerate(boundaries)]  # fmt: skip
