"""Measure titanlite on one GPU, compare it with torchtitan, and profile a step.

    benchmarks/gpu.sh PART [--out DIR] [--only TEXT ...] [--seconds 520] [--pairs 2] [--cache DIR]
        [--device cpu]

The parts:

    smoke       the debug model as a user starts it: ./run_train.sh, TensorBoard, checkpoint,
                resume, generate
    checks      the tests that depend on the GPU, and benchmarks/loss.py
    titanlite   Llama 1b and 8b: tokens/s, MFU, peak memory, time to the first step with a cold and
                a warm cache
    torchtitan  torchtitan 0.2.2 with the same workloads, in turns with titanlite
    profile     the most expensive kernels, the idle time, and each part of a step with its lower
                bound
    all         all parts, one after the other

Each part writes gpu_PART.json after each case, so an interrupted part keeps its results. It also
writes gpu_PART.txt, the output of the programs. If the time is too short for a case, the part
prints its name, and you can add the case to the same file later with `--only`. On a CPU, a tiny
model takes the place of each model, to test the scripts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from gpu_workloads import (
    AC_MODES,
    COMPARED,
    WORKLOADS,
    GpuWorkload,
    titanlite_options,
    torchtitan_job,
)
from runs import RESULTS, ROOT, commit, read_parts, write_text

CHECKS = ("tests/gpu", "tests/checkpoint/test_save_gpu.py", "tests/optim/test_clip.py")
# Time limit of one program, so that a hang leaves time for the other cases.
RUN_SECONDS = 180.0
# Settings of all workloads on a CPU.
TINY_SETTINGS: dict[str, Any] = {
    "flavor": "debugmodel",
    "tiny": True,
    "local_batch_size": 2,
    "seq_len": 64,
    "steps": 4,
}


class CaseFailed(Exception):
    """A case cannot be measured. The message contains the reason and the end of the output."""


class OutOfGpuMemory(CaseFailed):
    """A program needs more memory than the GPU has."""


class Part:
    """A part of the GPU benchmarks: its time limit, its folders and its results.

    Attributes:
        name: Name of the part.
        options: Command line options.
        folder: Temporary folder for the output of runs.
        cpu: Whether the part runs on a CPU.
        deadline: Time at which the part must end.
        out: Folder of the results.
        cache: Folder for compiled code.
        path: File of the results.
        log: File with the output of all programs.
        cases: Name -> result, including earlier results.
        about: Description of the measurement.
        text: Folder with the training text.
        failed: Names of the cases that could not be measured.
    """

    def __init__(self, name: str, options: argparse.Namespace, work_folder: Path) -> None:
        self.name = name
        self.options = options
        self.folder = work_folder
        self.cpu = options.device == "cpu"
        self.deadline = time.monotonic() + options.seconds
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.cache: Path = (options.cache or work_folder / "cache").resolve()
        self.path = self.out / f"gpu_{name}.json"
        self.log = self.out / f"gpu_{name}.txt"
        self.cases = read_parts(self.out, self.path.stem)
        self.about = about(self.cpu)
        self.text = write_text(work_folder).parent
        self.failed: list[str] = []

    def measure(self, case: str, run: Callable[[dict[str, Any]], None]) -> None:
        """Run one case, and keep its result, even if it is incomplete.

        Args:
            case: Name of the case. `--only` selects cases by name.
            run: Measures the case, and adds its results to the given dictionary.
        """
        only = self.options.only
        if only and not any(text in case for text in only):
            return
        result: dict[str, Any] = {"about": self.about}
        self.cases[case] = result
        try:
            run(result)
        except CaseFailed as error:
            result["error"] = str(error)
            self.failed.append(case)
        # The other cases are measured even after an unexpected error.
        except Exception:
            result["error"] = traceback.format_exc()
            self.failed.append(case)
        self.write()
        print(f"{self.name}, {case}: {summary(result)}", flush=True)

    def write(self) -> None:
        """Write the results of all cases atomically."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.cases, indent=1) + "\n")
        temporary.replace(self.path)

    def run(
        self, command: Sequence[object], limit: float = RUN_SECONDS, **variables: object
    ) -> tuple[float, str]:
        """Run a program, and return its time in seconds and its output.

        Args:
            command: Program and arguments.
            limit: Time limit in seconds.
            variables: Environment variables to add.

        Raises:
            CaseFailed: If it exits with an error, or exceeds its limit or the time of the part.
        """
        self.write()
        seconds_left = self.deadline - time.monotonic()
        part_is_over = CaseFailed(
            f"not finished: the {self.options.seconds:.0f} seconds of this part were over"
        )
        if seconds_left < 1:
            raise part_is_over

        arguments = [str(argument) for argument in command]
        environment = {**os.environ, **self.environment()}
        environment |= {name: str(value) for name, value in variables.items()}
        start = time.monotonic()
        log_size = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(arguments)}\n".encode())
            log.flush()
            try:
                exit_code = run_group(arguments, environment, log, min(seconds_left, limit))
            except subprocess.TimeoutExpired:
                if seconds_left <= limit:
                    raise part_is_over from None
                raise CaseFailed(f"no end after {limit:.0f} seconds") from None

        output = self.log.read_bytes()[log_size:].decode(errors="replace")
        if exit_code != 0:
            is_memory_error = re.search("OutOfMemoryError|out of memory|ALLOC_FAILED", output)
            error_type = OutOfGpuMemory if is_memory_error else CaseFailed
            raise error_type(f"exit code {exit_code}: {output[-3000:]}")
        return time.monotonic() - start, output

    def environment(self) -> dict[str, str]:
        """Return the environment variables that all programs get."""
        variables = {
            "PYTHONPATH": f"{ROOT}/benchmarks:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(self.folder / "huggingface"),
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "NGPU": "1",
        }
        if self.cpu:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        return variables

    def workloads(self, works: dict[str, GpuWorkload]) -> Iterator[tuple[str, GpuWorkload]]:
        """Yield the cases, with tiny models on a CPU."""
        for name, work in works.items():
            if self.cpu:
                work = replace(work, **TINY_SETTINGS)
            yield name, work


def run_group(
    arguments: list[str], environment: dict[str, str], log: BinaryIO, limit: float
) -> int:
    """Run a program in a process group, wait for it, and kill the group.

    Args:
        arguments: Program and arguments.
        environment: All environment variables.
        log: File for its output.
        limit: Time limit in seconds.

    Returns:
        The exit code of the program.

    Raises:
        TimeoutExpired: If the program exceeds the limit.
    """
    # Killing the process group ends all processes that the program started. A new session would
    # outlive this process.
    process = subprocess.Popen(
        arguments,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment,
        process_group=0,
    )
    try:
        return process.wait(timeout=limit)
    finally:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)


def about(cpu: bool) -> str:
    """Describe date, device, versions, commit and command of a measurement."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    device = f"a CPU ({platform.machine()}) with a tiny model" if cpu else describe_gpu()
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "triton", "torchao", "torchtitan"):
        if importlib.util.find_spec(package) is not None:
            versions.append(f"{package} {version(package)}")
    command = shlex.join(["benchmarks/gpu.sh", *sys.argv[1:]]).replace(f"{ROOT}/", "")
    return f"{date}, {device}, {', '.join(versions)}, {commit()}, `{command}`"


def describe_gpu() -> str:
    """Return the name, driver version and memory of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total"]
    query += ["--format=csv,noheader", "--id=0"]
    output = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    name, driver, memory = output.strip().split(", ")
    return f"{name}, driver {driver}, {memory}"


def summary(result: dict[str, Any]) -> str:
    """Format the measurements of a case in one line."""
    if "error" in result:
        return result["error"].strip().splitlines()[-1]
    texts = []
    for name, value in result.items():
        if name == "about":
            continue
        if isinstance(value, float):
            texts.append(f"{name} {value:,.4g}")
        elif isinstance(value, int | str):
            texts.append(f"{name} {value}")
    return ", ".join(texts)


# ----------------------------------------------------------------------------------------- parts


def smoke(part: Part) -> None:
    """Run the first steps of a new user."""
    steps = 6 if part.cpu else 40
    folder = part.folder / "debug_model"
    train = ["./run_train.sh", "--job.dump_folder", folder, "--checkpoint.interval", steps // 2]
    train += ["--metrics.log_freq", 2]
    if part.cpu:
        train += ["--training.seq_len", 64]

    def started(result: dict[str, Any]) -> None:
        result["seconds"], _ = part.run([*train, "--training.steps", steps])
        lines = read_lines(folder / "metrics.jsonl")
        result |= {"first loss": lines[0]["loss"], "last loss": lines[-1]["loss"]}
        result["checkpoints"] = sorted(path.name for path in (folder / "checkpoint").glob("step-*"))
        result["tensorboard files"] = len(list((folder / "tb").iterdir()))
        if len(result["checkpoints"]) != 2 or not result["tensorboard files"]:
            files = sorted(folder.iterdir())
            raise CaseFailed(f"two checkpoints and TensorBoard files are missing in {files}")

    def resumed(result: dict[str, Any]) -> None:
        result["seconds"], output = part.run([*train, "--training.steps", steps + 4])
        if f"Resumed after step {steps}" not in output:
            raise CaseFailed(f"it did not resume: {output[-2000:]}")
        result["last loss"] = read_lines(folder / "metrics.jsonl")[-1]["loss"]

    def generated(result: dict[str, Any]) -> None:
        command = [sys.executable, "-P", "-m", "titanlite", "generate", "--checkpoint", folder]
        command += ["--prompt", "def ", "--max-new-tokens", 20]
        result["seconds"], output = part.run(command)
        result["text"] = "def " + output.rpartition("\ndef ")[2].strip()

    for case in (started, resumed, generated):
        part.measure(case.__name__, case)


def checks(part: Part) -> None:
    """Run the tests that depend on the GPU, then compare the loss implementations."""

    def tests(result: dict[str, Any]) -> None:
        # The output names each test, so it shows the last test that ran.
        pytest = [sys.executable, "-m", "pytest", "-o", "addopts=--strict-markers", "-v", "-rs"]
        try:
            result["seconds"], _ = part.run([*pytest, *CHECKS], limit=part.options.seconds)
        finally:
            output = part.log.read_text(errors="replace").rpartition("\n$ ")[2]
            result |= count_tests(output)

    def loss(result: dict[str, Any]) -> None:
        command = [sys.executable, "benchmarks/loss.py", "--device", part.options.device]
        command += ["--dtype", "bf16", "--out", part.folder if part.cpu else part.out]
        if part.cpu:
            command += ["--dim", 64, "--tokens", 64, "--vocabulary", 512]
            command += ["--only", "materialized", "fused"]
        else:
            command += ["--calls", 20]
        result["seconds"], text = part.run(command, limit=part.options.seconds)
        result["text"] = text[text.index("| ") :].strip()

    part.measure("tests", tests)
    part.measure("loss", loss)


def count_tests(output: str) -> dict[str, Any]:
    """Return the outcome of each test in the output of pytest, and the count of each outcome."""
    pattern = r"^tests/(\S+\.py::\S+) (PASSED|FAILED|ERROR|SKIPPED)"
    tests = re.findall(pattern, output, re.MULTILINE)
    outcomes = [outcome for _, outcome in tests]
    result: dict[str, Any] = {"tests": dict(tests)}
    for name in ("PASSED", "FAILED", "ERROR", "SKIPPED"):
        result[name.lower()] = outcomes.count(name)
    return result


def titanlite(part: Part) -> None:
    """Measure throughput, memory and start of titanlite alone."""
    # Read all modules from disk once, so that the first case does not take longer. If this fails,
    # the cases report why.
    with suppress(CaseFailed):
        part.run([sys.executable, "-c", "import titanlite.train, torchao, datasets"])

    def measure_alone(work: GpuWorkload, cache: Path, result: dict[str, Any]) -> None:
        # A run of one step fills the compiler cache.
        if work.compile:
            shutil.rmtree(cache, ignore_errors=True)
            cold_run = run_titanlite(part, replace(work, steps=1), cache, extra_features=True)
            result["first step, cold cache"] = cold_run["first step"]
        result |= run_titanlite(part, work, cache, extra_features=True)

    for case, work in part.workloads(WORKLOADS):
        part.measure(case, partial(first_that_fits, part, case, work, AC_MODES, measure_alone))


def torchtitan(part: Part) -> None:
    """Compare both frameworks in alternating order."""
    for case, work in part.workloads(COMPARED):
        # Selective checkpointing saves every second matmul in titanlite, but no FP8 matmul in
        # torchtitan.
        modes = [mode for mode in AC_MODES if mode != "selective" or work.precision == "bf16"]
        measure_pairs = partial(compare_with_torchtitan, part)
        part.measure(case, partial(first_that_fits, part, case, work, modes, measure_pairs))


def compare_with_torchtitan(
    part: Part, work: GpuWorkload, cache: Path, result: dict[str, Any]
) -> None:
    """Run titanlite and torchtitan in pairs, and update the medians after each pair."""
    if part.cpu:
        raise CaseFailed("torchtitan needs a GPU")
    if importlib.util.find_spec("torchtitan") is None:
        raise CaseFailed("torchtitan is not installed")

    sides = {
        "titanlite": partial(run_titanlite, extra_features=False),
        "torchtitan": run_torchtitan,
    }
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    result["runs"] = runs
    for pair in range(part.options.pairs):
        # torchtitan runs first, because it may need a mode with less memory.
        order = ("torchtitan", "titanlite") if pair % 2 == 0 else ("titanlite", "torchtitan")
        for side in order:
            runs[side].append(sides[side](part, work, cache / side))
        for name in ("tokens/s", "memory reserved, GiB"):
            for side in sides:
                result[f"{side}: {name}"] = statistics.median(run[name] for run in runs[side])
            pairs = zip(runs["titanlite"], runs["torchtitan"], strict=True)
            ratios = [ours[name] / theirs[name] for ours, theirs in pairs]
            result[f"ratio of {name}"] = statistics.median(ratios)


def first_that_fits(
    part: Part,
    case: str,
    work: GpuWorkload,
    modes: Sequence[str],
    run: Callable[[GpuWorkload, Path, dict[str, Any]], None],
    result: dict[str, Any],
) -> None:
    """Run a case with the first mode of activation checkpointing that fits into memory.

    Args:
        part: Part of the case.
        case: Name of the case.
        work: Its workload. Modes before `work.activation_checkpoint` are not tried.
        modes: Modes of activation checkpointing, sorted by speed.
        run: Measures a workload, given the folder for compiled code and the result to extend.
        result: Result of the case.
    """
    for mode in modes[modes.index(work.activation_checkpoint) :]:
        work = replace(work, activation_checkpoint=mode)
        result["work"] = asdict(work)
        cache = part.cache / re.sub(r"\W+", "-", f"{case} {mode}")
        try:
            return run(work, cache, result)
        except OutOfGpuMemory:
            if mode == modes[-1]:
                raise
            result.setdefault("out of memory with", []).append(mode)


def run_torchtitan(part: Part, work: GpuWorkload, cache: Path) -> dict[str, Any]:
    """Measure torchtitan with its log."""
    import tomlkit

    folder = Path(tempfile.mkdtemp(dir=part.folder))
    job = folder / "job.toml"
    job.write_text(tomlkit.dumps(torchtitan_job(work, folder, part.text)))
    # torchrun would resolve the host name, which can fail without a network.
    world = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }
    command = [sys.executable, "-m", "torchtitan.train", "--job.config_file", job]
    _, output = part.run(command, **caches(cache), **world)
    lines = torchtitan_steps(output)
    steady = [line for line in lines if line["step"] > 2 * work.window]
    return {
        "tokens/s": statistics.median(line["tps"] for line in steady),
        "memory reserved, GiB": max(line["memory"] for line in lines),
        "last loss": lines[-1]["loss"],
    }


def torchtitan_steps(output: str) -> list[dict[str, float]]:
    """Parse the step lines of the torchtitan log."""
    pattern = r"step: *(\d+) +loss: *([\d.]+|nan|inf) .* memory: *([\d.]+)GiB.* tps: *([\d,]+) "
    names = ("step", "loss", "memory", "tps")
    steps = []
    for texts in re.findall(pattern, output):
        values = [float(text.replace(",", "")) for text in texts]
        steps.append(dict(zip(names, values, strict=True)))
    return steps


def run_titanlite(
    part: Part, work: GpuWorkload, cache: Path, extra_features: bool
) -> dict[str, Any]:
    """Measure titanlite with its metrics.jsonl."""
    folder = Path(tempfile.mkdtemp(dir=part.folder))
    options = titanlite_options(work, folder, part.text, extra_features)
    launched = time.time()
    part.run([sys.executable, "-P", "-m", "titanlite", "train", *options], **caches(cache))
    lines = read_lines(folder / "metrics.jsonl")
    steady = [line for line in lines if line["step"] > 2 * work.window] or lines
    mfu_values = [line["mfu"] for line in steady if line["mfu"] is not None]
    return {
        "tokens/s": statistics.median(line["tps"] for line in steady),
        "MFU": statistics.median(mfu_values) if mfu_values else None,
        "memory reserved, GiB": max(line["memory"] for line in lines),
        "memory allocated, GiB": max(line["memory_peak"] for line in lines),
        "first step": lines[0]["time"] - launched,
        "last loss": lines[-1]["loss"],
    }


def caches(folder: Path) -> dict[str, Any]:
    """Return environment variables that set the compiler cache folders."""
    return {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / "triton"}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def profile(part: Part) -> None:
    """Profile kernels, idle time and lower bounds of a step (gpu_profile.py)."""
    for case, work in part.workloads(WORKLOADS):
        if work.compile:
            # Here, `steps` only sets the length of the learning rate schedule, because
            # gpu_profile.py always runs a dozen steps.
            work = replace(work, steps=1000)
            run = partial(run_profile, part, case)
            part.measure(case, partial(first_that_fits, part, case, work, AC_MODES, run))


def run_profile(
    part: Part, case: str, work: GpuWorkload, cache: Path, result: dict[str, Any]
) -> None:
    """Run gpu_profile.py, and add the measurements that it has written to the result."""
    folder = Path(tempfile.mkdtemp(dir=part.folder))
    measurements = folder / "measurements.json"
    trace = part.out / f"gpu_profile_{case.replace(' ', '-')}.json.gz"
    program = [sys.executable, "-P", ROOT / "benchmarks/gpu_profile.py", measurements, trace]
    options = titanlite_options(work, folder / "run", part.text, extra_features=True)
    try:
        part.run([*program, *options], **caches(cache))
    finally:
        if measurements.exists():
            result |= json.loads(measurements.read_text())


PARTS = {part.__name__: part for part in (smoke, checks, titanlite, torchtitan, profile)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--cache",
        type=Path,
        help="folder for compiled code, which the part `profile` reuses from `titanlite`",
    )
    parser.add_argument(
        "--only", action="append", help="cases with this in their name; may be given several times"
    )
    parser.add_argument("--seconds", type=float, default=520, help="time of each part")
    parser.add_argument("--pairs", type=int, default=2, help="torchtitan: runs of each side")
    options = parser.parse_args(argv)
    if options.device == "cuda" and shutil.which("nvidia-smi") is None:
        parser.error("found no NVIDIA GPU; to test the scripts with a tiny model, use --device cpu")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts. Return 1 if a case could not be measured."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends child processes
    failed: list[str] = []
    for name in PARTS if options.part == "all" else [options.part]:
        with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
            part = Part(name, options, Path(folder))
            PARTS[name](part)
            failed += [f"{name}: {case}" for case in part.failed]
    if failed:
        print(f"Not measured: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
