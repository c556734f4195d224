"""Ranks with a failure under the titanlite launcher.

`mishap_run.py launch RANKS MISHAP ...` starts ranks that run `mishap_run.py MISHAP ...`. MISHAP is
one of MISHAPS, or one of the following failures during training with the given options:

- hang_data: rank 1 never receives the batch of step 5.
- hang_nccl: as hang_data, with an NCCL flight recorder entry that rank 1 did not join.
- hang_alone: rank 0 is alone and waits for its batch.
- hang_save: rank 1 never writes its part of a checkpoint.
- stop_after_save: rank 1 stops itself after its first save.
"""

import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from titanlite.config.errors import ERROR_FOLDER, GuardError, StoppedBySignal
from titanlite.runtime import process

RANK = int(os.environ.get("RANK", "0"))
is_rank_1 = RANK == 1
# Folder in which ranks report errors. Only the ranks have it, not the launcher.
FOLDER = Path(os.environ.get(ERROR_FOLDER, ""))


def launch(count: int, *options: str) -> int:
    from titanlite.launch.ranks import Ranks

    seconds = float(os.environ.get("STOP_SECONDS", "60"))
    restarts = int(os.environ.get("MAX_RESTARTS", "0"))
    hint = "To resume: outputs/\x1b]0;mine\x07"
    command = [__file__, *options]
    ranks = Ranks(command, range(count), count, seconds, restarts, lambda: hint)
    return ranks.run()


def handle_signals(handler: Callable[..., Any]) -> None:
    """Call `handler` when SIGINT, SIGTERM or SIGHUP arrives."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


def wait_until_ready() -> None:
    """On rank 0, wait until rank 1 has called this function, and print "ready"."""
    rank_1_is_ready = FOLDER / "ready"
    if is_rank_1:
        rank_1_is_ready.touch()
    else:
        while not rank_1_is_ready.exists():
            time.sleep(0.01)
        print("ready", flush=True)


def fail_after_rank_1(error: Exception) -> None:
    """Raise `error` on rank 1, and then another error on rank 0."""
    if is_rank_1:
        raise error
    while not (FOLDER / "1.json").exists():
        time.sleep(0.01)
    raise RuntimeError("connection reset by peer")


def stop_by_guard() -> None:
    """A guard stops rank 1, and rank 0 loses its connection."""
    fail_after_rank_1(GuardError("loss is nan on one rank"))


def crash() -> None:
    """Rank 1 crashes, and rank 0 loses its connection."""
    fail_after_rank_1(ValueError("the root cause"))


def crash_while_rank_0_hangs() -> None:
    """Rank 1 crashes, and rank 0 does not notice it."""
    if not is_rank_1:
        time.sleep(300)
    crash()


def save() -> None:
    """Stop after the first signal, and report how many signals arrived."""
    signals = []
    handle_signals(lambda number, frame: signals.append(number))
    wait_until_ready()
    while not signals:
        time.sleep(0.02)
    # The ranks exit at different times.
    time.sleep(0.3 + RANK)
    raise StoppedBySignal(f"saved after {len(signals)} signal")


def ignore_signals() -> None:
    """Never react to a signal."""
    handle_signals(lambda number, frame: None)
    wait_until_ready()
    time.sleep(300)


def wait_without_handler() -> None:
    """Wait like a run that has not installed its signal handlers yet."""
    wait_until_ready()
    time.sleep(300)


def save_without_launcher() -> None:
    """After a signal, write a file instead of a checkpoint, and exit."""

    def write_file(number: int, frame: object) -> None:
        Path(f"saved{RANK}").touch()
        sys.exit()

    handle_signals(write_file)
    wait_until_ready()
    time.sleep(300)


def die_without_report() -> None:
    """Rank 1 is killed without a report, and rank 0 reports the failure."""
    wait_until_ready()
    while not Path("go").exists():
        time.sleep(0.01)
    if is_rank_1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    raise RuntimeError("connection reset by peer")


def write_hostile_text() -> None:
    """Report a hang and an error with escape codes, then exit."""
    from titanlite.config.files import write_atomically

    (FOLDER / "train.log").write_text("run.log")
    report = json.dumps([False, 0, "Rank 0 is LATE: x\x1b[2J"])
    write_atomically(FOLDER / "0.hang.json", report.encode())  # the launcher may read it anytime
    if is_rank_1 and not Path("again").exists():
        Path("again").touch()
        (FOLDER / "1.json").write_text(
            json.dumps({"message": "a tensor\x1b[2J named\r\u202e", "time": 0.0})
        )
    if is_rank_1:
        os._exit(9)


def end_rank_1() -> None:
    """End rank 1 with exit code 0, without a report."""
    wait_until_ready()
    if is_rank_1:
        os._exit(0)
    time.sleep(300)


MISHAPS: dict[str, Callable[[], None]] = {
    "guard_on_one": stop_by_guard,
    "crash": crash,
    "hang": crash_while_rank_0_hangs,
    "save": save,
    "stuck": ignore_signals,
    "early": wait_without_handler,
    "orphan": save_without_launcher,
    "hostile": write_hostile_text,
    "lost": die_without_report,
    "exit": end_rank_1,
}


def train(mishap: str, arguments: list[str]) -> None:
    from torch._C import _distributed_c10d

    from titanlite.checkpoint.dcp import CheckpointWriter
    from titanlite.cli import train
    from titanlite.data.loader import Loader

    next_global_batch = Loader.next_global_batch
    batches = itertools.count(1)

    def late_batch(loader: Loader) -> Any:
        fifth = next(batches) == 5
        if mishap in ("hang_data", "hang_nccl") and is_rank_1 and fifth:
            time.sleep(1000)
        if mishap == "hang_alone" and fifth:
            time.sleep(10)
            os._exit(9)
        return next_global_batch(loader)

    def nccl_table(*_: bool) -> str:
        """Return an NCCL flight recorder entry of a collective that rank 1 has not joined."""
        entry = {
            "collective_seq_id": 6 if is_rank_1 else 7,
            "profiling_name": "nccl:all_reduce",
            "retired": is_rank_1,
        }
        return json.dumps({"entries": [{**entry, "time_created_ns": 2**62}]})

    def stop_after_save(record: logging.LogRecord) -> bool:
        if getattr(record.msg, "kind", "") == "save":
            logging.getLogger("titanlite").removeFilter(stop_after_save)
            os.kill(os.getpid(), signal.SIGSTOP)
        return True

    if mishap == "stop_after_save" and is_rank_1:
        logging.getLogger("titanlite").addFilter(stop_after_save)
    patch.object(Loader, "next_global_batch", late_batch).start()
    if mishap == "hang_save" and is_rank_1:
        patch.object(CheckpointWriter, "write_data", lambda *_: time.sleep(1000)).start()
    if mishap == "hang_nccl":
        patch.object(_distributed_c10d, "_dump_nccl_trace_json", nccl_table, create=True).start()
        patch("torch.distributed.is_nccl_available", lambda: True).start()
    train(arguments)


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    if name == "launch":
        sys.exit(launch(int(words[0]), *words[1:]))

    process.set_up_process()
    from titanlite.cli import run_quietly

    mishap = MISHAPS.get(name) or (lambda: train(name, words))
    sys.exit(run_quietly(mishap))
