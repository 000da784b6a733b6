"""On one machine, nobody else can connect to what the ranks listen on."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
import torch.distributed as dist

import pipegraph
from pipegraph import loopback
from pipegraph.graph.sources import load
from tests.runtime.packages import write
from tests.runtime.sketches import chain

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MODEL = """
import torch
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


example_inputs = (torch.zeros(2, 8),)
example_target = torch.zeros(2, 8)
loss_fn = nn.functional.mse_loss
"""

RANK = """
import sys, time
import torch
from pipegraph import Pipeline

pipe = Pipeline(sys.argv[1], kernels="autograd", loss_fn=lambda output, target: output.mean())
while True:
    pipe.step(torch.ones(2, 8))
    print("step", flush=True)
    time.sleep(0.05)
"""


def descendants(process: int) -> set[int]:
    """The process and all that it has started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it has ended
            continue
    processes = {process}
    while children := {child for child, parent in parents.items() if parent in processes} - processes:
        processes |= children
    return processes


def listening(processes: set[int]) -> set[str]:
    """The addresses at which sockets of these processes listen for connections."""
    inodes = set()
    for process in processes:
        for file in Path(f"/proc/{process}/fd").glob("*"):
            try:
                link = os.readlink(file)
            except OSError:
                continue
            inodes |= {match[1] for match in [re.fullmatch(r"socket:\[(\d+)\]", link)] if match}
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
                addresses.add(str(IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)))
    return addresses


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def watch(process: subprocess.Popen[str], lines: int = 3) -> set[str]:
    """The addresses at which its processes listen, from its start until it has printed `lines` lines."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    addresses, printed, deadline = set[str](), 0, time.monotonic() + 100
    while printed < lines:
        assert process.poll() is None and time.monotonic() < deadline
        addresses |= listening(descendants(process.pid))
        printed += len(process.stdout.readlines())
        time.sleep(0.02)
    return addresses


def is_loopback(address: str) -> bool:
    return loopback.is_loopback(address) or address == "::ffff:127.0.0.1"


def test_a_run_listens_on_loopback_alone(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    source = load(str(tmp_path / "model.py"))
    pipegraph.write_package(pipegraph.plan(pipegraph.capture(source.model, source.args), ["1"]), tmp_path / "package")
    options = ["--nproc", "2", "--kernels", "eager", "--steps", "100000", "--timeout", "60"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "nothing"}  # of a cluster
    run = ["-m", "pipegraph", "run", str(tmp_path / "package"), "--model", str(tmp_path / "model.py"), *options]
    with running(run, environment) as process:
        addresses = watch(process)
    assert addresses and all(map(is_loopback, addresses)), addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_ranks_with_a_store_on_loopback_listen_there_alone(host: str, tmp_path: Path) -> None:
    """Started as torchrun starts them, on one machine; rank 0 holds the store."""
    package, script = write(chain(2), tmp_path / "package"), tmp_path / "rank.py"
    script.write_text(RANK)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port}
    environments = [{**os.environ, **ranks, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    command = [str(script), str(package)]
    with running(command, environments[0]) as first, running(command, environments[1]) as second:
        addresses = watch(first) | watch(second)
    assert addresses and all(map(is_loopback, addresses)), addresses


def test_a_store_listens_on_loopback_alone() -> None:
    initial_addresses = listening({os.getpid()})
    store = loopback.open_store()
    assert listening({os.getpid()}) - initial_addresses <= {"127.0.0.1"}
    store.set("a", "b")
    assert dist.TCPStore("127.0.0.1", store.port, is_master=False).get("a") == b"b"
    with pytest.raises(OSError, match="in use"):
        loopback.open_store("127.0.0.1", store.port)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("192.0.2.1", False), ("no.such.host.invalid", False)],
)
def test_which_hosts_are_this_machine(host: str, expected: bool) -> None:
    assert loopback.is_loopback(host) is expected


def test_an_interface_that_the_user_names_stays_where_torchrun_started_the_ranks() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "eth7"}
    loopback.use_loopback(environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "lo"}
    loopback.use_loopback(environment, replace=True)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
