"""Remove one wait at a time from a training job, and count the alarms of the race detector.

`torchrun removed_waits.py OUT` writes a JSON file for each rank, OUT.RANK: removed wait -> number
of alarms.
"""

import ctypes
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite import register
from titanlite.checkpoint.save import Saver
from titanlite.hooks import guards
from titanlite.hooks.hook import Hook, Request
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
COMPILED = "--compile.enable --compile.components model loss optimizer clip"


check_finite = guards.is_finite


def check_finite_and_ignore_result(tensor: Tensor) -> bool:
    """Read a tensor as the guard does. The ghost GPU computes nothing, so its values are random."""
    check_finite(tensor)
    return True


guards.is_finite = check_finite_and_ignore_result


@register("hook", "roll_back")
class RollBack(Hook):
    """Roll back in each step before it is saved, as the guards do."""

    def built(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def check(self, step: int, request: Request) -> None:
        if step > 1:
            assert self.trainer.checkpointer is not None
            assert self.trainer.checkpointer.roll_back(step) == step - 1


@register("hook", "roll_back_during_save")
class RollBackDuringSave(RollBack):
    """Roll back in each step, while the save of the same step is in progress."""

    def check(self, step: int, request: Request) -> None:
        pass

    def act(self, step: int, request: Request) -> None:
        super().check(step, request)


@register("hook", "count_saves")
class CountSaves(Hook):
    """Change a tensor on the GPU when a save collects it, after all reads that wait for the GPU."""

    name = "count_saves"

    def built(self, trainer: Trainer) -> None:
        self.num_saves = torch.zeros(1, device=trainer.device)

    def tensors(self) -> dict[str, Tensor]:
        self.num_saves += 1
        return {"num_saves": self.num_saves}


def without_call(owner: Any, method: str, caller: str) -> Any:
    """Skip calls of a method from functions with the name `caller`."""
    call = getattr(owner, method)

    def skip_from_caller(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_name != caller:
            return call(*args, **kwargs)

    return patch.object(owner, method, skip_from_caller)


# Results of reduce-scatters are in the main stream although FSDP2 frees them early.
ALWAYS_KEPT = patch.object(memory_savers, "keeps_reduced_gradients", lambda run: True)
UNCHANGED = nullcontext()
Stream = torch.cuda.Stream
Event = torch.cuda.Event
WITHOUT_WAIT_BEFORE_REDUCTION = without_call(Stream, "wait_stream", "foreach_reduce")
WITHOUT_WAIT_FOR_COPIES = patch.object(Saver, "wait_for_copies", lambda self: None)
ALL_SAVES = f"{SAVES} --job.hooks count_saves"
# Number of ranks -> name -> patch, options
REMOVED_WAITS = {
    1: {
        "none": (UNCHANGED, f"{SAVES} --job.hooks roll_back_during_save"),
        # With several ranks, the collectives of the save and of the rollback would be mixed up.
        "wait of a rollback for the save": (
            without_call(Saver, "wait_until_saved", "roll_back"),
            f"{SAVES} --job.hooks roll_back_during_save",
        ),
    },
    2: {
        "none": (UNCHANGED, f"{ALL_SAVES} --optimizer.name Muon"),
        "none, compiled": (UNCHANGED, f"{ALL_SAVES} {COMPILED}"),
        "cast reduction": (
            ALWAYS_KEPT,
            "--training.dtype bfloat16 --optimizer.stochastic_rounding",
        ),
        "reduction of each microbatch": (
            ALWAYS_KEPT,
            "--training.global_batch_size 16 --parallelism.fsdp_reduce microbatch",
        ),
        "offloaded reduction": (ALWAYS_KEPT, OFFLOAD),
        "wait before reduction": (WITHOUT_WAIT_BEFORE_REDUCTION, ""),
        "wait before reduction, compiled": (WITHOUT_WAIT_BEFORE_REDUCTION, COMPILED),
        "wait for asynchronous all-gather": (
            without_call(dist.Work, "wait", "foreach_all_gather_copy_out"),
            "--parallelism.memory_savers all",
        ),
        "wait for copies of a save": (WITHOUT_WAIT_FOR_COPIES, SAVES),
        "wait for copies of a save, compiled": (WITHOUT_WAIT_FOR_COPIES, f"{SAVES} {COMPILED}"),
        "wait of a save for the GPU": (without_call(Stream, "synchronize", "_copy"), ALL_SAVES),
        "wait of muon": (
            patch.object(muon._Transfer, "wait", lambda self: self.result),
            "--optimizer.name Muon",
        ),
        "wait for requests": (without_call(Event, "synchronize", "wait"), ""),
        "wait for offloaded loss": (
            without_call(Event, "synchronize", "_copy_loss_to_device"),
            OFFLOAD,
        ),
    },
}


def count_alarms(options: str, folder: Path, removal: Any = UNCHANGED) -> int:
    """Train a job, and return the number of alarms of the race detector.

    Args:
        removal: Context in which the job runs, such as a patch that removes a wait.
    """
    detector = ctypes.CDLL("libcuda.so.1")
    earlier_alarms = detector.race_alarms()
    torch._dynamo.reset()
    arguments = f"{SMALL} {options} --job.dump_folder {folder}".split()
    with removal:
        Trainer(load_run(arguments, world_size=int(os.environ["WORLD_SIZE"]))).train()
    torch.cuda.synchronize()
    return detector.race_alarms() - earlier_alarms


def main(out: Path) -> None:
    alarms = {}
    for name, (removal, options) in REMOVED_WAITS[int(os.environ["WORLD_SIZE"])].items():
        folder = out.with_name(name.replace(" ", "_"))
        alarms[name] = count_alarms(options, folder, removal)
    out.with_name(f"{out.name}.{os.environ['RANK']}").write_text(json.dumps(alarms))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
