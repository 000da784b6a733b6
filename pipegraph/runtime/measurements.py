"""Observers: the hook into a rank's work, and what is measured there: times of actions, saved bytes, a whole run."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils.hooks import RemovableHandle

from pipegraph.collectives import CompositeWork
from pipegraph.device import Device
from pipegraph.runtime.parameters import storage_address
from pipegraph.schedule import Action, Collective, CollectiveKind, Kind

COMPUTING: Final = Kind.F, Kind.I, Kind.W, Kind.B

HISTORY_LENGTH: Final = 1000
"""How many times of each stage and kind are kept, so that a long run takes no more memory than a short one."""


class Observer(Protocol):
    """Sees every action of a step. Its calls come in the order of a rank's work, and never overlap on a rank.

    F, B, I and W last as long as the host takes to compute, or on a GPU to launch them. A SEND lasts as long as it
    takes to hand a message over. A RECV begins when its message is waited for, right before the action that uses it,
    and lasts as long as the wait. On a GPU all of it is on the current stream. An action that fails has no end.
    """

    def begin(self, rank: int, action: Action) -> None:
        """The rank begins an action."""
        ...

    def end(self, rank: int, action: Action, saved: Any) -> None:
        """The action is done. `saved` is what is held now for the backward of its stage and microbatch, or None."""
        ...


class Message(NamedTuple):
    """What the ranks of a collective send each other.

    Attributes:
        way: the way, as the links of a hardware profile name it: "gather", "reduce" or "all_reduce".
        size: bytes of the whole.
        ranks: that take part.
    """

    way: str
    size: int
    ranks: tuple[int, ...]


@runtime_checkable
class CollectiveObserver(Observer, Protocol):
    """An observer that sees the collectives of a step as well, once the step is done."""

    def collective(self, rank: int, collective: Collective, begin: Any, end: Any, messages: Sequence[Message]) -> None:
        """Receive the times of a collective, which may overlap with actions of its rank.

        A rank's collectives come in order and do not overlap: one begins when the rank has reached it and the previous
        one has ended, as in `simulate`, and ends when its last message has come. A RESHARD lasts until memory is freed.

        Args:
            begin, end: seconds of `time.perf_counter`, or on a GPU events that have been recorded in a stream.
        """
        ...


class NestedObservers:
    """Several observers as one. The first one begins first and ends last, so that it sees the time of all others."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def begin(self, rank: int, action: Action) -> None:
        for observer in self._observers:
            observer.begin(rank, action)

    def end(self, rank: int, action: Action, saved: Any) -> None:
        for observer in reversed(self._observers):
            observer.end(rank, action, saved)

    def collective(self, rank: int, collective: Collective, begin: Any, end: Any, messages: Sequence[Message]) -> None:
        for observer in self._observers:
            if isinstance(observer, CollectiveObserver):
                observer.collective(rank, collective, begin, end, messages)


class ObserverList:
    """The observers of a pipeline, and which of them see evaluations as well as steps."""

    def __init__(self) -> None:
        self._observers: OrderedDict[int, tuple[Observer, bool]] = OrderedDict()

    def add(self, observer: Observer, evals: bool) -> RemovableHandle:
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = observer, evals
        return handle

    def joined(self, is_eval: bool) -> Observer | None:
        """Return the observers of a step or an evaluation as one observer; None if nothing observes it."""
        observers = [observer for observer, evals in self._observers.values() if evals or not is_eval]
        return NestedObservers(observers) if len(observers) > 1 else next(iter(observers), None)


class TimeSpan(NamedTuple):
    """When an action ran: seconds since `ActionTimes.begin_step`."""

    action: Action
    begin: float
    end: float


class CollectiveSpan(NamedTuple):
    """When a collective ran, likewise."""

    collective: Collective
    begin: float
    end: float


@dataclass(frozen=True)
class StepTimes:
    """The spans of one step, for each rank of this process, in the order in which they began.

    Attributes:
        spans: the spans of actions.
        collectives: the spans of collectives, which may overlap with actions.
    """

    spans: Mapping[int, tuple[TimeSpan, ...]]
    collectives: Mapping[int, tuple[CollectiveSpan, ...]] = field(default_factory=dict)

    def busy(self, rank: int) -> float:
        """Seconds that a rank computed. Transfers do not count."""
        spans = self.spans.get(rank, ())
        return sum(span.end - span.begin for span in spans if not span.action.kind.is_transfer)


class ActionTimes:
    """An observer that times every action and collective: on a CPU by the host's clock, on a GPU by events of streams.

    Nothing waits for a GPU until figures are asked for. The events of a GPU are dropped as soon as they are read, which
    is when the GPU has passed them.

        times = ActionTimes(pipe.device)
        with pipe.observe(times):
            pipe.step(tokens, target=labels)
        print(times.medians())

    Attributes:
        messages: by stage and kind, what the last collective sent.
    """

    def __init__(self, device: torch.device) -> None:
        self.messages: dict[tuple[int, CollectiveKind], tuple[Message, ...]] = {}
        self._device = Device(device)
        self._begun: dict[int, Any] = {}
        self._unread: deque[tuple[int, Action | Collective, Any, Any]] = deque()
        self._seconds: dict[tuple[int, Kind | CollectiveKind], deque[float]] = defaultdict(
            partial(deque, maxlen=HISTORY_LENGTH)
        )
        self._zero: Any = None  # when the step began whose spans are kept
        self._spans: dict[int, list[TimeSpan]] = defaultdict(list)
        self._collectives: dict[int, list[CollectiveSpan]] = defaultdict(list)

    def begin(self, rank: int, action: Action) -> None:
        self._begun[rank] = self._device.now()

    def end(self, rank: int, action: Action, saved: Any) -> None:
        self._add(rank, action, self._begun.pop(rank), self._device.now())

    def collective(self, rank: int, collective: Collective, begin: Any, end: Any, messages: Sequence[Message]) -> None:
        self.messages[collective.stage, collective.kind] = tuple(messages)
        self._add(rank, collective, begin, end)

    def begin_step(self) -> None:
        """From here on, keep the span of every action until `end_step`."""
        self._read()
        self._forget_spans()
        self._zero = self._device.now()

    def end_step(self) -> StepTimes:
        """The spans since `begin_step`. Waits for a GPU."""
        self._read()
        spans = {rank: tuple(rank_spans) for rank, rank_spans in self._spans.items()}
        collectives = {rank: tuple(rank_collectives) for rank, rank_collectives in self._collectives.items()}
        self._forget_spans()
        self._zero = None
        return StepTimes(spans, collectives)

    def seconds(self) -> dict[tuple[int, Kind | CollectiveKind], list[float]]:
        """By stage and kind, the seconds of the last `HISTORY_LENGTH` actions or collectives. Waits for a GPU."""
        self._read()
        return {key: list(times) for key, times in self._seconds.items()}

    def medians(self) -> dict[tuple[int, Kind | CollectiveKind], float]:
        """By stage and kind, the median of `seconds`."""
        return {key: statistics.median(times) for key, times in self.seconds().items()}

    def _forget_spans(self) -> None:
        self._spans.clear()
        self._collectives.clear()

    def _add(self, rank: int, done: Action | Collective, begin: Any, end: Any) -> None:
        self._unread.append((rank, done, begin, end))
        while self._unread and self._device.has_passed(self._unread[0][-1]):
            self._read_first()

    def _read(self) -> None:
        """Wait for the GPU and read all its events."""
        if self._unread:
            self._device.synchronize()
        while self._unread:
            self._read_first()

    def _read_first(self) -> None:
        rank, done, begin, end = self._unread.popleft()
        self._seconds[done.stage, done.kind].append(self._device.seconds_between(begin, end))
        if self._zero is not None:
            times = tuple(self._device.seconds_between(self._zero, moment) for moment in (begin, end))
            if isinstance(done, Collective):
                self._collectives[rank].append(CollectiveSpan(done, *times))
            else:
                self._spans[rank].append(TimeSpan(done, *times))


class SavedBytes:
    """An observer of the most bytes that each rank holds for backwards at one time.

    Memory that several tensors share counts once. Weighing takes time, so that the times of a step that is weighed mean
    nothing.

    Args:
        uncounted: memory that is held in any case: parameters, buffers, the batch.
        gathered: returns what is held in any case now, but not always there: parameters that are gathered for a time.
    """

    def __init__(self, uncounted: Iterable[Tensor], gathered: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._uncounted = set(map(storage_address, uncounted))
        self._gathered = gathered
        self._saved_values: dict[int, dict[tuple[int, int], Any]] = defaultdict(dict)
        self._peaks: dict[int, int] = defaultdict(int)
        self._unknown: set[int] = set()

    def begin(self, rank: int, action: Action) -> None:
        pass

    def end(self, rank: int, action: Action, saved: Any) -> None:
        from pipegraph.kernels.stage_run import held_tensors  # which imports torch's compiler

        if action.kind.is_transfer:
            return
        saved_values, key = self._saved_values[rank], (action.stage, action.microbatch)
        saved_values.pop(key, None)
        if saved is not None:
            saved_values[key] = saved
        # All of them again: what is offloaded leaves during the actions of others.
        by_key = [held_tensors(microbatch_values) for microbatch_values in saved_values.values()]
        if None in by_key:
            self._unknown.add(rank)
            return
        tensors = [tensor for key_tensors in by_key for tensor in key_tensors or ()]
        sizes = {storage_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        uncounted = self._uncounted.union(map(storage_address, self._gathered()))
        together = sum(size for address, size in sizes.items() if address not in uncounted)
        self._peaks[rank] = max(self._peaks[rank], together)

    def peak(self, rank: int) -> int | None:
        """Bytes, over all steps seen; None if autograd keeps them, because it does not say what it keeps."""
        return None if rank in self._unknown else self._peaks[rank]


@dataclass(frozen=True)
class MeasuredCollective:
    """What a collective of a stage took: the median, in seconds, and what it sends."""

    seconds: float
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class MeasuredState:
    """Bytes that a rank holds between two steps: parameters with their copies, gradients, what the optimizer holds, and
    the model's buffers."""

    parameters: int
    gradients: int
    optimizer_state: int
    model_buffers: int


@dataclass(frozen=True)
class MeasuredRun:
    """The times of a run's steps, of all ranks together.

    Attributes:
        steps: how many steps the times are of: all but the first, which compiles.
        times: medians, in seconds, by stage and kind; empty after a single step.
        step: the median of a whole step, in seconds; None after a single one.
        bubble: the share of a step in which ranks computed nothing, their mean, the median over steps; None after a
            single one.
        state: of each rank.
        saved: the most bytes of each rank that were kept for backwards at one time; None if autograd keeps them.
        allocated: the most bytes that torch had allocated on the GPU of each process; empty without GPUs.
        processes: how many ran it: one for each rank, or one for all.
        kernels: that were run.
        collectives: of each stage and kind.
        parts: of each stage, the part of its parameters' bytes that a rank has; () if it has all of each.
        tensor_ranks: how many ranks along tp divide each stage.
        precision: in which they computed, if not in the package's own dtypes.
    """

    steps: int
    times: Mapping[tuple[int, Kind], float]
    step: float | None
    state: tuple[MeasuredState, ...]
    saved: tuple[int | None, ...]
    allocated: tuple[int, ...]
    processes: int
    kernels: str
    bubble: float | None = None
    collectives: Mapping[tuple[int, CollectiveKind], MeasuredCollective] = field(default_factory=dict)
    parts: tuple[float, ...] = ()
    tensor_ranks: int = 1
    precision: str | None = None


# ---- collective times ------------------------------------------------------------------------------------------------
# The times of a step's collectives, for observers: from gloo on a CPU, from events of a separate stream on a GPU.
#
# UNSHARD   started ─ … ─ its last message has come ─┐
#                         REDUCE_GRAD    started, waits │ ─ … ─ its last message has come
# lane      │ 0UNSHARD                               │ 0REDUCE_GRAD               │


Sent = tuple[Work | CompositeWork, Message]
"""A message that is under way."""


@dataclass
class _Started:
    """A collective that was started, and the times at which its messages arrived."""

    collective: Collective
    begin: Any
    sent: list[Sent]
    arrivals: list[float] = field(default_factory=list)
    end: Any = None


class CollectiveTimer:
    """Takes the times of a rank's collectives in one step."""

    def __init__(self, rank: int, device: torch.device, observer: CollectiveObserver) -> None:
        self._rank, self._observer = rank, observer
        self._started: list[_Started] = []
        self._device = Device(device)
        self._stream = self._device.stream()

    @contextmanager
    def timed(self, collective: Collective) -> Iterator[list[Sent]]:
        """A context in which a collective is started. The caller puts its messages into the list."""
        started = _Started(collective, self._now(), [])
        yield started.sent
        self._started.append(started)
        if not self._device.is_cpu:
            with self._device.on_stream(self._stream):  # which alone waits for them
                for work, _ in started.sent:
                    work.wait()
            started.end = self._now()
        for work, _ in started.sent if self._device.is_cpu else ():
            work.get_future().add_done_callback(partial(_note_arrival, started))
        if not started.sent:
            started.end = self._now()

    def report(self) -> None:
        """Tell the observer. Every message has come by now."""
        now = time.perf_counter()
        last = -float("inf")
        for span in self._started:
            begin, end = span.begin, span.end
            if self._device.is_cpu:
                if end is None:  # a callback may come a moment after what waits for the message
                    end = max(span.arrivals) if len(span.arrivals) == len(span.sent) else now
                begin, end = max(begin, last), max(end, last)
                last = end
            self._observer.collective(self._rank, span.collective, begin, end, [message for _, message in span.sent])

    def _now(self) -> Any:
        """Return the CPU's time in seconds; on a GPU, an event of the stream after all work launched so far."""
        if not self._device.is_cpu:
            self._stream.wait_stream(self._device.current_stream())
        return self._device.now(self._stream)


def _note_arrival(started: _Started, _: object) -> None:
    started.arrivals.append(time.perf_counter())
