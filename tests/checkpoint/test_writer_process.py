"""`checkpoint.async_mode = "process"`: another process writes what the trainer has staged in shared memory."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TinyRun, assert_equal

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.writer_process import SharedMemory, view

pytestmark = pytest.mark.usefixtures("one_rank")


def test_each_tensor_has_a_place_of_its_own_in_shared_memory():
    tensors = {
        "a": torch.arange(5.0),
        "scalar": torch.tensor(3.0),
        "bf16": torch.ones(3, 7, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
        "bytes": torch.arange(9, dtype=torch.uint8),
    }
    memory = SharedMemory(tensors)
    for name, tensor in tensors.items():
        memory.buffers[name].copy_(tensor)
    assert_equal(memory.buffers, tensors)
    for name, tensor in tensors.items():
        again = view(memory._memory, memory.place(memory.buffers[name]))
        assert torch.equal(again, tensor)
        assert again.untyped_storage().size() == tensor.nbytes  # or a writer would copy it first
    memory.close()


@pytest.mark.slow
def test_saves_in_a_process_that_survives_failures_and_leaves_nothing(tmp_path, monkeypatch):
    """One test for all, because the process takes seconds to start."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    folder, lines = tmp_path / "checkpoint", []
    before = set(os.listdir("/dev/shm"))
    run = TinyRun()
    manager = run.manager(folder, lines=lines, async_mode="process", keep_latest_k=0)
    writer = manager.saver._writer._process
    assert writer is not None

    def save(step: int) -> str:
        manager.save(step, run.train_state(step))
        manager.saver.settle()
        return next(line for line in reversed(lines) if f"step {step} " in line)

    assert save(0).startswith("saved step 0")  # weights alone
    run.train(1)
    open_files = len(os.listdir("/proc/self/fd"))
    assert save(1).startswith("saved step 1")
    assert len(os.listdir("/proc/self/fd")) <= open_files  # none for each tensor
    pid = writer._process.pid

    folder.rename(tmp_path / "away")
    folder.write_text("")
    assert "FAILED (NotADirectoryError" in save(2)
    folder.unlink()
    (tmp_path / "away").rename(folder)
    assert save(3).startswith("saved step 3")
    assert writer._process.pid == pid  # a failure costs no new process

    os.kill(pid, signal.SIGTERM)  # as a scheduler sends it to all processes: the trainer alone obeys
    assert save(4).startswith("saved step 4")
    os.kill(pid, signal.SIGSTOP)  # so that the save finds it alive, and it has not written anything when it dies
    connection: Any = writer._connection
    send = connection.send
    monkeypatch.setattr(connection, "send", lambda *task: (send(*task), os.kill(pid, signal.SIGKILL)))
    manager.save(5, run.train_state(5))
    manager.saver.settle()
    assert "save of step 5 FAILED (OSError: the process that writes has died, exit code -9)" in lines
    assert save(6).startswith("saved step 6")
    assert writer._process.pid != pid
    pid = writer._process.pid
    manager.close()
    assert not Path(f"/proc/{pid}").exists()
    assert manager.stats()["failed_saves"] == 2
    assert [step_folders.verify_folder(path) for path in step_folders.list_checkpoints(folder)] == [[]] * 5
    resumed = TinyRun(seed=99)
    resumed.manager(folder).load()
    assert_equal(resumed.everything(), run.everything())
    left = [name for name in os.listdir(tmp_path / "tmp") if not name.startswith("torchinductor")]  # torch's cache
    assert left == []
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch")]
