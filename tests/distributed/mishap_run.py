"""A worker to which something happens: `mishap_run.py MISHAP [--section.key value ...]`, run by titanlite's launcher.

killed: rank 1 gets SIGKILL in step 8 of the first attempt. hang_data: rank 1 never gets the batch of step 5; hang_nccl:
the same, and NCCL's flight recorder has a collective that it did not join. hang_alone: rank 0, which is alone, waits
for its batch until it dies. hang_save: rank 1 never writes its part of a checkpoint.
`mishap_run.py launch RANKS RESTARTS MISHAP ...` starts the launcher with such workers.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d

from titanlite.checkpoint.dcp import CommittingWriter
from titanlite.cli import run_quietly, train
from titanlite.data.loader import Loader
from titanlite.launch.ranks import Ranks
from titanlite.runtime import process

next_global_batch = Loader.next_global_batch
batches = 0


def stuck_or_killed(loader: Loader) -> Any:
    global batches
    batches += 1
    if mishap == "killed" and late and batches == 8 and not Path("was_killed").exists():
        Path("was_killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if mishap in ("hang_data", "hang_nccl") and late and batches == 5:
        time.sleep(1000)
    if mishap == "hang_alone" and batches == 5:
        time.sleep(10)
        os._exit(9)
    return next_global_batch(loader)


def nccl_table(*_: bool) -> str:
    """What NCCL's flight recorder would say: rank 1 has joined 6 collectives, the others wait in the seventh."""
    entry = {"collective_seq_id": 6 if late else 7, "profiling_name": "nccl:all_reduce", "retired": late}
    return json.dumps({"entries": [{**entry, "process_group": ["0", "default_pg"], "time_created_ns": 2**62}]})


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        count, restarts, *rest = sys.argv[2:]
        sys.exit(Ranks([__file__, *rest], range(int(count)), int(count), max_restarts=int(restarts)).run())
    process.begin()
    _, mishap, *arguments = sys.argv
    late = os.environ["RANK"] == "1"
    loaders: Any = Loader
    writers: Any = CommittingWriter
    recorder: Any = _distributed_c10d
    loaders.next_global_batch = stuck_or_killed
    if mishap == "hang_save" and late:
        writers.write_data = lambda *_: time.sleep(1000)
    if mishap == "hang_nccl":
        recorder._dump_nccl_trace_json = nccl_table
        torch.distributed.is_nccl_available = lambda: True
    sys.exit(run_quietly(lambda: train(arguments)))
