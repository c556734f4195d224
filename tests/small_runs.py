"""A small job that trains in a second, and helpers to run it and to read its metrics."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tomli

ROOT = Path(__file__).resolve().parents[1]
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

# Tests that do not test data workers save the time to start one for each rank.
SMALL_WITHOUT_WORKERS = f"{SMALL}\n[dataset]\nnum_workers = 0\n"


def job_tables(text: str) -> dict[str, Any]:
    """Return the tables of a job file that is written in one line, with " ; " between its keys."""
    return tomli.loads(text.replace(" ; ", "\n"))


def start(job_file: Path, folder: Path, *options: str, ranks: int = 1) -> "subprocess.Popen[str]":
    """Start `titanlite launch`."""
    command = [sys.executable, "-m", "titanlite", "launch", "--job.config_file", str(job_file)]
    return subprocess.Popen(
        [*command, "--job.dump_folder", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NGPU": str(ranks)},
    )


def launch_job(
    job_file: Path,
    folder: Path,
    *options: str,
    ranks: int = 1,
    code: int = 0,
) -> str:
    """Run a job, check the exit code, and return the output."""
    process = start(job_file, folder, *options, ranks=ranks)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out + err


def run_program(
    *command: object,
    folder: Path | None = None,
    variables: dict[str, str] | None = None,
    code: int = 0,
    timeout: float = 600,
) -> "subprocess.CompletedProcess[str]":
    """Run a program with additional environment variables, and check its exit code.

    Fail after `timeout` seconds.
    """
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=os.environ | (variables or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def wait_for_step(process: "subprocess.Popen[str]", step: int) -> None:
    assert process.stdout is not None
    deadline = time.monotonic() + 120
    for line in process.stdout:
        if re.search(rf"step +{step}/", line):
            return
        assert time.monotonic() < deadline
    raise AssertionError(process.stderr.read() if process.stderr else "")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a JSON lines file."""
    with path.open() as file:
        return [json.loads(line) for line in file]


def read_printed_json(output: str) -> dict[str, Any]:
    """Return the first JSON object that a command has printed."""
    first = next(line for line in output.splitlines() if line.startswith("{"))
    return json.loads(first)


def read_metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the entries of metrics.jsonl by step."""
    entries = read_jsonl(folder / "metrics.jsonl")
    assert len({entry["step"] for entry in entries}) == len(entries), "a step was logged twice"
    return {entry["step"]: entry for entry in entries}


def read_losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step."""
    return {step: entry["loss"] for step, entry in read_metrics(folder).items()}


def read_log(folder: Path) -> str:
    """Return the text of train.log."""
    return (folder / "train.log").read_text()


def read_tensorboard(folder: Path) -> Any:
    """Return the metrics that a run has written for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tb"))
    board.Reload()
    return board


def read_events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the entries of events.jsonl of one kind."""
    return [event for event in read_jsonl(folder / "events.jsonl") if event["event"] == kind]


def list_saved_steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints. Fail if their folder contains anything else."""
    names = sorted(path.name for path in folder.glob("checkpoint/*"))
    return [int(name.removeprefix("step-")) for name in names]


def read_documented_program(page: str, title: str) -> str:
    """Return the Python program with a title on a page in docs/reference."""
    text = (ROOT / f"docs/reference/{page}.md").read_text()
    (program,) = re.findall(rf'```python title="{title}"\n(.*?)```', text, flags=re.DOTALL)
    return program


def indent_like_log(text: str) -> str:
    """Indent all lines of a message but the first, as train.log does."""
    return text.rstrip("\n").replace("\n", "\n    ") + "\n"
