"""Represent the result of `titanlite plan`: memory, time, and changes that would make a run fit.

Invariant: a `Forecast` is plain data. A run that is out of memory starts the planner in a separate
process, and reads the forecast from its output to explain what went wrong.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from titanlite.config.errors import UserError
from titanlite.config.models import FileModel
from titanlite.observe.gpus import GIB
from titanlite.runtime.process import start_python

PLAN_SECONDS = 300
"""Maximum time to wait for the planner, in seconds."""

# Variables that a launcher sets for a rank. They are removed, because the planner is not a rank.
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TITANLITE_ERROR_FOLDER",
    "TITANLITE_STORE",
)


class TrainingTime(FileModel):
    """Estimated time of a whole training run.

    Fields that end with `_low` and `_high` are the bounds of 90% intervals.
    """

    tokens: int
    """Number of tokens to train on."""
    days: float
    days_low: float
    days_high: float
    gpu_hours: float
    """Hours of the run, multiplied by the number of GPUs."""
    gpu_hours_low: float
    gpu_hours_high: float


class Forecast(FileModel):
    """Estimated peak memory and step time of a training run.

    Memory fields describe the rank with the highest peak, and time fields the slowest rank.
    """

    job: str
    """Path of the job file."""
    world_size: int
    gpu: str
    """Name of the device that the estimates are for."""
    rank: int
    """Rank with the highest memory peak. Ranks with the same pipeline stages have the same peak."""
    peaks: dict[str, int]
    """Peak memory in bytes, keyed by rank. If several ranks have the same pipeline stages, only one
    of them is listed."""
    peak: int
    """Peak memory of tensors on the rank `rank`, in bytes."""
    moment: str
    """Description of the point in the step at which the peak occurs."""
    kinds: dict[str, int]
    """Memory at the peak in bytes, keyed by kind, such as weights or activations."""
    cpu_peak: int
    """Peak CPU memory that training.enable_cpu_offload uses, in bytes."""
    allowance: int
    """Estimated bytes that a rank needs in addition to `peak`: allocator overhead and libraries."""
    memory: int
    """Bytes available to a rank: the memory of its GPU, or on a CPU, its share of the node."""
    step_seconds: float
    """Seconds per optimizer step."""
    parts: dict[str, float]
    """Seconds for each part of an optimizer step, longest first."""
    hidden_seconds: float
    """Seconds of communication per step that overlap with computation."""
    tokens_per_second: float
    """Tokens per second of one device."""
    mfu: float
    """Model FLOPs utilization, with causal attention: fraction of the peak dense bfloat16 FLOP/s
    of the device, counting only the attention scores that the causal mask leaves visible."""
    mfu_full_attention: float
    """Model FLOPs utilization, with full attention: like `mfu`, but counting all attention scores,
    as torchtitan, PaLM and nanochat do."""
    training: TrainingTime | None = None
    """Time to train on the tokens in `titanlite plan --tokens`, or None without this option."""
    largest_local_batch_size: int | None = None
    """Largest number of sequences per forward pass that fits into memory.

    None if it was not requested, or if not even one sequence fits.
    """
    changes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Changes of the job that make the run fit, cheapest first.

    Each text gives the options, the memory that the run then needs, and the cost in speed.
    """

    @property
    def needs(self) -> int:
        """Bytes of device memory that a rank needs: its peak and the allowance for libraries."""
        return self.peak + self.allowance

    @property
    def fits(self) -> bool:
        """Whether a rank has enough device memory for its peak and the allowance for libraries."""
        return self.needs <= self.memory

    def explain_memory(self) -> str:
        """Return a paragraph that breaks down the memory peak and suggests how to make the job fit.

        Use it to explain why a run has run out of memory.
        """
        largest_first = sorted(self.kinds.items(), key=lambda kind: kind[1], reverse=True)
        kinds = ", ".join(f"{name} {size / GIB:.2f}" for name, size in largest_first if size > 0)
        return (
            f"The plan: peak memory {self.peak / GIB:.2f} GiB on rank {self.rank}, "
            f"in {self.moment}. In GiB: {kinds}. Allocator and libraries need about "
            f"{self.allowance / GIB:.1f} more; available are {self.memory / GIB:.1f}. "
            f"{self.remedy()}"
        )

    def remedy(self) -> str:
        """Return advice for the user: the cheapest change that makes the run fit into memory."""
        if self.changes:
            return f"Cheapest change that fits: {self.changes[0]}."
        return (
            "No single change of the job makes it fit. Use more or larger GPUs, or a smaller model."
        )


def plan_in_child(argv: Sequence[str], world_size: int, *options: str) -> Forecast:
    """Run `titanlite plan` for a job in a child process, and return its forecast.

    The child runs on the CPU, because this process may have used up the memory of its GPU.

    Args:
        argv: Arguments of `titanlite train` that describe the job.
        world_size: Number of ranks.
        options: Further options of `titanlite plan`, such as "--gpu=H100".

    Raises:
        UserError: If the child fails or takes longer than `PLAN_SECONDS`.
    """
    command = ["-m", "titanlite", "plan", "--json", "--quick", f"--world-size={world_size}"]
    try:
        exit_code, output, errors = _run_on_cpu([*command, *options, *argv])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"titanlite plan failed: {error}") from None

    if exit_code != 0:
        lines = errors.strip().splitlines() or [f"exit code {exit_code}"]
        raise UserError(f"titanlite plan failed: {lines[-1]}")
    return Forecast.model_validate_json(output)


def _run_on_cpu(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run Python in a child process without GPUs and without the environment variables of a rank.

    Args:
        arguments: Arguments of the Python interpreter, such as ["-m", "titanlite", "plan"].

    Returns:
        The exit code, and the text on standard output and on standard error.

    Raises:
        OSError: If the process cannot be started.
        subprocess.TimeoutExpired: If it takes longer than `PLAN_SECONDS`.
    """
    variables: dict[str, str | None] = dict.fromkeys(RANK_VARIABLES)  # None removes a variable
    variables["CUDA_VISIBLE_DEVICES"] = ""
    process = start_python(
        arguments,
        variables,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            output, errors = process.communicate(timeout=PLAN_SECONDS)
        finally:
            process.kill()  # ends it after a timeout or Ctrl-C, and otherwise does nothing
    return process.returncode, output, errors
