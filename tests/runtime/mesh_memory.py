"""The memory of sharded parameters in a step: what each rank measures, and what the simulator says."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pipegraph.kernels.sharded import local
from pipegraph.schedule import Times
from pipegraph.schedule.parameter_memory import parameter_bytes
from tests.runtime.meshes import Shape, make
from tests.runtime.packages import Sketch, Stage

WIDTH, LAYERS = 64, 24
ROWS = 4  # of one step: one per microbatch, so that activations are small compared to parameters


def deep(stages: int) -> Sketch:
    """Stages of many residual layers, which are gathered one by one."""
    parts, values = [], {"x": ("float32", ("batch", WIDTH), False)}
    for index in range(stages):
        source, output = "x" if index == 0 else f"h{index - 1}", f"h{index}"
        init = (
            f"self.layers{index} = nn.ModuleList(nn.Sequential(nn.Linear({WIDTH}, {WIDTH})) for _ in range({LAYERS}))"
        )
        body = f"for layer in self.layers{index}:\n    {source} = {source} + layer({source})\nreturn {source}"
        parts.append(Stage(source, output, init, body))
        values[output] = ("float32", ("batch", WIDTH), True)
    return Sketch(tuple(parts), values, f"h{stages - 1}")


class Alive(TorchDispatchMode):
    """The most bytes of all tensors that are alive at one time, looked at after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage._cdata, StorageWeakRef(storage))

    def look(self) -> int:
        live_bytes = 0
        for key, reference in list(self._storages.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                live_bytes += storage.nbytes()
        self.peak = max(self.peak, live_bytes)
        return live_bytes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = function(*args, **kwargs or {})
        for output in returned if isinstance(returned, (tuple, list)) else (returned,):
            if isinstance(output, Tensor) and type(output) in (Tensor, nn.Parameter):
                self.see(output)
        self.look()
        return returned


def measure(rank: int, cases: list[tuple[str, Shape, str, int | None]]) -> list[dict[str, tuple[float, float]]]:
    """Of each case: bytes of parameters and gradients as measured, and as simulated.

    They are those between steps, in an evaluation, and in a step.
    """
    return [_measure(*case) for case in cases]


def _measure(folder: str, shape: Shape, schedule: str, resident: int | None) -> dict[str, tuple[float, float]]:
    pipe, _ = make(folder, shape, schedule, resident=resident, loss_fn=mean)
    x, target = torch.randn(ROWS, WIDTH), torch.zeros(ROWS)
    pipe.evaluate(x, target=target)
    pipe.step(x, target=target)  # both trace
    for parameter in pipe.parameters():
        parameter.grad = None
    gc.collect()
    stage_bytes = 4.0 * LAYERS * (WIDTH + 1) * WIDTH
    count, executors = pipe.schedule.stages, pipe._runner.executors
    sizes = Times.equal(count), [stage_bytes] * count, [stage_bytes / 2] * count
    exchanged = "dp_replicate" not in shape  # sums over replicas are in place
    in_step = parameter_bytes(pipe.schedule_with_collectives, *sizes, exchanged=exchanged)[pipe.ranks[0]]
    in_evaluation = parameter_bytes(executors._evaluation, *sizes)[pipe.ranks[0]]
    shard_bytes = sum(shard.numel() for shard in map(local, pipe.parameters())) * 4.0
    measurements = {"rest": (shard_bytes, in_step.at_rest)}
    # Products add the gradients of weights to those before; what a backward makes apart, those of biases, is small.
    for name, run, simulated in (
        ("evaluation", pipe.evaluate, in_evaluation.parameters),
        ("step", pipe.step, in_step.with_gradients),
    ):
        alive = Alive()
        for candidate in gc.get_objects():
            if isinstance(candidate, Tensor) and type(candidate) in (Tensor, nn.Parameter):
                alive.see(candidate)
        baseline = alive.look() - shard_bytes
        with alive:
            run(x, target=target)
        measurements[name] = alive.peak - baseline, simulated
    return measurements


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()
