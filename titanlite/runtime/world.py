"""The world of ranks: its start and its end.

Invariant: one process is a world of size one, on the same path as many.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.model.attention import backend_order
from titanlite.runtime.hang_report import record_collectives
from titanlite.runtime.meeting import meeting_store


def keep_freed_memory() -> None:
    """Let glibc take large tensors from its heap, and keep what they free for the next step. It would map fresh pages
    for each of them, which the kernel must zero: a tenth of a step on a CPU. Other C libraries stay as they are."""
    if platform.libc_ver()[0] != "glibc":
        return
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # numbers of mallopt(3)
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(trim_threshold, 2**31 - 1)  # bytes, as much as an int holds
    mallopt(mmap_threshold, 2**30)
    if torch.get_num_threads() == 1:  # several would wait for one another, a fifth of a step
        mallopt(arena_max, 1)  # or what gloo's threads leave behind in heaps of their own is 10 MB a rank


def use_large_pages() -> None:
    """Gather the heap, which has its size after the first step, into pages of 2 MB: the processor looks up fewer of
    them, 1 to 4% of a step. Linux only; where the kernel (before 6.1) or its settings refuse, pages stay small."""
    if sys.platform != "linux":
        return
    madvise, collapse = ctypes.CDLL(None).madvise, 25  # MADV_COLLAPSE; mmap has no name for it
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            for advice in (mmap.MADV_HUGEPAGE, collapse):  # pages to come, and those that are there
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


@contextmanager
def process_group(job: JobConfig) -> Iterator[torch.device]:
    """The world of ranks, of size one without a launcher, and this rank's device."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"  # gloo serves offloaded gradients
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    if job.training.num_threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(job.training.num_threads or max(1, (os.cpu_count() or 1) // local_world_size))
    if device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(job.training.seed)  # nothing draws from it; but its state is saved, and must not be chance
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
    dist.destroy_process_group()  # not after an error: it would wait for ranks that wait for this one
