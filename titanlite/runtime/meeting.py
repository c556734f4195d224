"""How the ranks of a run find each other.

Invariant: on one machine no port is opened. With several machines only the address of MASTER_ADDR listens.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import FileStore, HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from titanlite.config.errors import UserError
from titanlite.runtime.process import LISTENER, STORE


def meeting_store(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """The store of a world of ranks. None if another launcher, such as torchrun, describes it by its own variables.

    Raises:
        UserError: there are several ranks, but no launcher has said where they meet.
    """
    if world_size == 1:
        return HashStore()
    if STORE not in os.environ:
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise UserError(
                f"WORLD_SIZE={world_size}, but no {' and no '.join(missing)}: `NGPU={world_size} titanlite launch` or "
                "torchrun starts a world of several ranks. Unset WORLD_SIZE to train on one."
            )
        return None
    host, _, port = os.environ[STORE].rpartition(":")
    if not port.isdecimal():  # our launcher's file
        store = FileStore(os.environ[STORE])
        store.set_timeout(timeout)
        return store
    return TCPStore(
        host,
        int(port),
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=int(os.environ[LISTENER]) if rank == 0 else None,
    )
