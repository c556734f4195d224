"""Where the ranks of a run find each other.

Invariant: on one machine no port is opened for it; with several, only the address of MASTER_ADDR listens.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import FileStore, HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from titanlite.runtime.process import LISTENER, STORE


def meeting_store(rank: int, world_size: int, timeout: timedelta, port: int | None = None) -> Store | None:
    """The store of a world of ranks; None where another launcher, such as torchrun, says it by its own variables.

    Args:
        port: Free on the machine of rank 0, and equal on all ranks: for a second world of them, beside the first one.
    """
    if world_size == 1:
        return HashStore()
    if STORE not in os.environ:
        return None
    host, _, first_port = os.environ[STORE].rpartition(":")
    if not first_port.isdecimal():  # our launcher's file: a port is a name for another one
        store = FileStore(os.environ[STORE] if port is None else f"{os.environ[STORE]}-{port}")
        store.set_timeout(timeout)
        return store
    listener = None
    if rank == 0:
        listener = int(os.environ[LISTENER]) if port is None else socket.create_server((host, port)).detach()
    return TCPStore(
        host,
        int(first_port) if port is None else port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
