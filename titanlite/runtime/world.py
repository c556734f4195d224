"""The world of ranks: its start and its end.

Invariant: one process is a world of size one, on the same path as many.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.model.attention import backend_order
from titanlite.runtime.hang_report import record_collectives
from titanlite.runtime.meeting import meeting_store


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


@contextmanager
def process_group(job: JobConfig) -> Iterator[torch.device]:
    """Start the world of ranks, which has size one without a launcher. Gives this rank's device."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
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
    record_collectives()
    timeout = timedelta(seconds=job.comm.init_timeout_seconds)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = meeting_store(rank, world_size, timeout)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    with backend_order(device):
        yield device
    dist.destroy_process_group()  # not after an error, because it would wait for ranks that wait for this one
