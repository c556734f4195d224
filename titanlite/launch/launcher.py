"""What ./run_train.sh starts: checks the job and the environment, then starts the workers of this node.

Invariant: a wrong job or variable is reported in a fraction of a second, before a process is started. The launcher
never imports torch, so that it needs little memory while the workers train.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.config.errors import UserError, one_line

EXPLAINED = {
    "NGPU": "number of processes on this machine, one per GPU",
    "NNODES": "number of machines, or the least and the most as in 1:2",
    "MAX_RESTARTS": "how many times a crashed run is started again",
    "NODE_RANK": "number of this machine, from 0",
    "MASTER_PORT": "a port of MASTER_ADDR that is free",
}
LARGEST = {"MASTER_PORT": 65535, "NNODES": 100_000}
LONGEST_NAME = 255  # of a machine's name, in characters
WORKER_BYTES = 200 << 20  # the least memory that a process with torch needs
CROWDED = 4  # processes per core


def main(argv: Sequence[str]) -> int:
    """Check, launch and wait; returns the exit code of the run."""
    try:
        return launch(argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def launch(argv: Sequence[str]) -> int:
    """Start `titanlite train ARGV` on every rank of this node.

    ARGV may have --dry-run, too.

    Raises:
        UserError: the job, or a variable of the environment, is wrong.
    """
    from titanlite.load_run import load_run
    from titanlite.plan.before_start import foresee, without_dry_run
    from titanlite.runtime.logging import logged_ranks

    workers, gpus = _workers()
    least, nodes = _nodes()
    node_rank = _number("NODE_RANK", 0)
    if node_rank is not None and node_rank >= nodes:
        raise UserError(f"NODE_RANK={node_rank} must be less than NNODES={nodes}.")
    if nodes > 1 and not os.environ.get("MASTER_ADDR"):
        raise UserError(
            f"NNODES={nodes} needs MASTER_ADDR: the name or address of the first machine, as others see it."
        )
    address = os.environ.get("MASTER_ADDR") or "localhost"
    if not _is_address(address):
        raise UserError(
            f"MASTER_ADDR={address[:80]!r}: the name or address of the first machine is allowed, such as node0."
        )
    shown_ranks = logged_ranks(workers * nodes)
    words, is_dry = without_dry_run(argv)
    run = load_run(words, workers * nodes)
    if least < nodes:
        load_run(words, workers * least)  # the run must also work on the fewest nodes
    foresee(run, words, workers, is_dry)

    _set_variables(workers, gpus, run.job.training.num_threads)

    from titanlite.checkpoint.go_on import COMMAND, how_to_go_on, is_saved
    from titanlite.launch.agent import Saved, World, run_workers

    os.environ[COMMAND] = _on_this_node(os.environ.get(COMMAND, "titanlite launch"), nodes)
    world = World(
        workers,
        nodes,
        node_rank,
        address,
        _number("MASTER_PORT", 1) or 29500,
        shown_ranks,
        run.job.comm.preemption_seconds,
        _number("MAX_RESTARTS", 0) or 0,
        least,
    )
    saved = Saved(lambda: is_saved(run), lambda: how_to_go_on(run, argv))
    return run_workers(["-m", "titanlite", "train", *argv], world, saved)


def launch_command(words: Sequence[str]) -> int:
    """Start `titanlite WORDS` on NGPU processes of this machine; returns the exit code. Raises UserError: NGPU is
    wrong."""
    from titanlite.launch.agent import World, run_workers

    workers, gpus = _workers()
    _set_variables(workers, gpus, 0)
    return run_workers(["-m", "titanlite", *words], World(workers))


def _workers() -> tuple[int, int]:
    """The number of processes on this machine, and of its GPUs.

    Raises:
        UserError: NGPU is wrong, or the machine is too small for so many.
    """
    wanted, gpus = _number("NGPU", 1), count_gpus()
    if wanted and 0 < gpus < wanted:
        raise UserError(f"NGPU={wanted}: this machine has {gpus}. (CUDA_VISIBLE_DEVICES= hides them: CPU processes.)")
    workers = wanted or gpus or 1
    if not gpus:
        _check_processes(workers)
    return workers, gpus


def _set_variables(workers: int, gpus: int, num_threads: int) -> None:
    """Set the environment variables of the workers that the user has not set."""
    # The threads of all processes together use each core once. More threads would slow each other down.
    threads = num_threads or max(1, _cores() // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # so that a crash of native code shows the Python stack
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "titanlite" / "inductor"))  # /tmp is often emptied
    if gpus and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # less memory is lost by fragmentation


def _on_this_node(command: str, nodes: int) -> str:
    """`command` with the environment variables that it needs to be started again on this node."""
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


def _nodes() -> tuple[int, int]:
    """NNODES: the least and the most number of machines."""
    least, colon, most = os.environ.get("NNODES", "").partition(":")
    if not colon:
        nodes = _number("NNODES", 1) or 1
        return nodes, nodes
    if not (_is_number(least, 1, LARGEST["NNODES"]) and _is_number(most, int(least), LARGEST["NNODES"])):
        text = one_line(f"{least}:{most}"[:40])
        raise UserError(f"NNODES={text}: a number, or two rising ones such as 1:2 ({EXPLAINED['NNODES']}).")
    return int(least), int(most)


def _number(name: str, least: int) -> int | None:
    """The environment variable as a number. None if it is not set."""
    text, most = os.environ.get(name, ""), LARGEST.get(name, 10**15)
    if not text:
        return None
    if not _is_number(text, least, most):
        allowed = f"of at least {least}" if name not in LARGEST else f"from {least} to {most}"
        raise UserError(f"{name}={one_line(text[:40])}: a whole number {allowed} is allowed ({EXPLAINED[name]}).")
    return int(text)


def _is_address(text: str) -> bool:
    """Whether `text` can be the name or the address of a machine."""
    with contextlib.suppress(UnicodeError):  # a part of the name is empty or too long
        is_name = len(text) <= LONGEST_NAME and re.fullmatch(r"[\w.:%-]+", text, re.ASCII)
        return bool(is_name and text.encode("idna"))
    return False


def _is_number(text: str, least: int, most: int) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,16}", text)) and least <= int(text) <= most


def _check_processes(workers: int) -> None:
    """On a CPU: refuse more processes than fit into memory, and warn about more than the cores can handle."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if workers * WORKER_BYTES > memory:
        raise UserError(
            f"NGPU={workers}: so many processes need at least {workers * WORKER_BYTES / 2**30:,.0f} GiB of memory; "
            f"this machine has {memory / 2**30:,.0f}. One for each of its {_cores()} cores is the most that helps."
        )
    if workers > CROWDED * _cores():
        print(
            f"NGPU={workers}: this machine has no GPU and {_cores()} cores. So many processes get in each other's way; "
            "it can take minutes until all have started.",
            file=sys.stderr,
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
