"""Measures the rates of this machine: matmuls, attention, memory, collectives, and what launching a kernel costs.

Invariant: the kernels are those of titanlite's own step, timed one by one while it runs, so that a plan finds each of
them under the name that its trace uses.
"""

from __future__ import annotations

import os
import time

import torch

from titanlite.observe.gpus import Gpu

GIB = 2**30


def this_cpu() -> Gpu:
    """The cores and the memory of this machine, measured in about a second."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    side = 768
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, dtype=dtype) for _ in range(2))
        rates[dtype] = 2 * side**3 / _best(lambda a=a, b=b: a @ b) / 1e12
    data = torch.ones(32 << 20)
    bandwidth = 2 * data.nbytes / _best(lambda: data.clone()) / 1e9
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Gpu(
        name=f"{cores} CPU core{'s' if cores > 1 else ''}",
        cpu=True,
        memory_gib=memory / GIB,
        bf16=rates[torch.bfloat16],
        fp32=rates[torch.float32],
        bandwidth=bandwidth,
        link=bandwidth / 4,  # a collective of gloo copies each byte a few times
        network=1.0,
        host=bandwidth,
        latency_us=300.0,
        machine=cores,
        measured="one matmul and one copy, timed now",
    )


def _best(call: object, seconds: float = 0.15) -> float:
    """The shortest time of `call`, over so many seconds."""
    assert callable(call)
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best
