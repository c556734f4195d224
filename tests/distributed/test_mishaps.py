"""Ranks that die or hang: the run goes on by itself, or says who was late, in what and where."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import losses

from titanlite.launch.verdict import explain_hang

WORKER = Path(__file__).with_name("mishap_run.py")
JOB = """
[model]
dim = 64
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 128
[training]
steps = 20
seq_len = 32
local_batch_size = 2
global_batch_size = 8
mixed_precision_param = "float32"
[dataset]
num_workers = 0
[lr_scheduler]
warmup_steps = 2
[checkpoint]
interval = 5
timeout_seconds = 6
[metrics]
log_freq = 1
enable_tensorboard = false
[comm]
train_timeout_seconds = 8
init_timeout_seconds = 30
"""


def launch(folder: Path, mishap: str, restarts: int) -> subprocess.CompletedProcess[str]:
    (folder / "job.toml").write_text(JOB)
    arguments = ["--job.config_file", folder / "job.toml", "--job.dump_folder", folder / mishap]
    command = [sys.executable, WORKER, "launch", "2", str(restarts), mishap, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.slow
def test_a_killed_rank_restarts_the_run_and_the_curve_is_the_same(tmp_path: Path) -> None:
    done = launch(tmp_path, "killed", restarts=1)
    assert done.returncode == 0, done.stderr
    assert "Rank 1 failed first: it was killed (SIGKILL)" in done.stderr
    assert "Starting again from the newest checkpoint (0 restarts left)." in done.stderr
    assert "resumed from step 10" in done.stdout
    assert launch(tmp_path, "nothing", restarts=0).returncode == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "nothing")
    assert list(losses(tmp_path / "killed")) == list(range(1, 21))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mishap", "step", "waits_in", "file", "function", "seconds"),
    [
        pytest.param("hang1", 1, "gloo:all_gather", "train.py", "stuck_or_killed", 30, marks=pytest.mark.long),
        ("hang5", 5, "gloo:all_gather", "train.py", "stuck_or_killed", 8),
        ("hang_save", 5, "gloo:all_gather", "saver.py", "mishap_run.py", 6),
    ],
)
def test_a_hang_ends_in_a_report_that_names_the_late_rank(
    tmp_path: Path, mishap: str, step: int, waits_in: str, file: str, function: str, seconds: int
) -> None:
    started = time.monotonic()
    done = launch(tmp_path, mishap, restarts=0)
    assert done.returncode not in (0, 2, 3, 4, 75)
    assert time.monotonic() - started < seconds + 40
    late, waiting = done.stderr.index(f"step {step}, is LATE"), done.stderr.index(f"step {step}, waits in {waits_in}")
    assert late < waiting
    assert file in done.stderr[late:waiting]
    assert function in done.stderr[late:waiting]


def hang(rank: int, number: int) -> dict:
    collectives = {"0": (number, "gloo:all_reduce"), "7": (3, "gloo:broadcast")}
    where = {"line": "a.py:1 in f: g()", "inside": "wait (b.py:2)", "host": f"node{rank}", "hosts": ["node0", "node1"]}
    return {"rank": rank, "step": 9, "collectives": collectives, **where}


def test_the_late_rank_comes_first() -> None:
    late, waiting = explain_hang([hang(0, 12), hang(1, 11)], set()).split("\nRank 0")
    assert late.startswith("Rank 1 (node1), step 9, is LATE: after gloo:all_reduce number 11 it did not join the next")
    assert "a.py:1 in f: g()" in late
    assert "waits in gloo:" in waiting


def test_a_rank_that_could_not_even_say_where_it_is() -> None:
    text = explain_hang([hang(0, 12)], {1})
    assert text.startswith("Rank 1 is LATE: its process was stopped, or hangs outside of Python.")
    assert explain_hang([], {1}) == ""


def test_ranks_of_a_machine_that_went_away() -> None:
    assert explain_hang([hang(0, 12)], set()).startswith(
        "No rank of this machine is late. Gone, or late: rank 1 (node1).\nRank 0 (node0), step 9, waits in gloo:"
    )
