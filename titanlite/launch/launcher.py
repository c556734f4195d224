"""What ./run_train.sh starts: checks the job and the environment, then starts the ranks of this machine.

Invariant: a wrong job or variable is reported in a fraction of a second, before a process is started. On one machine
the launcher never imports torch, so that it needs little memory and time.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from titanlite.config.errors import UserError, one_line

NUMBERS = {  # environment variable -> least, most, meaning
    "NGPU": (1, 1024, "number of processes on this machine, one per GPU"),
    "NNODES": (1, 100_000, "number of machines, or the least and the most as in 1:2"),
    "NODE_RANK": (0, 100_000, "number of this machine, from 0"),
    "MASTER_PORT": (1, 65535, "a port of MASTER_ADDR that is free"),
    "MAX_RESTARTS": (0, 10**6, "how many times a crashed run is started again"),
}


def launch(argv: Sequence[str]) -> int:
    """Start `titanlite train ARGV` on every rank of this machine.

    ARGV may have --dry-run, too.

    Raises:
        UserError: the job, or a variable of the environment, is wrong, or the machines did not meet.
    """
    from titanlite.checkpoint.find import COMMAND, resume_hint
    from titanlite.launch import machines
    from titanlite.launch.ranks import Ranks
    from titanlite.load_run import load_run
    from titanlite.plan.start import foresee, without_dry_run
    from titanlite.runtime.logging import logged_ranks

    workers = _workers()
    least, _, most = os.environ.get("NNODES", "").partition(":")
    least, nodes = _number("NNODES", 1, least), _number("NNODES", 1, most or least)
    address, port, number = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 29500), _number("NODE_RANK", -1)
    if least > nodes or number >= nodes:
        raise UserError(f"NNODES={least}:{nodes}: no more than the most machines, and more than NODE_RANK={number}.")
    if nodes > 1 and not re.fullmatch(r"[\w.:%-]{1,253}", address, re.ASCII):
        given = one_line(address[:80])
        raise UserError(
            f"MASTER_ADDR={given}: NNODES={nodes} needs the address of the first machine, as others see it."
        )
    max_restarts, shown_ranks = _number("MAX_RESTARTS", 0), logged_ranks(workers * nodes)
    words, is_dry = without_dry_run(argv)
    run = load_run(words, workers * nodes)
    if least < nodes:
        load_run(words, workers * least)  # the run must also work on the fewest machines
    ranks = Ranks(
        ["-m", "titanlite", "train", *argv],
        range(workers),
        workers,
        shown_ranks,
        run.job.comm.preemption_seconds,
        max_restarts,
        resume_hint=lambda: resume_hint(run, argv),
    )
    if folder := os.environ.pop(machines.FOLDER, None):  # torch's agent has started this process for its machine
        return machines.run_part(Path(folder), ranks)
    foresee(run, words, workers, is_dry)
    set_here = [f"{name}={os.environ[name]}" for name in (*NUMBERS, "MASTER_ADDR") if os.environ.get(name)]
    os.environ[COMMAND] = " ".join([*set_here, os.environ.get(COMMAND, "titanlite launch")])
    _set_variables(workers, run.job.training.num_threads)
    if nodes == 1:
        return ranks.run()
    return machines.run_agent(argv, run, (least, nodes), address, port, number, max_restarts)


def launch_command(words: Sequence[str]) -> int:
    """Start `titanlite WORDS` on NGPU processes of this machine; returns the exit code. Raises UserError: NGPU is
    wrong."""
    from titanlite.launch.ranks import Ranks

    workers = _workers()
    _set_variables(workers, 0)
    return Ranks(["-m", "titanlite", *words], range(workers), workers).run()


def _workers() -> int:
    """The number of processes on this machine. Raises UserError: NGPU is wrong."""
    gpus = count_gpus()
    workers = _number("NGPU", gpus or 1)
    if 0 < gpus < workers:
        raise UserError(f"NGPU={workers}: this machine has {gpus}. (CUDA_VISIBLE_DEVICES= hides them: CPU processes.)")
    return workers


def _set_variables(workers: int, num_threads: int) -> None:
    """Set the environment variables of the ranks that the user has not set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # The threads of all processes together use each core once. More threads would slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads or max(1, cores // workers)))
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # so that a crash of native code shows the Python stack


def count_gpus() -> int:
    """Number of GPUs that a process of this machine sees, found without torch. 0 if there is no NVIDIA driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return 0
    gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    if visible is None:
        return gpus
    return min(gpus, sum(name.strip() not in ("", "-1") for name in visible.split(",")))


def _number(name: str, default: int, text: str | None = None) -> int:
    """The environment variable, or this part of it, as a number. Raises UserError."""
    least, most, meaning = NUMBERS[name]
    text = os.environ.get(name, "") if text is None else text
    if not os.environ.get(name):
        return default
    if not re.fullmatch(r"[0-9]{1,16}", text) or not least <= int(text) <= most:
        given = f"{name}={one_line(os.environ[name][:40])}"
        raise UserError(f"{given}: a whole number from {least} to {most} is allowed ({meaning}).")
    return int(text)
