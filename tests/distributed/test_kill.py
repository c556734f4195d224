"""Whatever kills a run, at whatever moment: started again, it ends with the bits of a run that nothing disturbed.

Each test is one training run with a history of deaths. `benchmarks/kill.sh N` makes it a long one.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titanlite.checkpoint import commit

pytestmark = pytest.mark.slow

JOB = """
[model]
dim = 64
n_layers = 2
n_heads = 2
n_kv_heads = 1
ffn_dim = 128
[training]
steps = 8
seq_len = 32
local_batch_size = 1
global_batch_size = 2
mixed_precision_param = "float32"
[optimizer]
lr = 2e-3
[lr_scheduler]
warmup_steps = 2
[activation_checkpoint]
mode = "none"
[checkpoint]
interval = 2
keep_latest_k = 1
[metrics]
log_freq = 1
enable_tensorboard = false
"""
RANDOM_KILLS = int(os.environ.get("TITANLITE_RANDOM_KILLS", "2"))
SEED = int(os.environ.get("TITANLITE_KILL_SEED", "0"))


class Run:
    """A training run in `folder` that can be started, and ended, again and again."""

    def __init__(self, folder: Path, ranks: int, mode: str) -> None:
        self.folder = folder
        self.ranks = ranks
        self.seconds = 0.0  # that `finish` took
        job = folder.with_suffix(".toml")
        job.write_text(JOB)
        self.options = [
            "--job.config_file",
            str(job),
            "--job.dump_folder",
            str(folder),
            "--checkpoint.async_mode",
            mode,
        ]

    def start(self, point: str = "none", *options: str) -> "subprocess.Popen[str]":
        script = [str(Path(__file__).with_name("kill_run.py")), point, *self.options, *options]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        command = [sys.executable, *(launcher if self.ranks > 1 else []), *script]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    def finish(self, point: str = "none", *options: str) -> str:
        started = time.monotonic()
        process = self.start(point, *options)
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 0, out
        self.seconds = time.monotonic() - started
        return out

    def die(self, point: str) -> str:
        process = self.start(point)
        out, _ = process.communicate(timeout=200)
        assert process.returncode == (-signal.SIGKILL if self.ranks == 1 else 1), out  # torchrun reports 1
        return out

    def die_after(self, seconds: float) -> None:
        process = self.start()
        time.sleep(seconds)
        for pid in [*children(process.pid), process.pid]:  # workers first: the launcher would end them gently
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)

    def checkpoints(self) -> list[str]:
        return [path.name for path in commit.list_checkpoints(self.folder / "checkpoint")]

    def losses(self) -> dict[int, float]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}

    def final_state(self) -> dict[str, str]:
        """The checksums of the last checkpoint's data: weights, optimizer state and random states."""
        path = self.folder / "checkpoint" / "step-00000008"
        assert commit.verify_folder(path) == []
        files = commit.read_manifest(path)["files"]
        return {name: entry["xxh3_128"] for name, entry in files.items() if name.endswith(".distcp")}


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def assert_undisturbed(run: Run, reference: Run) -> None:
    assert run.losses() == reference.losses()
    assert sorted(run.losses()) == list(range(1, 9))
    assert run.final_state() == reference.final_state()
    assert len(run.final_state()) == run.ranks
    assert os.listdir(run.folder / "checkpoint") == ["step-00000008"]


@pytest.fixture(scope="module", params=[(1, "disabled"), (2, "async")], ids=["1-rank-sync", "2-ranks-async"])
def layout(request) -> tuple[int, str]:
    return request.param


@pytest.fixture(scope="module")
def reference(layout, tmp_path_factory) -> Run:
    run = Run(tmp_path_factory.mktemp("reference") / "run", layout[0], "disabled")
    run.finish()
    return run


def test_killed_at_every_point_of_a_save(tmp_path, layout, reference):
    run = Run(tmp_path / "run", *layout)
    for point in ("before_data", "within_file", "before_manifest", "before_rename"):
        run.die(f"{point}:0")
        assert run.checkpoints() == []  # a checkpoint exists or it does not
        assert any(path.name.startswith(".tmp-step-00000002") for path in (run.folder / "checkpoint").iterdir())
    assert "removed 1 unfinished checkpoint" in run.die("after_rename:0")
    assert run.checkpoints() == ["step-00000002"]
    if run.ranks > 1:
        run.die("within_file:1")
        assert run.checkpoints() == ["step-00000002"]
    run.die("during_purge:0")
    assert run.checkpoints() == ["step-00000004"]
    out = run.finish("full_disk:0")
    assert "save of step 6 FAILED (OSError: [Errno 28] No space left on device)" in out
    assert_undisturbed(run, reference)


def test_killed_at_random_moments(tmp_path, layout, reference):
    run, generator = Run(tmp_path / "run", *layout), random.Random(SEED)
    for _ in range(RANDOM_KILLS):
        run.die_after(generator.uniform(0.3, 1.0) * reference.seconds)
    run.finish()
    assert_undisturbed(run, reference)


def test_a_damaged_checkpoint_is_passed_over(tmp_path, layout, reference):
    run = Run(tmp_path / "run", *layout)
    run.finish("none", "--checkpoint.keep_latest_k", "0")
    data = run.folder / "checkpoint" / "step-00000008" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 4
    data.write_bytes(content)
    out = run.finish()
    assert "step-00000008 is DAMAGED (__0_0.distcp: checksum differs" in out
    assert run.losses() == reference.losses()
    assert run.final_state() == reference.final_state()
