"""Compare output projection and cross entropy with gradients: fused, materialized, and torch.

    python benchmarks/loss.py [--dim 1024] [--dtype fp32 bf16] [--only NAME ...] [--device cuda]

Each variant runs in a separate process. torch before 2.13 has no F.linear_cross_entropy.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from runs import MIB, RESULTS, ROOT, read_parts, table, write_part
from torch import Tensor, nn
from torch.nn import functional as F

from titanlite.optim.losses import linear_cross_entropy_sum
from titanlite.runtime.world import keep_freed_memory

TOKENS = 4096
VOCABULARY = 128256
CALLS = 3
MAX_ERROR_TOKENS = 512  # float64 takes minutes for more
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INTRO = """\
The tables compare three ways to compute the output projection together with the cross-entropy loss.
Each method runs in a separate process, on {tokens:,} tokens with a vocabulary of {vocabulary:,}.
It computes the loss, the gradient of the hidden states, and the gradient of the output matrix.

- **fused:** `linear_cross_entropy_sum` in titanlite/optim/losses.py.
- **materialized:** `F.linear`, then `F.cross_entropy` in fp32, with all logits in memory.
- **F.linear_cross_entropy:** the torch function with `LinearCrossEntropyOptions()`.

The following table explains the columns of all tables in this section.

| column | meaning |
|---|---|
| seconds | median time of a call |
| memory | peak memory of a call, without inputs, loss and both gradients |
| ratio | time relative to the materialized version; the target is at most 1.05 |
| share | memory relative to the materialized version; the target is at most 10% |
| error of the loss | relative difference from a computation in float64, for {errors:,} tokens |
| error of a gradient | norm of the difference from float64, divided by the norm of the gradient |

**Bold** marks results that miss their target. For errors, the target is 1.05 times the error of the
materialized version, which keeps all logits in memory. Errors of at most 2e-7, roughly the rounding
error of fp32, always meet it.
"""


# Each variant takes hidden states (N, C), weights (V, C) and labels (N,), and returns the mean
# loss.


def materialized(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute all logits, then the cross-entropy in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


@functools.cache
def compile_materialized() -> Callable[..., Tensor]:
    """Compile `materialized` at the first call, because importing the compiler takes seconds."""
    return torch.compile(materialized)


def materialized_compiled(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute `materialized` in compiled kernels."""
    return compile_materialized()(hidden, weight, labels)


def fused(hidden: Tensor, weight: Tensor, labels: Tensor, compiled: bool = False) -> Tensor:
    """Compute the default loss of titanlite, which never holds all logits."""
    scale = torch.tensor(1.0 / len(labels), device=hidden.device)
    return linear_cross_entropy_sum(hidden[None], weight, labels[None], scale, compiled=compiled)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute the fused loss of torch."""
    options = nn.LinearCrossEntropyOptions()  # pyright: ignore[reportAttributeAccessIssue]
    return F.linear_cross_entropy(  # pyright: ignore[reportAttributeAccessIssue]
        hidden, weight, labels, options=options
    )


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "materialized": materialized,
    "fused": fused,
    "materialized, compiled": materialized_compiled,
    "fused, compiled": functools.partial(fused, compiled=True),
    "F.linear_cross_entropy": linear_cross_entropy,
}


def float64_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss with all operations in float64."""
    return F.cross_entropy(F.linear(hidden.double(), weight.double()), labels)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument(
        "--only", choices=VARIANTS, nargs="+", default=list(VARIANTS), metavar="VARIANT"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of loss.json")
    parser.add_argument(
        "--here", choices=("seconds", "memory"), help="measure one variant here and print its JSON"
    )
    return parser.parse_args()


def main() -> None:
    """Measure the chosen variants in child processes, store the results, and print the tables."""
    options = parse()
    if options.here == "seconds":
        print(json.dumps({"seconds": measure_seconds(options)}))
        return
    if options.here == "memory":
        print(json.dumps({"bytes": measure_memory(options), "errors": measure_errors(options)}))
        return

    sizes = {name: getattr(options, name) for name in ("dim", "tokens", "vocabulary", "calls")}
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else ""
    for dtype in options.dtype:
        part = f"{options.device}, dim {options.dim:,}, {dtype}"
        for variant in options.only:
            if variant == "F.linear_cross_entropy" and not hasattr(F, "linear_cross_entropy"):
                continue
            cost = measure_in_children(variant, dtype, options.device, sizes)
            stored = read_parts(options.out, "loss").get(part, {}).get("variants", {})
            result = {"sizes": sizes, "variants": stored | {variant: cost}}
            write_part(options.out, "loss", part, result, gpu)
    print("\n".join(tables(read_parts(options.out, "loss"))))


def measure_in_children(
    variant: str, dtype: str, device: str, sizes: dict[str, int]
) -> dict[str, Any]:
    """Measure the time, memory and errors of a variant, each in a new process.

    Returns:
        - "seconds": Seconds of each call.
        - "bytes": Peak memory of a call.
        - "errors": Relative errors of the loss and of both gradients.
    """
    command = [sys.executable, __file__, "--only", variant, "--dtype", dtype, "--device", device]
    for name, value in sizes.items():
        command += [f"--{name}", str(value)]

    # Without this threshold, the heap would keep the memory that the first call frees, and the
    # peak of the measured call would not show.
    memory_variables = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    cost: dict[str, Any] = {}
    for measurement, variables in (("seconds", {}), ("memory", memory_variables)):
        environment = os.environ | variables | {"PYTHONPATH": str(ROOT)}
        child = subprocess.run(
            [*command, "--here", measurement], env=environment, stdout=subprocess.PIPE, check=True
        )
        cost |= json.loads(child.stdout)
    return cost


def measure_seconds(options: argparse.Namespace) -> list[float]:
    """Return the seconds of each call of a variant, after one call to warm up."""
    loss_fn = VARIANTS[options.only[0]]
    inputs = random_inputs(options, options.tokens)
    keep_freed_memory()
    loss_and_gradients(loss_fn, *inputs)

    seconds = []
    for _ in range(options.calls):
        start = time.perf_counter()
        loss_and_gradients(loss_fn, *inputs)
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_memory(options: argparse.Namespace) -> int:
    """Return the peak memory of the second call, without its inputs and results, in bytes."""
    loss_fn = VARIANTS[options.only[0]]
    inputs = random_inputs(options, options.tokens)
    loss_and_gradients(loss_fn, *inputs)

    before = start_of_memory(options.device)
    results = loss_and_gradients(loss_fn, *inputs)
    result_bytes = sum(result.nbytes for result in results)
    return peak_of_memory(options.device) - before - result_bytes


def measure_errors(options: argparse.Namespace) -> list[float]:
    """Return the relative errors of the loss and of the gradients of hidden states and weights."""
    loss_fn = VARIANTS[options.only[0]]
    hidden, weight, labels = random_inputs(options, min(options.tokens, MAX_ERROR_TOKENS))
    # The fused loss overwrites `hidden`, so it runs last.
    exact_results = loss_and_gradients(float64_loss, hidden.double(), weight.double(), labels)
    results = loss_and_gradients(loss_fn, hidden, weight, labels)
    return [
        float((result.double() - exact).norm() / exact.norm())
        for result, exact in zip(results, exact_results, strict=True)
    ]


def random_inputs(options: argparse.Namespace, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalized hidden states (N, C), weights (V, C) and labels (N,)."""
    dtype = DTYPES[options.dtype[0]]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, options.dim, generator=generator)
    weight = torch.randn(options.vocabulary, options.dim, generator=generator).mul_(0.02)
    labels = torch.randint(options.vocabulary, (tokens,), generator=generator)
    return (
        hidden.to(options.device, dtype),
        weight.to(options.device, dtype),
        labels.to(options.device),
    )


def loss_and_gradients(
    loss_fn: Callable[..., Tensor], hidden: Tensor, weight: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss and the gradients of `hidden` and `weight`, and wait for the device."""
    hidden = hidden.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    loss = loss_fn(hidden, weight, labels)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    results = loss.detach(), hidden.grad, weight.grad
    if hidden.is_cuda:
        torch.cuda.synchronize()
    return results


def start_of_memory(device: str) -> int:
    """Return the allocated bytes, and reset the peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    return peak_of_memory(device)


def peak_of_memory(device: str) -> int:
    """Return the peak bytes since `start_of_memory`: allocated on a GPU, or the resident set."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def tables(parts: dict[str, Any]) -> list[str]:
    """Return Markdown tables that compare each variant with the materialized one."""
    sizes = next(iter(parts.values()))["sizes"]
    lines = [INTRO.format(errors=min(MAX_ERROR_TOKENS, sizes["tokens"]), **sizes)]
    columns = [
        "seconds",
        "ratio",
        "memory, MiB",
        "share",
        "error of the loss",
        "of d hidden",
        "of d weight",
    ]
    for name, part in parts.items():
        rows = [table_row(variant, part["variants"]) for variant in part["variants"]]
        lines += [f"Results for {name}:", "", *table([name, *columns], rows)]
        if "F.linear_cross_entropy" not in part["variants"]:
            lines += ["`F.linear_cross_entropy` needs torch 2.13 and was not measured.", ""]
    return lines


def table_row(variant: str, costs: dict[str, Any]) -> list[str]:
    """Return the cells of a variant, in which missed targets of the fused variants are bold."""
    base_name = "materialized, compiled" if variant.endswith("compiled") else "materialized"
    cost = costs[variant]
    base = costs[base_name]
    has_targets = variant.startswith("fused")

    def cell(value: float, target: float, form: str) -> str:
        text = f"{value:{form}}"
        return f"**{text}**" if has_targets and value > target else text

    seconds = statistics.median(cost["seconds"])
    time_ratio = seconds / statistics.median(base["seconds"])
    digits = 2 if seconds >= 1 else 5
    errors = [
        cell(error, max(1.05 * base_error, 2e-7), ".1e")
        for error, base_error in zip(cost["errors"], base["errors"], strict=True)
    ]
    return [
        variant,
        f"{seconds:.{digits}f}",
        cell(time_ratio, 1.05, ".2f"),
        f"{cost['bytes'] / MIB:,.0f}",
        cell(cost["bytes"] / base["bytes"], 0.1, ".1%"),
        *errors,
    ]


if __name__ == "__main__":
    main()
