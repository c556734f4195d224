"""Words for a step or a start that ran out of memory: what the plan says of the peak, and what would help.

Invariant: the plan is made in another process, because this one has no memory left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.observe.forecast import plan_in_child
from titanlite.observe.gpus import GIB, gpu_of_device


class OutOfMemory(UserError):
    """A rank has no memory left. A start after it may succeed, if only the allocator's blocks were scattered."""

    exit_code = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host has refused memory."""
    refused = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return refused or isinstance(error, torch.OutOfMemoryError | MemoryError)


def explained(error: BaseException, run: Run, argv: Sequence[str], device: torch.device, when: str) -> OutOfMemory:
    """The error with the peak, what it consists of and the cheapest change that takes less memory.

    Args:
        argv: The command line of `run`.
        when: The part of the run in which it happened.
    """
    torch_says = (str(error).strip() or type(error).__name__).splitlines()[0]
    measured, options = "", ["--gpu", "cpu"]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        measured = f" Tensors took {torch.cuda.max_memory_allocated(device) / GIB:.2f} GiB at the most."
        name = getattr(gpu_of_device(properties.name), "name", properties.name).replace(" ", "-")
        options = ["--gpu", name, f"--memory={properties.total_memory / GIB}"]
    try:
        planned = plan_in_child(argv, run.world_size, "--remedies", *options).explain_memory()
    except UserError as failure:  # for example because the table has no such GPU
        planned = str(failure)
    return OutOfMemory(f"Out of memory {when}: {torch_says}{measured} {planned}")
