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

TOKENS, VOCABULARY, CALLS = 4096, 128256, 3
TOKENS_OF_ERRORS = 512  # in float64 they take minutes, too
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INTRO = """\
The tables compare three ways to compute the output projection together with the cross-entropy loss. Each method runs in
a process of its own, on {tokens:,} tokens with a vocabulary of {vocabulary:,}. It computes the loss and two gradients:
that of the hidden states and that of the output matrix.

- **fused:** `linear_cross_entropy_sum` in titanlite/optim/losses.py.
- **materialised:** `F.linear`, then `F.cross_entropy` in fp32, with all logits in memory.
- **F.linear_cross_entropy:** the torch function with `LinearCrossEntropyOptions()`.

The following table explains the columns of all tables in this section.

| column | meaning |
|---|---|
| seconds | median time of up to 3 calls |
| memory | peak memory of a call, without inputs, loss and both gradients |
| ratio, share | time and memory relative to the materialised version; the targets are at most 1.05 and at most 10% |
| error of the loss | relative difference from a computation in float64, for {errors:,} tokens |
| error of a gradient | norm of the difference from float64, divided by the norm of the gradient |

Ratios and shares are **bold** if they miss their target. An error is **bold** if it exceeds both 2e-7, which is the
rounding error of fp32, and 1.05 times the error of the materialised version.
"""


def mean(loss_sum: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the titanlite loss as a mean over tokens."""
    return lambda hidden, weight, labels: loss_sum(
        hidden[None], weight, labels[None], torch.tensor(1.0 / len(labels), device=hidden.device)
    )


def materialised(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def exactly(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)  # all in the inputs' dtype


@functools.cache
def compiled() -> Callable[..., Tensor]:
    """Return `materialised` compiled. Importing the compiler takes seconds."""
    return torch.compile(materialised)


def materialised_compiled(*args: Any) -> Tensor:
    return compiled()(*args)


def fused_compiled(*args: Any) -> Tensor:
    return linear_cross_entropy_sum(*args, compiled=True)


def torch_own(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions()  # pyright: ignore[reportAttributeAccessIssue]
    return F.linear_cross_entropy(hidden, weight, labels, options=options)  # pyright: ignore[reportAttributeAccessIssue]


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "materialised": materialised,
    "fused": mean(linear_cross_entropy_sum),
    "materialised, compiled": materialised_compiled,
    "fused, compiled": mean(fused_compiled),
    "F.linear_cross_entropy": torch_own,
}


def main() -> None:
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
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options)))
        return
    sizes = {name: getattr(options, name) for name in ("dim", "tokens", "vocabulary", "calls")}
    words = [str(word) for name, value in sizes.items() for word in (f"--{name}", value)] + [
        "--device",
        options.device,
    ]
    # Without the threshold the heap keeps what a call has freed, and the next one's memory would
    # not be seen.
    environments = {"seconds": {}, "memory": {"MALLOC_MMAP_THRESHOLD_": str(MIB)}}
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else ""
    for dtype in options.dtype:
        part = f"{options.device}, dim {options.dim:,}, {dtype}"
        for variant in options.only:
            if variant == "F.linear_cross_entropy" and not hasattr(F, "linear_cross_entropy"):
                continue
            cost: dict[str, Any] = {}
            for what, environment in environments.items():
                command = [
                    sys.executable,
                    __file__,
                    "--here",
                    what,
                    "--only",
                    variant,
                    "--dtype",
                    dtype,
                    *words,
                ]
                environment = os.environ | environment | {"PYTHONPATH": str(ROOT)}
                ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
                cost |= json.loads(ended.stdout)
            known = read_parts(options.out, "loss").get(part, {}).get("variants", {})
            result = {"sizes": sizes, "variants": known | {variant: cost}}
            write_part(options.out, "loss", part, result, gpu)
    print("\n".join(tables(read_parts(options.out, "loss"))))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one variant: seconds of each call, or peak memory and errors."""
    loss_fn, dtype = VARIANTS[options.only[0]], DTYPES[options.dtype[0]]
    inputs = random_inputs(options, options.tokens, dtype)
    if options.here == "seconds":
        keep_freed_memory()
    loss_and_gradients(loss_fn, *inputs)
    if options.here == "seconds":
        seconds = []
        for _ in range(options.calls):
            start = time.perf_counter()
            loss_and_gradients(loss_fn, *inputs)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}
    before = start_of_memory(options.device)
    results = loss_and_gradients(loss_fn, *inputs)
    held = sum(result.nbytes for result in results)
    memory = peak_of_memory(options.device) - before - held
    inputs = random_inputs(options, min(options.tokens, TOKENS_OF_ERRORS), dtype)
    exact = loss_and_gradients(exactly, inputs[0].double(), inputs[1].double(), inputs[2])
    errors = [
        float((found.double() - true).norm() / true.norm())
        for found, true in zip(loss_and_gradients(loss_fn, *inputs), exact, strict=True)
    ]
    return {"bytes": memory, "errors": errors}


def random_inputs(
    options: argparse.Namespace, tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalized hidden states (N, C), weights (V, C) and labels (N,)."""
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
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
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
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def tables(parts: dict[str, Any]) -> list[str]:
    """Return a Markdown table that compares each variant with the materialized one."""
    sizes = next(iter(parts.values()))["sizes"]
    lines = [INTRO.format(errors=min(TOKENS_OF_ERRORS, sizes["tokens"]), **sizes)]
    header = [
        "seconds",
        "ratio",
        "memory, MiB",
        "share",
        "error of the loss",
        "of d hidden",
        "of d weight",
    ]
    for name, part in parts.items():
        rows = []
        for variant, cost in part["variants"].items():
            base = part["variants"]["materialised" + ", compiled" * variant.endswith("compiled")]
            bold = "**" if variant.startswith("fused") else ""
            seconds = statistics.median(cost["seconds"])
            slower = seconds / statistics.median(base["seconds"])
            share = cost["bytes"] / base["bytes"]
            rows.append(
                [
                    variant,
                    f"{seconds:.{2 if seconds >= 1 else 5}f}",
                    _judged(slower, 1.05, ".2f", bold),
                ]
            )
            rows[-1] += [f"{cost['bytes'] / MIB:,.0f}", _judged(share, 0.1, ".1%", bold)]
            pairs = zip(cost["errors"], base["errors"], strict=True)
            rows[-1] += [
                _judged(ours, max(1.05 * theirs, 2e-7), ".1e", bold) for ours, theirs in pairs
            ]
        lines += table([name, *header], rows)
        if "F.linear_cross_entropy" not in part["variants"]:
            lines += ["`F.linear_cross_entropy` needs torch 2.13 and was not measured.", ""]
    return lines


def _judged(value: float, most: float, form: str, bold: str) -> str:
    return f"{bold}{value:{form}}{bold}" if value > most else f"{value:{form}}"


if __name__ == "__main__":
    main()
