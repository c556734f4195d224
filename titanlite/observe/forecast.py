"""What a plan says about a run: memory, time and what would help. `titanlite plan --json` prints it.

Invariant: it is data. The planner makes it in a process of its own, and a run without memory left reads it from there.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from titanlite.config.errors import UserError
from titanlite.config.files import FileModel
from titanlite.observe.gpus import GIB
from titanlite.runtime.process import start_python

PLAN_SECONDS = 300  # after which a run that ends does not wait for its plan any longer


class Forecast(FileModel):
    """A plan of a run: the rank with the highest peak, and the time of the slowest rank."""

    job: str
    """The job file."""
    world_size: int
    gpu: str
    """The device that the plan is for."""
    rank: int
    """The rank with the highest peak. All ranks with the same pipeline stages have the same."""
    peaks: dict[str, int]
    """Rank -> its peak in bytes, for one rank of each kind."""
    peak: int
    """Bytes of tensors at the worst moment."""
    moment: str
    kinds: dict[str, int]
    """Kind of memory -> bytes at that moment."""
    host: int
    """Bytes in host memory (training.enable_cpu_offload)."""
    allowance: int
    """Bytes for allocator and libraries."""
    memory: int
    """Bytes that a rank has: of its device, or its share of the machine on a CPU."""
    step_seconds: float
    parts: dict[str, float]
    """What takes the time of a step -> seconds, the most first."""
    hidden_seconds: float
    """Seconds of communication behind other work."""
    tokens_per_second: float
    """Of one device."""
    mfu: float
    largest_local_batch_size: int | None = None
    """Rows per forward pass that still fit; None if it was not asked for, or if not even one fits."""
    changes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What makes the run fit, cheapest first: options, the memory that it takes then, and its price in speed."""

    @property
    def needs(self) -> int:
        """Bytes of a device that the run takes, allowance included."""
        return self.peak + self.allowance

    @property
    def fits(self) -> bool:
        """Whether there is room for the peak and for the allowance."""
        return self.needs <= self.memory

    def explain_memory(self) -> str:
        """The peak, when it is, what it consists of, and the cheapest change that fits."""
        kinds = sorted(self.kinds.items(), key=lambda kind: -kind[1])
        composition = ", ".join(f"{name} {size / GIB:.2f}" for name, size in kinds if size > 0)
        return (
            f"The plan: {self.peak / GIB:.2f} GiB at the peak, on rank {self.rank}, in {self.moment}. In GiB: "
            f"{composition}. Beside it about {self.allowance / GIB:.1f} for allocator and libraries; there are "
            f"{self.memory / GIB:.1f}. {self.remedy()}"
        )

    def remedy(self) -> str:
        """The cheapest change that makes the run fit."""
        if self.changes:
            return f"Cheapest change that fits: {self.changes[0]}."
        return "No single change of the job makes it fit: take more or larger devices, or a smaller model."


def plan_in_child(argv: Sequence[str], world_size: int, *options: str) -> Forecast:
    """The forecast of a command line's job, made by `titanlite plan` in another process.

    Args:
        argv: The words after `titanlite train`.
        options: Further options of `titanlite plan`, such as --gpu H100.

    Raises:
        UserError: the plan could not be made. The message says why in a line.
    """
    command = ["-m", "titanlite", "plan", "--json", "--quick", f"--world-size={world_size}", *options, *argv]
    # It needs no GPU, and this process may have filled it.
    alone, pipe = {**dict.fromkeys(_OF_A_RANK), "CUDA_VISIBLE_DEVICES": ""}, subprocess.PIPE
    try:
        with start_python(command, alone, text=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as child:
            try:
                out, err = child.communicate(timeout=PLAN_SECONDS)
            finally:
                child.kill()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"The plan could not be made: {error}") from None
    if child.returncode != 0:
        reason = (err.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise UserError(f"The plan could not be made: {reason}")
    return Forecast.model_validate_json(out)


# What a launcher tells a rank, which the planner must not take for its own.
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TITANLITE_ERROR_FOLDER", "TITANLITE_STORE")
