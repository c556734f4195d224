"""Describe accelerators: memory, peak FLOP/s and bandwidths, from gpus.toml or a user's file.

Invariant: gpus.toml is the only table of devices, so that the planner and MFU use the same numbers.
This module does not import torch, because the launcher checks whether a run fits before it starts
any process.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import tomli
from pydantic import Field, PositiveInt, ValidationError

from titanlite.config.errors import UserError
from titanlite.config.files import read_file
from titanlite.config.mistakes import explain_error, format_value
from titanlite.config.models import FileModel
from titanlite.config.run import Run
from titanlite.observe.flops import state_bytes

TABLE = Path(__file__).with_name("gpus.toml")
MAX_FILE_BYTES = 1 << 22
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of the NVIDIA, AMD and Windows (WSL) GPU drivers."""
MIB = 2**20
GIB = 2**30
MOST_GIB = 1e6
"""Maximum memory of a device, in GiB: over a thousand times the memory of the largest GPU."""
RENAMED_KEYS = {"host": "cpu_link", "machine": "gpus_per_node"}
"""Mapping from former names of keys in GPU files to the current names."""
Amount = Annotated[float, Field(gt=0, le=1e9)]


class Gpu(FileModel):
    """Memory, peak compute rates and bandwidths of a GPU, or of a node that trains on its CPU.

    All values are per GPU. If `cpu` is true, they describe the whole node instead.
    """

    name: str
    cpu: bool = False
    """Whether the ranks train on CPU cores, and share the memory and the cores of the node."""
    capability: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """CUDA compute capability, such as 9.0. 0 means that the device is not from NVIDIA."""
    memory_gib: Annotated[float, Field(gt=0, le=MOST_GIB)]
    """Memory of one device, or of the whole node if `cpu` is true, in GiB."""
    bf16: Amount
    """Peak dense bfloat16 rate, in TFLOP/s."""
    fp8: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Peak dense FP8 rate, in TFLOP/s. 0 means that the device does not support FP8."""
    fp32: Amount
    """Peak fp32 rate of a matmul, in TFLOP/s."""
    bandwidth: Amount
    """Memory bandwidth, in GB/s."""
    link: Amount
    """Bandwidth to other devices of the same node, in one direction, in GB/s."""
    network: Amount
    """Bandwidth to other nodes per device, in one direction, in GB/s."""
    cpu_link: Amount
    """Bandwidth between device and CPU memory, in one direction, in GB/s."""
    latency_us: Amount = 10.0
    """Minimum time of a collective, in microseconds."""
    attention: Annotated[float, Field(gt=0, le=1)] = 0.60
    """Fraction of the bf16 peak that fused attention reaches in the forward pass, with a head width
    of 128.

    The backward pass, counted as five matmuls, reaches 5/6 of this fraction. Attention is slower
    than a matmul, because the softmax runs on other units. The default is the published value of
    FlashAttention 2 on an A100 and of cuDNN on an H100.
    """
    gpus_per_node: PositiveInt
    """Number of GPUs that `link` connects, or number of CPU cores if `cpu` is true."""

    @property
    def memory(self) -> int:
        """Memory of one device, or of the whole node if `cpu` is true, in bytes."""
        return int(self.memory_gib * GIB)

    def of_rank(self, ranks: int) -> Gpu:
        """Return the share of the hardware that each rank can use.

        Args:
            ranks: Number of ranks on the node.

        Returns:
            This specification if the ranks train on GPUs. On a CPU, a copy whose memory and rates
            are divided by `ranks`.
        """
        if not self.cpu:
            return self
        shared = ("memory_gib", "bf16", "fp32", "bandwidth")
        return self.model_copy(update={name: getattr(self, name) / ranks for name in shared})


@cache
def known_gpus() -> tuple[Gpu, ...]:
    """Load the specifications of all GPUs in gpus.toml.

    Variants such as "H100 PCIe" come before the plain name, so the first entry that matches a
    device name is the most specific one.
    """
    table = tomli.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(Gpu.model_validate(entry) for entry in table["gpu"])


def gpu_of_device(device_name: str) -> Gpu | None:
    """Look up the specification of a GPU by the name that its driver reports.

    An entry of gpus.toml matches if the device name contains all words of the entry's name. The
    first match counts, so "H100 PCIe" must come before "H100" in gpus.toml.

    Args:
        device_name: Name from `torch.cuda.get_device_name()`, such as "NVIDIA H100 80GB HBM3".

    Returns:
        The specification. None if gpus.toml does not list the device, or if the device is a MIG
        slice, whose name does not show its share of the GPU.
    """
    words = _split_name(device_name)
    if "MIG" in words:
        return None
    for gpu in known_gpus():
        has_all_words = _split_name(gpu.name) <= words
        if has_all_words:
            return gpu
    return None


def peak_flops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a GPU, which is the denominator of MFU.

    Args:
        device_name: Name from `torch.cuda.get_device_name()`.

    Returns:
        Peak FLOP/s, or None if gpus.toml does not list the device.
    """
    gpu = gpu_of_device(device_name)
    return None if gpu is None else gpu.bf16 * 1e12


def find_gpu(name: str) -> Gpu:
    """Return the specification of the GPU that the option --gpu selects.

    Args:
        name: Name in gpus.toml, such as H100, H100-PCIe or A100-80GB, or the path of a TOML file
            with the fields of `Gpu`.

    Raises:
        UserError: If the name is unknown, or the file does not exist or is invalid.
    """
    if name.endswith(".toml"):
        return _read_gpu(name)
    for gpu in known_gpus():
        if _split_name(gpu.name) == _split_name(name):
            return gpu
    names = ", ".join(sorted(gpu.name.replace(" ", "-") for gpu in known_gpus()))
    raise UserError(f"--gpu {name}: unknown. Use one of {names}, cpu, or a TOML file.")


def _read_gpu(path: str) -> Gpu:
    """Read the specification of a GPU from a TOML file.

    Raises:
        UserError: If the file does not exist, or its content is invalid.
    """
    try:
        text = read_file(Path(path).expanduser(), MAX_FILE_BYTES).decode("utf-8-sig")
        values = tomli.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--gpu {path}: not valid TOML: {error}") from None

    for former_key, key in RENAMED_KEYS.items():
        if former_key in values and key not in values:
            values[key] = values.pop(former_key)
            logging.getLogger("titanlite").warning(
                f"--gpu {path}: {former_key} is now called {key}."
            )
    try:
        return Gpu.model_validate(values)
    except ValidationError as error:
        raise UserError(
            f"--gpu {path}: {explain_error(Gpu, error)}. See docs/internals/planner.md."
        ) from None


class LocalGpu(NamedTuple):
    """A GPU of this node.

    Attributes:
        name: Name that the driver reports, such as "NVIDIA H100 80GB HBM3", or "unknown".
        memory: Memory in bytes, or None if it is unknown.
    """

    name: str
    memory: int | None


def find_local_gpu() -> LocalGpu | None:
    """Return the first GPU of this node.

    This does not import torch, so that a launcher can call it quickly.

    Returns:
        The GPU, or None if there is no GPU or CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if is_hidden:
        return None

    gpus = list_gpus()
    if gpus:
        return gpus[0]
    has_driver = any(os.path.exists(path) for path in DRIVERS)
    if has_driver:
        return LocalGpu("unknown", memory=None)  # a GPU that nvidia-smi cannot describe
    return None


@cache
def list_gpus() -> list[LocalGpu]:
    """Return all GPUs that nvidia-smi lists, including those that CUDA_VISIBLE_DEVICES hides.

    Return [] if there is no nvidia-smi. Because nvidia-smi can take a second, the result is cached.
    """
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    gpus: list[LocalGpu] = []
    # A line is, for example, "NVIDIA H100 80GB HBM3, 81559" or "NVIDIA GB10, [N/A]".
    for name, mebibytes in re.findall(r"^(.+), *(?:(\d+)|\[.+\])$", output, re.MULTILINE):
        memory = int(mebibytes) * MIB if mebibytes else None
        gpus.append(LocalGpu(name, memory))
    return gpus


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_memory() -> int:
    """Return the physical CPU memory of this node, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(
    run: Run, num_local_ranks: int | None = None, on_other_nodes: bool = False
) -> None:
    """Reject a run that is certain to run out of memory.

    Each rank must at least hold its training state (parameters, gradients and optimizer moments)
    and, without CPU offload, the inputs of the transformer blocks. Only the first rank of a node
    performs the check.

    Args:
        run: Run to check.
        num_local_ranks: Number of ranks on this node. By default, read it from the environment
            variables of the launcher.
        on_other_nodes: Whether the run is for other nodes, whose memory is unknown. The check then
            assumes the memory of the largest known GPU, or the CPU memory of this node if it is
            larger.

    Raises:
        UserError: If the memory is too small.
    """
    is_first_rank = os.environ.get("LOCAL_RANK", "0") == "0"
    if not is_first_rank:
        return

    is_offloaded = run.job.training.enable_cpu_offload
    if on_other_nodes:
        memory = _largest_memory(is_offloaded)
    else:
        memory = _memory_of_rank(num_local_ranks, is_offloaded)
    if memory is None:  # unknown
        return

    state = state_bytes(run)
    if memory < state:
        raise UserError(_describe_missing_memory(run, memory, state))
    if not is_offloaded:
        _check_block_inputs(run, memory, state)


def _check_block_inputs(run: Run, memory: int, training_state: int) -> None:
    """Check that a rank has memory for its training state and the inputs of its blocks.

    The inputs of all transformer blocks are kept for the backward pass, even with full activation
    checkpointing.

    Args:
        run: Run to check.
        memory: Memory of a rank, in bytes. At least `training_state`.
        training_state: Size of weights, gradients and optimizer state on a rank, in bytes.

    Raises:
        UserError: If the memory is too small for training.local_batch_size sequences.
    """
    # Context and tensor parallelism divide the tokens of a sequence between ranks, and pipeline
    # parallelism divides the blocks.
    training = run.job.training
    num_tokens = training.seq_len // (run.degrees.context * run.degrees.tensor)
    num_blocks = run.arch.n_layers // run.degrees.pipeline

    min_bytes_per_value = 2
    bytes_per_sequence = min_bytes_per_value * num_tokens * run.arch.dim * num_blocks
    batch_size = training.local_batch_size
    input_bytes = batch_size * bytes_per_sequence
    if training_state + input_bytes <= memory:
        return

    num_fitting = (memory - training_state) // bytes_per_sequence
    raise UserError(
        f"training.local_batch_size = {batch_size}: the inputs of the blocks need "
        f"{input_bytes / GIB:,.1f} GiB, but a rank has {memory / GIB:,.1f} GiB for them, weights "
        f"and optimizer state. At most {num_fitting:,} sequences fit."
    )


def _describe_missing_memory(run: Run, memory: int, state: int) -> str:
    """Return the error message for a run whose ranks cannot hold their training state.

    Args:
        run: The rejected run.
        memory: Memory of a rank, in bytes.
        state: Size of weights, gradients and optimizer state on a rank, in bytes.
    """
    model = run.job.model
    keys = model.model_dump(exclude_unset=True) or {"flavor": model.flavor}
    options = ", ".join(f"model.{key} = {format_value(value)}" for key, value in keys.items())
    num_devices = run.world_size * state // memory + 1
    return (
        f"{options}: weights, gradients and optimizer state take {state / GIB:,.1f} GiB on each "
        f"of {run.world_size:,} ranks. Each rank has {memory / GIB:,.1f} GiB. Use at least "
        f"{num_devices:,} such devices; `titanlite plan` shows other options."
    )


def _largest_memory(is_offloaded: bool) -> int:
    """Return an upper bound, in bytes, on the memory of a rank on an unknown node.

    Without CPU offload, this is the memory of the largest known GPU, or the CPU memory of this node
    if it is larger. With CPU offload, it is a huge value, because the CPU memory of other nodes is
    unknown.

    Args:
        is_offloaded: Whether the training state is in CPU memory.
    """
    if is_offloaded:
        return int(MOST_GIB * GIB)
    return max(physical_memory(), *(gpu.memory for gpu in known_gpus()))


def _memory_of_rank(num_local_ranks: int | None, is_offloaded: bool) -> int | None:
    """Return how much memory a rank of this node has for its training state.

    Args:
        num_local_ranks: Number of ranks on this node. If None, read it from the environment
            variables of the launcher.
        is_offloaded: Whether the training state is in CPU memory.

    Returns:
        Memory in bytes, or None if the memory of the GPU is unknown.
    """
    gpu = None if is_offloaded else find_local_gpu()
    if gpu is not None:
        return gpu.memory

    # The ranks share the CPU memory of the node.
    if num_local_ranks is None:
        num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return physical_memory() // num_local_ranks


def _split_name(name: str) -> set[str]:
    """Split a device name into a set of words in upper case, to compare names.

    For example, "H100-PCIe" becomes {"H100", "PCIE"}.
    """
    return set(re.split(r"[\s\-_]+", name.upper()))
