"""Run small programs with a planted race, and their correct versions, under the race detector.

`planted.py OUT` writes the JSON file OUT.0: name -> number of alarms of [the race, the correct
version].
"""

import ctypes
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard

SIZE = 2**20


def ones() -> Tensor:
    return torch.ones(SIZE, device="cuda")


def wait(waiting: Any, stream: Any, is_correct: bool) -> None:
    if is_correct:
        waiting.wait_stream(stream)


def other_stream_reads_early(is_correct: bool, main: Any, side: Any) -> Any:
    x = ones()
    wait(side, main, is_correct)
    with torch.cuda.stream(side):
        return x + 1


def freed_while_other_stream_reads(is_correct: bool, main: Any, side: Any) -> Any:
    x = ones()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        result = x + 1
    wait(main, side, is_correct)
    del x
    return ones(), result


def freed_in_other_stream_while_read(is_correct: bool, main: Any, side: Any) -> Any:
    with torch.cuda.stream(side):
        x = ones()
    main.wait_stream(side)
    x.add_(1)
    del x
    wait(side, main, is_correct)
    with torch.cuda.stream(side):
        return ones()


def pinned_overwritten_during_copy(is_correct: bool, main: Any, side: Any) -> Any:
    pinned = torch.ones(SIZE).pin_memory()
    copy = pinned.to("cuda", non_blocking=True)
    if is_correct:
        main.synchronize()
    pinned.fill_(3)
    return copy


def pinned_read_before_copy(is_correct: bool, main: Any, side: Any) -> Any:
    pinned = torch.empty(SIZE, pin_memory=True)
    pinned.copy_(ones(), non_blocking=True)
    if is_correct:
        main.synchronize()
    return pinned[:8].tolist()


def result_freed_during_reduction(is_correct: bool, main: Any, side: Any) -> Any:
    x = ones()
    result = ones()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        dist.reduce_scatter_tensor(result, x)
    wait(main, side, is_correct)
    del result
    return ones()


def result_allocated_before_wait(is_correct: bool, main: Any, side: Any) -> Any:
    """The reduction writes to memory that the main stream still uses (see memory_savers.py)."""
    x = ones()
    activation = ones()
    side.wait_stream(main)
    activation.mul_(2)
    del activation
    result = torch.empty(SIZE, device="cuda")
    wait(side, main, is_correct)
    with torch.cuda.stream(side):
        dist.reduce_scatter_tensor(result, x)
    return result


def gather_read_early(is_correct: bool, main: Any, side: Any) -> Any:
    result = ones()
    work: Any = dist.all_gather_into_tensor(result, ones(), async_op=True)
    if is_correct:
        work.wait()
    return result.sum(), work


def gather_input_overwritten(is_correct: bool, main: Any, side: Any) -> Any:
    x = ones()
    work: Any = dist.all_gather_into_tensor(ones(), x, async_op=True)
    if is_correct:
        work.wait()
    return x.zero_(), work


def weights_updated_during_copy(is_correct: bool, main: Any, side: Any) -> Any:
    weights = ones()
    pinned = torch.empty(SIZE, pin_memory=True)
    side.wait_stream(main)

    def copy() -> None:
        with torch.cuda.stream(side):
            pinned.copy_(weights, non_blocking=True)
        side.synchronize()

    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(copy)
        if is_correct:
            copied.result()
        weights.add_(1)


def fsdp_without_events(is_correct: bool, main: Any, side: Any) -> Any:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    wait_event = torch.cuda.Stream.wait_event
    ignored = wait_event if is_correct else lambda *_: None
    for step in range(3):
        with patch.object(torch.cuda.Stream, "wait_event", ignored if step else wait_event):
            model(torch.ones(64, 512, device="cuda")).sum().backward()
        optimizer.step()


RACES: list[Callable[[bool, Any, Any], Any]] = [
    other_stream_reads_early,
    freed_while_other_stream_reads,
    freed_in_other_stream_while_read,
    pinned_overwritten_during_copy,
    pinned_read_before_copy,
    result_freed_during_reduction,
    result_allocated_before_wait,
    gather_read_early,
    gather_input_overwritten,
    weights_updated_during_copy,
    fsdp_without_events,
]


def count_alarms(race: Callable[[bool, Any, Any], Any], is_correct: bool) -> int:
    detector = ctypes.CDLL("libcuda.so.1")
    earlier_alarms = detector.race_alarms()
    kept = race(is_correct, torch.cuda.current_stream(), torch.cuda.Stream())
    torch.cuda.synchronize()
    del kept
    torch.cuda.empty_cache()
    return detector.race_alarms() - earlier_alarms


if __name__ == "__main__":
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    num_alarms = {
        race.__name__: [count_alarms(race, fixed) for fixed in (False, True)] for race in RACES
    }
    Path(sys.argv[1] + ".0").write_text(json.dumps(num_alarms))
    dist.destroy_process_group()
