"""Accelerators: memory, rates and links, from data sheets (gpus.toml) or from a file of one's own.

Invariant: this is the only table of devices. The planner and MFU read the same numbers. It does not use torch, because
the launcher asks whether a run can fit before anything starts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Annotated

import tomli
from pydantic import Field, PositiveInt, ValidationError

from titanlite.config.errors import UserError
from titanlite.config.files import FileModel, read_file
from titanlite.config.mistakes import explain, shown
from titanlite.config.run import Run
from titanlite.observe.flops import state_bytes

_TABLE = Path(__file__).with_name("gpus.toml")
_MOST_BYTES = 1 << 22
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Where there is a GPU: files of NVIDIA's driver, of AMD's, and of Windows."""
MIB, GIB = 2**20, 2**30

MOST_GIB = 1e6
"""Of a device: a thousand times the largest."""
Amount = Annotated[float, Field(gt=0, le=1e9)]


class Gpu(FileModel):
    """An accelerator, or a machine whose processes compute on its CPU cores."""

    name: str
    cpu: bool = False
    """The ranks of a machine share its memory and its cores."""
    memory_gib: Annotated[float, Field(gt=0, le=MOST_GIB)]
    """Memory of one device; of the whole machine if `cpu`."""
    bf16: Amount
    """Peak dense bfloat16, TFLOP/s. All rates here are for one device, or for the machine if `cpu`."""
    fp8: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Peak dense FP8, TFLOP/s. 0: no FP8."""
    fp32: Amount
    """Peak fp32 of a matmul, TFLOP/s."""
    bandwidth: Amount
    """Of the memory, GB/s."""
    link: Amount
    """To other devices of the machine, in one direction, GB/s."""
    network: Amount
    """To other machines, in one direction, GB/s for each device."""
    host: Amount
    """To host memory, in one direction, GB/s."""
    latency_us: Amount = 10.0
    """Least time of a collective, microseconds."""
    attention: Annotated[float, Field(gt=0, le=1)] = 0.60
    """Share of the bf16 peak that fused attention reaches, with heads of 128; its backward pass, counted as five
    matmuls, 5/6 of that. It is less than a matmul's, because the softmax is computed on other units. The default is
    that of FlashAttention 2 on an A100 and of cuDNN on an H100, as published."""
    machine: PositiveInt
    """Devices of a machine; cores if `cpu`."""

    @property
    def memory(self) -> int:
        """Bytes of one device, or of the machine if `cpu`."""
        return int(self.memory_gib * GIB)

    def of_rank(self, ranks: int) -> Gpu:
        """What each of `ranks` ranks has: a device, or its share of the machine if `cpu`."""
        shared = ("memory_gib", "bf16", "fp32", "bandwidth") if self.cpu else ()
        return self.model_copy(update={name: getattr(self, name) / ranks for name in shared})


@cache
def known_gpus() -> tuple[Gpu, ...]:
    """The devices of the table, variants before plain names."""
    return tuple(map(Gpu.model_validate, tomli.loads(_TABLE.read_text(encoding="utf-8"))["gpu"]))


def gpu_of_device(device_name: str) -> Gpu | None:
    """The device with a name as `torch.cuda.get_device_name()` gives it.

    None if it is not in the table, and for a MIG slice, whose share of the chip the name does not tell exactly.
    """
    words = _words(device_name)
    return None if "MIG" in words else next((gpu for gpu in known_gpus() if _words(gpu.name) <= words), None)


def peak_flops(device_name: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of a device by its name. None as for `gpu_of_device`."""
    gpu = gpu_of_device(device_name)
    return None if gpu is None else gpu.bf16 * 1e12


def find_gpu(name: str) -> Gpu:
    """The device that a user names: a name of the table (H100, H100-PCIe, A100-80GB) or a TOML file.

    Raises:
        UserError: there is no such name or file, or the file's content is wrong.
    """
    if not name.endswith(".toml"):
        if found := [gpu for gpu in known_gpus() if _words(gpu.name) == _words(name)]:
            return found[0]
        names = ", ".join(sorted(gpu.name.replace(" ", "-") for gpu in known_gpus()))
        raise UserError(f"--gpu {name}: unknown. Known are {names}, cpu, and TOML files with the numbers of a device.")
    try:
        text = read_file(Path(name).expanduser(), _MOST_BYTES).decode("utf-8-sig")
        return Gpu.model_validate(tomli.loads(text))
    except ValidationError as failure:
        raise UserError(f"--gpu {name}: {explain(Gpu, failure)}. docs/planning.md lists the keys.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"--gpu {name}: not valid TOML: {error}") from None


@cache
def device_memory() -> tuple[str | None, int]:
    """The name of this machine's first GPU, and its bytes, or 0 if nvidia-smi does not tell; without a GPU, None and
    the bytes of the machine."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not hidden and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        if found := re.match(r"(.+), *(\d+)\s", listed):
            return found[1], int(found[2]) * MIB
    if not hidden and any(map(os.path.exists, DRIVERS)):
        return "unknown", 0
    return None, machine_memory()


def machine_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(run: Run, ranks: int = 0, elsewhere: bool = False) -> None:
    """Compare a rank's weights, gradients and moments with the memory of its device, or with its share of the machine
    if they are kept there.

    It is a lower bound, with the inputs of the blocks, but without other activations and buffers, so a run that is
    refused would have failed. The first rank of a machine looks for all.

    Args:
        ranks: Processes of this machine. 0: as the launcher of this process says.
        elsewhere: The ranks are on other machines: any device of the table might be theirs.

    Raises:
        UserError: They are larger.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    gpu, memory = device_memory()
    if elsewhere:
        largest = max(machine_memory(), *(gpu.memory for gpu in known_gpus()))
        memory = int(MOST_GIB * GIB) if run.job.training.enable_cpu_offload else largest
    elif gpu is None or (memory and run.job.training.enable_cpu_offload):
        memory = machine_memory() // (ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    state, training, degree = state_bytes(run), run.job.training, run.degrees
    # The input of each block is kept in 2 bytes or more, however much is recomputed.
    tokens = training.seq_len // (degree.context * degree.tensor) * (not training.enable_cpu_offload)
    row = 2 * tokens * run.arch.dim * (run.arch.n_layers // degree.pipeline)
    if 0 < memory < state:
        keys = run.job.model.model_dump(exclude_unset=True) or {"flavor": run.job.model.flavor}
        raise UserError(
            f"{', '.join(f'model.{key} = {shown(value)}' for key, value in keys.items())}: weights, gradients and "
            f"optimizer state take {state / GIB:,.1f} GiB on each rank (of {run.world_size:,}), which has "
            f"{memory / GIB:,.1f} GiB. "
            f"{run.world_size * state // memory + 1:,} such devices hold them; `titanlite plan` says what else fits."
        )
    if 0 < memory < state + (rows := training.local_batch_size) * row:
        needs = f"the inputs of blocks need {rows * row / GIB:,.1f} GiB; a rank has {memory / GIB:,.1f} GiB for them,"
        most = f"weights and optimizer state. At most {(memory - state) // row:,} rows fit."
        raise UserError(f"training.local_batch_size = {rows}: {needs} {most}")


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s\-_]+", name.upper()))
