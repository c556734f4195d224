"""Run torchtitan 0.2.2 on a CPU, with the command line of torchtitan.

The environment variable MODEL contains the sizes of the model as JSON. torchtitan assumes CUDA if
there is no accelerator, so this module substitutes `torch.cpu`.
"""

import json
import os
import resource
from types import SimpleNamespace

import torch
from torch import _utils
from torch.distributed.fsdp import FSDPModule


def get_device_properties(_device: object) -> SimpleNamespace:
    """Return the memory of this computer, because there is no GPU."""
    return SimpleNamespace(total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def memory_stats(_device: object) -> dict[str, int]:
    """Return the peak of the resident set, because there is no GPU allocator."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"reserved_bytes.all.peak": peak_kib * 1024}


CPU_MODULE = SimpleNamespace(
    **{
        **vars(torch.cpu),
        "get_device_name": lambda _: "CPU",
        "get_device_properties": get_device_properties,
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
    }
)

# torchtitan selects its device when this module is imported.
get_device_type = _utils._get_available_device_type
get_device_module = _utils._get_device_module
_utils._get_available_device_type = lambda: "cpu"
_utils._get_device_module = lambda _: CPU_MODULE
import torchtitan.tools.utils  # pyright: ignore[reportMissingImports]  # noqa: E402, F401

_utils._get_available_device_type = get_device_type
_utils._get_device_module = get_device_module

from torchtitan.distributed import utils  # pyright: ignore[reportMissingImports]  # noqa: E402
from torchtitan.models.llama3 import (  # pyright: ignore  # noqa: E402
    TransformerModelArgs,
    llama3_args,
)
from torchtitan.train import Trainer, main  # pyright: ignore[reportMissingImports]  # noqa: E402


def sum_gradients(self: FSDPModule, factor: float) -> None:
    """Use a plain sum, because gloo does not support the scaled sum that a factor of 1 selects."""
    assert factor == 1.0
    self.set_force_sum_reduction_for_comms(True)


shape = json.loads(os.environ["MODEL"])
# torchtitan multiplies the width of feed-forward layers by `ffn_dim_multiplier`, and rounds it up
# to a multiple of `multiple_of`. The small multiplier makes the result exactly `multiple_of`.
shape |= {"multiple_of": shape.pop("ffn_dim"), "ffn_dim_multiplier": 0.1}
llama3_args["measured"] = TransformerModelArgs(**shape)
# The barrier in this function passes device IDs, which gloo rejects.
utils.set_pg_timeouts = lambda **_: None
FSDPModule.set_gradient_divide_factor = sum_gradients
os.environ["LOCAL_RANK"] = "0"  # there is one CPU
main(Trainer)
