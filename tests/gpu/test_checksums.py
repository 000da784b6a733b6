"""Checksums of inputs on a GPU: those of a CPU, reported one call later, without waiting for them."""

from __future__ import annotations

import torch

from pipegraph.runtime.checksums import ABSENT, Checksums, checksum


def test_a_gpu_computes_the_checksums_of_a_cpu() -> None:
    for values in (torch.randn(5, 3), torch.randint(50, (7, 1000)), torch.randn(4, 3000).bfloat16()):
        assert int(checksum(values.cuda(), 0)) == int(checksum(values, 0))


def test_checksums_are_reported_with_the_next_call() -> None:
    checksums = Checksums(2, torch.device("cuda"))
    first, second = torch.tensor(5, device="cuda"), torch.tensor(7)
    assert checksums.report(1, [first, None]) == (0, (ABSENT, ABSENT))
    assert checksums.report(2, [first, second]) == (1, (5, ABSENT))
    assert checksums.report(3, [None, None]) == (2, (5, 7))
