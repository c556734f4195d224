"""Profile a step: the most expensive kernels, idle time, and lower bounds of each part.

    python benchmarks/gpu_profile.py OUT.json TRACE.json.gz [options of `titanlite train`]

A lower bound is the FLOPs of a part divided by the speed of a large matmul, or its bytes divided by
the speed of a large copy, both measured on this GPU. FLOPs are counted as in
`titanlite.observe.flops`, without recomputation. Bytes count weights, gradients and optimizer
state.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from titanlite.config.flavors import Architecture
from titanlite.load_run import load_run
from titanlite.observe.flops import num_params
from titanlite.runtime.world import process_group
from titanlite.train import step
from titanlite.train.trainer import Trainer

WARM_UP, TIMED, TRACED = 4, 6, 2  # steps


def main() -> None:
    out, trace, *options = sys.argv[1:]
    run = load_run(options, world_size=1)
    with process_group(run.job) as device:
        result: dict[str, Any] = {"rates": (rates := measure_rates(device))}
        trainer = Trainer(run, device)
        result["attention, ms"] = measure_attention(run.arch, run.job.training.seq_len, device)
        write(Path(out), result)
        clock = Clock(device)
        watch_parts(trainer, clock)
        gc.collect()
        gc.disable()  # as in Trainer.train
        for _ in range(WARM_UP):
            trainer.step()
        clock.steps.clear()
        for _ in range(TIMED):
            trainer.step()
        parts = clock.medians()
        floors = part_floors(trainer, rates)
        result["step, ms"] = 1e3 * sum(parts.values())
        result["parts"] = {
            name: {"ms": 1e3 * parts[name], **floors.get(name, {})} for name in parts
        }
        write(Path(out), result)
        with profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * (device.type == "cuda"))]
        ) as profiler:
            for _ in range(TRACED):
                trainer.step()
            synchronize(device)
        profiler.export_chrome_trace(trace)
        with gzip.open(trace, "rt") as file:
            result |= device_time(
                json.load(file)["traceEvents"], "cuda" if device.type == "cuda" else "cpu"
            )
        write(Path(out), result)
        trainer.close()


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the current results."""
    path.write_text(json.dumps(result, indent=1))


class Clock:
    """Timestamps on the device timeline, which cause no host sync during a step."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.steps: list[list[tuple[str, Any]]] = []

    def mark(self, part: str) -> None:
        """Attribute the time since the last mark to `part`. An empty name starts a step."""
        if not part:
            self.steps.append([])
        now: Any = time.perf_counter()
        if self.cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.steps[-1].append((part, now))

    def medians(self) -> dict[str, float]:
        """Return the seconds of each part, in execution order."""
        if self.cuda:
            torch.cuda.synchronize()
        seconds: dict[str, list[float]] = defaultdict(list)
        for marks in self.steps:
            for (_, before), (part, after) in pairwise(marks):
                seconds[part].append(
                    before.elapsed_time(after) / 1e3 if self.cuda else after - before
                )
        return {part: sorted(times)[len(times) // 2] for part, times in seconds.items()}


def watch_parts(trainer: Trainer, clock: Clock) -> None:
    """Mark the start and the end of each part of a step."""

    def wrapped(
        function: Callable[..., Any], after: str, before: str | None = None
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                clock.mark(before)
            result = function(*args, **kwargs)
            clock.mark(after)
            return result

        return call

    forward_backward = trainer.forward_backward
    forward_backward.loss_fn = wrapped(
        forward_backward.loss_fn, "loss and its gradients", before="forward"
    )
    backward = wrapped(trainer.train_step.forward_backward, "backward", before="batch")
    trainer.train_step.forward_backward = backward  # pyright: ignore[reportAttributeAccessIssue]
    step.scale_gradients_ = wrapped(step.scale_gradients_, "clipping")
    trainer.optimizer.step = wrapped(trainer.optimizer.step, "optimizer")
    trainer.step = wrapped(trainer.step, "rest", before="")


def part_floors(trainer: Trainer, rates: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return lower bounds of each part in milliseconds, from FLOPs and bytes."""
    job, arch, training = trainer.job, trainer.run.arch, trainer.job.training
    tokens = training.local_batch_size * training.seq_len
    output = arch.vocab_size * arch.dim
    params = num_params(arch)
    blocks = params - output * (
        1 if arch.tied_embeddings else 2
    )  # the norms' few weights among them
    attention = 2 * arch.n_layers * training.seq_len * arch.dim  # FLOPs of a token, causal
    compute = 2 if training.mixed_precision_param == "bfloat16" else 4
    stored = 2 if training.dtype == "bfloat16" else 4
    moment = {"bfloat16": 2, "float32": 4, None: stored}[job.optimizer.state_dtype]
    high, linear = (
        rates["matmul, FLOP/s"],
        rates["FP8 matmul, FLOP/s"] if job.float8.enable else None,
    )
    copy = rates["copy, bytes/s"]
    forward = tokens * (2 * blocks / (linear or high) + attention / high)
    flops = {
        "forward": forward,
        "loss and its gradients": tokens * 6 * output / high,
        "backward": 2 * forward,
    }
    sizes = {
        "forward": blocks * compute,
        "loss and its gradients": output * (compute + 4),
        "backward": blocks * compute + params * stored,
        "clipping": params * stored * 3,  # read for the norm, read and written for the scaling
        "optimizer": params
        * (3 * stored + 4 * moment),  # the gradient and what is read and written
    }
    floors = {name: {"floor by bytes, ms": 1e3 * size / copy} for name, size in sizes.items()}
    for name, seconds in flops.items():
        floors[name]["floor by FLOPs, ms"] = 1e3 * seconds
    return floors


def device_time(events: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Return the ten most expensive kernels of a trace and its idle share.

    On a CPU, operators are reported instead of kernels. They nest, so their times overlap.
    """
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"} if device == "cuda" else {"cpu_op"}
    kernels = [event for event in events if event.get("ph") == "X" and event.get("cat") in kinds]
    if not kernels:  # the profiler may not be allowed to see the GPU, and a stand-in has none
        return {"kernels": []}
    kernels.sort(key=lambda event: event["ts"])
    totals: dict[str, list[float]] = defaultdict(list)
    busy, end = 0.0, kernels[0]["ts"]
    for kernel in kernels:
        totals[kernel["name"]].append(kernel["dur"])
        until = kernel["ts"] + kernel["dur"]
        busy += max(0.0, until - max(end, kernel["ts"]))
        end = max(end, until)
    span = end - kernels[0]["ts"]
    dearest = sorted(totals.items(), key=lambda item: -sum(item[1]))[:10]
    return {
        "traced, ms": span / 1e3,
        "idle share": 1 - busy / span,
        "kernels": [
            {
                "name": name[:200],
                "calls": len(times),
                "ms": sum(times) / 1e3,
                "share": sum(times) / span,
            }
            for name, times in dearest
        ],
    }


# ------------------------------------------------------------------------------------------------------ what there is


def measure_rates(device: torch.device) -> dict[str, float]:
    """Measure FLOP/s of a large matmul in bf16 and FP8, and bytes/s of a large copy."""
    size, copied = (8192, 2**30) if device.type == "cuda" else (512, 2**24)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    rates = {"matmul, FLOP/s": 2 * size**3 / seconds(lambda: a @ b, device)}
    rates["FP8 matmul, FLOP/s"] = rates["matmul, FLOP/s"]
    if device.type == "cuda":
        low, one = (torch.float8_e4m3fn, torch.ones((), device=device))
        a8, b8 = a.to(low), b.to(low).t()  # the second one by columns, as the kernel asks
        options = {
            "scale_a": one,
            "scale_b": one,
            "out_dtype": torch.bfloat16,
            "use_fast_accum": True,
        }

        def multiply_fp8() -> Tensor:
            return torch._scaled_mm(a8, b8, **options)  # pyright: ignore

        rates["FP8 matmul, FLOP/s"] = 2 * size**3 / seconds(multiply_fp8, device)
    source = torch.empty(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates["copy, bytes/s"] = 2 * copied / seconds(lambda: target.copy_(source), device)
    return rates


def measure_attention(arch: Architecture, length: int, device: torch.device) -> dict[str, Any]:
    """Measure causal attention, forward and backward, with each backend and the default order."""
    shapes = [
        (1, heads, length, arch.head_dim)
        for heads in (arch.n_heads, arch.n_kv_heads, arch.n_kv_heads)
    ]
    q, k, v = (torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes)

    def attend() -> None:
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()

    results: dict[str, Any] = {"as trained": 1e3 * seconds(attend, device)}
    backends = (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    )
    for backend in backends if device.type == "cuda" else (SDPBackend.FLASH_ATTENTION,):
        with sdpa_kernel(backend):
            try:
                results[backend.name] = 1e3 * seconds(attend, device)
            except RuntimeError as error:  # it does not take these shapes
                results[backend.name] = str(error).splitlines()[0]
    return results


def seconds(
    function: Callable[[], Tensor | None], device: torch.device, repeats: int = 50
) -> float:
    """Return the mean seconds of a call over many calls, because clocks rise from idle."""
    for _ in range(3):
        function()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
