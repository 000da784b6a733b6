"""What is another one in torch for a time, in threads that begin and end it in any order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import TestCase

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from pipegraph.kernels.random_operations import RandomOps
from pipegraph.torch_private.fake_tensors import fake_tensors

TIMEOUT = 20.0


class ThreadInside:
    """A thread that is in a context until it is told to leave."""

    def __init__(self, context: Callable[[], AbstractContextManager[object]]) -> None:
        entered, self._leave = threading.Event(), threading.Event()

        def run() -> None:
            with context():
                entered.set()
                self._leave.wait(TIMEOUT)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert entered.wait(TIMEOUT)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()


def is_repeated_alike(reentrant: bool) -> bool:
    """Whether a dropout in a checkpoint has the same mask in the backward."""
    x = torch.ones(8, 64, requires_grad=True)
    y: Tensor = checkpoint.checkpoint(nn.Dropout(0.5), x, use_reentrant=reentrant)
    y.sum().backward()
    return x.grad is not None and torch.equal(x.grad, y)


@contextmanager
def drawing() -> Iterator[None]:
    with RandomOps(nn.Module(), "", key=lambda position: 1 + position).replacing():
        yield


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_a_thread_are_its_own(reentrant: bool) -> None:
    """While other threads take random numbers from keys, and after that."""
    of_torch = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction.forward
    first, second = ThreadInside(drawing), ThreadInside(drawing)
    assert is_repeated_alike(reentrant)
    with drawing():
        first.leave()
        assert is_repeated_alike(reentrant)
    assert is_repeated_alike(reentrant)
    second.leave()
    assert is_repeated_alike(reentrant)
    assert (checkpoint._CheckpointFrame, checkpoint.CheckpointFunction.forward) == of_torch


def test_torch_logs_as_before() -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    first, second = ThreadInside(fake_tensors), ThreadInside(fake_tensors)
    with TestCase().assertLogs(logger) as logged:
        logger.warning("of a thread that is in none")
        first.leave()
        second.leave()
        logger.warning("after both")
    assert [record.getMessage() for record in logged.records] == ["of a thread that is in none", "after both"]
