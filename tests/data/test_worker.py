"""Background processes: the same rows, and they neither hang nor outlive their trainer."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from data_helpers import ROOT, Ranks, dataset_of, make_loader, some_texts
from ranks import descendants

from titanlite.config.errors import UserError

pytestmark = pytest.mark.slow


def is_worker(pid: int) -> bool:
    """Whether a process is a data worker that lives."""
    try:
        return b"titanlite.data.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def workers(parent: int | None = None) -> list[int]:
    """The living data workers of a process."""
    return sorted(filter(is_worker, descendants(parent or os.getpid())))


def wait_until(true):
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("size", "number"), [(1, 1), (2, 2)])
def test_workers_change_no_row_and_no_state_and_end_with_the_loader(tmp_path, size, number):
    dataset = dataset_of(tmp_path, some_texts(150))
    alone, ranks = Ranks(dataset, 1), Ranks(dataset.model_copy(update={"num_workers": number, "prefetch": 3}), size)
    for _ in range(6):
        assert torch.equal(ranks.batch(), alone.batch())
    assert len(workers()) == size * number
    for worker in workers():  # signals that are for the trainer
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(worker, name)
    state = ranks.state()
    assert state == alone.state()  # what lies prefetched does not count
    expected = alone.batch()
    assert torch.equal(ranks.batch(), expected)
    assert torch.equal(ranks.load(state).batch(), expected)  # and is thrown away
    ranks.close()
    assert not workers()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGBUS])
def test_a_killed_worker_is_reported(tmp_path, end):
    """The kernel sends SIGBUS to whoever reads a mapped file behind its new end."""
    killed = end == signal.SIGKILL
    loader = make_loader(dataset_of(tmp_path, some_texts(100)).model_copy(update={"num_workers": 2 if killed else 1}))
    loader.next_global_batch()
    os.kill(pid := workers()[-1], signal.SIGSTOP)
    if not killed:
        os.truncate(tmp_path / "a.jsonl", 100)
    os.kill(pid, end)
    os.kill(pid, signal.SIGCONT)
    said = r"a data worker \(process \d+\) ended by signal SIGKILL" if killed else r"a\.jsonl has changed"
    with pytest.raises(UserError, match=said) as error:
        list(loader)
    assert error.value.exit_code == (1 if killed else 2)
    loader.close()
    assert not workers()


BUSY = """
import sys
sys.path[:0] = [sys.argv[1]]
from data_helpers import *
import tokenizers
path = write_jsonl(Path(sys.argv[2]) / "a.jsonl", ["word " * 40] * 20 + ["a" * 60 + "!"] * 500)
value = json.loads((ROOT / "assets/tokenizer/tokenizer.json").read_text())
value["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "[ab]*?[ab]*?[ab]*?[ab]*?[ab]*?c|."}
file = Path(sys.argv[2]) / "tokenizer.json"
file.write_text(json.dumps(value))
loader = make_loader(Dataset(source="jsonl", path=str(path), num_workers=1), tokenizer=load_tokenizer(file))
loader.start()
print("started", flush=True)
loader.next_global_batch()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_trainer_even_in_a_busy_loop(tmp_path, number):
    command = [sys.executable, "-c", BUSY, str(ROOT / "tests/data"), str(tmp_path)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert trainer.stdout and trainer.stdout.readline() == b"started\n"  # noqa: PT018
    wait_until(lambda: workers(trainer.pid))
    found = workers(trainer.pid)
    time.sleep(2.0)  # it has begun with the text that takes for ever
    trainer.send_signal(number)
    trainer.wait()
    wait_until(lambda: not any(map(is_worker, found)))


@pytest.mark.parametrize("sent", [b"", b"\x80\x05\x95\xff", pickle.dumps(("data", "part"))])
def test_a_worker_whose_trainer_is_killed_at_once_says_nothing(sent):
    reader, pipe = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "titanlite.data.worker", "0"]
    assert not subprocess.run(command, input=sent, stdout=pipe, stderr=subprocess.PIPE, cwd=ROOT, check=False).stderr
    os.close(pipe)
