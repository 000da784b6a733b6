"""What ranks run, as processes of their own: functions for `ranks.run`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.testing import assert_close

from pipegraph.errors import PipegraphError, RuntimeFault
from pipegraph.package import Package
from pipegraph.runtime.transport import sends
from pipegraph.runtime.transport.sends import PendingSend
from pipegraph.schedule import read_csv
from tests.runtime.packages import Reference, batch, loss
from tests.runtime.parity import arguments, assert_parity
from tests.runtime.pipelines import pipeline


def parity(rank: int, cases: list[tuple[str, str]], kernels: str = "autograd") -> str:
    """Every (package, schedule) of `cases`, over two optimizer steps of two accumulated batches each."""
    for folder, schedule in cases:
        assert_parity(Path(folder), schedule, accumulate=2, kernels=kernels)
    return "equal"


def fail(rank: int, folder: str, how: str, failing: int, in_forward: bool, keep: bool) -> tuple[str, float, str]:
    """After a good step stage `failing` fails at microbatch 2. What this rank says, after how long, and what then.

    With `keep`, a process stays alive until all have noticed, so that nobody notices another's end instead.
    """
    package = Package.open(folder)
    pipe = pipeline(package, schedule="1f1b", microbatches=4, loss_fn=loss)
    inputs, _ = arguments(package, batch(package.manifest, 4))
    target = torch.zeros(len(inputs[0]))
    pipe.step(*inputs, target=target)
    calls = 0

    def break_down(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("broken on purpose")

    if rank == failing:
        stage = pipe.stages[rank]
        if in_forward:
            stage.register_forward_pre_hook(break_down)
        else:
            next(stage.parameters()).register_hook(break_down)
    started = time.monotonic()
    try:
        for _ in range(2):  # a rank that was done with the step already learns of it in the next one
            pipe.step(*inputs, target=target)
    except RuntimeFault as error:
        seconds, message = time.monotonic() - started, str(error)
    try:
        pipe.step(*inputs, target=target)
    except RuntimeFault as error:
        again = str(error)
    Path(folder, f"noticed-{rank}").touch()
    survivors = pipe.schedule.ranks - (how == "kill")
    deadline = time.monotonic() + 10
    while keep and len(list(Path(folder).glob("noticed-*"))) < survivors and time.monotonic() < deadline:
        time.sleep(0.05)
    return message, seconds, again


def break_at(
    rank: int, folder: str, schedule: str, how: str, failing: int, position: int, timeout: float
) -> tuple[str, float, str]:
    """After a successful step rank `failing` raises, is killed or stopped before the lowered action at `position`.

    Return the message of this rank, the seconds until it came, and the action at which this rank was.
    """
    package = Package.open(folder)
    pipe = pipeline(package, schedule=schedule, microbatches=4, loss_fn=loss, timeout=timeout)
    inputs, _ = arguments(package, batch(package.manifest, 4))
    target = torch.zeros(len(inputs[0]))
    pipe.step(*inputs, target=target)
    (executor,) = pipe._runner.executors.training_executors

    def breaking(do: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> None:
            if executor.position == position:
                if how == "raise":
                    raise ValueError("broken on purpose")
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            do(*args)

        return watched

    if rank == failing:
        executor._do = {kind: breaking(do) for kind, do in executor._do.items()}
    started = time.monotonic()
    try:
        while True:  # a rank that is done with the step already learns of it in the next one
            pipe.step(*inputs, target=target)
    except RuntimeFault as error:
        return str(error), time.monotonic() - started, str(executor.actions[executor.position])


def fail_to_send(rank: int, folder: str, waits: bool) -> tuple[str, float]:
    """The message of rank 0 for microbatch 2 fails, in the thread that starts it or in the one that waits for it."""
    package = Package.open(folder)
    pipe = pipeline(package, schedule="1f1b", microbatches=4, loss_fn=loss, timeout=30)
    inputs, _ = arguments(package, batch(package.manifest, 4))
    sends.LARGE = 0  # so that every message is started in a thread
    method = "wait" if waits else "start"
    do = getattr(PendingSend, method)

    def fail(send: PendingSend) -> None:
        if rank == 0 and send.transfer is not None and send.transfer.microbatch == 2:
            raise TypeError("no such message")
        do(send)

    setattr(PendingSend, method, fail)
    return _failure_of(lambda: pipe.step(*inputs, target=torch.zeros(len(inputs[0]))))


def die_in_a_collective(rank: int, folder: str, dying: int) -> tuple[str, float]:
    pipe = pipeline(folder, schedule="1f1b", microbatches=4, loss_fn=loss, timeout=30)
    pipe.gather([rank])
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return _failure_of(lambda: pipe.gather([rank]))


def skip_a_call(rank: int, folder: str, call: str, timeout: float) -> tuple[str, float]:
    """Rank 1 leaves out a call that every rank has to make, and stays."""
    pipe = pipeline(folder, microbatches=2, loss_fn=loss, timeout=timeout)
    calls: dict[str, Callable[[], object]] = {
        "clip_grad_norm_()": lambda: pipe.clip_grad_norm_(1.0),
        "save()": lambda: pipe.save(f"{folder}-saved", step=1),
    }
    failure = ("", 0.0) if rank == 1 else _failure_of(calls[call])
    dist.barrier()
    return failure


def _failure_of(call: Callable[[], object]) -> tuple[str, float]:
    """What a call says that fails, or the next one, and after how many seconds."""
    started = time.monotonic()
    try:
        for _ in range(2):  # a rank that is done with a step already learns of it in the next one
            call()
    except RuntimeFault as error:
        return str(error), time.monotonic() - started
    raise AssertionError("it did not fail")


def evaluate(rank: int, folder: str) -> Any:
    """Training and evaluation in turns, as each rank sees it, then a batch of a wrong size."""
    package = Package.open(folder)
    pipe = pipeline(package, schedule="1f1b", microbatches=2, loss_fn=loss)
    reference = Reference(package)
    for seed in range(3):
        inputs = batch(package.manifest, 2, seed)
        args, kwargs = arguments(package, inputs)
        for inference in (True, False):  # what is received into must serve a later step too
            with torch.inference_mode(inference):
                output = pipe.eval(*args, **kwargs)
            if len(reference.stages) - 1 in pipe.stages:
                assert_close(output, reference(inputs))
            else:
                assert output is None
        pipe.step(*args, target=torch.zeros(4), **kwargs)
    pipe.evaluate(*(tensor[:2] for tensor in args), **kwargs)


def frozen_steps(rank: int, folder: str) -> tuple[str, list[str]]:
    """What a step of frozen stages says, and what has a gradient in one of stages of which the last is not frozen."""
    freeze = partial(Module.requires_grad_, requires_grad=False)
    inputs, target = torch.ones(4, 8), torch.zeros(4)
    message = ""
    for frozen in (2, 1):
        pipe = pipeline(
            folder, "1f1b", "eager", microbatches=2, loss_fn=loss, parallelize_fn=freeze if rank < frozen else None
        )
        pipe.evaluate(inputs, target=target)
        try:
            pipe.step(inputs, target=target)
        except PipegraphError as error:
            message += str(error)
    return message, [name for name, parameter in pipe.named_parameters() if parameter.grad is not None]


def own_inputs(rank: int, folder: str) -> str:
    """A rank that passes only what its stages take, and the target only where the last stage is."""
    package = Package.open(folder)
    pipe = pipeline(package, schedule="gpipe", microbatches=2, loss_fn=loss)
    inputs = batch(package.manifest, 2)
    if rank == 0:
        result = pipe.step(inputs["tokens"])
    elif rank == 3:
        result = pipe.step(weights=inputs["weights"], target=torch.zeros(4))
        assert result.loss is not None
    else:
        result = pipe.step()
    return "done"


def halved(rank: int, folder: str, converting: list[int]) -> str:
    """Some ranks give their stages bfloat16, as all of them have to; then what crosses is bfloat16."""
    half = (lambda stage: stage.to(torch.bfloat16)) if rank in converting else None
    pipe = pipeline(folder, schedule="1f1b", microbatches=2, loss_fn=loss, parallelize_fn=half)
    (inputs,) = (tensor.bfloat16() for tensor in batch(pipe.package.manifest, 2).values())
    result = pipe.step(inputs, target=torch.zeros(len(inputs), dtype=torch.bfloat16))
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.bfloat16 for parameter in pipe.parameters())
    return f"{result.loss.item():.4f}"


def build(rank: int, folder: str, schedules: list[str], missing_on: int | None = None) -> None:
    """Make a pipeline, with its own schedule on each rank, or without the weights of one rank."""
    if rank == missing_on:
        folder = f"{folder}-elsewhere"
    pipeline(folder, schedule=schedules[rank], microbatches=2, loss_fn=loss)


def groups(rank: int, folder: str) -> str:
    """Two pipelines of two ranks at the same time, each over its own group; the user's groups stay usable."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    package = Package.open(folder)
    pipe = pipeline(package, microbatches=2, loss_fn=loss, group=pairs[rank // 2])
    inputs, _ = arguments(package, batch(package.manifest, 2))
    result = pipe.step(*inputs, target=torch.zeros(4))
    assert result.loss is not None
    assert (result.metrics is None) == (rank % 2 == 0)
    dist.barrier()
    return "done"


def receives(rank: int, folder: str, schedules: list[str], microbatches: int) -> list[dict[tuple[int, int], set[int]]]:
    """Under each schedule the memory, by edge and direction, that messages were received into over three steps."""
    package = Package.open(folder)
    addresses = []
    for schedule in schedules:
        pipe = pipeline(package, schedule, "eager", microbatches=microbatches, loss_fn=loss)
        inputs, _ = arguments(package, batch(package.manifest, microbatches))
        transport = pipe._runner.transport
        used: dict[tuple[int, int], set[int]] = {}

        def watched(transfer: Any, step_inputs: Any, post: Any = transport.receive, used: Any = used) -> Any:
            receive = post(transfer, step_inputs)
            used.setdefault((transfer.sender, transfer.receiver), set()).add(receive._tensors[0].data_ptr())
            return receive

        transport.receive = watched
        for _ in range(3):
            pipe.step(*inputs, target=torch.zeros(len(inputs[0])))
            pipe.evaluate(*inputs)
        assert not any(incoming._unfinished for incoming in transport._incoming.values())
        addresses.append(used)
    return addresses


def run_by_torch(rank: int, folder: str, files: list[str]) -> str:
    """torch's runtime takes a step under every schedule of `files`, and gives the gradients of plain autograd."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    package = Package.open(folder)
    for file in files:
        schedule = read_csv(file)
        modules = {stage: package.load_stage(stage) for stage, place in enumerate(schedule.placement) if place == rank}
        stages = [PipelineStage(modules[index], index, schedule.stages, torch.device("cpu")) for index in modules]
        runtime = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=loss)
        runtime._load_csv(file, format="compute_comms" if schedule.lowered else "compute_only")
        inputs, _ = arguments(package, batch(package.manifest, schedule.microbatches))
        target = torch.zeros(len(inputs[0]))
        last = {"target": target} if schedule.stages - 1 in modules else {}
        runtime.step(*(inputs if 0 in modules else ()), **last)
        reference = Reference(package)
        loss(reference({package.manifest.args[0]: inputs[0]}), target).backward()
        for module in modules.values():
            for name, parameter in module.named_parameters():
                expected = reference.parameters[name].grad
                # What has transfers lacks the action at which torch would divide by the number of microbatches.
                assert_close(parameter.grad, expected * schedule.microbatches if schedule.lowered else expected)
    return "equal"


def other_calls(rank: int, folder: str) -> list[str]:
    """What a rank says where the other makes another call, and where only the last one lacks a loss."""
    package = Package.open(folder)
    inputs, _ = arguments(package, batch(package.manifest, 2))
    messages = []
    for case in ("eval and step", "no loss"):
        loss_fn = None if case == "no loss" and rank == 1 else loss
        pipe = pipeline(package, microbatches=2, loss_fn=loss_fn, timeout=20)
        try:
            if case == "eval and step":
                pipe.step(*inputs, target=torch.zeros(4))
                if rank == 0:
                    pipe.evaluate(*inputs)
            pipe.step(*inputs, target=torch.zeros(4))
        except PipegraphError as error:
            messages.append(str(error))
    return messages
