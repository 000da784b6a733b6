"""The interpreter of one rank's lowered actions. It knows no schedule by name.

fed or received ─▶ F ─▶ outputs ─▶ SEND_F ─▶ RECV_F, of the consumer
                   └──▶ saved ─┐
RECV_B ─▶ sum over consumers ──┴─▶ B, or I and then W ─▶ gradients of inputs ─▶ SEND_B
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pipegraph.errors import RuntimeFault
from pipegraph.kernels import StageKernels
from pipegraph.package import CALLER
from pipegraph.progress import report_progress
from pipegraph.runtime.observer import Observer
from pipegraph.runtime.processes.faults import ActionFailed
from pipegraph.runtime.receive_lookahead import receives_due
from pipegraph.runtime.step_state import Feed, Posting, Results, Step, Sums
from pipegraph.runtime.transport.protocol import Transport
from pipegraph.runtime.wiring import StageWiring, named_outputs, transfer, zeros
from pipegraph.schedule import Action, Kind, Schedule


class Executor:
    """One rank's part of a lowered schedule, over the kernels of that rank's stages. Each `run` is one step.

    `observer`, if there is one, is told what happens in it.
    """

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        wiring: Sequence[StageWiring],
        kernels: Mapping[int, StageKernels],
        transport: Transport,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.actions = schedule.actions[rank]
        self.position = 0
        self.observer: Observer | None = None
        self._schedule = schedule
        self._wiring = wiring
        self._kernels = kernels
        self._transport = transport
        self._device = device
        moves = [action for action in self.actions if action.kind.is_transfer]
        self._transfers = {action: transfer(action, wiring, schedule.placement) for action in moves}
        self._receives = [action for action in moves if not action.sends]
        self._due = receives_due(self.actions)
        self._is_prepared = False
        self._do: dict[Kind, Callable[[Step, Feed, Results, Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_backward,
            Kind.W: self._weight_backward,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
        }

    def run(self, feed: Feed, results: Results) -> Iterator[None]:
        """Do every action. Yields where another executor of this process has to go on first. Raises ActionFailed."""
        for stage, kernels in self._kernels.items():
            if self._is_here(stage):
                kernels.begin()
        self._prepare(feed)
        step, posted, observer = Step(), 0, self.observer
        for position, action in enumerate(self.actions):
            self.position = position
            try:
                for receive in self._receives[posted : self._due[position]]:
                    self._post(step, receive)
                    posted += 1
                if action.kind in (Kind.F, Kind.B, Kind.I):
                    for posting in step.posted.pop((action.stage, action.microbatch, action.kind is not Kind.F), ()):
                        while not posting.receive.ready():
                            yield
                        self._take(step, posting)
                do = self._do.get(action.kind)
                if do is None:  # a RECV is posted by now; what uses it waits for it
                    continue
                if observer is not None:
                    observer.begin(self.rank, action)
                do(step, feed, results, action)
                if observer is not None:
                    observer.end(self.rank, action, step.saved.get((action.stage, action.microbatch)))
            except Exception as error:
                raise ActionFailed(self.rank, self.actions, position) from error

    def _prepare(self, feed: Feed) -> None:
        """Before the first action: ranks compile side by side, and not each when its first input arrives."""
        if self._is_prepared:
            return
        self._is_prepared = True
        kinds: dict[int, str] = {}
        for action in self.actions:
            if not action.kind.is_transfer and action.kind.value not in kinds.setdefault(action.stage, ""):
                kinds[action.stage] += action.kind.value
        for stage, needed in kinds.items():
            with_loss = self._is_last(stage) and feed.with_loss
            self._kernels[stage].prepare(
                [
                    feed.inputs[value.name][0] if value.producer == CALLER else zeros(value, self._device)
                    for value in self._wiring[stage].inputs
                ],
                target=feed.targets[0] if with_loss else None,
                with_loss=with_loss,
                differentiable=self._schedule.trains,
                kinds=needed,
            )
        report_progress("running the first step")

    def _post(self, step: Step, action: Action) -> None:
        message = self._transfers[action]
        posting = Posting(action, message, self._transport.receive(message))
        step.posted[action.stage, action.microbatch, message.backward].append(posting)

    def _take(self, step: Step, posting: Posting) -> None:
        """Wait for a message, and lay down what it brings for the action that uses it."""
        action, message, receive = posting
        if self.observer is not None:
            self.observer.begin(self.rank, action)
        arrived = zip(message.names, receive.wait(), strict=True)
        if message.backward:
            step.gradients[action.stage, action.microbatch].add(arrived)
        else:
            step.inputs[action.stage, action.microbatch].update(arrived)
        if self.observer is not None:
            self.observer.end(self.rank, action, None)

    def _send(self, step: Step, feed: Feed, results: Results, action: Action) -> None:
        message = self._transfers[action]
        self._transport.send(message, step.outgoing.pop(message.key))

    def _forward(self, step: Step, feed: Feed, results: Results, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        wiring = self._wiring[stage]
        arrived = step.inputs.pop((stage, microbatch), {})
        with_loss = self._is_last(stage) and feed.with_loss
        forward = self._kernels[stage].forward(
            [
                feed.inputs[value.name][microbatch] if value.producer == CALLER else arrived.pop(value.name)
                for value in wiring.inputs
            ],
            target=feed.targets[microbatch] if with_loss else None,
            with_loss=with_loss,
            differentiable=self._schedule.trains,
        )
        outputs = named_outputs(wiring, forward.outputs)
        if self._schedule.trains:
            step.saved[stage, microbatch] = forward.saved
            for value, returned in zip(wiring.outputs, forward.outputs, strict=True):
                if value.consumers and returned.dtype != outputs[value.name].dtype:
                    step.cast[stage, microbatch][value.name] = returned.dtype
        for edge in wiring.leaving:
            if self._is_here(edge.consumer):
                step.inputs[edge.consumer, microbatch].update((name, outputs[name]) for name in edge.names)
            else:
                step.outgoing[stage, edge.consumer, microbatch] = [outputs[name] for name in edge.names]
        if forward.loss is not None:
            results.losses[microbatch] = forward.loss
        if self._is_last(stage) and feed.keep_outputs:
            results.outputs[microbatch] = forward.outputs

    def _backward(self, step: Step, feed: Feed, results: Results, action: Action) -> None:
        saved = step.saved.pop((action.stage, action.microbatch))
        gradients = self._kernels[action.stage].backward(saved, self._output_gradients(step, results, action))
        self._return_gradients(step, action, gradients)

    def _input_backward(self, step: Step, feed: Feed, results: Results, action: Action) -> None:
        saved = step.saved[action.stage, action.microbatch]
        gradients = self._kernels[action.stage].input_backward(saved, self._output_gradients(step, results, action))
        self._return_gradients(step, action, gradients)

    def _weight_backward(self, step: Step, feed: Feed, results: Results, action: Action) -> None:
        self._kernels[action.stage].weight_backward(step.saved.pop((action.stage, action.microbatch)))

    def _output_gradients(self, step: Step, results: Results, action: Action) -> list[Tensor | None]:
        """Of each output, the sum over its consumers; at the end that of the loss, a mean over microbatches."""
        stage, microbatch = action.stage, action.microbatch
        sums = step.gradients.pop((stage, microbatch), Sums())
        for name, dtype in step.cast.pop((stage, microbatch), {}).items():
            if name in sums:
                sums[name] = sums[name].to(dtype)
        gradients = [sums.get(value.name) for value in self._wiring[stage].outputs]
        if self._is_last(stage):
            gradients.append(torch.full_like(results.losses[microbatch], 1 / self._schedule.microbatches))
        return gradients

    def _return_gradients(self, step: Step, action: Action, gradients: Sequence[Tensor | None]) -> None:
        """Give the gradients of a stage's inputs back to the stages that the inputs came from."""
        stage, microbatch = action.stage, action.microbatch
        wiring = self._wiring[stage]
        found = {value.name: grad for value, grad in zip(wiring.inputs, gradients, strict=True) if grad is not None}
        for edge in wiring.arriving:
            if self._is_here(edge.producer):
                names = [value.name for value in edge.gradients if value.name in found]
                step.gradients[edge.producer, microbatch].add((name, found[name]) for name in names)
            elif edge.gradients:
                sent = [found[v.name] if v.name in found else zeros(v, self._device) for v in edge.gradients]
                step.outgoing[stage, edge.producer, microbatch] = sent

    def _is_here(self, stage: int) -> bool:
        return self._schedule.placement[stage] == self.rank

    def _is_last(self, stage: int) -> bool:
        return stage == len(self._wiring) - 1


def drive(executors: Sequence[Executor], feed: Feed, results: Results) -> None:
    """One step of every executor. Each goes on until it needs what another of them has yet to send."""
    runs = [(executor, executor.run(feed, results)) for executor in executors]
    while runs:
        before = [executor.position for executor, _ in runs]
        waiting = [(executor, run) for executor, run in runs if next(run, "done") is None]
        if len(waiting) == len(runs) and before == [executor.position for executor, _ in waiting]:
            at = ", ".join(f"rank {executor.rank} at {executor.actions[executor.position]}" for executor, _ in waiting)
            raise RuntimeFault(f"the schedule deadlocks: every rank waits for another one ({at}). Check the schedule.")
        runs = waiting
