"""Data workers read the same sequences as the trainer, and neither hang nor outlive it."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from data_helpers import ROOT, RankLoaders, change, jsonl_dataset, make_loader, some_texts
from ranks import descendants

from titanlite.config.errors import UserError

pytestmark = pytest.mark.slow


def is_worker(pid: int) -> bool:
    try:
        return b"titanlite.data.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def find_workers(parent: int | None = None) -> list[int]:
    """List the living data workers of a process."""
    return sorted(filter(is_worker, descendants(parent or os.getpid())))


def wait_until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("size", "num_workers"),
    [(1, 1), (2, 2)],
)
def test_workers_change_no_sequence_and_no_state(tmp_path, size, num_workers):
    dataset = jsonl_dataset(tmp_path, some_texts(150))
    alone = RankLoaders(dataset, 1)
    ranks = RankLoaders(change(dataset, num_workers=num_workers, prefetch=3), size)

    for _ in range(6):
        assert torch.equal(ranks.batch(), alone.batch())

    assert len(find_workers()) == size * num_workers

    # Schedulers and terminals also signal workers, which must leave the reaction to the trainer.
    for worker in find_workers():
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(worker, name)
    state = ranks.state()

    # Prefetched batches do not change the state, and loading a state discards them.
    assert state == alone.state()

    expected = alone.batch()
    assert torch.equal(ranks.batch(), expected)
    assert torch.equal(ranks.load(state).batch(), expected)

    ranks.close()
    assert not find_workers()


def make_loader_with_workers(folder, num_workers):
    dataset = jsonl_dataset(folder, some_texts(100))
    return make_loader(change(dataset, num_workers=num_workers))


def assert_reported(loader, cause, exit_code):
    with pytest.raises(UserError, match=cause) as error:
        list(loader)
    assert error.value.exit_code == exit_code

    loader.close()
    assert not find_workers()


def test_a_worker_that_is_killed_is_reported_with_the_signal(tmp_path):
    loader = make_loader_with_workers(tmp_path, 2)
    loader.next_global_batch()

    os.kill(find_workers()[-1], signal.SIGKILL)

    assert_reported(loader, r"data worker \(process \d+\) .*SIGKILL", 1)


def test_a_worker_that_reads_a_truncated_file_is_reported_with_the_file(tmp_path):
    loader = make_loader_with_workers(tmp_path, 1)
    loader.next_global_batch()

    [worker] = find_workers()
    os.kill(worker, signal.SIGSTOP)
    os.truncate(tmp_path / "a.jsonl", 100)
    # The kernel sends this signal to a process that reads a mapped file past its end.
    os.kill(worker, signal.SIGBUS)
    os.kill(worker, signal.SIGCONT)

    assert_reported(loader, r"a\.jsonl has changed", 2)


def test_a_source_that_cannot_be_pickled_is_an_error(tmp_path):
    loader = make_loader_with_workers(tmp_path, 1)
    # The source of a plugin can have any attribute.
    setattr(loader.sources[0], "lock", threading.Lock())  # noqa: B010

    with pytest.raises(UserError, match="cannot pickle"):
        loader.next_global_batch()

    loader.close()
    assert not find_workers()


BUSY = """
import sys
sys.path[:0] = [sys.argv[1] + "/data", sys.argv[1]]
from pathlib import Path
from data_helpers import *
path = write_jsonl(Path(sys.argv[2]) / "a.jsonl", ["word " * 40] * 20 + ["a" * 60 + "!"] * 500)
value = json.loads((ROOT / "assets/tokenizer/tokenizer.json").read_text())
pattern = "[ab]*?[ab]*?[ab]*?[ab]*?[ab]*?c|."
value["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
file = Path(sys.argv[2]) / "tokenizer.json"
file.write_text(json.dumps(value))
dataset = Dataset(source="jsonl", path=str(path), num_workers=1)
loader = make_loader(dataset, tokenizer=load_tokenizer(file))
loader.start()
print("started", flush=True)
loader.next_global_batch()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_trainer_even_in_a_busy_loop(tmp_path, number):
    command = [sys.executable, "-c", BUSY, str(ROOT / "tests"), str(tmp_path)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)

    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"started\n"

    wait_until(lambda: find_workers(trainer.pid))
    workers = find_workers(trainer.pid)
    # After this time, the workers tokenize the text that takes forever.
    time.sleep(2.0)

    trainer.send_signal(number)
    trainer.wait()

    wait_until(lambda: not any(map(is_worker, workers)))


@pytest.mark.parametrize(
    "setup",
    [b"", b"\x80\x05\x95\xff", pickle.dumps(("data", "part"))],
)
def test_a_worker_whose_trainer_is_killed_at_once_prints_nothing(setup):
    reader, pipe = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "titanlite.data.worker", "0"]

    done = subprocess.run(command, input=setup, stdout=pipe, stderr=subprocess.PIPE, cwd=ROOT)

    assert not done.stderr

    os.close(pipe)
