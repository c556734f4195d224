"""Explain an out-of-memory error: the predicted memory peak of the run, and how to reduce it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titanlite.checkpoint.find import resume_hint
from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.observe.forecast import plan_in_child
from titanlite.observe.gpus import GIB, gpu_of_device


class OutOfMemory(UserError):
    """Raised when a rank runs out of GPU or CPU memory.

    The launcher may restart the run, which can succeed if the memory was only fragmented.
    """

    exit_code = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that the GPU or the CPU has no memory left."""
    is_cpu_error = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return is_cpu_error or isinstance(error, torch.OutOfMemoryError | MemoryError)


def explain_out_of_memory(
    error: BaseException, run: Run, argv: Sequence[str], device: torch.device, when: str
) -> OutOfMemory:
    """Convert an out-of-memory error to an error that explains how to make the run fit.

    The message contains the memory peak that `titanlite plan` predicts, the cheapest change to the
    job that makes it fit, and the command that resumes the run.

    Args:
        error: The original error.
        run: The run that failed.
        argv: Command line of `run`.
        device: Device of this rank.
        when: Part of the run in which the error occurred, for example "at step 12".
    """
    message = str(error).strip() or type(error).__name__
    problem = f"Out of memory {when}: {message.splitlines()[0]}"
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        problem += f" The peak of allocated tensors was {peak / GIB:.2f} GiB."

    out_of_memory = OutOfMemory(f"{problem} {_predict_memory(run, argv, device)}")
    out_of_memory.add_note(resume_hint(run, argv))
    return out_of_memory


def _predict_memory(run: Run, argv: Sequence[str], device: torch.device) -> str:
    """Predict the memory peak of a run with `titanlite plan` and explain it for the error message.

    If the prediction fails, return the reason instead.
    """
    # Run the planner in a child process, because this process has no memory left.
    try:
        plan = plan_in_child(argv, run.world_size, "--remedies", *_planner_options(device))
        return plan.explain_memory()
    except UserError as failure:  # for example, if gpus.toml does not list the GPU
        return str(failure)


def _planner_options(device: torch.device) -> list[str]:
    """Return the options of `titanlite plan` that describe a device, such as ["--gpu", "cpu"]."""
    if device.type != "cuda":
        return ["--gpu", "cpu"]
    properties = torch.cuda.get_device_properties(device)
    gpu = gpu_of_device(properties.name)
    name = properties.name if gpu is None else gpu.name
    memory = properties.total_memory / GIB
    return ["--gpu", name.replace(" ", "-"), f"--memory={memory}"]
