"""Connections between the processes of one machine, which no other machine can reach.

By default a store of torch listens on all interfaces, and gloo and NCCL on the one that the machine's name stands for.
Who reaches them reads and writes what ranks send to each other; none of them asks for a password.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ADDRESS: Final = "127.0.0.1"
_INTERFACES: Final = ("lo", "lo0")  # of Linux, and of macOS
_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_WAITING: Final = 2048
"""Connections that may wait to be accepted: all ranks connect at once."""


def open_store(host: str = ADDRESS, port: int = 0, size: int | None = None, timeout: float = 300.0) -> TCPStore:
    """A store of this process that listens on a loopback address alone, at a free port by default.

    Args:
        host: a name or an address for which `is_loopback` holds.
        size: the number of processes that use it.
        timeout: seconds that a call waits.

    Raises:
        OSError: the port is taken.
    """
    from torch.distributed import TCPStore

    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=_WAITING)
    _, chosen, *_ = listener.getsockname()
    return TCPStore(
        host,
        chosen,
        size,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def is_loopback(host: str) -> bool:
    """Whether a name or an address stands for this machine, and no other machine can reach it by that."""
    try:
        addresses = [str(address[0]).partition("%")[0] for *_, address in socket.getaddrinfo(host, None)]
    except OSError:
        return False
    return all(ip_address(address).is_loopback for address in addresses)


def use_loopback(environment: MutableMapping[str, str], replace: bool = False) -> None:
    """Let gloo and NCCL listen on the loopback interface alone, in processes with this environment.

    It has to be set before their first connection. Nothing is set on a system whose interface is not known.

    Args:
        environment: to which it is added.
        replace: whether it takes the place of an interface that is named there.
    """
    interfaces = [name for _, name in socket.if_nameindex() if name in _INTERFACES]
    for variable in _VARIABLES if interfaces else ():
        if replace or not environment.get(variable):
            environment[variable] = interfaces[0]


def is_one_machine() -> bool:
    """Whether the environment is that of a launcher that has started all processes on this machine."""
    size = os.environ.get("WORLD_SIZE")
    return size is not None and os.environ.get("LOCAL_WORLD_SIZE") == size
