"""The processes that share a pipeline: joined, and connected. A plain process is a world by itself."""

from __future__ import annotations

import atexit
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from pipegraph.arguments import argument, require_type
from pipegraph.device import Device
from pipegraph.errors import ArgumentError, PipegraphError
from pipegraph.loopback import is_one_machine, use_loopback
from pipegraph.runtime.processes.faults import FAULT, FaultGuard
from pipegraph.runtime.processes.group import (
    ConnectionLost,
    Group,
    call_within,
    check_timeout,
    interruptible,
    lost_connections,
    wait_for_key,
)
from pipegraph.runtime.processes.launched_rank import exit_with_parent
from pipegraph.runtime.processes.meeting import Meeting, environment_store, restart_count
from pipegraph.runtime.processes.rank_grid import DIMENSIONS, PIPELINE, TENSOR, RankGrid, check_mesh, single
from pipegraph.runtime.processes.shard_group import ShardLine
from pipegraph.torch_private.distributed import default_store, groups_made, name_groups_from, release_mesh, uses_nccl
from pipegraph.torch_private.distributed import make_mesh as torch_make_mesh

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

# ---- clock -----------------------------------------------------------------------------------------------------------
# How far the clocks of two processes are apart, measured by the exchange of times that NTP uses (RFC 5905, section 8):
#
# rank r   sent ──────────────▶ received        offset = answer − (sent + received) / 2
#                 answer                        error ≤ (received − sent) / 2
# rank 0   ─────────▲─────────


ROUNDS: Final = 16
"""How often times are exchanged to measure a clock."""


@dataclass(frozen=True)
class ClockOffset:
    """Rank 0's clock is this rank's clock (`time.time_ns`) + `offset_ns`, to within `error_ns`, both in nanoseconds."""

    offset_ns: int = 0
    error_ns: int = 0

    def until(self, later_offset: ClockOffset) -> ClockOffset:
        """The offset between this measurement and a later one: their mean. What the clock drifted adds to the error."""
        drift = abs(later_offset.offset_ns - self.offset_ns)
        return ClockOffset(
            (self.offset_ns + later_offset.offset_ns) // 2, max(self.error_ns, later_offset.error_ns) + drift
        )


def measure_offset(group: Group, rank: int, ranks: Sequence[int], now: Callable[[], int] = time.time_ns) -> ClockOffset:
    """Measure this rank's clock against that of the first of `ranks`, by the quickest of `ROUNDS` exchanges.

    Collective: every rank of `group` must call it. The first one answers one rank after the other. `now` is the clock,
    in nanoseconds.
    """
    first, *other_ranks = ranks
    if rank == first:
        for peer in other_ranks:
            _answer(group, peer, now)
        return ClockOffset()
    return min((_ask(group, first, now) for _ in range(ROUNDS)), key=lambda offset: offset.error_ns)


def _answer(group: Group, peer: int, now: Callable[[], int]) -> None:
    question, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with lost_connections(peer):
        for _ in range(ROUNDS):
            group.receive(question, peer).wait()
            answer[0] = now()
            group.send(answer, peer).wait()


def _ask(group: Group, first: int, now: Callable[[], int]) -> ClockOffset:
    question, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with lost_connections(first):
        answered = group.receive(answer, first)
        sent = now()
        group.send(question, first).wait()
        answered.wait()
        received = now()
    return ClockOffset(int(answer) - (sent + received) // 2, (received - sent + 1) // 2)


# ---- devices ---------------------------------------------------------------------------------------------------------
# The device of a process, and whether the ranks' backend serves tensors there.


def check_backend(grid: RankGrid, device: torch.device) -> None:
    """Raise ArgumentError for ranks with GPUs that share layers or train alike, and have no NCCL for it.

    Over gloo ranks of FSDP and of tensor parallelism on an H100 were gone without a word, with torch 2.11.
    """
    if device.type == "cuda" and not uses_nccl(device) and grid.size > grid.length(PIPELINE):
        names = [name for name in grid.names if name != PIPELINE and grid.length(name) > 1]
        raise ArgumentError(
            f"the default group was made for gloo, which does not serve tensors on a GPU along {', '.join(names)}.",
            'torch.distributed.init_process_group("nccl") and a GPU for each rank, or a mesh of pp alone.',
        )


def local_device(device: str | torch.device) -> torch.device:
    """Return `device`. Plain "cuda" under a launcher is the GPU of this process's local rank."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise PipegraphError(f"{device!r} is not a device of torch: {error}.", "cpu or cuda.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise PipegraphError(f"device {str(device)!r} was asked for, and torch finds no GPU.", "device='cpu'.")
    if str(device) == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', torch.cuda.current_device())}"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


# ---- world -----------------------------------------------------------------------------------------------------------


_CLOSING_SECONDS: Final = 10.0
"""The time limit for NCCL to finish pending messages before its connections are closed."""


_CONTINUE, _STOP = "continue", "stop"
"""What ranks decide that wait for each other."""


class LoneProcess:
    """The world of a plain process, which holds all stages. It has the methods of `World` that `Pipeline` offers."""

    copies = 1

    def gather(self, figures: Sequence[float], *names: str) -> list[list[float]]:
        return [list(figures)]

    def gather_text(self, text: str, *names: str) -> list[str]:
        return [text]

    def clock_offset(self) -> ClockOffset:
        return ClockOffset()

    def along(self, *names: str, on_cpu: bool = False) -> None:
        return None


class World:
    """This process among those of one pipeline, or of the pipelines of a mesh, and its connections to them.

    Ranks are numbered over all these processes, and named by their place in the grid. Each world has a separate
    `store`.

    Args:
        processes: the number of each rank in the default group.

    Attributes:
        pipeline: the ranks of this process's pipeline, in its order.
        uses_nccl: whether tensors on its device cross by NCCL; else by gloo, through CPU memory.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        grid: RankGrid,
        device: torch.device,
        timeout: float,
        processes: Sequence[int],
    ) -> None:
        self.store, self._processes = store, processes
        self.rank, self.grid, self.device = rank, grid, device
        self.timeout = timeout
        self.uses_nccl = uses_nccl(device)
        self.pipeline = grid.line(rank, PIPELINE)
        self._groups: list[Group] = []
        self._mesh: DeviceMesh | None = None
        self._lines: list[ShardLine] = []
        self._along: dict[tuple[tuple[int, ...], bool], Group] = {}

    @property
    def size(self) -> int:
        """How many ranks there are in all pipelines."""
        return self.grid.size

    @property
    def copies(self) -> int:
        """How many ranks hold the same stages as this one, whole or in part, itself included."""
        return self.size // len(self.pipeline)

    def open(self) -> None:
        """Connect all ranks. Collective, and before anything else."""
        self.along(*DIMENSIONS, on_cpu=True)

    def connect(self, name: str, ranks: Sequence[int], device: torch.device | None = None) -> Group:
        """Connect `ranks`, of which this is one, for tensors on `device`. All of them call this with the same `name`.

        Returns when all of them are connected: a rank that failed and left before would take the others with it before
        they know why, or leave them waiting.
        """
        store = dist.PrefixStore(name, self.store)
        self._wait_for_all(store, "here", ranks)  # a rank that failed before would keep gloo waiting for its timeout
        group = Group(store, self.rank, ranks, device or self.device, self.timeout)
        self._groups.append(group)
        self._wait_for_all(store, "connected", ranks)
        return group

    def _wait_for_all(self, store: dist.Store, event: str, ranks: Sequence[int]) -> None:
        """Wait until all of these ranks have come here, or one has failed.

        The ranks decide together: without that one could see the failure and leave, and another one could see that all
        are here, and wait for the one that left until the timeout of gloo.
        """
        key = f"all {event}"

        def check() -> None:
            if self.store.check([FAULT]):
                store.compare_set(key, "", _STOP)

        with lost_connections(sum(ranks) - self.rank if len(ranks) == 2 else None):
            if store.add(event, 1) == len(ranks):
                store.compare_set(key, "", _CONTINUE)
            wait_for_key(store, key, self.timeout, check)
            if store.get(key).decode() == _STOP:
                raise ConnectionLost(None, "another rank has failed")

    def along(self, *names: str, on_cpu: bool = False) -> Group:
        """The ranks that lie in one line with this one along these dimensions, for tensors on its device or the CPU.

        Collective at the first call: every rank of the line must make it.
        """
        ranks = self.grid.line(self.rank, *names)
        key = ranks, on_cpu
        if key not in self._along:
            name = f"{'cpu' if on_cpu else 'device'}-{'-'.join(map(str, ranks))}"
            self._along[key] = self.connect(name, ranks, torch.device("cpu") if on_cpu else None)
        return self._along[key]

    def mesh(self, *names: str) -> DeviceMesh:
        """A mesh of these dimensions for DTensors, whose groups are closed when a rank fails.

        Its dimensions are in the order of `DIMENSIONS`. The first call is collective for all ranks.
        """
        if self._mesh is None:
            order = [self.grid.names.index(name) for name in DIMENSIONS if name in self.grid.names]
            shape = torch.tensor(self._processes).reshape(self.grid.shape).permute(order)
            ordered = [self.grid.names[place] for place in order]
            self._agree_on_names()
            self._mesh = torch_make_mesh(shape, ordered, self.device.type, self.timeout)
        return self._mesh[tuple(name for name in DIMENSIONS if name in names)]

    def dimensions_between(self, processes: Collection[int]) -> set[str]:
        """The dimensions along which this rank differs from those of these processes that are of this world."""
        ranks = [rank for rank, number in enumerate(self._processes) if number in processes]
        places, local_place = list(map(self.grid.coordinates, ranks)), self.grid.coordinates(self.rank)
        return {name for name in self.grid.names if any(place[name] != local_place[name] for place in places)}

    def shard_line(self) -> ShardLine:
        """The ranks that share the parameters of this one's stages. Collective: every rank must call it."""
        self._agree_on_names()
        line = ShardLine(self.grid, self._processes, self.device, self.timeout)
        self._lines.append(line)
        return line

    def _agree_on_names(self) -> None:
        """Let all ranks give the same names to the groups of torch's own that they make next. Collective."""
        number = torch.tensor(groups_made())
        self.along(*DIMENSIONS, on_cpu=True).all_reduce(number, dist.ReduceOp.MAX)
        name_groups_from(int(number))

    def check_everywhere(self, problem: str | None) -> None:
        """Raise ArgumentError on every rank if one of them has a problem. Collective: every rank must call it."""
        for rank_problem in self.gather_text(problem or "", *DIMENSIONS):
            if rank_problem:
                raise ArgumentError(rank_problem)

    def gather(self, figures: Sequence[float], *names: str) -> list[list[float]]:
        """The figures of every rank in one line with this one along these dimensions, by default of its pipeline.

        Collective: all of them must call it, with equally many.
        """
        names = names or (PIPELINE,)
        ranks = self.grid.line(self.rank, *names)
        table = torch.zeros(len(ranks), len(figures), dtype=torch.float64)
        table[ranks.index(self.rank)] = torch.tensor(figures, dtype=torch.float64)
        self.along(*names, on_cpu=True).all_reduce(table)
        rows: list[list[float]] = table.tolist()
        return rows

    def gather_text(self, text: str, *names: str) -> list[str]:
        """The texts of the same ranks. Collective: all of them must call it."""
        names = names or (PIPELINE,)
        texts = []
        lengths = self.gather([len(text.encode())], *names)
        for sender, (length,) in zip(self.grid.line(self.rank, *names), lengths, strict=True):
            letters = torch.zeros(int(length), dtype=torch.uint8)
            if self.rank == sender and text:
                letters = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            if length:
                self.along(*names, on_cpu=True).broadcast(letters, sender)
            texts.append(bytes(letters.tolist()).decode())
        return texts

    def clock_offset(self) -> ClockOffset:
        """Measure this process's clock against that of the first rank. Collective: every rank must call it."""
        return measure_offset(self.along(*DIMENSIONS, on_cpu=True), self.rank, range(self.size))

    def close(self, abort: bool) -> None:
        """End every connection. That wakes every rank that waits for this one.

        Without `abort`, what a GPU has yet to send or receive is given some time first.
        """
        if self.device.type == "cuda" and not abort:
            # Two steps: after the first nothing is on its way, and if the first fails all can still be aborted.
            abort = not _succeeds_in_time(Device(self.device).synchronize)
            if not abort:
                _succeeds_in_time(lambda: self._close_groups(abort=False))
                return
        self._close_groups(abort)

    def _close_groups(self, abort: bool) -> None:
        if abort and self._mesh is not None:  # else DTensors of the user's may still need it
            mesh, self._mesh = self._mesh, None
            release_mesh(mesh)
        for line in self._lines:
            line.close()
        for group in self._groups:
            group.close(abort)


def fingerprint(data: bytes) -> int:
    """A number that ranks can `gather`, to compare data by it."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "big")  # 48 bits, all of them in a float64


def join_world(
    group: dist.ProcessGroup | None, device: str | torch.device, timeout: float, mesh: DeviceMesh | None = None
) -> tuple[World | None, torch.device]:
    """The world of `mesh`, of `group`, or of the default group, and the device of this process.

    The world is None in a plain process, which holds all stages. The default group is made if the environment is that
    of a launcher such as torchrun. `timeout` is how many seconds a rank waits for another one, here as well.
    """
    check_timeout(timeout)
    require_type(device, (str, torch.device), "device is a name or a torch.device", 'device="cpu"')
    grid = None if mesh is None else check_mesh(mesh, group)
    if group is not None:
        require_type(group, dist.ProcessGroup, "group is a process group", "torch.distributed.new_group([0, 1])")
    _follow_launcher()
    if not dist.is_initialized():
        if group is None and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return None, local_device(device)
        _make_default_group(device, timeout)
    members = dist.group.WORLD if group is None else group
    assert members is not None, "the default group was there, or was made above"
    ranks = dist.get_process_group_ranks(members) if mesh is None else mesh.mesh.flatten().tolist()
    grid = grid or single(len(ranks))
    meeting = Meeting(default_store(), dist.get_rank(), ranks, timeout, grid.text)
    with meeting:
        chosen = local_device(device)
        check_backend(grid, chosen)
    return World(meeting.join(), ranks.index(dist.get_rank()), grid, chosen, timeout, ranks), chosen


def make_mesh(grid: RankGrid, device: str | torch.device, timeout: float) -> DeviceMesh:
    """A mesh of all processes that a launcher has started. Makes the default group if it is not there."""
    _follow_launcher()
    if not dist.is_initialized():
        _make_default_group(device, timeout)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", grid.size))
    if dist.get_rank() == 0 and grid.crosses_nodes(TENSOR, per_node):
        order = argument("mesh_order", ",".join([*(name for name in grid.names if name != TENSOR), TENSOR]))
        warnings.warn(
            f"the {grid.length(TENSOR)} ranks along tp lie in several nodes of {per_node} processes each, and send "
            f"the most.\nTry: {order}, and a tp that divides {per_node}.",
            stacklevel=2,
        )
    return dist.init_device_mesh(torch.device(device).type, grid.shape, mesh_dim_names=grid.names)


def _follow_launcher() -> None:
    """End with the launcher, and on one machine be reachable from there alone."""
    exit_with_parent()
    if is_one_machine():
        use_loopback(os.environ)


def _make_default_group(device: str | torch.device, timeout: float) -> None:
    store, rank, size = environment_store(timeout)
    meeting = Meeting(store, rank, range(size), timeout)
    with meeting:
        backend = "nccl" if local_device(device).type == "cuda" else "gloo"
    # Ranks that torchrun has started again find the store of those before: torch's own names in it are taken.
    group_store = dist.PrefixStore(f"pipegraph-default-group/{restart_count()}", store)
    meeting.join()
    with FaultGuard(rank, single(size), dist.PrefixStore("pipegraph", group_store)), lost_connections(None):
        limit = timedelta(seconds=timeout)
        interruptible(
            lambda: dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=limit),
            local_device(device),
        )
    atexit.register(_destroy_default_group)


def guard_of(world: World | None) -> FaultGuard:
    """The guard around what this process does together with others, which closes the world's connections at its end."""
    if world is None:
        return FaultGuard(0, single(1), None)
    guard = FaultGuard(world.rank, world.grid, world.store)
    guard.closing.callback(lambda: world.close(abort=guard.has_failed))
    return guard


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _succeeds_in_time(function: Callable[[], None]) -> bool:
    try:
        call_within(_CLOSING_SECONDS, function)
    except Exception:
        return False
    return True
