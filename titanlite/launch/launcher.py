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
    "NGPU": (1, 10**15, "number of processes on this machine, one per GPU"),
    "NNODES": (1, 100_000, "number of machines, or the least and the most as in 1:2"),
    "MAX_RESTARTS": (0, 10**15, "how many times a crashed run is started again"),
    "NODE_RANK": (0, 100_000, "number of this machine, from 0"),
    "MASTER_PORT": (1, 65535, "a port of MASTER_ADDR that is free"),
}
RANK_BYTES = 200 << 20  # the least memory that a process with torch needs


def launch(argv: Sequence[str]) -> int:
    """Start `titanlite train ARGV` on every rank of this machine.

    ARGV may have --dry-run, too.

    Raises:
        UserError: the job, or a variable of the environment, is wrong, or the machines did not meet.
    """
    from titanlite.checkpoint.find import COMMAND, is_saved, resume_hint
    from titanlite.launch import machines
    from titanlite.launch.ranks import World, run_ranks
    from titanlite.load_run import load_run
    from titanlite.plan.start import foresee, without_dry_run
    from titanlite.runtime.logging import logged_ranks

    workers = _workers()
    least, nodes = _machines()
    address, port, number = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 29500), _number("NODE_RANK", -1)
    if number >= nodes:
        raise UserError(f"NODE_RANK={number} must be less than NNODES={nodes}.")
    if nodes > 1 and not re.fullmatch(r"[\w.:%-]{1,253}", address, re.ASCII):
        wrong = f"MASTER_ADDR={one_line(address[:80])}: " if address else f"NNODES={nodes} needs MASTER_ADDR: "
        raise UserError(f"{wrong}the name or address of the first machine, as others see it.")
    max_restarts, shown_ranks = _number("MAX_RESTARTS", 0), logged_ranks(workers * nodes)
    words, is_dry = without_dry_run(argv)
    run = load_run(words, workers * nodes)
    if least < nodes:
        load_run(words, workers * least)  # the run must also work on the fewest machines
    world = World(range(workers), workers, shown_ranks, run.job.comm.preemption_seconds, max_restarts)
    command = ["-m", "titanlite", "train", *argv]

    def hint() -> str:
        return resume_hint(run, argv)

    if folder := os.environ.pop(machines.FOLDER, None):  # torch's agent has started this process for its machine
        world = machines.part_of(world)
        return machines.run_part(Path(folder), lambda: run_ranks(command, world, hint))
    foresee(run, words, workers, is_dry)
    os.environ[COMMAND] = _on_this_machine(os.environ.get(COMMAND, "titanlite launch"), nodes)
    _set_variables(workers, run.job.training.num_threads)
    if nodes > 1:
        own = None if number < 0 else number
        meeting = machines.Machines(least, nodes, address, port, own, max_restarts)
        return machines.run_agent(argv, meeting, lambda: hint() if is_saved(run) else "")
    return run_ranks(command, world, hint)


def launch_command(words: Sequence[str]) -> int:
    """Start `titanlite WORDS` on NGPU processes of this machine; returns the exit code. Raises UserError: NGPU is
    wrong."""
    from titanlite.launch.ranks import World, run_ranks

    workers = _workers()
    _set_variables(workers, 0)
    return run_ranks(["-m", "titanlite", *words], World(range(workers), workers))


def _workers() -> int:
    """The number of processes on this machine.

    Raises:
        UserError: NGPU is wrong, or the machine is too small for so many.
    """
    gpus = count_gpus()
    workers = _number("NGPU", gpus or 1)
    if 0 < gpus < workers:
        raise UserError(f"NGPU={workers}: this machine has {gpus}. (CUDA_VISIBLE_DEVICES= hides them: CPU processes.)")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if workers * RANK_BYTES > memory:
        raise UserError(
            f"NGPU={workers}: so many processes need at least {workers * RANK_BYTES / 2**30:,.0f} GiB of memory; "
            f"this machine has {memory / 2**30:,.0f}. One for each of its {_cores()} cores is the most that helps."
        )
    return workers


def _set_variables(workers: int, num_threads: int) -> None:
    """Set the environment variables of the ranks that the user has not set."""
    # The threads of all processes together use each core once. More threads would slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads or max(1, _cores() // workers)))
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # so that a crash of native code shows the Python stack


def _on_this_machine(command: str, nodes: int) -> str:
    """`command` with the environment variables that it needs to be started again on this machine."""
    names = ("NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS") if nodes > 1 else ("NGPU",)
    return " ".join([*(f"{name}={os.environ[name]}" for name in names if os.environ.get(name)), command])


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


def _machines() -> tuple[int, int]:
    """NNODES: the least and the most number of machines. Raises UserError."""
    least, colon, most = os.environ.get("NNODES", "").partition(":")
    if not colon:
        return _number("NNODES", 1), _number("NNODES", 1)
    numbers = _number("NNODES", 1, least), _number("NNODES", 1, most)
    if numbers[0] > numbers[1]:
        raise UserError(f"NNODES={least}:{most}: the first number is that of the fewest machines.")
    return numbers


def _number(name: str, default: int, text: str | None = None) -> int:
    """The environment variable, or this part of it, as a number. Raises UserError."""
    least, most, meaning = NUMBERS[name]
    if text is None and not (text := os.environ.get(name, "")):
        return default
    if not re.fullmatch(r"[0-9]{1,16}", text) or not least <= int(text) <= most:
        allowed = f"of at least {least}" if most == 10**15 else f"from {least} to {most}"
        raise UserError(f"{name}={one_line(os.environ[name][:40])}: a whole number {allowed} is allowed ({meaning}).")
    return int(text)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
