"""The interpreter of one rank's lowered actions. It knows no schedule by name.

given or received ─▶ F ─▶ outputs ─▶ SEND_F ─▶ RECV_F, of the consumer
                     └──▶ saved ─┐
RECV_B ─▶ sum over consumers ────┴─▶ B, or I and then W ─▶ gradients of inputs ─▶ SEND_B
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from pipegraph.device import Device
from pipegraph.garbage import rare_collection
from pipegraph.kernels import OffloadedValues, StageKernels
from pipegraph.package import CALLER
from pipegraph.progress import report_progress
from pipegraph.runtime.input_gradients import StepInputGradients
from pipegraph.runtime.loss_check import BatchLoss, LossCheck
from pipegraph.runtime.measurements import Observer
from pipegraph.runtime.microbatches import StepInputs
from pipegraph.runtime.parameter_collectives import ParameterCollectives
from pipegraph.runtime.parameters import TiedWeights, share_memory
from pipegraph.runtime.processes.faults import ActionFailed
from pipegraph.runtime.rank_context import RankContext
from pipegraph.runtime.step_state import GradientSums, PostedReceive, StepOutputs, StepState, receives_due
from pipegraph.runtime.transport.protocol import Transport
from pipegraph.runtime.wiring import Transfer, named_outputs, transfer_of
from pipegraph.schedule import Action, Collective, Kind, Schedule
from pipegraph.schedule.action import BACKWARD
from pipegraph.schedule.lifetimes import offload_windows

# ---- host memory -----------------------------------------------------------------------------------------------------
# The CPU memory, in which what a forward saved waits for its backward.
#
# On a GPU copies run on two streams of their own, one for each direction, to and from pinned memory. On a CPU there is
# one memory only: the copies are made all the same, and what the rank holds is counted as if they were elsewhere.


_Key = tuple[int, int]  # stage, microbatch


@dataclass
class _Away:
    """Values that were taken out: the bytes of each memory that they use, and where each value lies: the place of its
    memory, its dtype, offset, shape and strides.

    ``device`` holds them until ``copied``, an event of a GPU, has been waited for.
    """

    device: dict[str, Tensor]
    bytes: list[Tensor]
    layouts: dict[str, tuple[int, torch.dtype, Any, Any, Any]]
    copied: Any = None


class HostMemory:
    """Copies values that the stages of one rank offload: out during the action after F, in during that before I or B.

    Args:
        actions: the actions of the rank.
        device: the device of its stages.
    """

    def __init__(self, actions: Sequence[Action], device: torch.device) -> None:
        computing = [action for action in actions if not action.kind.is_transfer]
        self._device = Device(device)
        self._leaving: set[_Key] = set()
        self._keys_to_free: dict[Action, list[_Key]] = defaultdict(list)
        self._come_before: dict[Action, list[_Key]] = defaultdict(list)
        for window in offload_windows(computing):
            key = window.stage, window.microbatch
            self._leaving.add(key)
            self._keys_to_free[computing[window.departure]].append(key)
            self._come_before[computing[window.back]].append(key)
        self._away: dict[_Key, _Away] = {}
        self._coming: dict[_Key, Any] = {}  # events of a GPU, or None
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)  # pinned memory by its size
        self._streams: tuple[Any, Any] | None = None
        self._warned = False

    def before_action(self, action: Action, saved: Mapping[_Key, Any]) -> None:
        """Start to bring back what the next action reads, and wait for what this one does."""
        if not (self._away or self._coming):
            return
        for key in self._come_before.get(action, ()):
            if key in self._away:
                values, arrived = self._brought(self._away.pop(key))
                saved[key].put_back(values)
                self._coming[key] = arrived
        if action.kind in (Kind.B, Kind.I):
            self._device.wait_event(self._coming.pop((action.stage, action.microbatch), None))

    def after_action(self, action: Action, saved: Mapping[_Key, Any]) -> None:
        """Free what has been copied out by now, and start to copy out what this F saved."""
        for key in self._keys_to_free.get(action, ()) if self._away else ():
            if key in self._away:
                away = self._away[key]
                self._device.wait_event(away.copied)
                saved[key].take_offloaded(self._device.torch_device)
                away.device.clear()
        key = action.stage, action.microbatch
        if action.kind is Kind.F and key in self._leaving:
            saved_values: Any = saved.get(key)
            if _may_offload(saved_values.__class__) and (
                values := saved_values.take_offloaded(self._device.torch_device)
            ):
                self._warn_of_emulation()
                saved_values.put_back(values)  # until they are copied
                self._away[key] = self._sent(values)

    def clear(self) -> None:
        """Discard the values of a step that failed.

        On a GPU the current stream waits for copies that still write to its memory, because it may reuse that memory.
        """
        for arrived in self._coming.values():
            self._device.wait_event(arrived)
        self._away.clear()
        self._coming.clear()

    def _sent(self, values: dict[str, Tensor]) -> _Away:
        memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in values.values()}
        place = {address: index for index, address in enumerate(memories)}
        layouts = {
            name: (
                place[tensor.untyped_storage().data_ptr()],
                tensor.dtype,
                tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
            )
            for name, tensor in values.items()
        }
        sources = [_bytes_of(memory, self._device.torch_device) for memory in memories.values()]
        if self._device.is_cpu:
            return _Away(values, [source.clone() for source in sources], layouts)
        out, _ = self._own_streams()
        buffers = [self._pinned(len(source)) for source in sources]
        out.wait_stream(self._device.current_stream())
        with self._device.on_stream(out):
            for (buffer, read), source in zip(buffers, sources, strict=True):
                if read is not None:
                    out.wait_event(read)
                buffer.copy_(source, non_blocking=True)
            copied = out.record_event()
        return _Away(values, [buffer for buffer, _ in buffers], layouts, copied)

    def _brought(self, away: _Away) -> tuple[dict[str, Tensor], Any]:
        device = self._device.torch_device
        copies = [torch.empty_like(host_buffer, device=device, pin_memory=False) for host_buffer in away.bytes]
        arrived = None
        if not self._device.is_cpu:
            _, back = self._own_streams()
            # The new memory may have been freed by work that this stream has yet to do.
            back.wait_stream(self._device.current_stream())
            back.wait_event(away.copied)
            with self._device.on_stream(back):
                for copy, buffer in zip(copies, away.bytes, strict=True):
                    copy.copy_(buffer, non_blocking=True)
                arrived = back.record_event()
            for buffer in away.bytes:
                self._free[len(buffer)].append((buffer, arrived))
        else:
            for copy, buffer in zip(copies, away.bytes, strict=True):
                copy.copy_(buffer)
        values = {
            name: torch.empty(0, dtype=dtype, device=device).set_(copies[index].untyped_storage(), offset, size, stride)
            for name, (index, dtype, offset, size, stride) in away.layouts.items()
        }
        return values, arrived

    def _pinned(self, size: int) -> tuple[Tensor, Any]:
        """Return pinned memory of `size` bytes, and the event after which it may be written, or None."""
        free = self._free[size]
        return free.pop(0) if free else (torch.empty(size, dtype=torch.uint8, pin_memory=True), None)

    def _own_streams(self) -> tuple[Any, Any]:
        if self._streams is None:
            self._streams = self._device.stream(), self._device.stream()
        return self._streams

    def _warn_of_emulation(self) -> None:
        if self._device.is_cpu and not self._warned:
            self._warned = True
            warnings.warn(
                'recompute="offload" is emulated on a CPU: what is saved is copied within the same memory, which takes '
                "time and frees none. Figures of memory count the copies as if they were in another one.",
                stacklevel=2,
            )


@cache
def _may_offload(kind: type) -> bool:
    """Whether values of this class may offload some. Asked once: comparing a class with a protocol takes long."""
    return issubclass(kind, OffloadedValues)


def _bytes_of(memory: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(memory)


# ---- executor --------------------------------------------------------------------------------------------------------


class Executor:
    """One rank's part of a lowered schedule, over the kernels of that rank's stages. Each `run` is one step.

    Args:
        context: the process.
        rank: of the schedule.
        schedule: lowered.
        kernels: of each stage of this process.
        transport: carries tensors between ranks.
        ties: adds up the gradients of tied weights.
        collectives: runs the schedule's collectives; None if it has none.

    Attributes:
        observer: sees every action; None without one.
        input_gradients: collects the gradients of the caller's inputs.
        batch_loss: evaluates the loss of the whole batch; None if each microbatch has its own.
        loss_check: checks the loss of each microbatch; None after the first step.
    """

    def __init__(
        self,
        context: RankContext,
        rank: int,
        schedule: Schedule,
        kernels: Mapping[int, StageKernels],
        transport: Transport,
        ties: TiedWeights,
        collectives: ParameterCollectives | None = None,
    ) -> None:
        self.rank = rank
        self.actions = schedule.actions[rank]
        self.position = 0
        self.observer: Observer | None = None
        self.input_gradients = StepInputGradients({}, {})
        self.batch_loss: BatchLoss | None = None
        self.loss_check: LossCheck | None = None
        self.schedule = schedule
        self._trains = schedule.trains
        self._wiring, self._device, self._numbers = context.wiring, context.device, context.numbers
        self._kernels = kernels
        self._transport = transport
        self._ties = ties
        self._collectives = collectives
        self._host = HostMemory(self.actions, context.device)
        self._pending: dict[int, list[Collective]] = defaultdict(list)  # by position: the collectives before the action
        position = 0
        for operation in schedule.program(rank) if collectives is not None else ():
            if isinstance(operation, Collective):
                self._pending[position].append(operation)
            else:
                position += 1
        places = [context.pipeline[rank] for rank in schedule.placement]
        self._messages = [
            transfer_of(action, context.wiring, places) if action.kind.is_transfer else None for action in self.actions
        ]
        pairs = zip(self.actions, self._messages, strict=True)
        self._receives = [(action, message) for action, message in pairs if message and not action.sends]
        self._last = context.last
        self._due = receives_due(self.actions)
        self._prepared: set[tuple[tuple[str, int], ...]] = set()  # sizes of microbatches
        self._kinds: dict[int, str] = {}
        for action in self.actions:
            if not action.kind.is_transfer and action.kind.value not in self._kinds.setdefault(action.stage, ""):
                self._kinds[action.stage] += action.kind.value
        self._do = dict(_DO)

    def run(self, inputs: StepInputs, results: StepOutputs) -> Iterator[None]:
        """Do every action. Yields while another executor of this process has to continue first. Raises ActionFailed."""
        for stage, kernels in self._kernels.items():
            if self.has_stage(stage):
                with self._preparing(stage):
                    kernels.begin()
        step, posted, observer = StepState(inputs, results), 0, self.observer
        for position, action in enumerate(self.actions):
            self.position = position
            try:
                for receive in self._receives[posted : self._due[position]]:
                    self._post(step, *receive)
                    posted += 1
                if position == 0:  # by now the sizes are known, also to a rank that is given no input
                    self._prepare(inputs)
                self._do_collectives(position)
                if action.kind in (Kind.F, Kind.B, Kind.I):
                    for expected in step.posted.pop((action.stage, action.microbatch, action.kind is not Kind.F), ()):
                        while not expected.receive.ready():
                            yield
                        self._take(step, expected)
                do = self._do.get(action.kind)
                if do is None:  # a RECV is posted by now; the action that uses it waits for it
                    continue
                if self._collectives is not None and not action.kind.is_transfer:
                    self._collectives.use(action.stage)
                if observer is not None:
                    observer.begin(self.rank, action)
                if action.kind.is_transfer:
                    do(self, step, action)
                else:
                    self._host.before_action(action, step.saved)
                    do(self, step, action)
                    self._host.after_action(action, step.saved)
                if observer is not None:
                    observer.end(self.rank, action, step.saved.get((action.stage, action.microbatch)))
                if self._collectives is not None and action.kind in BACKWARD:
                    self._collectives.computed(action.stage)
            except ActionFailed:
                raise
            except Exception as error:
                raise ActionFailed(self.rank, self.actions, position) from error
        try:
            self._do_collectives(len(self.actions))
        except Exception as error:
            raise ActionFailed(self.rank, self.actions, self.position) from error

    def clear(self) -> None:
        """Forget what a step has left, also one that failed."""
        self._host.clear()

    def _do_collectives(self, position: int) -> None:
        """Do the collectives before the action at `position`, or start them."""
        for collective in self._pending.get(position, ()):
            assert self._collectives is not None
            self._collectives.do(collective)

    @contextmanager
    def _preparing(self, stage: int) -> Iterator[None]:
        """A context for the work before the first action of a stage. Raises ActionFailed."""
        try:
            yield
        except Exception as error:
            computing = (at for at, action in enumerate(self.actions) if not action.kind.is_transfer)
            first = next(at for at in computing if self.actions[at].stage == stage)
            raise ActionFailed(self.rank, self.actions, first, is_preparation=True) from error

    def _prepare(self, inputs: StepInputs) -> None:
        """Compile before the first action, so that ranks compile side by side, not each when its first input comes."""
        sizes = inputs.batch.sizes.microbatches
        for microbatch, microbatch_sizes in enumerate(sizes):
            key = tuple(microbatch_sizes.sizes.items())
            if key not in self._prepared:
                self._prepared.add(key)
                self._prepare_for(inputs, microbatch)

    def _prepare_for(self, inputs: StepInputs, microbatch: int) -> None:
        """Compile for the sizes of a microbatch, on inputs of zeros."""
        for stage, kinds in self._kinds.items():
            with_loss = self._with_loss(stage, inputs)
            with self._preparing(stage), rare_collection():
                self._kernels[stage].prepare(
                    [
                        self._caller_input(inputs, value.name, microbatch)
                        if value.producer == CALLER
                        else inputs.zeros(value, microbatch, self._device)
                        for value in self._wiring[stage].inputs
                    ],
                    target=inputs.batch.targets[microbatch] if with_loss else None,
                    with_loss=with_loss,
                    differentiable=self._trains,
                    kinds=kinds,
                )
        if len(self._prepared) == 1:
            report_progress("running the first step")

    def _post(self, step: StepState, action: Action, message: Transfer) -> None:
        posted = PostedReceive(action, message, self._transport.receive(message, step.step_inputs))
        step.posted[action.stage, action.microbatch, message.backward].append(posted)

    def _take(self, step: StepState, posted: PostedReceive) -> None:
        """Wait for a message and put what it brings where the action that uses it finds it."""
        action, message, receive = posted
        key = action.stage, action.microbatch
        if self.observer is not None:
            self.observer.begin(self.rank, action)
        tensors = receive.wait()
        if receive.is_pooled:
            step.received[key].add(receive, tensors)
        arrived = zip(message.names, tensors, strict=True)
        if message.backward:
            step.gradients[key].add(arrived)
        else:
            step.inputs[key].update(arrived)
        if self.observer is not None:
            self.observer.end(self.rank, action, None)

    def _send(self, step: StepState, action: Action) -> None:
        message = self._messages[self.position]
        assert message is not None
        self._transport.send(message, step.outgoing.pop(message.key))

    def _forward(self, step: StepState, action: Action) -> None:
        stage, microbatch = key = action.stage, action.microbatch
        wiring, step_inputs, results = self._wiring[stage], step.step_inputs, step.results
        arrived = step.inputs.pop(key, {})
        with_loss = self._with_loss(stage, step_inputs)
        self._numbers.microbatch = microbatch
        inputs = [
            self._caller_input(step_inputs, value.name, microbatch)
            if value.producer == CALLER
            else arrived.pop(value.name)
            for value in wiring.inputs
        ]
        forward = self._kernels[stage].forward(
            inputs,
            target=step_inputs.batch.targets[microbatch] if with_loss else None,
            with_loss=with_loss,
            differentiable=self._trains,
        )
        shape = step_inputs.batch.sizes.microbatches[microbatch].shape
        outputs = named_outputs(wiring, forward.outputs, shape, step_inputs.dtype)
        if self._trains:
            step.saved[key] = forward.saved
            for value, returned in zip(wiring.outputs, forward.outputs, strict=True):
                if value.consumers and returned.dtype != outputs[value.name].dtype:
                    step.cast[key][value.name] = returned.dtype
        self._hand_on(step, action, dict(zip((value.name for value in wiring.inputs), inputs, strict=True)))
        for edge in wiring.leaving:
            if self.has_stage(edge.consumer):
                computed = [(name, outputs[name]) for name in edge.names if name in outputs]
                step.inputs[edge.consumer, microbatch].update(computed)
            else:
                step.outgoing[stage, edge.consumer, microbatch] = [outputs[name] for name in edge.names]
        if forward.loss is not None:
            results.add_loss(microbatch, forward.loss, forward.metrics)
            if self.loss_check is not None:
                sizes = step_inputs.batch.sizes.microbatches[microbatch].sizes
                self.loss_check.add(inputs, forward.outputs, step_inputs.batch.targets[microbatch], sizes)
        if stage == self._last and self.batch_loss is not None:
            self.batch_loss.add(microbatch, forward.outputs, results)
        if stage == self._last and step_inputs.keep_outputs:
            results.outputs[microbatch] = forward.outputs
        if not forward.is_pure:
            step.received[key].keep_all()
        elif key in step.received:
            step.received[key].keep_shared((*forward.outputs, forward.loss, *forward.metrics.values()))
        if not self._trains:
            step.release(key)

    def _hand_on(self, step: StepState, action: Action, inputs: Mapping[str, Any]) -> None:
        """Give inputs of a stage that came from another rank to later stages of this rank, which take them too."""
        stage, microbatch = key = action.stage, action.microbatch
        for edge in self._wiring[stage].leaving:
            handed_on = {value.name: inputs[value.name] for value in edge.values if value.producer != stage}
            if handed_on:
                step.inputs[edge.consumer, microbatch].update(handed_on)
                step.received[key].keep_shared(list(handed_on.values()))  # they may be read after this stage is done

    def _with_loss(self, stage: int, inputs: StepInputs) -> bool:
        """Whether the kernels of a stage compute the loss of each microbatch."""
        return stage == self._last and inputs.with_loss and self.batch_loss is None

    def _caller_input(self, inputs: StepInputs, name: str, microbatch: int) -> Any:
        return self.input_gradients.leaf(name, microbatch, inputs.batch.inputs[name][microbatch])

    def _backward(self, step: StepState, action: Action) -> None:
        saved = step.saved.pop((action.stage, action.microbatch))
        with self._ties.adding(action.stage):
            gradients = self._kernels[action.stage].backward(saved, self._output_gradients(step, action))
        self._return_gradients(step, action, gradients)
        step.release((action.stage, action.microbatch))

    def _input_backward(self, step: StepState, action: Action) -> None:
        saved = step.saved[action.stage, action.microbatch]
        with self._ties.adding(action.stage):
            gradients = self._kernels[action.stage].input_backward(saved, self._output_gradients(step, action))
        self._return_gradients(step, action, gradients)

    def _weight_backward(self, step: StepState, action: Action) -> None:
        key = action.stage, action.microbatch
        with self._ties.adding(action.stage):
            self._kernels[action.stage].weight_backward(step.saved.pop(key))
        step.release(key)

    def _output_gradients(self, step: StepState, action: Action) -> list[Tensor | None]:
        """The gradient of each output, summed over its consumers. For the last stage also that of the loss."""
        stage, microbatch = key = action.stage, action.microbatch
        if stage == self._last and self.batch_loss is not None:
            return self.batch_loss.gradients(microbatch)
        sums = step.gradients.pop(key, GradientSums())
        for name, dtype in step.cast.pop(key, {}).items():
            if name in sums:
                sums[name] = sums[name].to(dtype)
        gradients = [sums.get(value.name) for value in self._wiring[stage].outputs]
        if stage == self._last:
            loss_gradient = step.step_inputs.scale.gradient(microbatch)
            gradients.append(torch.full_like(step.results.losses[microbatch], loss_gradient))
        return gradients

    def _return_gradients(self, step: StepState, action: Action, gradients: Sequence[Tensor | None]) -> None:
        """Give the gradients of a stage's inputs back to the stages that the inputs came from."""
        stage, microbatch = key = action.stage, action.microbatch
        wiring = self._wiring[stage]
        by_name: dict[str, Tensor] = {}
        for value, gradient in zip(wiring.inputs, gradients, strict=True):
            if gradient is not None:
                # Two receivers of the same memory would each add to it in place.
                is_shared = bool(by_name) and share_memory([gradient], by_name.values())
                by_name[value.name] = gradient.clone() if is_shared else gradient
                if value.producer == CALLER:
                    self.input_gradients.add(value.name, microbatch, gradient)
        for name, gradient in step.handed_back.pop(key, {}).items():
            by_name[name] = by_name[name] + gradient if name in by_name else gradient
        for edge in wiring.arriving:
            if self.has_stage(edge.producer):
                for value in edge.gradients:
                    if value.name in by_name:
                        sums = step.gradients if value.producer == edge.producer else step.handed_back
                        sums[edge.producer, microbatch].add([(value.name, by_name[value.name])])
            elif edge.gradients:
                step.outgoing[stage, edge.producer, microbatch] = [
                    by_name[value.name]
                    if value.name in by_name
                    else step.step_inputs.zeros(value, microbatch, self._device)
                    for value in edge.gradients
                ]
        if key in step.received:
            step.received[key].keep_shared(gradients)

    def has_stage(self, stage: int) -> bool:
        """Whether a stage is on the rank of this executor."""
        return self.schedule.placement[stage] == self.rank


# Functions, not methods: an executor that held its own methods would be garbage only for a collector.
_DO: Final[Mapping[Kind, Callable[[Executor, StepState, Action], None]]] = {
    Kind.F: Executor._forward,
    Kind.B: Executor._backward,
    Kind.I: Executor._input_backward,
    Kind.W: Executor._weight_backward,
    Kind.SEND_F: Executor._send,
    Kind.SEND_B: Executor._send,
}
