"""Start runs of titanlite, plain.py and torchtitan like a user, and measure them.

Times and memory are measured from outside, or read from metrics.jsonl. No hooks are used. One
process is `titanlite train` or `python PROGRAM`, and two use the launcher or torchrun.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from titanlite.config.flavors import Architecture
from titanlite.observe.flops import num_params

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MIB = 2**20


@dataclass(frozen=True)
class Work:
    """What one run trains, and on what. The default is the debug model, 2,048 tokens a step."""

    dim: int = 256
    n_layers: int = 6
    n_heads: int = 4
    n_kv_heads: int = 2
    ffn_dim: int = 640
    vocab_size: int = 4096
    seq_len: int = 256
    rows: int = 8
    """Of a step, over all ranks."""
    accumulate: int = 1
    """Microbatches of a step; titanlite only."""
    dtype: str = "fp32"
    compile: bool = False
    ranks: int = 1
    threads: int = 2
    """CPU threads of each rank."""
    steps: int = 16
    window: int = 1
    """Steps whose mean is one time: titanlite logs so often. Very short steps need more than 1."""
    fsdp: bool = False
    """Plain: FSDP2 on one process, too, as titanlite has it."""


SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
MATMULS = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Measured:
    """What one run took."""

    tokens_per_second: float
    """Median of the windows after a warm-up of 3 steps or one window."""
    peak_rss: int
    """Bytes: largest resident set of a single process, that is of a training rank."""
    total_pss: int
    """Bytes of all processes, with shared pages counted once, sampled twice a second."""
    first_step: float
    """Seconds from the command to the end of the first step."""
    loss: float
    """Loss of the last step, a plausibility check: initial weights and data order differ."""


def prepare_tokens(folder: Path) -> Path:
    """Tokenize the standard library into shards that both sides read; returns their folder."""
    run_command(
        [sys.executable, "-P", "-m", "titanlite", "prepare", "--out", folder / "shards"], {}, folder
    )
    return folder / "shards"


def write_text(folder: Path) -> Path:
    """Write the standard library as JSON lines, and return the file."""
    path = folder / "text" / "stdlib.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for source in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
            if "-packages" not in str(source):
                file.write(json.dumps({"text": source.read_text(errors="replace")}) + "\n")
    return path


def run_titanlite(work: Work, data: Path, cache: Path, options: Sequence[str] = ()) -> Measured:
    """Train with the titanlite command on shards or JSON lines. `cache` keeps compiled code."""
    settings: dict[str, object] = {f"model.{name}": getattr(work, name) for name in SHAPE}
    settings |= {
        "training.seq_len": work.seq_len,
        "training.local_batch_size": work.rows // (work.ranks * work.accumulate),
        "training.global_batch_size": work.rows,
        "training.steps": work.steps,
        "training.mixed_precision_param": MATMULS[work.dtype],
        "dataset.source": "jsonl" if data.suffix == ".jsonl" else "shards",
        "dataset.path": data,
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": work.window,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    words += ["--checkpoint.no-enable", "--metrics.no-enable_tensorboard", *options]
    words += ["--compile.enable"] * work.compile
    module = ["titanlite", "launch"] if work.ranks > 1 else ["titanlite", "train"]
    with tempfile.TemporaryDirectory(prefix="titanlite-") as name:
        command = [sys.executable, "-P", "-m", *module, *words, "--job.dump_folder", name]
        launched, peak, total, _ = run_command(command, environment(work, cache), Path(name))
        lines = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    return _measured(
        work,
        [line["step_time"] for line in lines],
        peak,
        total,
        lines[0]["time"] - launched,
        lines[-1],
    )


def run_plain(work: Work, shards: Path, cache: Path) -> Measured:
    """The same work by plain.py."""
    assert work.accumulate == 1
    settings: dict[str, object] = {
        name: getattr(work, name) for name in (*SHAPE, "seq_len", "steps", "dtype")
    }
    settings |= {"rows": work.rows // work.ranks, "data": next(shards.glob("*.bin"))}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    words += ["--compile"] * work.compile + ["--fsdp"] * work.fsdp
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={work.ranks}"]
    with tempfile.TemporaryDirectory(prefix="plain-") as name:
        command = [
            sys.executable,
            *(torchrun if work.ranks > 1 else ()),
            ROOT / "benchmarks" / "plain.py",
            *words,
        ]
        launched, peak, total, output = run_command(command, environment(work, cache), Path(name))
    report = json.loads(output.splitlines()[-1])
    ends = [
        launched,
        report["ends"][0],
        *report["ends"][max(1, work.window - 1) :: work.window],
    ]  # as titanlite logs
    times = [(end - start) / work.window for start, end in pairwise(ends)]
    return _measured(work, times, peak, total, ends[1] - launched, {"loss": report["losses"][-1]})


def run_torchtitan(work: Work, text: Path, cache: Path) -> Measured:
    """The same work by the torchtitan trainer, on the JSON lines beside `text`.

    Raises:
        RuntimeError: it failed, or its model has another number of parameters.
    """
    assert work.accumulate == 1
    settings: dict[str, object] = {
        "model.name": "llama3",
        "model.flavor": "measured",
        "model.hf_assets_path": ROOT / "assets/tokenizer",
        "training.dataset": "c4_test",  # the name of a loader of local files
        "training.dataset_path": text.parent,
        "training.seq_len": work.seq_len,
        "training.local_batch_size": work.rows // work.ranks,
        "training.steps": work.steps,
        "training.mixed_precision_param": MATMULS[work.dtype],
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": work.window,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    words += ["--metrics.disable_color_printing", *["--compile.enable"] * work.compile]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={work.ranks}"]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    variables = environment(work, cache) | {
        "MODEL": json.dumps({name: getattr(work, name) for name in SHAPE})
    }
    variables |= {} if work.ranks > 1 else alone
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as name:
        program = [*(torchrun if work.ranks > 1 else ()), ROOT / "benchmarks" / "cpu_torchtitan.py"]
        command = [sys.executable, *program, *words, "--job.dump_folder", name]
        launched, peak, total, log = run_command(command, variables, Path(name))
    (size,) = set(re.findall(r"size: ([\d,]+) total parameters", log))
    shape = Architecture(**{name: getattr(work, name) for name in SHAPE})
    if int(size.replace(",", "")) != num_params(shape):
        raise RuntimeError(f"torchtitan trains {size} parameters, titanlite {num_params(shape):,}")
    steps = re.findall(
        r"^\[titan\] (\S+ [\d:]+,\d+) .* step: *\d+ +loss: *(\S+)", log, re.MULTILINE
    )
    ends = [
        datetime.strptime(time, "%Y-%m-%d %H:%M:%S,%f").timestamp()
        for time, _ in steps[:: work.ranks]
    ]
    ends = [launched, *ends]
    times = [(end - start) / work.window for start, end in pairwise(ends)]
    return _measured(work, times, peak, total, ends[1] - launched, {"loss": float(steps[-1][1])})


def _measured(
    work: Work, times: list[float], peak: int, total: int, first_step: float, last: dict[str, float]
) -> Measured:
    """`times`: seconds of step 1, then of one step of each window."""
    warm = times[3 if work.window == 1 else 2 :]
    return Measured(
        work.rows * work.seq_len / statistics.median(warm), peak, total, first_step, last["loss"]
    )


def environment(work: Work, cache: Path) -> dict[str, str]:
    """Both sides: so many threads, no GPU, the compiler's cache in a folder of their own."""
    variables = {
        "OMP_NUM_THREADS": work.threads,
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHINDUCTOR_CACHE_DIR": cache,
    }
    return {name: str(value) for name, value in (variables | {"NGPU": work.ranks}).items()}


def run_command(
    command: Sequence[object], variables: dict[str, str], folder: Path, measure: bool = True
) -> tuple[float, int, int, str]:
    """Run and wait; returns the time of the start, peak RSS, total PSS and standard output.

    Raises:
        RuntimeError: it failed.
    """
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    words, variables = (
        [str(word) for word in command],
        {**os.environ, "PYTHONPATH": path, **variables},
    )
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    with out.open("w") as output, err.open("w") as errors:
        launched = time.time()
        process = subprocess.Popen(words, stdout=output, stderr=errors, cwd=ROOT, env=variables)
        total, pid = 0, 0
        while not pid:
            time.sleep(0.5 if measure else 0.02)
            total = max(total, pss_of_tree(process.pid)) if measure else 0
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(
            f"{' '.join(words)} ended with {process.returncode}\n{err.read_text()[-4000:]}"
        )
    # The kernel keeps the largest resident set of the process and of all children that it has
    # waited for.
    return launched, usage.ru_maxrss * 1024, total, out.read_text()


def pss_of_tree(root: int) -> int:
    """Bytes that a process and all below it hold, pages that several share counted once."""
    found, total = [root], 0
    for pid in found:
        try:
            found += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def write_part(
    folder: Path, benchmark: str, part: str, result: dict[str, Any], gpu: str = ""
) -> None:
    """Add a result to FOLDER/BENCHMARK.json, with time and place of the measurement."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = read_parts(folder, benchmark) | {part: {"about": about(gpu), **result}}
    (folder / f"{benchmark}.json").write_text(json.dumps(parts, indent=1) + "\n")


def about(gpu: str = "") -> str:
    """Describe date, machine and commit of a measurement."""
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), model
        )
    place = f"{gpu or f'{len(os.sched_getaffinity(0))} cores of {model}'}, Python {platform.python_version()}"
    return (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {place}, torch {version('torch')}, {commit()}"
    )


def commit() -> str:
    """The commit of the code that is measured, and whether it has been changed since."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout
    changes = subprocess.run(
        [*git, "status", "--porcelain", "titanlite"], capture_output=True, check=False
    ).stdout
    return f"commit {name.strip() or 'unknown'}{' with changes' if changes else ''}"


def read_parts(folder: Path, benchmark: str) -> dict[str, Any]:
    """The parts of one benchmark that have been measured."""
    path = folder / f"{benchmark}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Format a Markdown table with text in the first column and numbers in the others."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return [*("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)), ""]
