"""Background processes: the same rows, and they neither hang nor outlive their trainer."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from data_helpers import ROOT, Ranks, dataset_of, hide_bad_records, make_loader, some_texts, write_jsonl

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data.loader import OutOfData
from titanlite.data.worker import WorkerError, WorkerPool

pytestmark = pytest.mark.slow


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def pids(loader):
    assert isinstance(loader._reader, WorkerPool)
    return [worker._process._process.pid for worker in loader._reader._workers]


def count_batches(loader):
    return sum(1 for _ in iter(loader.next_global_batch, None))


@pytest.mark.parametrize(("size", "workers"), [(1, 1), (1, 3), (2, 2)])
def test_workers_change_no_row_and_no_state(tmp_path, size, workers):
    dataset = dataset_of(tmp_path, some_texts(150))
    alone = Ranks(dataset, 1)
    ranks = Ranks(dataset.model_copy(update={"num_workers": workers, "prefetch": 3}), size)
    for _ in range(6):
        assert torch.equal(ranks.batch(), alone.batch())
    state = ranks.state()
    assert state == alone.state()  # what lies prefetched does not count
    expected = alone.batch()
    assert torch.equal(ranks.batch(), expected)
    assert torch.equal(ranks.load(state).batch(), expected)  # and is thrown away
    processes = [pid for loader in ranks.loaders for pid in pids(loader)]
    ranks.close()
    assert not any(map(alive, processes))


def test_a_mistake_in_the_data_is_raised_in_the_trainer(tmp_path):
    (line,) = hide_bad_records(path := tmp_path / "a.jsonl", some_texts(200))
    loader = make_loader(Dataset(source="jsonl", path=str(path), num_workers=2))
    with pytest.raises(UserError, match=rf"a\.jsonl, line {line}, column 1: not valid JSON"):
        count_batches(loader)
    loader.close()


def test_the_end_of_the_data_arrives_at_the_step_it_would_without_workers(tmp_path):
    dataset = dataset_of(tmp_path, some_texts(100), max_epochs=1)
    steps = []
    for workers in (0, 2):
        loader = make_loader(dataset.model_copy(update={"num_workers": workers}))
        with pytest.raises(OutOfData):
            count_batches(loader)
        steps.append(loader.state_dict()["schedule"]["step"])
        loader.close()
    assert steps[0] == steps[1] > 2


def test_a_killed_worker_is_reported_at_once(tmp_path):
    loader = make_loader(dataset_of(tmp_path, some_texts(100)).model_copy(update={"num_workers": 2}))
    loader.next_global_batch()
    os.kill(pids(loader)[1], signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(WorkerError, match=r"a data worker \(process \d+\) ended by signal SIGKILL"):
        loader.next_global_batch()  # although many batches of it still lie in the queue and the socket
    loader.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_trainer_however_it_ends(tmp_path, number):
    path = write_jsonl(tmp_path / "a.jsonl", some_texts(100))
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path[:0] = [{str(ROOT / "tests/data")!r}]
            from data_helpers import hide_bad_records, Dataset, make_loader
            loader = make_loader(Dataset(source="jsonl", path={str(path)!r}, num_workers=2))
            loader.next_global_batch()
            print(*[worker._process._process.pid for worker in loader._reader._workers], flush=True)
            time.sleep(60)
            """
        )
    )
    trainer = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert trainer.stdout is not None
    processes = [int(word) for word in trainer.stdout.readline().split()]
    assert len(processes) == 2
    assert all(map(alive, processes))
    trainer.send_signal(number)
    trainer.wait()
    deadline = time.monotonic() + 5
    while any(map(alive, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_workers_run_ahead_only_so_far(tmp_path):
    """A queue of `prefetch` batches, one batch in the receiving thread's hand, and what fits into the socket."""
    dataset = dataset_of(tmp_path, some_texts(100), prefetch=2).model_copy(update={"num_workers": 1})
    loader = make_loader(dataset, seq_len=2048, global_batch_size=64)  # 0.5 MiB a batch, more than a socket holds
    loader.next_global_batch()
    assert isinstance(loader._reader, WorkerPool)
    worker = loader._reader._workers[0]

    def cpu_time():
        with open(f"/proc/{worker._process._process.pid}/stat") as file:
            return sum(map(int, file.read().rsplit(") ", 1)[1].split()[11:13]))

    deadline, times = time.monotonic() + 30, [-1, cpu_time()]
    while times[-1] != times[-2]:  # until it sleeps
        assert time.monotonic() < deadline
        time.sleep(1.0)
        times.append(cpu_time())
    assert worker._received.qsize() == 2
    loader.close()
