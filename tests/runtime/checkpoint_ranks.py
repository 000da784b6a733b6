"""What ranks run in tests of checkpoints, as processes of their own: functions for `ranks.run`."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
import weakref
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from pipegraph.errors import PipegraphError
from pipegraph.runtime.checkpoint.folder import read_index
from pipegraph.runtime.checkpoint.storage import StoredTensors
from tests.runtime.checkpoint_models import Position, by_depth, start

TIMEOUT_SECONDS = 60.0  # of a rank that has died, which is noticed long before

TP_PLAN = {"layers.*.0": "colwise_gather_output", "embed": "embedding_rowwise", "head": "colwise_gather_output"}

Losses = list[float | None]


def go_on(rank: int, package: str, schedule: str, folder: str, save_folder: str) -> tuple[Losses, Losses]:
    """The losses after a checkpoint of another process. Steps 7 to 10 run while step 7 is saved in the background."""
    run = start(package, schedule, {"pp": 2})
    assert run.load(folder).step == 5
    early_losses = run.train(5, 7)
    place = run.save(save_folder, 7, background=True)
    late_losses = run.train(7, 10)
    assert run.pipe.wait_for_save() == place
    assert place.is_dir()
    assert run.pipe.wait_for_save() is None
    return early_losses, late_losses


def resume(
    rank: int, package: str, schedule: str, shape: dict[str, int], folder: str, batch: int, seed: int | None
) -> Losses:
    """The losses of steps 6 to 10 after a checkpoint of another process."""
    run = start(package, schedule, shape, batch, seed=seed)
    run.load(folder)
    return run.train(5, 10)


def over_mesh(
    rank: int, package: str, shape: dict[str, int], folder: str, save_folder: str, schedule: str = "1f1b"
) -> tuple[Losses, Losses, bool]:
    """The losses of steps 6 to 10 after a checkpoint of another process, and after one of this mesh."""
    options: dict[str, Any] = {"tp_plan": TP_PLAN} if "tp" in shape else {}
    run = start(package, schedule, shape, **options)
    assert not run.load(folder).has_random_state
    torch.manual_seed(rank)
    random_state = torch.get_rng_state()
    run.save(save_folder, 5, background=True)
    torch.rand(3)
    first = run.train(5, 10)
    assert run.load(save_folder).has_random_state
    return first, run.train(5, 10), torch.equal(random_state, torch.get_rng_state())


def save_groups(rank: int, package: str, folder: str, rates: list[float], keeps_empty: bool) -> list[float]:
    """The learning rates after saving, losing and loading an optimizer of which some groups are empty here."""
    pipe = start(package, "1f1b", {"pp": 2}).pipe
    optimizer = by_depth(pipe, rates, keeps_empty)
    pipe.save(folder, optimizer, step=1)
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    pipe.load(folder, optimizer)
    pipe.save(folder, optimizer, step=2)
    return [group["lr"] for group in optimizer.param_groups if group["params"]]


def positions(rank: int, package: str, folder: str) -> int:
    """Each data-parallel rank's own position in the data, saved by replicas and read by ranks that share parameters."""
    start(package, "1f1b", {"dp_replicate": 2}).pipe.save(
        folder, step=1, extra={"data": Position(100 + rank), "epoch": 3}
    )
    start(package, "1f1b", {"dp_replicate": 2}).pipe.save(
        f"{folder}/plain", step=1, extra={"data": Position(7), "place": rank}
    )
    position = Position(0)
    checkpoint = start(package, "1f1b", {"dp_shard": 2}).pipe.load(folder, extra={"data": position})
    assert checkpoint.extra == {"epoch": 3}
    assert not checkpoint.has_random_state
    return position.place


def refuse(rank: int, package: str, folder: str) -> list[str]:
    """What this rank says when the other one cannot save or load; then a step and a checkpoint."""
    run = start(package, "1f1b", {"pp": 2})
    messages = []

    def attempt(work: Any) -> None:
        try:
            work()
        except PipegraphError as error:
            messages.append(f"{type(error).__name__}: {error}")
        assert list(Path(folder).iterdir()) == []

    run.train(0, 1)
    write_data = FileSystemWriter.write_data
    if rank == 1:

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        FileSystemWriter.write_data = full  # type: ignore[assignment, method-assign]
    attempt(lambda: run.save(folder, 1))
    run.save(folder, 1, background=True)
    attempt(run.pipe.wait_for_save)
    FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    foreign = torch.optim.SGD(run.pipe.parameters() if rank == 0 else [torch.zeros(1, requires_grad=True)])
    attempt(lambda: run.pipe.save(folder, foreign, step=1))
    attempt(lambda: run.pipe.save(folder, step=1 + rank))
    attempt(lambda: run.pipe.save(folder, step=1, extra={"a": 1, "b": 2} if rank else {"a": 1}))
    attempt(lambda: run.pipe.save(folder, run.optimizer if rank else None, step=1))
    attempt(lambda: run.load(folder))
    run.train(1, 2)
    run.save(folder, 2)
    return messages


def killed(rank: int, package: str, folder: str) -> str:
    """A rank is killed while it writes. What the other one says."""
    run = start(package, "1f1b", {"pp": 2}, timeout=20)
    run.save(folder, 1)

    def end(*_: Any) -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        FileSystemWriter.write_data = end  # type: ignore[assignment, method-assign]
    try:
        run.save(folder, 2)
    except PipegraphError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def die_before_the_first_save(rank: int, package: str, folder: str) -> tuple[str, float]:
    """A rank is killed once all are connected. What the other one says, and after how many seconds."""
    run = start(package, "1f1b", {"pp": 2}, timeout=TIMEOUT_SECONDS)
    run.pipe.prepare_save()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        run.save(folder, 1, background=True)
        run.pipe.wait_for_save()
    except PipegraphError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "saved", 0.0


def fail_beside(rank: int, package: str, folder: str, late: str) -> tuple[bool, str, str]:
    """Whether a pipeline is freed after it has saved; and what this rank says when a step fails during a save.

    Rank 1 continues with `late`, a method of the writer, when rank 0 has given up.
    """
    run = start(package, "1f1b", {"pp": 2}, timeout=20)
    run.save(folder, 1, background=True)
    freed = weakref.ref(run.pipe)
    del run
    gc.collect()
    is_whole = freed() is None and Path(folder, "step-00000001").is_dir()
    run = start(package, "1f1b", {"pp": 2}, timeout=20)
    noticed = Event()
    write = getattr(FileSystemWriter, late)

    def wait(*arguments: Any) -> Any:
        noticed.wait(10)
        time.sleep(rank)
        return write(*arguments)

    def break_down(*_: Any) -> None:
        raise ValueError("broken on purpose")

    setattr(FileSystemWriter, late, wait)
    run.save(folder, 2, background=True)
    if rank == 1:
        next(iter(run.pipe.stages.values())).register_forward_pre_hook(break_down)
    messages = []
    for work in (lambda: run.train(0, 1), run.pipe.wait_for_save):
        try:
            work()
        except PipegraphError as error:
            messages.append(f"{type(error).__name__}: {error}")
        noticed.set()
    return is_whole, messages[0], messages[1]


def stored_tensors(place: Path) -> StoredTensors:
    """The tensors of a checkpoint."""
    return StoredTensors(place, read_index(place).files)


def content(place: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, but for random states."""
    storage = stored_tensors(place)
    stored = storage.entries
    tensors = {
        name: torch.zeros(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in stored.items()
        if name.startswith(("model.", "optimizer."))
    }
    storage.read(tensors)
    return tensors
