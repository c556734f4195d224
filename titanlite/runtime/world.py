"""Initialize and destroy the default process group of torch.distributed.

Invariant: A single process forms a process group of size one, so it runs the same code as several
ranks. A single-node run opens no port. A process can initialize one group after another.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, Store, rendezvous  # pyright: ignore

from titanlite.config.errors import ERROR_FOLDER, UserError
from titanlite.config.schema import JobConfig
from titanlite.runtime.attention_kernels import attention_kernels
from titanlite.runtime.process import STORE, set_up_torch

T = TypeVar("T")

# Parameters of mallopt(3).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def keep_freed_memory() -> None:
    """Configure glibc malloc to keep the memory of freed tensors for the next step.

    By default, glibc returns the memory of large tensors to the operating system. Each step then
    gets new pages, which the system must first fill with zeros. On a CPU, this takes a tenth of a
    training step. With another C library, this function does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)  # bytes, the largest int
    mallopt(M_MMAP_THRESHOLD, 2**30)
    if torch.get_num_threads() == 1:
        # Use one heap for all threads. Otherwise, gloo threads get separate heaps, which hold 10 MB
        # per rank that are never freed. With several compute threads, keep separate heaps, because
        # waiting for the lock of a shared heap would take a fifth of a step.
        mallopt(M_ARENA_MAX, 1)


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather a value from every rank of a group. All ranks of the group must call this together.

    Args:
        value: Value of this rank. It is pickled.
        group: Process group. None means all ranks.

    Returns:
        The values of all ranks in rank order, the same list on every rank.
    """
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def set_timeout(groups: Iterable[dist.ProcessGroup], seconds: int) -> None:
    """Set the timeout of all later collectives of process groups.

    Args:
        groups: The process groups.
        seconds: Time after which a collective that waits for another rank fails.
    """
    for group in groups:
        group.set_timeout(timedelta(seconds=seconds))


_worlds = count()


@cache
def _rendezvous(world_size: int, timeout: timedelta, file: str | None) -> Store:
    """Return the store through which the ranks connect.

    All process groups of this process share it, so the result is cached.

    Args:
        world_size: Number of ranks.
        timeout: Longest time to wait for the other ranks.
        file: File of the store, which the titanlite launcher chooses on a single node. If None, use
            the address in MASTER_ADDR and MASTER_PORT.

    Raises:
        UserError: If there are several ranks without a titanlite launcher, and the address is
            missing or invalid, or the ranks cannot connect to it.
    """
    if world_size == 1:
        return HashStore()
    if file is None:
        return _connect_by_address(world_size, timeout)
    store = FileStore(file)  # a file avoids the need for a free port
    store.set_timeout(timeout)
    return store


def _connect_by_address(world_size: int, timeout: timedelta) -> Store:
    """Connect to the other ranks at the address in MASTER_ADDR and MASTER_PORT.

    Args:
        world_size: Number of ranks.
        timeout: Longest time to wait for the other ranks.

    Raises:
        UserError: If there is no titanlite launcher, and the address is missing or invalid, or the
            ranks cannot connect to it.
    """
    try:
        # "env://" reads MASTER_ADDR and MASTER_PORT, and yields store, rank and world size.
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    except (ValueError, dist.DistNetworkError, dist.DistStoreError) as error:
        # The launcher sets valid variables, and restarts a run after a lost connection.
        was_started_by_launcher = ERROR_FOLDER in os.environ
        if was_started_by_launcher:
            raise

        # A variable is missing or invalid, or the ranks have not connected in time.
        first_line = str(error).partition("\n")[0]  # without a C++ stack
        reason = first_line.rstrip(".")
        raise UserError(
            "MASTER_ADDR and MASTER_PORT must name an address of the first rank that all ranks can "
            f"reach: {reason}. Start with torchrun, which sets them. On one node, you can also "
            f"unset WORLD_SIZE and set NGPU={world_size}. Then train with `titanlite launch` "
            "instead of `titanlite train`."
        ) from None
    return store


@contextmanager
def process_group(job: JobConfig, ends_process: bool = False) -> Iterator[torch.device]:
    """Initialize the default process group, and destroy it when the context ends.

    Also configure torch for training in this process. At the end, restore its number of threads and
    its determinism. Without a launcher, the group consists of this process only.

    Args:
        job: Job that determines the backend, timeouts, threads and seed.
        ends_process: Whether the process ends after this context. If so, keep the group after an
            error, so that a save in progress can complete, and do not clear the mesh cache.

    Yields:
        The device of this rank.

    Raises:
        UserError: If this process already has a process group, the ranks cannot connect, or the
            device lacks the attention kernels of the job.
    """
    if dist.is_initialized():
        raise UserError(
            "This process already has a process group, for example because another Trainer is "
            "still open. Close that Trainer: call close(), or use `with Trainer(job) as trainer:`."
        )
    set_up_torch()  # for programs that use the Python API; commands have called it before
    rank = _read_variable("RANK", 0)
    world_size = _read_variable("WORLD_SIZE", 1)
    local_rank = _read_variable("LOCAL_RANK", 0)
    local_world_size = _read_variable("LOCAL_WORLD_SIZE", 1)

    backend = "gloo"
    device = torch.device("cpu")
    if torch.cuda.is_available():
        # Offloaded gradients are on the CPU, which NCCL does not support.
        backend = "cpu:gloo,cuda:nccl" if job.training.enable_cpu_offload else "nccl"
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)

    with ExitStack() as settings:
        _configure_torch(job, device, local_world_size, settings)
        _configure_communication()

        timeout = timedelta(seconds=job.comm.init_timeout_seconds)
        store = _rendezvous(world_size, timeout, os.environ.get(STORE))
        group_number = next(_worlds)
        if group_number > 0:
            _clear_mesh_cache()  # after an error, the previous group has not cleared it
        # The keys of earlier process groups stay in the store, so each group gets a new prefix.
        store = PrefixStore(f"world-{group_number}", store)
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=rank, world_size=world_size
        )
        try:
            # Run the backward pass in this thread. DTensor has a mesh cache in each thread, and
            # only the cache of this thread can be cleared for the next process group.
            with attention_kernels(job, device), torch.autograd.set_multithreading_enabled(False):
                yield device
        except (Exception, KeyboardInterrupt):
            # With several ranks, destroying the group could hang while other ranks wait in it.
            if world_size == 1 and not ends_process:
                with suppress(Exception):  # the first error is more important
                    dist.destroy_process_group()
            raise
        dist.destroy_process_group()
        if not ends_process:
            _clear_mesh_cache()


def _read_variable(name: str, default: int) -> int:
    """Return the environment variable `name`, an integer that launchers set.

    If the variable is not set, set it to `default` first.
    """
    return int(os.environ.setdefault(name, str(default)))


def _configure_torch(
    job: JobConfig, device: torch.device, local_world_size: int, settings: ExitStack
) -> None:
    """Configure the threads, memory allocator and determinism of torch in this process.

    Args:
        job: Job to train.
        device: Device of this rank.
        local_world_size: Number of ranks on this node.
        settings: Exit stack that will restore the number of threads and the determinism.
    """
    settings.callback(torch.set_num_threads, torch.get_num_threads())
    _set_num_threads(job.training.num_threads, local_world_size)
    if device.type == "cpu":
        keep_freed_memory()

    # titanlite does not use the global random generator, but plugins may. Its state is also part of
    # checkpoints, which would otherwise differ between identical runs.
    torch.manual_seed(job.training.seed)
    if job.training.deterministic:
        # cuBLAS is deterministic only with a fixed workspace.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        settings.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)


def _set_num_threads(num_threads: int, local_world_size: int) -> None:
    """Set the number of CPU threads that torch uses in this process.

    Args:
        num_threads: Number of threads. If 0, use OMP_NUM_THREADS, or by default an equal share of
            the CPU cores of this node.
        local_world_size: Number of ranks on this node.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        cores = os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_world_size))


def _configure_communication() -> None:
    """Configure gloo for large runs, and record collectives so that hangs can be diagnosed.

    Let gloo open fewer sockets, and raise this process's limit on open files to the hard limit.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives in the flight recorder
    # Connect two ranks when they first exchange data. By default, gloo connects all pairs of ranks
    # in each group. With a few hundred ranks, this exceeds the descriptor limit of a process.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # Rank 0 has a connection from every other rank, so the usual soft limit of 1024 open files and
    # sockets is too low for large runs.
    if sys.platform == "linux":
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def _clear_mesh_cache() -> None:
    """Clear the cache of DTensor, which holds device meshes of destroyed process groups.

    Without this, DTensor would look up the names of destroyed groups, because a mesh of a new
    process group compares equal to a cached mesh, which contains these names.
    """
    # Imported here, because the import takes 0.4 s, which would delay the first batch.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
