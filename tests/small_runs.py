"""A run that takes a second: its job, the ways to start it, and what it has measured."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SMALL = """
[model]
dim = 64
n_layers = 2
n_heads = 2
n_kv_heads = 1
ffn_dim = 128

[training]
steps = 12
seq_len = 64
local_batch_size = 2
global_batch_size = 4
mixed_precision_param = "float32"

[optimizer]
lr = 2e-3

[lr_scheduler]
warmup_steps = 2

[activation_checkpoint]
mode = "none"

[checkpoint]
interval = 5

[metrics]
log_freq = 1
enable_tensorboard = false
"""


def start(job_file: Path, folder: Path, *options: str, ranks: int = 1) -> "subprocess.Popen[str]":
    """`titanlite launch`, as a user starts it."""
    command = [sys.executable, "-m", "titanlite", "launch", "--job.config_file", str(job_file)]
    return subprocess.Popen(
        [*command, "--job.dump_folder", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NGPU": str(ranks)},
    )


def launched(job_file: Path, folder: Path, *options: str, ranks: int = 1, code: int = 0) -> str:
    """What a run and its launcher said."""
    process = start(job_file, folder, *options, ranks=ranks)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out + err


def wait_for_step(process: "subprocess.Popen[str]", step: int) -> None:
    assert process.stdout is not None
    deadline = time.monotonic() + 120
    for line in process.stdout:
        if re.search(rf"step +{step}/", line):
            return
        assert time.monotonic() < deadline
    raise AssertionError(process.stderr.read() if process.stderr else "")


def logged(folder: Path) -> dict[int, dict[str, Any]]:
    """Step -> what metrics.jsonl has of it."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len({entry["step"] for entry in entries}) == len(entries), "a step was logged twice"
    return {entry["step"]: entry for entry in entries}


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss."""
    return {step: entry["loss"] for step, entry in logged(folder).items()}


def as_logged(text: str) -> str:
    """In train.log all lines of a message but the first are indented."""
    return text.rstrip("\n").replace("\n", "\n    ") + "\n"
