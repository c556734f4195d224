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

from titanlite import Loader
from titanlite.config.errors import UserError
from titanlite.data.loader import Interrupted

pytestmark = pytest.mark.slow


def workers(parent: int | None = None) -> list[int]:
    """The living data workers of a process."""
    found = []
    for pid in descendants(parent or os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [pid] * (b"titanlite.data.worker" in words)
    return sorted(found)


def wait_until(true: object, seconds: float = 60.0) -> None:
    assert callable(true)
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def count_batches(loader: Loader) -> int:
    return sum(1 for _ in iter(loader.next_global_batch, None))


@pytest.mark.parametrize(("size", "number"), [(1, 1), (2, 2)])
def test_workers_change_no_row_and_no_state_and_end_with_the_loader(tmp_path: Path, size: int, number: int) -> None:
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
def test_a_killed_worker_is_reported(tmp_path: Path, end: signal.Signals) -> None:
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
        count_batches(loader)
    assert error.value.exit_code == (1 if killed else 2)
    loader.close()
    assert not workers()


def test_waiting_for_a_worker_that_stands_still_has_a_limit_and_ends_when_told(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, some_texts(100)).model_copy(update={"num_workers": 1, "prefetch": 1})
    told: list[int] = []
    loader = make_loader(
        dataset, comm={"train_timeout_seconds": 2}, global_batch_size=512, seq_len=256, stopping=lambda: bool(told)
    )
    loader.next_global_batch()
    os.kill(workers()[0], signal.SIGSTOP)
    still = r"stood still for 1 seconds in jsonl .*a\.jsonl, document \d+: .*a\.jsonl, byte"
    with pytest.raises(UserError, match=still):
        count_batches(loader)
    loader.close()
    loader.start()
    os.kill(workers()[0], signal.SIGSTOP)
    told.append(1)
    assert isinstance(loader.failure(50), Interrupted)
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
def test_workers_end_with_their_trainer_even_in_a_busy_loop(tmp_path: Path, number: signal.Signals) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(ROOT / "tests/data"), str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert trainer.stdout and trainer.stdout.readline() == b"started\n"  # noqa: PT018
    wait_until(lambda: workers(trainer.pid))
    found = workers(trainer.pid)
    time.sleep(2.0)  # it has begun with the text that takes for ever
    trainer.send_signal(number)
    trainer.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and _alive(pid) for pid in found))


@pytest.mark.parametrize("sent", [b"", b"\x80\x05\x95\xff", pickle.dumps(("data", "part"))])
def test_a_worker_whose_trainer_is_killed_at_once_says_nothing(sent: bytes) -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "titanlite.data.worker", "0"]
    assert not subprocess.run(command, input=sent, stdout=pipe, stderr=subprocess.PIPE, cwd=ROOT, check=False).stderr
    os.close(pipe)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False
