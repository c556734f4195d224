"""Run titanlite, plain.py and torchtitan as a user does, and measure speed and memory.

Times and memory are measured from outside the process, or read from its logs. A single rank runs as
`titanlite train` or `python PROGRAM`, and several ranks run with the launcher or torchrun.
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
import textwrap
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
class Workload:
    """Model, batch and number of steps of a run. The default is the debug model.

    Attributes:
        batch_size: Sequences per step, over all ranks.
        num_microbatches: Microbatches per step. Only titanlite supports more than 1.
        threads: CPU threads of each rank.
        window: Number of steps that are timed together. The measured time is their mean. Use more
            than 1 if steps are very short.
    """

    dim: int = 256
    n_layers: int = 6
    n_heads: int = 4
    n_kv_heads: int = 2
    ffn_dim: int = 640
    vocab_size: int = 4096
    seq_len: int = 256
    batch_size: int = 8
    num_microbatches: int = 1
    dtype: str = "fp32"
    compile: bool = False
    ranks: int = 1
    threads: int = 2
    steps: int = 16
    window: int = 1


SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
COMPUTE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Measured:
    """Measurements of one run.

    Attributes:
        tokens_per_second: Median over the windows after a warmup of 3 steps or one window.
        peak_rss: Largest resident set of a single process, which is a training rank, in bytes.
        total_pss: Largest memory of all processes together, with shared pages counted once, in
            bytes. It is sampled twice a second.
        first_step: Seconds from the command to the end of the first step.
        loss: Loss of the last step. It only shows that the run is plausible, because initial
            weights and data order differ between frameworks.
    """

    tokens_per_second: float
    peak_rss: int
    total_pss: int
    first_step: float
    loss: float


@dataclass(frozen=True)
class Process:
    """A command that has finished.

    Attributes:
        launched: Time at which it started, in seconds since the epoch.
        peak_rss: Largest resident set of the process or one of its children, in bytes.
        total_pss: Largest memory of all its processes together, in bytes.
        output: Standard output.
    """

    launched: float
    peak_rss: int
    total_pss: int
    output: str


def prepare_tokens(folder: Path) -> Path:
    """Tokenize the standard library into shards for titanlite and plain.py.

    Returns:
        The folder of the shards.
    """
    shards = folder / "shards"
    run_command([sys.executable, "-P", "-m", "titanlite", "prepare", "--out", shards], {}, folder)
    return shards


def write_text(folder: Path) -> Path:
    """Write the standard library as JSON lines, and return the file."""
    path = folder / "text" / "stdlib.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    with path.open("w") as file:
        for source in sorted(stdlib.rglob("*.py")):
            if "-packages" not in str(source):
                document = {"text": source.read_text(errors="replace")}
                file.write(json.dumps(document) + "\n")
    return path


def run_titanlite(work: Workload, data: Path, cache: Path, options: Sequence[str] = ()) -> Measured:
    """Run and measure the `titanlite` command.

    Args:
        work: The run.
        data: Folder of shards, or a file of JSON lines.
        cache: Folder for compiled code.
        options: Further options of `titanlite train`.
    """
    settings: dict[str, object] = {f"model.{name}": getattr(work, name) for name in SHAPE}
    settings |= {
        "training.seq_len": work.seq_len,
        "training.local_batch_size": work.batch_size // (work.ranks * work.num_microbatches),
        "training.global_batch_size": work.batch_size,
        "training.steps": work.steps,
        "training.mixed_precision_param": COMPUTE_DTYPES[work.dtype],
        "dataset.source": "jsonl" if data.suffix == ".jsonl" else "shards",
        "dataset.path": data,
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": work.window,
    }
    flags = ["--checkpoint.no-enable", "--metrics.no-enable_tensorboard"]
    if work.compile:
        flags.append("--compile.enable")
    subcommand = "launch" if work.ranks > 1 else "train"
    command = [sys.executable, "-P", "-m", "titanlite", subcommand, *to_options(settings)]

    with tempfile.TemporaryDirectory(prefix="titanlite-") as name:
        command += [*flags, *options, "--job.dump_folder", name]
        process = run_command(command, environment(work, cache), Path(name))
        metrics = Path(name, "metrics.jsonl").read_text().splitlines()

    lines = [json.loads(line) for line in metrics]
    step_times = [line["step_time"] for line in lines]
    first_step = lines[0]["time"] - process.launched
    return summarize(work, process, step_times, first_step, lines[-1]["loss"])


def run_plain(work: Workload, shards: Path, cache: Path) -> Measured:
    """Run and measure the same work with plain.py."""
    assert work.num_microbatches == 1
    names = (*SHAPE, "seq_len", "steps", "dtype")
    settings: dict[str, object] = {name: getattr(work, name) for name in names}
    settings["batch_size"] = work.batch_size // work.ranks
    settings["data"] = next(shards.glob("*.bin"))
    flags = []
    if work.compile:
        flags.append("--compile")
    program = [*torchrun_options(work.ranks), ROOT / "benchmarks" / "plain.py"]

    with tempfile.TemporaryDirectory(prefix="plain-") as name:
        command = [sys.executable, *program, *to_options(settings), *flags]
        process = run_command(command, environment(work, cache), Path(name))

    report = json.loads(process.output.splitlines()[-1])
    first_end = report["ends"][0]
    # Measure the same windows as titanlite, which logs every `window` steps after the first one.
    window_ends = report["ends"][max(1, work.window - 1) :: work.window]
    times = window_times(work, [process.launched, first_end, *window_ends])
    first_step = first_end - process.launched
    return summarize(work, process, times, first_step, report["losses"][-1])


def run_torchtitan(work: Workload, text: Path, cache: Path) -> Measured:
    """Run and measure the same work with the trainer of torchtitan.

    Args:
        work: The run.
        text: File of JSON lines, alone in its folder.
        cache: Folder for compiled code.

    Raises:
        RuntimeError: If the run fails, or its model has a different number of parameters.
    """
    assert work.num_microbatches == 1
    settings: dict[str, object] = {
        "model.name": "llama3",
        "model.flavor": "measured",
        "model.hf_assets_path": ROOT / "assets/tokenizer",
        # The name of a loader of local files.
        "training.dataset": "c4_test",
        "training.dataset_path": text.parent,
        "training.seq_len": work.seq_len,
        "training.local_batch_size": work.batch_size // work.ranks,
        "training.steps": work.steps,
        "training.mixed_precision_param": COMPUTE_DTYPES[work.dtype],
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": work.window,
    }
    flags = ["--metrics.disable_color_printing"]
    if work.compile:
        flags.append("--compile.enable")
    sizes = {name: getattr(work, name) for name in SHAPE}
    variables = environment(work, cache) | {"MODEL": json.dumps(sizes)}
    if work.ranks == 1:
        variables |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
    program = [*torchrun_options(work.ranks), ROOT / "benchmarks" / "cpu_torchtitan.py"]

    with tempfile.TemporaryDirectory(prefix="torchtitan-") as name:
        command = [sys.executable, *program, *to_options(settings), *flags]
        process = run_command([*command, "--job.dump_folder", name], variables, Path(name))

    check_torchtitan_size(process.output, Architecture(**sizes))
    ends, last_loss = parse_torchtitan_log(process.output, work.ranks)
    times = window_times(work, [process.launched, *ends])
    first_step = ends[0] - process.launched
    return summarize(work, process, times, first_step, last_loss)


def check_torchtitan_size(output: str, arch: Architecture) -> None:
    """Raise RuntimeError if the model of torchtitan has a different number of parameters."""
    (size,) = set(re.findall(r"size: ([\d,]+) total parameters", output))
    expected_size = num_params(arch)
    if int(size.replace(",", "")) != expected_size:
        raise RuntimeError(f"torchtitan trains {size} parameters, titanlite {expected_size:,}")


def parse_torchtitan_log(output: str, num_ranks: int) -> tuple[list[float], float]:
    """Return the time of each step line of the first rank, in seconds since the epoch.

    Also return the loss of the last step line. All ranks log to the same output.
    """
    log_line = re.compile(r"^\[titan\] (\S+ [\d:]+,\d+) .* step: *\d+ +loss: *(\S+)", re.MULTILINE)
    steps = log_line.findall(output)
    ends = []
    for logged, _ in steps[::num_ranks]:
        ends.append(datetime.strptime(logged, "%Y-%m-%d %H:%M:%S,%f").timestamp())
    last_loss = float(steps[-1][1])
    return ends, last_loss


def to_options(settings: dict[str, object]) -> list[object]:
    """Turn settings into command line options."""
    options: list[object] = []
    for name, value in settings.items():
        options += [f"--{name}", value]
    return options


def torchrun_options(num_ranks: int) -> list[str]:
    """Return the options of Python that run a program on several ranks. For one rank, none."""
    if num_ranks == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]


def window_times(work: Workload, ends: list[float]) -> list[float]:
    """Return the mean seconds of a step in each interval between two log lines."""
    return [(end - start) / work.window for start, end in pairwise(ends)]


def summarize(
    work: Workload, process: Process, times: list[float], first_step: float, loss: float
) -> Measured:
    """Combine the measurements of a run.

    Args:
        work: The run.
        process: Its process.
        times: Seconds of the first step, then the mean seconds of a step in each window.
        first_step: Seconds from the command to the end of the first step.
        loss: Loss of the last step.
    """
    num_warmup = 3 if work.window == 1 else 2
    median_time = statistics.median(times[num_warmup:])
    tokens_per_second = work.batch_size * work.seq_len / median_time
    return Measured(tokens_per_second, process.peak_rss, process.total_pss, first_step, loss)


def environment(work: Workload, cache: Path) -> dict[str, str]:
    """Return the environment variables of a run.

    They set the number of CPU threads and ranks, hide GPUs, and set the folder for compiled code.
    """
    return {
        "OMP_NUM_THREADS": str(work.threads),
        "NGPU": str(work.ranks),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }


def run_command(
    command: Sequence[object], variables: dict[str, str], folder: Path, measure: bool = True
) -> Process:
    """Run a command from the repository root, wait for it, and measure its memory.

    Args:
        command: Program and arguments.
        variables: Environment variables to add.
        folder: Folder for its output.
        measure: Sample `total_pss` twice a second. Otherwise it is 0, and the function returns
            sooner after the command has ended.

    Raises:
        RuntimeError: If the command fails.
    """
    arguments = [str(word) for word in command]
    python_path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    full_environment = {**os.environ, "PYTHONPATH": python_path, **variables}
    out = folder / "stdout.txt"
    err = folder / "stderr.txt"

    with out.open("w") as output, err.open("w") as errors:
        launched = time.time()
        process = subprocess.Popen(
            arguments, stdout=output, stderr=errors, cwd=ROOT, env=full_environment
        )
        total_pss = 0
        pid = 0
        while pid == 0:
            time.sleep(0.5 if measure else 0.02)
            if measure:
                total_pss = max(total_pss, pss_of_tree(process.pid))
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)

    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        last_errors = err.read_text()[-4000:]
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}\n{last_errors}")
    # ru_maxrss is the largest resident set of the process and of the children it waited for.
    return Process(launched, usage.ru_maxrss * 1024, total_pss, out.read_text())


def pss_of_tree(root: int) -> int:
    """Return the memory of a process and its descendants in bytes. Shared pages count once."""
    remaining_pids = [root]
    total = 0
    while remaining_pids:
        pid = remaining_pids.pop()
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # the process has just ended
            continue
        remaining_pids += [int(child) for child in children]
        for line in lines:
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def write_part(
    folder: Path, benchmark: str, part: str, result: dict[str, Any], gpu: str = ""
) -> None:
    """Add a result to FOLDER/BENCHMARK.json.

    Args:
        folder: Folder of the results.
        benchmark: Name of the file, without its suffix.
        part: Name of the result. An earlier result of this name is replaced.
        result: The result. The date, device, versions and commit are added to it.
        gpu: Name of the GPU. By default, the CPU is described.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = read_parts(folder, benchmark)
    parts[part] = {"about": about(gpu), **result}
    (folder / f"{benchmark}.json").write_text(json.dumps(parts, indent=1) + "\n")


def about(gpu: str = "") -> str:
    """Describe date, device, versions and commit of a measurement.

    Args:
        gpu: Name of the GPU. By default, the CPU is described.
    """
    device = gpu or f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    python = platform.python_version()
    return f"{date}, {device}, Python {python}, torch {version('torch')}, {commit()}"


def describe_measurement(description: str) -> str:
    """Return a sentence with the date and environment in `description`, a result of `about`."""
    date, _, environment = description.partition(", ")
    return f"Measured on {date} with {environment}."


def cpu_name() -> str:
    """Return the model name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor()


def commit() -> str:
    """Return the commit of this repository, and whether titanlite has uncommitted changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    name = git("rev-parse", "--short", "HEAD") or "unknown"
    has_changes = git("status", "--porcelain", "titanlite") != ""
    return f"commit {name} with changes" if has_changes else f"commit {name}"


def read_parts(folder: Path, benchmark: str) -> dict[str, Any]:
    """Return the stored results of a benchmark. {} if there are none."""
    path = folder / f"{benchmark}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def paragraph(text: str) -> str:
    """Wrap a paragraph of Markdown to lines of at most 100 columns."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Format a Markdown table with text in the first column and numbers in the others."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]
    return [*lines, ""]
