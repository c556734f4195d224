"""What ./run_train.sh starts: checks the job, then starts torchrun's agent with the workers of this node.

Invariant: a wrong job ends here, in a fraction of a second, before torch is imported or a process is started. May
import titanlite.config, titanlite.validate and titanlite.observe.logger, none of which has torch; after the check also
titanlite.launch.agent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from titanlite.config.errors import UserError

EXPLAINED = {
    "NGPU": "processes on this machine, one for each GPU",
    "NNODES": "machines, or the least and the most of them as in 1:2",
    "MAX_RESTARTS": "times that a crashed run is started again",
    "NODE_RANK": "number of this machine, from 0",
    "MASTER_PORT": "a port of MASTER_ADDR that is free",
}


def main(argv: Sequence[str]) -> int:
    """Check, launch and wait; returns the exit code of the run."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it, workers too
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # "save and go on": there is nothing to save yet
    try:
        return launch(argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before there were workers
        return 130


def command(argv: Sequence[str]) -> NoReturn:
    """Run `main` and end this process with its exit code."""
    code = main(argv)
    with contextlib.suppress(OSError):  # a terminal that is gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # while Python shuts down, a signal that comes late would replace the exit code


def launch(argv: Sequence[str]) -> int:
    """Start `titanlite train ARGV` on every rank of this node.

    Raises:
        UserError: the job, or a variable of the environment, is wrong.
    """
    from titanlite.observe.logger import logged_ranks
    from titanlite.validate import load_and_check

    wanted, gpus = _number("NGPU", 1), count_gpus()
    if wanted and 0 < gpus < wanted:
        raise UserError(f"NGPU={wanted}: this machine has {gpus}. (CUDA_VISIBLE_DEVICES= hides them: CPU processes.)")
    workers = wanted or gpus or 1
    least, nodes = _nodes()
    node_rank = _number("NODE_RANK", 0)
    if node_rank is not None and node_rank >= nodes:
        raise UserError(f"NODE_RANK={node_rank} must be less than NNODES={nodes}.")
    if nodes > 1 and "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"NNODES={nodes} needs MASTER_ADDR: the name or address of the first machine, as others see it."
        )
    shown_ranks = logged_ranks()
    job = load_and_check(argv, workers * nodes)
    if least < nodes:
        load_and_check(argv, workers * least)  # the run must be able to go on there

    # Threads of all processes together use each core once; more only gets in each other's way.
    threads = job.training.num_threads or max(1, _cores() // workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a Python stack where native code crashes
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "titanlite" / "inductor"))  # /tmp is soon forgotten
    if gpus and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # less memory lost to fragments
    if "LOGLEVEL" not in os.environ:  # torchrun's switch for its own messages
        import logging

        logging.disable(logging.ERROR)

    from titanlite.checkpoint.go_on import how_to_go_on
    from titanlite.launch.agent import World, run_workers

    restarts = _number("MAX_RESTARTS", 0) or 0
    addr, port = os.environ.get("MASTER_ADDR", "localhost"), _number("MASTER_PORT", 1) or 29500
    world = World(
        workers,
        nodes,
        node_rank,
        addr,
        port,
        shown_ranks,
        job.comm.preemption_seconds,
        restarts,
        least,
        how_to_go_on=lambda: how_to_go_on(job, argv),
    )
    return run_workers(["-P", "-m", "titanlite.cli", "train", *argv], world)


def count_gpus() -> int:
    """GPUs that a process started here would see, found without torch. 0 where there is no NVIDIA driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return 0
    gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    return (
        gpus
        if visible is None
        else min(gpus, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    )


def _nodes() -> tuple[int, int]:
    """NNODES: the least and the most machines."""
    least, colon, most = os.environ.get("NNODES", "").partition(":")
    if not colon:
        nodes = _number("NNODES", 1) or 1
        return nodes, nodes
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise UserError(f"NNODES={least}:{most}: a number, or two rising ones such as 1:2 ({EXPLAINED['NNODES']}).")
    return int(least), int(most)


def _number(name: str, minimum: int) -> int | None:
    """The environment variable as a number; None where it is not set."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < minimum:
        raise UserError(f"{name}={text}: a whole number of at least {minimum} is allowed ({EXPLAINED[name]}).")
    return int(text)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
