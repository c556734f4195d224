"""Whole runs that meet a record which cannot be read: they save first, say it once, and can go on without it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from data_helpers import hide_bad_records, some_texts

pytestmark = pytest.mark.slow

JOB = """
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
[dataset]
source = "jsonl"
path = "text.jsonl"
[lr_scheduler]
warmup_steps = 2
[checkpoint]
interval = 5
[metrics]
log_freq = 1
enable_tensorboard = false
"""


def run(folder: Path, out: str, *options: str, ranks: int, code: int) -> str:
    (folder / "job.toml").write_text(JOB)
    command = [sys.executable, "-m", "titanlite.launch", "--job.config_file", "job.toml", "--job.dump_folder", out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NGPU": str(ranks)}
    done = subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(folder: Path) -> list[tuple[int, float]]:
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(entry["step"], entry["loss"]) for entry in entries]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_saved_before_a_bad_record_ends_it_and_goes_on_where_such_records_are_skipped(
    tmp_path: Path, ranks: int
) -> None:
    lines = hide_bad_records(tmp_path / "text.jsonl", some_texts(200), count=3)
    bad, skip = r"text\.jsonl, line \d+, column 1: not valid JSON", ("--dataset.on_bad_record", "skip")
    said = run(tmp_path, "run", ranks=ranks, code=2)
    last = losses(tmp_path / "run")[-1][0]
    assert 3 < last < 12
    assert f"The last good step is {last}, saved in" in said
    assert len(re.findall(bad, said)) == 1
    again = run(tmp_path, "run", ranks=ranks, code=2)
    assert losses(tmp_path / "run")[-1][0] == last
    assert len(re.findall(bad, again)) == 1

    told = run(tmp_path, "run", *skip, ranks=ranks, code=0)
    run(tmp_path, "whole", *skip, ranks=ranks, code=0)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert losses(tmp_path / "run")[-1][0] == 12
    found = [int(line) for line in re.findall(r"skipped a record: \S*text\.jsonl, line (\d+)", told)]
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(set(found)) == len(found) == entries[-1]["skipped_records"] > 0
    assert set(found) <= set(lines)
