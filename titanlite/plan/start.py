"""What happens before the processes of a run start: a plan, where one is asked for or needed, and a refusal.

Invariant: no torch here, because the launcher asks. A run whose memory is surely enough costs no more than a few
additions. A run is refused only if the tensors of its plan alone are more than the memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.load_run import broken_rules
from titanlite.observe.flops import num_params, state_bytes
from titanlite.observe.forecast import GIB, MIB, PLAN, plan_in_child
from titanlite.observe.gpus import gpu_of_device

Settings = Mapping[str, Any]
"""A change of a job: "section.key" -> value."""
HALF_STATE = {"optimizer.state_dtype": "bfloat16", "optimizer.stochastic_rounding": True}
BF16 = {"training.dtype": "bfloat16", "optimizer.stochastic_rounding": True}

DRY_RUN = "--dry-run"  # an option of `train` and `launch` beside the keys of a job
_BESIDE = 3 * GIB  # more than any allowance beside tensors that is not a share of them


def without_dry_run(argv: Sequence[str]) -> tuple[list[str], bool]:
    """The words of a command line without --dry-run, and whether it was there."""
    words = [word for word in argv if word.replace("_", "-") != DRY_RUN]
    return words, len(words) < len(argv)


def foresee(run: Run, argv: Sequence[str], ranks: int, dry_run: bool = False) -> None:
    """Plan a run that is about to start on `ranks` processes of this machine, and hand the plan down to them.

    The plan is made for a dry run, or if a quick upper bound does not show that the run fits.

    Args:
        argv: The command line of `run`.

    Raises:
        UserError: The run cannot fit. The message says what would: devices, or the cheapest change.
    """
    if PLAN in os.environ:  # the launcher has done so
        return
    name, memory = device_memory()
    device = None if name is None else gpu_of_device(name)
    total = memory if name else memory // ranks
    state = state_bytes(run)
    if state > total and not (name and run.job.training.enable_cpu_offload):  # no trace is needed to know
        raise UserError(
            f'model.flavor = "{run.job.model.flavor}", {num_params(run.arch):,} parameters: weights, gradients and '
            f"optimizer state take {state / GIB:.1f} GiB on each of {run.world_size} ranks, which has "
            f"{total / GIB:.1f} GiB. Take {run.world_size * state // total + 1:,} such devices or more, "
            'training.dtype = "bfloat16" (half of it), or a smaller model.'
        )
    if not dry_run and 1.1 * upper_bound(run) + _BESIDE < total:
        return
    try:
        if name is not None and device is None:
            raise UserError(f"No plan: this machine's GPU, {name}, is not in the table; see docs/planning.md.")
        options = ["--gpu", "cpu" if device is None else device.name.replace(" ", "-"), f"--memory={memory / GIB}"]
        plan = plan_in_child(argv, run.world_size, *options)
    except UserError as error:
        print(error, file=sys.stderr)
        return
    # Ranks that share a machine's memory take it as they need it.
    if (mean(plan.peaks.values()) if plan.shared else plan.peak) > total:
        raise UserError(f"This run cannot fit. {plan.explain_memory()}")
    if dry_run and not plan.fits:
        print(f"This run may not fit. {plan.explain_memory()}", file=sys.stderr)
    os.environ[PLAN] = plan.model_dump_json()


def device_memory() -> tuple[str | None, int]:
    """The name of this machine's first GPU and its bytes; without a GPU, None and the bytes of the machine."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1") and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        if found := re.match(r"(.+), *(\d+)\s", listed):
            return found[1], int(found[2]) * MIB
    return None, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def upper_bound(run: Run) -> int:
    """More bytes than any rank of the run takes at its peak. It says no more than that a run fits without a trace."""
    arch, degree, training = run.arch, run.degrees, run.job.training
    pipelined, matrices = degree.pipeline > 1, 2 * arch.vocab_size * arch.dim  # both on one rank without a pipeline
    # Stages may be uneven, so one may have twice the mean of the state.
    state = state_bytes(run) * (1 + pipelined) + 16 * matrices * degree.replicate // run.world_size
    # Gathered at once at the most: all weights, and their gradients in fp32 with the copy that is reduced.
    gathered = 12 * (num_params(arch) // (degree.pipeline * degree.tensor) + matrices // degree.tensor)
    tokens = training.local_batch_size * training.seq_len // degree.context
    loss = min(4096, tokens) * arch.vocab_size * 12 + matrices * 4 + tokens * arch.dim * 12
    waiting = run.microbatches if pipelined else 1
    mask = 4 * training.local_batch_size * training.seq_len**2 * waiting * run.job.dataset.document_mask
    # Twice what blocks keep, because beside it are copies in fp32, and what an allocator has not returned yet.
    kept = kept_by_blocks(run, waiting) * (1 + pipelined) + 3 * tokens * _kept_by_block(run)
    return int(state + gathered + 2 * (kept + loss) + mask)


def kept_by_blocks(run: Run, waiting: int) -> float:
    """About what the blocks of a rank keep for the backward passes of as many microbatches as are `waiting`, bytes."""
    training, recompute, arch = run.job.training, run.job.activation_checkpoint, run.arch
    of_token = _kept_by_block(run)
    if recompute.mode == "full":
        of_token = 4 * arch.dim / run.degrees.tensor  # its input
    elif recompute.mode == "selective" and recompute.selective_ac_option == "op":
        of_token *= 0.4  # of 8b: every second matmul and the attention
    tokens = training.local_batch_size * training.seq_len / run.degrees.context * waiting
    return tokens * of_token * arch.n_layers / run.degrees.pipeline


def _kept_by_block(run: Run) -> float:
    """Bytes that one token of a block keeps on one rank if nothing is recomputed: see model/llama.py, line by line."""
    arch, size = run.arch, {"float32": 4, "bfloat16": 2}[run.job.training.mixed_precision_param]
    # The residual stream and its norms, twice; queries, keys and values; SwiGLU; a tenth for rotary embedding in fp32.
    values = 7 * arch.dim + 2 * arch.n_kv_heads * arch.head_dim + 4 * arch.ffn_dim
    return 1.1 * (size + run.job.float8.enable) * values / run.degrees.tensor + size * arch.dim


def with_keys(run: Run, settings: Settings) -> Run:
    """The run with other values of some keys. Whether they break a rule is not asked."""
    job = run.job
    for key, value in settings.items():
        section, name = key.split(".")
        job = job.model_copy(update={section: getattr(job, section).model_copy(update={name: value})})
    return Run(job, run.world_size)


def changed(run: Run, settings: Settings) -> Run | None:
    """The run with other values of some keys; None if it breaks a rule then."""
    new = with_keys(run, settings)
    return None if broken_rules(new) else new


def options(settings: Settings) -> tuple[str, ...]:
    """The options of a command line that make these settings."""
    listed: list[str] = []
    for key, value in settings.items():
        section, name = key.split(".")
        listed.append(f"--{section}.no-{name}" if value is False else f"--{key}")
        listed += [] if isinstance(value, bool) else [str(value)]
    return tuple(listed)
