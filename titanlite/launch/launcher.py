"""Validate the job and the environment variables, then start the ranks of this node.

This module implements `titanlite launch` and ./run_train.sh.

Invariant: an invalid job or environment variable is reported in a fraction of a second, before any
process is started. On a single node, the launcher never imports torch, so it needs little memory
and time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from titanlite.config.errors import UserError
from titanlite.config.mistakes import explain_error
from titanlite.runtime.logging import logged_ranks


class Variables(BaseModel):
    """Environment variables that configure the launcher. An empty variable counts as not set."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    NGPU: Annotated[int, Field(ge=1, le=1024)]
    """Processes on this node, one per GPU."""
    NNODES: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})?$")] = "1"
    """Number of nodes, or their minimum and maximum, as in 1:2."""
    NODE_RANK: Annotated[int, Field(ge=0, le=99_999)] | None = None
    """Number of this node, from 0."""
    MASTER_ADDR: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:%-]{1,253}$")] | None = None
    """Address of the first node, which the other nodes can reach."""
    MASTER_PORT: Annotated[int, Field(ge=1, le=65535)] = 29500
    """A free port of MASTER_ADDR."""
    MAX_RESTARTS: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Number of times to restart a crashed run."""


def launch(argv: Sequence[str]) -> int:
    """Start `titanlite train ARGV` on every rank of this node, and return the exit code.

    The environment variables in `Variables`, such as NGPU and NNODES, determine the number of
    ranks. On several nodes, run the command once on each node.

    Args:
        argv: Options of `titanlite train`.

    Raises:
        UserError: If the job or an environment variable is invalid, or the nodes could not connect.
    """
    from titanlite.checkpoint.find import COMMAND, resume_hint
    from titanlite.launch import multi_node
    from titanlite.launch.output_folder import run_in_output_folder
    from titanlite.launch.ranks import Ranks
    from titanlite.load_run import load_run
    from titanlite.observe.gpus import check_memory

    variables = read_variables()
    num_local_ranks = variables.NGPU
    min_nodes, max_nodes = _parse_node_counts(variables)
    logged_ranks(num_local_ranks * max_nodes)  # raises UserError if LOG_RANK is invalid

    # This also downloads the model of --from, once for all ranks.
    run = load_run(argv, num_local_ranks * max_nodes)
    if min_nodes < max_nodes:
        # The job must also be valid on the minimum number of nodes.
        load_run(argv, num_local_ranks * min_nodes)

    ranks = Ranks(
        words=["-m", "titanlite", "train", *argv],
        ranks=range(num_local_ranks),
        size=num_local_ranks,
        stop_seconds=run.job.comm.preemption_seconds,
        max_restarts=variables.MAX_RESTARTS,
        resume_hint=lambda: resume_hint(run, argv),
    )
    agent_folder = os.environ.pop(multi_node.FOLDER, None)
    if agent_folder is not None:  # the torch agent started this process as the node process
        return multi_node.run_node_process(Path(agent_folder), ranks)

    check_memory(run, num_local_ranks)
    settings = " ".join(f"{name}={value}" for name, value in get_set_variables().items())
    os.environ[COMMAND] = f"{settings} {os.environ.get(COMMAND, 'titanlite launch')}".strip()
    _set_threads(num_local_ranks, run.job.training.num_threads)
    if variables.MASTER_ADDR is None or max_nodes == 1:
        return run_in_output_folder(run, ranks.run)
    store = variables.MASTER_ADDR, variables.MASTER_PORT
    nodes = min_nodes, max_nodes
    return multi_node.run_agent(
        argv, run, nodes, store, variables.NODE_RANK, variables.MAX_RESTARTS
    )


def _parse_node_counts(variables: Variables) -> tuple[int, int]:
    """Parse NNODES, and return the minimum and the maximum number of nodes.

    For example, NNODES=1:2 gives 1 and 2, and NNODES=4 gives 4 and 4.

    Raises:
        UserError: If the range is invalid or contradicts NODE_RANK, or MASTER_ADDR is missing.
    """
    first, _, last = variables.NNODES.partition(":")
    minimum = int(first)
    maximum = int(last or first)  # without a colon, `last` is empty
    setting = f"NNODES={variables.NNODES}"
    if minimum > maximum:
        raise UserError(f"{setting} must have the minimum number of nodes first, as in 1:2.")
    if variables.NODE_RANK is not None and maximum <= variables.NODE_RANK:
        raise UserError(f"NODE_RANK={variables.NODE_RANK} must be less than {setting}.")
    if maximum > 1 and variables.MASTER_ADDR is None:
        raise UserError(f"{setting} needs MASTER_ADDR, the address of the first node.")
    return minimum, maximum


def launch_command(words: Sequence[str]) -> int:
    """Run a titanlite command, such as `eval`, on this node, and return its exit code.

    Use this for commands other than `train`. The environment variable NGPU sets the number of
    processes, by default one per GPU.

    Args:
        words: Name of the command and its options.

    Raises:
        UserError: If NGPU is invalid.
    """
    from titanlite.launch.ranks import Ranks

    variables = read_variables()
    num_local_ranks = variables.NGPU
    _set_threads(num_local_ranks, 0)
    return Ranks(["-m", "titanlite", *words], range(num_local_ranks), num_local_ranks).run()


def get_set_variables() -> dict[str, str]:
    """Return the names and values of the launcher environment variables that the user has set."""
    names = Variables.model_fields
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def read_variables() -> Variables:
    """Read and validate the environment variables of the launcher.

    Returns:
        All variables, with defaults for those that are not set.

    Raises:
        UserError: If a variable is invalid, or NGPU exceeds the number of GPUs.
    """
    num_gpus = count_gpus()
    defaults = {"NGPU": num_gpus or 1}
    try:
        variables = Variables.model_validate(defaults | get_set_variables())
    except ValidationError as error:
        raise UserError(f"{explain_error(Variables, error)}.") from None

    has_too_few_gpus = 0 < num_gpus < variables.NGPU  # without a GPU, ranks use the CPU
    if has_too_few_gpus:
        raise UserError(
            f"NGPU={variables.NGPU}: this node has {num_gpus}. "
            "Set CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
    return variables


def count_gpus() -> int:
    """Return the number of GPUs that this process can use, or 0 if there is no NVIDIA driver.

    The function uses nvidia-smi and CUDA_VISIBLE_DEVICES, because importing torch is slow.
    """
    from titanlite.observe.gpus import list_gpus

    gpus = len(list_gpus())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    # Users hide all GPUs with an empty list or -1.
    names = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return min(gpus, len(names))


def _set_threads(num_local_ranks: int, num_threads: int) -> None:
    """Set OMP_NUM_THREADS for the ranks of this node, unless the user has set it.

    Args:
        num_local_ranks: Number of processes on this node.
        num_threads: Number of threads per process. 0 divides the CPU cores of this node evenly
            among the processes.
    """
    from titanlite.observe.gpus import count_cores

    share = max(1, count_cores() // num_local_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads or share))
