"""What a step in bfloat16 does where its linear layers are converted to FP8, on a device that has FP8.

Invariant: `titanlite.parallel.float8` decides which layers are converted.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from titanlite.config.run import Run
from titanlite.model.llama import TransformerBlock
from titanlite.parallel.float8 import is_converted
from titanlite.plan.counts import Work


def in_fp8(run: Run, work: Iterable[Work]) -> Iterator[Work]:
    """`work` with the matmuls of converted layers in FP8, and the casts of their inputs: read twice, for the scale and
    for the cast, and written in one byte."""
    training, shares = run.job.training, _converted_shares(run)
    tokens = training.local_batch_size * training.seq_len // run.degrees.context
    for each in work:
        sides = list(each.shape)
        if len(sides) == 3 and tokens in sides and each.dtype == "bfloat16":
            sides.remove(tokens)
        count = round(each.count * shares.get((min(sides), max(sides)), 0.0)) if len(sides) == 2 else 0
        if count < each.count:
            yield _times(each, each.count - count)
        if count:
            m, k, n = each.shape
            fp8 = _times(each, count)
            yield replace(fp8, dtype="float8_e4m3fn", bytes=fp8.bytes // 2)
            yield Work(each.phase, "float8.cast", each.dtype, (), count, 0, count * 5 * (m * k + k * n))


def _times(work: Work, count: int) -> Work:
    """So many of the kernels of an entry."""
    return replace(work, count=count, flops=work.flops * count // work.count, bytes=work.bytes * count // work.count)


def _converted_shares(run: Run) -> dict[tuple[int, int], float]:
    """The sides of a weight on a rank, smaller one first -> the share of the linear layers with such sides that are
    converted to FP8. With tensor parallelism one of the sides is split, which one depends on the layer."""
    degree, sizes, converted = run.degrees.tensor, Tally[tuple[int, int]](), Tally[tuple[int, int]]()
    with torch.device("meta"):
        block = TransformerBlock(run.arch)
    for name, layer in block.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        inner, outer = layer.in_features, layer.out_features
        splits = {(inner // degree, outer), (inner, outer // degree)}
        names = [f"layers.{number}.{name}" for number in range(run.arch.n_layers)]
        chosen = sum(is_converted(name, (inner, outer), run.job.float8) for name in names)
        for sides in {(min(split), max(split)) for split in splits}:
            sizes[sides] += len(names)
            converted[sides] += chosen
    return {sides: converted[sides] / count for sides, count in sizes.items()}
