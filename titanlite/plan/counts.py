"""What one optimizer step of a rank takes, as `titanlite.plan.trace` counts it.

Invariant: all numbers are counted from kernels, storages and collectives of the step itself. None is an estimate, and
none depends on how fast a device is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Kernels that are alike.

    Attributes:
        phase: "forward", "backward" (with what is recomputed), or "optimizer" (with clipping).
        op: Name of the operator, without its overload: "aten.mm". `gpus.WRAPPER` for operators on tensor subclasses,
            which take Python's time only.
        dtype: Of its first floating-point input: "bfloat16", "float8_e4m3fn".
        shape: (m, k, n) of a matmul; (batch, heads, queries, keys, head_dim) of attention; () of others.
        count: Number of kernels in one optimizer step of this rank.
        flops: FLOPs of all of them; 0 for those that only move memory. Attention is counted with its causal half.
        bytes: Bytes that all of them read and write.
    """

    phase: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class Traffic:
    """Collectives that are alike.

    Attributes:
        phase: As `Work.phase`.
        op: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send" or "broadcast".
        group: The dimension of the world: "fsdp", "replicate", "tensor", "context", "pipeline", "data", "world".
        ranks: Number of ranks of the group.
        span: The distance from its first to its last rank, plus 1. The group lies within a machine if the machine has
            that many ranks.
        count: Number of collectives in one optimizer step of this rank.
        bytes: Bytes of all of them, each as large as the whole tensor: gathered, or to be reduced.
    """

    phase: str
    op: str
    group: str
    ranks: int
    span: int
    count: int
    bytes: int


@dataclass(frozen=True)
class RankTrace:
    """One optimizer step of a rank.

    Attributes:
        rank: Number of the rank. It stands for all ranks with the same pipeline stages.
        stages: The pipeline stages that it runs; (0,) without a pipeline.
        peak: The most bytes on the device at one time.
        moment: The part of the step in which the peak is: "backward of block 31", "optimizer", "loss".
        kinds: Kind of memory -> bytes at the peak. They add up to `peak`.
        host: The most bytes in host memory: weights, gradients and optimizer state with CPU offload.
        together: The most bytes at one time if device and host are one memory; `peak` without CPU offload.
        work: All kernels.
        traffic: All collectives.
        notes: What the counts leave out, in a sentence each.
    """

    rank: int
    stages: tuple[int, ...]
    peak: int
    moment: str
    kinds: Mapping[str, int]
    host: int
    together: int
    work: tuple[Work, ...]
    traffic: tuple[Traffic, ...]
    notes: tuple[str, ...] = ()
