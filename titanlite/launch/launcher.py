"""What ./run_train.sh starts: checks the job and the environment, then starts the ranks of this machine.

Invariant: a wrong job or variable is reported in a fraction of a second, before a process is started. On one machine
the launcher never imports torch, so that it needs little memory and time.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from titanlite.config.errors import UserError, one_line
from titanlite.config.run import Run
from titanlite.runtime.logging import EVENTS_FILE, LOGGER_NAME, logged_ranks, note


class Variables(BaseModel):
    """The environment variables of a start. One that is empty counts as not set."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    NGPU: Annotated[int, Field(ge=1, le=1024)]
    """Processes on this machine, one per GPU."""
    NNODES: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})?$")] = "1"
    """Number of machines, or the least and the most as in 1:2."""
    NODE_RANK: Annotated[int, Field(ge=0, le=99_999)] | None = None
    """Number of this machine, from 0."""
    MASTER_ADDR: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:%-]{1,253}$")] | None = None
    """The first machine, as others see it."""
    MASTER_PORT: Annotated[int, Field(ge=1, le=65535)] = 29500
    """A port of MASTER_ADDR that is free."""
    MAX_RESTARTS: Annotated[int, Field(ge=0, le=10**6)] = 0
    """How many times a crashed run is started again."""


def launch(argv: Sequence[str]) -> int:
    """Start `titanlite train ARGV` on every rank of this machine.

    Raises:
        UserError: the job, or a variable of the environment, is wrong, or the machines did not meet.
    """
    from titanlite.checkpoint.find import COMMAND, resume_hint
    from titanlite.launch import machines
    from titanlite.launch.ranks import Ranks
    from titanlite.load_run import load_run
    from titanlite.observe.gpus import check_memory

    variables, given = read_variables()
    least, _, most = variables.NNODES.partition(":")
    workers, nodes = variables.NGPU, (int(least), int(most or least))
    if nodes[0] > nodes[1]:
        raise UserError(f"NNODES={variables.NNODES}: the least number of machines comes first, then the most.")
    if (variables.NODE_RANK or 0) >= nodes[1]:
        raise UserError(f"NODE_RANK={variables.NODE_RANK} must be less than NNODES={variables.NNODES}.")
    if nodes[1] > 1 and variables.MASTER_ADDR is None:
        raise UserError(f"NNODES={variables.NNODES} needs MASTER_ADDR: the first machine, as others see it.")
    logged_ranks(workers * nodes[1])
    run = load_run(argv, workers * nodes[1])  # brings the model of --from for all ranks
    if nodes[0] < nodes[1]:
        load_run(argv, workers * nodes[0])  # it must also work on the fewest machines
    command, seconds = ["-m", "titanlite", "train", *argv], run.job.comm.preemption_seconds
    ranks = Ranks(command, range(workers), workers, seconds, variables.MAX_RESTARTS, lambda: resume_hint(run, argv))
    if folder := os.environ.pop(machines.FOLDER, None):  # torch's agent has started this process for its machine
        return machines.run_part(Path(folder), ranks)
    check_memory(run, workers)
    command = " ".join(f"{name}={value}" for name, value in given.items())
    os.environ[COMMAND] = f"{command} {os.environ.get(COMMAND, 'titanlite launch')}".strip()
    _set_threads(workers, run.job.training.num_threads)
    if variables.MASTER_ADDR is None or nodes[1] == 1:
        with output_folder(run):
            return ranks.run()
    store = variables.MASTER_ADDR, variables.MASTER_PORT
    return machines.run_agent(argv, run, nodes, store, variables.NODE_RANK, variables.MAX_RESTARTS)


@contextmanager
def output_folder(run: Run) -> Iterator[None]:
    """A start on this machine alone. It waits for another run that uses the output folder, and removes the folder that
    it has made if it ends by an answer or a signal and has trained nothing."""
    from titanlite.checkpoint import find, step_folders

    folder, refusal = run.dump_folder, None
    new = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    if (held := step_folders.lock(folder / "run", step_folders.LOCK_PATIENCE, note)) is not None:
        os.close(held)  # for the rank that locks it
    try:
        yield
    except UserError as error:
        refusal = error
    events = folder / EVENTS_FILE
    said = events.read_text(encoding="utf-8") if events.exists() else ""
    needed = any(f'"event": "{kind}"' in said for kind in ("finish", "guard", "failure", "hang"))
    if new and not needed and not find.is_saved(run) and not (folder / "metrics.jsonl").exists():
        logging.getLogger(LOGGER_NAME).handlers.clear()  # or the reason of the end would be written there
        with suppress(UserError):  # another run has the folder by now
            held = step_folders.lock(folder / "run", 0.0, note)
            shutil.rmtree(folder, ignore_errors=True)
            if held is not None:
                os.close(held)
            with suppress(OSError):  # another run has a folder beside it
                for path in new[1:]:
                    path.rmdir()
    if refusal is not None:
        raise refusal


def launch_command(words: Sequence[str]) -> int:
    """Start `titanlite WORDS` on NGPU processes of this machine; returns the exit code. Raises UserError: NGPU is
    wrong."""
    from titanlite.launch.ranks import Ranks

    workers = read_variables()[0].NGPU
    _set_threads(workers, 0)
    return Ranks(["-m", "titanlite", *words], range(workers), workers).run()


def read_variables() -> tuple[Variables, dict[str, str]]:
    """The environment variables of this start, and those that the user has set. Raises UserError: one is wrong."""
    given = {name: os.environ[name] for name in Variables.model_fields if os.environ.get(name)}
    gpus = count_gpus()
    try:
        variables = Variables.model_validate({"NGPU": gpus or 1} | given)
    except ValidationError as error:
        wrong = error.errors()[0]
        name, must = str(wrong["loc"][0]), wrong["msg"].replace("Input should", "must").partition(",")[0]
        about = f"{must}. {Variables.model_fields[name].description}"
        raise UserError(f"{name}={one_line(given[name][:40])}: {about}") from None
    if 0 < gpus < variables.NGPU:
        raise UserError(f"NGPU={variables.NGPU}: this machine has {gpus}. (CUDA_VISIBLE_DEVICES= hides them.)")
    return variables, given


def count_gpus() -> int:
    """Number of GPUs that a process of this machine sees, found without torch. 0 if there is no NVIDIA driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return 0
    gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    return gpus if visible is None else min(gpus, sum(name.strip() not in ("", "-1") for name in visible.split(",")))


def _set_threads(workers: int, num_threads: int) -> None:
    """Let the threads of all processes together use each core once. More would slow each other down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads or max(1, cores // workers)))
