"""What happens before the processes of a run start: a plan, where one is asked for or needed, and a refusal.

Invariant: no torch here. A run whose memory is surely enough costs no more than a few additions. A run is refused only
if the tensors of its plan alone are more than the memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.observe.flops import num_params, state_bytes
from titanlite.observe.forecast import GIB, PLAN, plan_in_child
from titanlite.observe.gpus import gpu_of_device
from titanlite.plan.advice import room_for_state
from titanlite.plan.bounds import upper_bound

DRY_RUN = "--dry-run"  # an option of `train` and `launch` beside the keys of a job
_BESIDE = 3 * GIB  # more than any allowance beside tensors that is not a share of them
MIB = 2**20


def without_dry_run(argv: Sequence[str]) -> tuple[list[str], bool]:
    """The words of a command line without --dry-run, and whether it was there."""
    words = [word for word in argv if word.replace("_", "-") != DRY_RUN]
    return words, len(words) < len(argv)


def foresee(run: Run, argv: Sequence[str], ranks: int, dry_run: bool = False) -> None:
    """Plan a run that is about to start on `ranks` processes of this machine, and hand the plan down to them.

    The plan is made if `job.plan` or a dry run asks for it, or if a quick upper bound does not show that the run fits.

    Args:
        argv: The command line of `run`.

    Raises:
        UserError: The run cannot fit. The message has the cheapest change that does.
    """
    if PLAN in os.environ:  # the launcher has done so
        return
    name, memory = device_memory()
    device = None if name is None else gpu_of_device(name)
    wanted = dry_run or run.job.job.plan
    total = memory if name else memory // ranks
    state = state_bytes(run)
    if state > total and not (name and run.job.training.enable_cpu_offload):  # no trace is needed to know
        raise UserError(
            f'model.flavor = "{run.job.model.flavor}", {num_params(run.arch):,} parameters: weights, gradients and '
            f"optimizer state take {state / GIB:.1f} GiB on each of {run.world_size} ranks, which has "
            f"{total / GIB:.1f} GiB. {room_for_state(run, total)}"
        )
    if not wanted and 1.1 * upper_bound(run) + _BESIDE < total:
        return
    if name is not None and device is None:
        if wanted:
            _say(f"No plan: this machine's GPU, {name}, is not in the table; see docs/planning.md.")
        return
    options = ["--gpu", "cpu" if device is None else device.name.replace(" ", "-"), f"--memory={memory / GIB}"]
    try:
        plan = plan_in_child(argv, run.world_size, *options)
    except UserError as error:
        return _say(f"{error}")
    if plan.exceeds(total):
        raise UserError(f"This run cannot fit. {plan.explain_memory()}")
    if wanted and not plan.fits:
        _say(f"This run may not fit. {plan.explain_memory()}")
    os.environ[PLAN] = plan.model_dump_json()


def device_memory() -> tuple[str | None, int]:
    """The name of this machine's first GPU and its bytes; without a GPU, None and the bytes of the machine."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1") and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
        if listed and "," in listed[0]:
            name, size = listed[0].rsplit(",", 1)
            if size.strip().isdecimal():
                return name.strip(), int(size) * MIB
    return None, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _say(message: str) -> None:
    print(message, file=sys.stderr)
