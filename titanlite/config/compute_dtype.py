"""Choose the compute dtype if `training.mixed_precision_param` is "auto".

bfloat16 halves memory and memory traffic, but is only fast if the hardware supports it. A CPU
without bfloat16 instructions emulates each matmul: with AVX2 alone, the debug model trains 36 times
slower than in float32. This module does not import torch.
"""

from pathlib import Path
from typing import Literal

ComputeDtype = Literal["bfloat16", "float32"]

CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is the name on ARM


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 instructions.

    On systems other than Linux, return False.
    """
    if not CPU_INFO.exists():
        return False
    for line in CPU_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86 and ARM
            return not BFLOAT16_FLAGS.isdisjoint(value.split())
    return False


def fast_compute_dtype(on_gpu: bool) -> ComputeDtype:
    """Return "bfloat16" if the hardware supports fast bfloat16, and "float32" otherwise.

    Args:
        on_gpu: Whether the ranks compute on GPUs. All GPUs are assumed to support fast bfloat16.
    """
    return "bfloat16" if on_gpu or cpu_has_bfloat16() else "float32"
