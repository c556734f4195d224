"""What tests of launched runs share: a small job, a launcher of it, and two hosts with a cable between them.

A host is a network namespace of this machine. To make one takes iproute2 and the right to administer networks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

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
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "cable0"  # the interface of each host


def ip(*words: str) -> int:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode


@contextlib.contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """The words that run a command on each of two hosts, which reach each other at ADDRESSES."""
    names = (f"tl{os.getpid()}a", f"tl{os.getpid()}b")
    if shutil.which("ip") is None or ip("netns", "add", names[0]) != 0:
        pytest.skip("network namespaces cannot be made here: they need iproute2 and the right to administer networks")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            ip("-n", name, "link", "set", CABLE, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            ip("netns", "del", name)


def launch(folder: Path, job: str, log: Path, prefix: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
    """A launcher with the text of a job file; the run's output folder is `folder`/out."""
    file = folder / "job.toml"
    file.write_text(job)
    command = [*prefix, sys.executable, "-P", "-m", "titanlite", "launch", "--job.config_file", str(file)]
    with log.open("w") as out:
        return subprocess.Popen(
            [*command, "--job.dump_folder", str(folder / "out")],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdout=out,
            stderr=out,
            text=True,
        )
