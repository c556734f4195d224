"""Measures collectives of ranks on this machine, as a step meets them.

Invariant: the ranks compute before each collective, so its time has what they wait for the one that is late.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.observe import gpus

REPEATS, TURNS = 4, 3
# Numbers of 4 bytes in a tensor.
ON_CPU = tuple(2**n for n in (4, 10, 14, 16, 18, 20, 22))
ON_GPU = tuple(2**n for n in (10, 16, 20, 22, 24, 26))


def timed_collectives(together: int, sizes: Sequence[int]) -> list[gpus.Collective]:
    """Each collective on tensors of some sizes: the mean of the ranks that take part.

    Args:
        together: Number of processes that run.
        sizes: Of the groups in which they meet.
    """
    with tempfile.TemporaryDirectory() as folder:
        timed = in_processes(_collectives, together, together, sizes, str(Path(folder, "store")))
    found = []
    for op, ranks in dict.fromkeys((op, ranks) for op, ranks, _ in timed[0]):
        counts = sorted(count for *other, count in timed[0] if other == [op, ranks])
        means = [statistics.mean(each[op, ranks, n] for each in timed if (op, ranks, n) in each) for n in counts]
        for count, mean in zip(counts, _rising(means), strict=True):
            seconds = max(1e-6, mean)
            found.append(gpus.Collective(op=op, ranks=ranks, together=together, bytes=count, seconds=seconds))
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


def _collectives(rank: int, together: int, sizes: Sequence[int], store: str) -> dict[tuple[str, int, int], float]:
    """(operation, ranks of a group, bytes of the whole tensor) -> the seconds that it adds to what a rank computes
    before it.

    As in a step, the ranks compute and then meet, so each waits for the one that is late.
    """
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if is_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=together)
    matrix = torch.ones(512, 512, device=device)

    def seconds(groups: Sequence[Any], call: Callable[[Any], Any]) -> float:
        turns = []
        for _ in range(TURNS):
            dist.barrier()
            wait(device)
            started = time.perf_counter()
            for _ in range(REPEATS):
                for group in groups:
                    torch.mm(torch.mm(matrix, matrix), matrix)
                    call(group)
            wait(device)
            turns.append((time.perf_counter() - started) / REPEATS / len(groups))
        return statistics.median(turns)

    alone = seconds([None], lambda _: None)
    times: dict[tuple[str, int, int], float] = {}
    for ranks in sizes:
        groups = _groups(together, ranks)
        for numbers in ON_GPU if is_gpu else ON_CPU:
            part = torch.ones(numbers // ranks, device=device)
            whole = torch.ones(len(part) * ranks, device=device)
            for name, call in _operations(whole, part).items():
                times[name, ranks, whole.nbytes] = seconds(groups, call) - alone
            if any(dist.get_rank(group) > 1 for group in groups):
                del times["send", ranks, whole.nbytes]  # it waited for nobody
    dist.destroy_process_group()
    return times


def _groups(together: int, ranks: int) -> list[Any]:
    """This rank's groups of a size along both dimensions of a mesh, as with FSDP and tensor parallelism: so the groups
    along one of them wait for each other, too."""
    count = together // ranks
    groups = [dist.new_subgroups(ranks)[0]]
    if count > 1:
        others = [list(range(first, together, count)) for first in range(count)]
        groups.append(dist.new_subgroups_by_enumeration(others)[0])
    return groups


def _operations(whole: Tensor, part: Tensor) -> dict[str, Callable[[Any], Any]]:
    # torch 2.13 has new names for them.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def send(group: Any) -> None:
        rank = dist.get_rank(group)
        if rank < 2:
            dist.send(whole, group=group, group_dst=1) if rank == 0 else dist.recv(whole, group=group, group_src=0)

    return {
        "all_gather": lambda group: gather(whole, part, group=group),
        "reduce_scatter": lambda group: reduce_scatter(part, whole, group=group),
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "send": send,
    }


def in_processes(body: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """What `body(rank, *args)` returns in each of `count` processes that run at the same time."""
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        return pool.starmap(body, [(rank, *args) for rank in range(count)], chunksize=1)


def wait(device: torch.device) -> None:
    """Until the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
