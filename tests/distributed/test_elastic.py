"""Invariants 2 and 4: a run that changes its layout at every restart sees the same data and follows the same curve;
one that keeps its layout follows it bitwise (on one rank and two: test_kill.py)."""

import json
import shutil
from pathlib import Path

import pytest
from equivalence import LAYOUTS
from ranks import titanlite

from titanlite.checkpoint import step_folders

pytestmark = pytest.mark.slow

JOB = """
[model]
dim = 64
n_layers = 4
n_heads = 2
n_kv_heads = 2
ffn_dim = 128
[training]
steps = 14
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
PIPELINES = {  # on each of two ranks one stage, or two spread in turns or in a V
    schedule: {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": schedule,
        "training.local_batch_size": 1,
    }
    for schedule in ("1F1B", "Interleaved1F1B", *(["ZBVZeroBubble"] if "pp2 ZBVZeroBubble" in LAYOUTS else []))
}
LEGS = [  # last step, ranks, what differs from one rank
    (2, 1, {"checkpoint.create_seed_checkpoint": True}),  # saves the initial weights and stops
    (2, 1, {}),
    (4, 2, {"parallelism.tensor_parallel_degree": 2}),
    (6, 2, PIPELINES["Interleaved1F1B"]),
    (8, 2, {"training.local_batch_size": 1}),
    (10, 4, {"parallelism.data_parallel_replicate_degree": 2, "training.local_batch_size": 1}),
    (12, 2, PIPELINES.get("ZBVZeroBubble", PIPELINES["Interleaved1F1B"])),
    (14, 1, {"training.local_batch_size": 1}),
]


def train(job: Path, folder: Path, ranks: int, options: dict[str, object]) -> None:
    words = [word for key, value in options.items() for word in (f"--{key}", str(value)) if word != "True"]
    titanlite("train", "--job.config_file", job, "--job.dump_folder", folder, *words, ranks=ranks)


def losses(folder: Path) -> list[float]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
    return [entry["loss"] for entry in entries]


def test_the_curve_does_not_depend_on_the_layout(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    train(job, tmp_path / "straight", 1, {})
    for last, ranks, options in LEGS:
        train(job, tmp_path / "moved", ranks, {**options, "training.steps": last})  # ends with a save
        if "checkpoint.create_seed_checkpoint" in options:
            assert [path.name for path in (tmp_path / "moved" / "checkpoint").iterdir()] == ["step-00000000"]
    assert len(losses(tmp_path / "moved")) == 14
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "straight"), abs=1e-5)


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=[pytest.mark.long] * (name != "Interleaved1F1B")) for name in PIPELINES]
)
def test_a_pipeline_that_validates_first_resumes_exactly(tmp_path, schedule):
    job, straight, resumed = tmp_path / "job.toml", tmp_path / "straight", tmp_path / "resumed"
    job.write_text(JOB)
    options = PIPELINES[schedule] | {
        "training.steps": 4,
        "checkpoint.interval": 2,
        "validation.freq": 4,
        "validation.holdout": 0.1,
        "validation.sequences": 4,
    }
    train(job, straight, 2, options)
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoint" / "step-00000004")
    train(job, resumed, 2, options)
    assert losses(resumed) == losses(straight)
    last, again = (
        step_folders.read_manifest(folder / "checkpoint" / "step-00000004")["files"] for folder in (straight, resumed)
    )
    assert {name for name in last if last[name] != again[name]} <= {".metadata"}  # it holds a random number
