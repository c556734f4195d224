"""Measures collectives of ranks on this machine, as a step meets them.

Invariant: the ranks compute before each collective, so its time has what they wait for the one that is late.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.observe import gpus

REPEATS, TURNS = 5, 3
# Numbers of 4 bytes in a tensor.
ON_CPU = tuple(2**n for n in (4, 10, 14, 16, 18, 20, 22))
ON_GPU = tuple(2**n for n in (10, 16, 20, 22, 24, 26))


def timed_collectives(ranks: int) -> list[gpus.Collective]:
    """Each collective of so many processes, at some sizes: the mean of the ranks that take part."""
    with tempfile.TemporaryDirectory() as folder:
        timed = in_processes(_collectives, ranks, ranks, str(Path(folder, "store")))
    found = []
    for op in dict.fromkeys(op for op, _ in timed[0]):
        sizes = sorted(size for other, size in timed[0] if other == op)
        means = [statistics.mean(each[op, size] for each in (timed[:2] if op == "send" else timed)) for size in sizes]
        for size, seconds in zip(sizes, _rising(means), strict=True):
            found.append(gpus.Collective(op=op, ranks=ranks, bytes=size, seconds=max(1e-6, seconds)))
    return found


def _rising(values: Iterable[float]) -> list[float]:
    """The nearest values that never fall: a larger tensor takes no less time. Neighbours that fall get their mean."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and statistics.mean(pools[-2]) > statistics.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [statistics.mean(pool) for pool in pools for _ in pool]


def link(timed: list[gpus.Collective]) -> dict[str, float]:
    """GB/s of a link in a ring, and the microseconds of a collective without content."""
    small, *_, large = sorted((each for each in timed if each.op == "all_gather"), key=lambda each: each.bytes)
    moved = (large.bytes - small.bytes) * (small.ranks - 1) / small.ranks
    hops = 1 if torch.cuda.is_available() else small.ranks - 1
    rate = moved / max(1e-9, large.seconds - small.seconds) / 1e9
    return {"link": rate, "latency_us": max(0.1, small.seconds * 1e6 / hops)}


def _collectives(rank: int, ranks: int, store: str) -> dict[tuple[str, int], float]:
    """(operation, bytes of the whole tensor) -> the seconds that it adds to what a rank computes before it.

    As in a step, the ranks compute and then meet, so each waits for the one that is late.
    """
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if is_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)

    def send(whole: Tensor) -> None:
        if rank < 2:
            dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0)

    # torch 2.13 has new names for them.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    operations: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "all_gather": gather,
        "reduce_scatter": lambda whole, part: reduce_scatter(part, whole),
        "all_reduce": lambda whole, _: dist.all_reduce(whole),
        "send": lambda whole, _: send(whole),
    }
    matrix = torch.ones(512, 512, device=device)

    def seconds(call: Callable[[], Any]) -> float:
        turns = []
        for _ in range(TURNS):
            dist.barrier()
            wait(device)
            started = time.perf_counter()
            for _ in range(REPEATS):
                torch.mm(torch.mm(matrix, matrix), matrix)
                call()
            wait(device)
            turns.append((time.perf_counter() - started) / REPEATS)
        return statistics.median(turns)

    alone = seconds(lambda: None)
    times: dict[tuple[str, int], float] = {}
    for numbers in ON_GPU if is_gpu else ON_CPU:
        part = torch.ones(numbers // ranks, device=device)
        whole = torch.ones(len(part) * ranks, device=device)
        for name, call in operations.items():
            times[name, whole.nbytes] = seconds(lambda call=call, whole=whole, part=part: call(whole, part)) - alone
    dist.destroy_process_group()
    return times


def in_processes(body: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """What `body(rank, *args)` returns in each of `count` processes that run at the same time."""
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        return pool.starmap(body, [(rank, *args) for rank in range(count)], chunksize=1)


def wait(device: torch.device) -> None:
    """Until the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
