"""Invariants 2 and 4: a run that changes its layout at every restart sees the same data and follows the same curve."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

JOB = """
[model]
dim = 64
n_layers = 2
n_heads = 2
n_kv_heads = 2
ffn_dim = 128
[training]
steps = 12
seq_len = 32
local_batch_size = 2
global_batch_size = 4
mixed_precision_param = "float32"
[optimizer]
lr = 2e-3
[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.0
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
enable_tensorboard = false
"""
LEGS = [  # last step, ranks, what differs from one rank
    (2, 1, {"checkpoint.create_seed_checkpoint": True}),  # saves the initial weights and stops
    (2, 1, {}),
    (4, 2, {"parallelism.tensor_parallel_degree": 2}),
    (6, 2, {"parallelism.pipeline_parallel_degree": 2}),
    (8, 2, {"training.local_batch_size": 1}),
    (10, 4, {"parallelism.data_parallel_replicate_degree": 2, "training.local_batch_size": 1}),
    (12, 1, {"training.local_batch_size": 1}),
]


def train(job: Path, folder: Path, ranks: int, options: dict[str, object]) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    words = [word for key, value in options.items() for word in (f"--{key}", str(value)) if word != "True"]
    where = ["--job.config_file", str(job), "--job.dump_folder", str(folder)]
    command = [sys.executable, *launcher, "-m", "titanlite.cli", "train", *where, *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def losses(folder: Path) -> list[float]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(1, 13))
    return [entry["loss"] for entry in entries]


def test_the_curve_does_not_depend_on_the_layout(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    train(job, tmp_path / "straight", 1, {})
    for last, ranks, options in LEGS:
        train(job, tmp_path / "moved", ranks, {**options, "training.steps": last})  # ends with a save
        if "checkpoint.create_seed_checkpoint" in options:
            assert [path.name for path in (tmp_path / "moved" / "checkpoint").iterdir()] == ["step-00000000"]
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "straight"), abs=1e-5)
