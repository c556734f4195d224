"""The world of ranks: its start and its end.

Invariant: one process is a world of size one, on the same path as many. On one machine no port is opened. A process can
start one world after the other.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, Store, rendezvous  # pyright: ignore

from titanlite.config.errors import UserError
from titanlite.config.schema import JobConfig
from titanlite.model.attention import backend_order
from titanlite.runtime.process import STORE

T = TypeVar("T")


def keep_freed_memory() -> None:
    """Let glibc take large tensors from its heap and keep freed memory for the next step.

    By default it maps fresh pages for each large tensor, which the kernel must fill with zeros. That takes a tenth of a
    step on a CPU. With another C library this does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # numbers of mallopt(3)
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(trim_threshold, 2**31 - 1)  # bytes, the largest int
    mallopt(mmap_threshold, 2**30)
    if torch.get_num_threads() == 1:  # several threads would wait for one another, for a fifth of a step
        mallopt(arena_max, 1)  # otherwise gloo's threads have their own heaps, with 10 MB per rank that is never freed


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks of a group, in their order. All of them call it together. None: of the whole world."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def set_timeout(groups: Iterable[dist.ProcessGroup], seconds: int) -> None:
    """Set the longest wait for any later collective of these groups."""
    for group in groups:
        group.set_timeout(timedelta(seconds=seconds))


_worlds = count()


@cache
def _rendezvous(world_size: int, timeout: timedelta, file: str | None) -> Store:
    """The store in which the ranks find each other: in `file`, or as another launcher such as torchrun says.

    Raises:
        UserError: there are several ranks, but no launcher has said where they meet.
    """
    if world_size == 1:
        return HashStore()
    if file is not None:
        store = FileStore(file)
        store.set_timeout(timeout)
        return store
    try:
        return next(rendezvous("env://", timeout=timeout))[0]
    except ValueError as error:  # a variable is not set
        raise UserError(f"{error}. `NGPU={world_size} titanlite launch` or torchrun sets all.") from None


@contextmanager
def process_group(job: JobConfig) -> Iterator[torch.device]:
    """Start the world of ranks, which has size one without a launcher. Gives this rank's device."""
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    rank, world_size, local_rank, local_world_size = (
        int(os.environ.setdefault(name, str(number))) for name, number in alone.items()
    )
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"  # gloo is for offloaded gradients
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    if job.training.num_threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(job.training.num_threads or max(1, (os.cpu_count() or 1) // local_world_size))
    if device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(job.training.seed)  # nothing uses it, but its state is saved and must not be random
    if job.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch's flight recorder keeps the last collectives
    timeout = timedelta(seconds=job.comm.init_timeout_seconds)
    # The keys of an earlier world of this process stay in the store, so each world has a prefix of its own.
    store = PrefixStore(f"world-{next(_worlds)}", _rendezvous(world_size, timeout, os.environ.get(STORE)))
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    # A GPU's backward pass in this thread, as a CPU's: cuBLAS has 32 MiB, and DTensor its caches, for each thread.
    with backend_order(device), torch.autograd.set_multithreading_enabled(False):
        yield device
    dist.destroy_process_group()  # not after an error, because it would wait for ranks that wait for this one
    # DTensor remembers meshes. Those of a later world compare equal, although their process groups have other names.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # 0.4 s, for which the data would wait

    _clear_sharding_prop_cache()
