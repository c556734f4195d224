"""Remove one wait at a time from a training job, and count the alarms of the race detector.

`torchrun removed_waits.py OUT` writes a JSON file for each rank, OUT.RANK: removed wait -> number
of alarms.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from titanlite.checkpoint.save import Saver
from titanlite.load_run import load_run
from titanlite.optim import muon
from titanlite.parallel import memory_savers
from titanlite.train.trainer import Trainer

SMALL = (
    "--model.n_layers 4 --training.seq_len 128 --training.local_batch_size 2 --training.steps 4 "
    "--metrics.log_freq 50 --parallelism.fsdp_min_num_params 60000 --checkpoint.no-enable "
    "--guards.max_skipped 1000000"
)
SAVES = "--checkpoint.enable --checkpoint.interval 1 --checkpoint.async_mode async_with_pinned_mem"
OFFLOAD = "--training.enable_cpu_offload"


def without_call(owner: Any, method: str, caller: str) -> Any:
    """Skip calls of a method from functions with the name `caller`."""
    call = getattr(owner, method)

    def skip_from_caller(*args: Any) -> Any:
        if sys._getframe(1).f_code.co_name != caller:
            return call(*args)

    return patch.object(owner, method, skip_from_caller)


# Results of reduce-scatters are in the main stream although FSDP2 frees them early.
ALWAYS_FINAL = patch.object(memory_savers, "are_reductions_final", lambda run: True)
Stream = torch.cuda.Stream
Event = torch.cuda.Event
# Name -> patch, options
REMOVED_WAITS = {
    "none": (patch.object(sys, "argv", sys.argv), f"{SAVES} --optimizer.name Muon"),
    "cast reduction": (ALWAYS_FINAL, "--training.dtype bfloat16 --optimizer.stochastic_rounding"),
    "reduction of each microbatch": (
        ALWAYS_FINAL,
        "--training.global_batch_size 16 --parallelism.fsdp_reduce microbatch",
    ),
    "offloaded reduction": (ALWAYS_FINAL, OFFLOAD),
    "wait before reduction": (without_call(Stream, "wait_stream", "foreach_reduce"), ""),
    "wait for copies of a save": (patch.object(Saver, "wait_for_copies", lambda self: None), SAVES),
    "wait of muon": (
        patch.object(muon._Transfer, "wait", lambda self: self.result),
        "--optimizer.name Muon",
    ),
    "wait for requests": (without_call(Event, "synchronize", "receive"), ""),
    "wait for offloaded loss": (
        without_call(Event, "synchronize", "_move_loss"),
        OFFLOAD,
    ),
}


def count_alarms(name: str, folder: Path) -> int:
    removal, options = REMOVED_WAITS[name]
    detector = ctypes.CDLL("libcuda.so.1")
    earlier_alarms = detector.race_alarms()
    arguments = f"{SMALL} {options} --job.dump_folder {folder / name.replace(' ', '_')}".split()
    with removal:
        Trainer(load_run(arguments, world_size=int(os.environ["WORLD_SIZE"]))).train()
    torch.cuda.synchronize()
    return detector.race_alarms() - earlier_alarms


if __name__ == "__main__":
    out = Path(sys.argv[1])
    alarms = {name: count_alarms(name, out.parent) for name in REMOVED_WAITS}
    out.with_name(f"{out.name}.{os.environ['RANK']}").write_text(json.dumps(alarms))
