"""Profile a step: the most expensive kernels, idle time, and lower bounds of each part.

    python benchmarks/gpu_profile.py OUT.json TRACE.json.gz [options of `titanlite train`]

A lower bound is the FLOPs of a part divided by the speed of a large matmul, or its bytes divided by
the speed of a large copy, both measured on this GPU. FLOPs are counted as in
`titanlite.observe.flops`, without recomputed activations. Bytes count weights, gradients and
optimizer state.
"""

from __future__ import annotations

import gc
import gzip
import json
import statistics
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

WARMUP_STEPS = 4
TIMED_STEPS = 6
TRACED_STEPS = 2


def main() -> None:
    """Write the measurements to OUT.json after each stage, and the trace to TRACE.json.gz."""
    out, trace, *options = sys.argv[1:]
    run = load_run(options, world_size=1)
    with process_group(run.job) as device:
        rates = measure_rates(device)
        trainer = Trainer(run, device)
        attention = measure_attention(run.arch, run.job.training.seq_len, device)
        result: dict[str, Any] = {"rates": rates, "attention, ms": attention}
        write(Path(out), result)

        seconds_of_parts = time_parts(trainer, device)
        bounds = lower_bounds(trainer, rates)
        result["step, ms"] = 1e3 * sum(seconds_of_parts.values())
        result["parts"] = {
            name: {"ms": 1e3 * seconds, **bounds.get(name, {})}
            for name, seconds in seconds_of_parts.items()
        }
        write(Path(out), result)

        result |= trace_steps(trainer, device, trace)
        write(Path(out), result)
        trainer.close()


def time_parts(trainer: Trainer, device: torch.device) -> dict[str, float]:
    """Run some steps and return the median seconds of each part of a step, in execution order."""
    clock = Clock(device)
    watch_parts(trainer, clock)
    gc.collect()
    gc.disable()  # as in Trainer.train
    for _ in range(WARMUP_STEPS):
        trainer.step()
    clock.steps.clear()
    for _ in range(TIMED_STEPS):
        trainer.step()
    return clock.medians()


def trace_steps(trainer: Trainer, device: torch.device, path: str) -> dict[str, Any]:
    """Record some steps with the profiler, save the trace, and summarize its kernels."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(TRACED_STEPS):
            trainer.step()
        synchronize(device)
    profiler.export_chrome_trace(path)

    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return summarize_kernels(events, device.type)


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the current results."""
    path.write_text(json.dumps(result, indent=1))


class Clock:
    """Timestamps on the device timeline, which cause no host sync during a step."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.steps: list[list[tuple[str, Any]]] = []

    def mark(self, part: str) -> None:
        """Attribute the time since the last mark to `part`. An empty name starts a step."""
        if not part:
            self.steps.append([])
        now: Any = time.perf_counter()
        if self.is_cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.steps[-1].append((part, now))

    def medians(self) -> dict[str, float]:
        """Return the median seconds of each part over all steps, in execution order."""
        if self.is_cuda:
            torch.cuda.synchronize()
        seconds: dict[str, list[float]] = defaultdict(list)
        for marks in self.steps:
            for (_, before), (part, after) in pairwise(marks):
                if self.is_cuda:
                    seconds[part].append(before.elapsed_time(after) / 1e3)
                else:
                    seconds[part].append(after - before)
        return {part: statistics.median(times) for part, times in seconds.items()}


def watch_parts(trainer: Trainer, clock: Clock) -> None:
    """Mark the start and the end of each part of a step."""

    def wrapped(
        function: Callable[..., Any], after: str, before: str | None = None
    ) -> Callable[..., Any]:
        """Mark the end of part `before` before a call, and the end of `after` after it."""

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


def lower_bounds(trainer: Trainer, rates: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return lower bounds of each part in milliseconds, from FLOPs and bytes.

    Args:
        trainer: Trainer whose step is timed.
        rates: Result of `measure_rates`.
    """
    job = trainer.job
    arch = trainer.run.arch
    training = job.training
    num_tokens = training.local_batch_size * training.seq_len

    num_output_params = arch.vocab_size * arch.dim
    num_params_total = num_params(arch)
    num_tables = 1 if arch.tied_embeddings else 2
    num_block_params = num_params_total - num_tables * num_output_params  # includes all norms

    bf16_rate = rates["matmul, FLOP/s"]
    linear_rate = rates["FP8 matmul, FLOP/s"] if job.float8.enable else bf16_rate
    attention_flops = 2 * arch.n_layers * training.seq_len * arch.dim  # per token, causal
    forward = num_tokens * (2 * num_block_params / linear_rate + attention_flops / bf16_rate)
    seconds_by_flops = {
        "forward": forward,
        "loss and its gradients": num_tokens * 6 * num_output_params / bf16_rate,
        "backward": 2 * forward,
    }

    compute_bytes = 2 if training.mixed_precision_param == "bfloat16" else 4
    stored_bytes = 2 if training.dtype == "bfloat16" else 4
    moment_bytes = {"bfloat16": 2, "float32": 4, None: stored_bytes}[job.optimizer.state_dtype]
    sizes = {
        "forward": num_block_params * compute_bytes,
        "loss and its gradients": num_output_params * (compute_bytes + 4),
        "backward": num_block_params * compute_bytes + num_params_total * stored_bytes,
        # Clipping reads gradients for the norm, then reads and writes them to scale them.
        "clipping": num_params_total * stored_bytes * 3,
        # The optimizer reads gradients, and reads and writes parameters and two moments.
        "optimizer": num_params_total * (3 * stored_bytes + 4 * moment_bytes),
    }

    copy_rate = rates["copy, bytes/s"]
    bounds = {
        name: {"lower bound by bytes, ms": 1e3 * size / copy_rate} for name, size in sizes.items()
    }
    for name, seconds in seconds_by_flops.items():
        bounds[name]["lower bound by FLOPs, ms"] = 1e3 * seconds
    return bounds


def summarize_kernels(events: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Return the ten kernels of a trace that take the most time, and the idle share of the trace.

    On a CPU, operators are reported instead of kernels. They nest, so their times overlap.

    Args:
        events: Events of a Chrome trace.
        device: "cuda" or "cpu".
    """
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"} if device == "cuda" else {"cpu_op"}
    kernels = [event for event in events if event.get("ph") == "X" and event.get("cat") in kinds]
    # The profiler lacks permission to trace the GPU, or the GPU is simulated.
    if not kernels:
        return {"kernels": []}

    kernels.sort(key=lambda event: event["ts"])
    start = kernels[0]["ts"]
    end = start
    busy = 0.0
    durations: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        durations[kernel["name"]].append(kernel["dur"])
        kernel_end = kernel["ts"] + kernel["dur"]
        busy += max(0.0, kernel_end - max(end, kernel["ts"]))
        end = max(end, kernel_end)
    span = end - start

    slowest_first = sorted(durations.items(), key=lambda item: sum(item[1]), reverse=True)
    summary = [
        {
            "name": name[:200],
            "calls": len(times),
            "ms": sum(times) / 1e3,
            "share": sum(times) / span,
        }
        for name, times in slowest_first[:10]
    ]
    return {"traced, ms": span / 1e3, "idle share": 1 - busy / span, "kernels": summary}


def measure_rates(device: torch.device) -> dict[str, float]:
    """Measure FLOP/s of a large matmul in bf16 and FP8, and bytes/s of a large copy."""
    size = 512
    copied_bytes = 2**24
    if device.type == "cuda":
        size = 8192
        copied_bytes = 2**30
    matmul_flops = 2 * size**3

    a = torch.randn(size, size, device=device).bfloat16()
    b = torch.randn(size, size, device=device).bfloat16()
    bf16_rate = matmul_flops / seconds_per_call(lambda: a @ b, device)

    fp8_rate = bf16_rate
    if device.type == "cuda":
        a8 = a.to(torch.float8_e4m3fn)
        # The kernel needs the second matrix in column order.
        b8 = b.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)

        def multiply_fp8() -> Tensor:
            return torch._scaled_mm(  # pyright: ignore
                a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        fp8_rate = matmul_flops / seconds_per_call(multiply_fp8, device)

    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = seconds_per_call(lambda: target.copy_(source), device)
    return {
        "matmul, FLOP/s": bf16_rate,
        "FP8 matmul, FLOP/s": fp8_rate,
        "copy, bytes/s": 2 * copied_bytes / copy_seconds,
    }


def measure_attention(arch: Architecture, length: int, device: torch.device) -> dict[str, Any]:
    """Measure forward and backward pass of causal attention with each SDPA backend.

    Returns:
        Backend -> milliseconds, or the error message of a backend that rejects the shapes.
        "as trained" uses the backend that SDPA selects.
    """

    def random_heads(num_heads: int) -> Tensor:
        x = torch.randn(1, num_heads, length, arch.head_dim, device=device)
        return x.bfloat16().requires_grad_()

    q = random_heads(arch.n_heads)
    k = random_heads(arch.n_kv_heads)
    v = random_heads(arch.n_kv_heads)

    def attend() -> None:
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()

    backends = [SDPBackend.FLASH_ATTENTION]
    if device.type == "cuda":
        backends += [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    results: dict[str, Any] = {"as trained": 1e3 * seconds_per_call(attend, device)}
    for backend in backends:
        with sdpa_kernel(backend):
            try:
                results[backend.name] = 1e3 * seconds_per_call(attend, device)
            except RuntimeError as error:
                results[backend.name] = str(error).splitlines()[0]
    return results


def seconds_per_call(
    function: Callable[[], Tensor | None], device: torch.device, repeats: int = 50
) -> float:
    """Return the mean seconds per call.

    Many calls are timed, because the clocks of an idle GPU rise only under load.
    """
    for _ in range(3):
        function()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
