"""Measure titanlite on one GPU, compare it with torchtitan, and profile a step.

    benchmarks/gpu.sh PART [--out DIR] [--only TEXT ...] [--seconds 520] [--pairs 2] [--cache DIR] [--device cpu]

    smoke       the debug model as a user starts it: ./run_train.sh, TensorBoard, checkpoint, resume, generate
    checks      tests/gpu
    titanlite   Llama 1b and 8b: tokens/s, MFU, peak memory, time to the first step with a cold and a warm cache
    torchtitan  torchtitan 0.2.2 on the same work, in turns with titanlite
    profile     the dearest kernels, the time without any, and each part of a step beside its floor
    all         one after the other

Each part writes gpu_PART.json and gpu_PART.txt (what the programs printed), case by case: what was
measured stays when it is stopped. A case that the time is too short for is named, and `--only`
measures it later into the same file. On a CPU a tiny model takes its place, which shows that the scripts
work and nothing else.
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
from typing import Any

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


class Failed(Exception):
    """A case cannot be measured. The message contains the reason and the end of the output."""


class OutOfMemory(Failed):
    """A program needs more memory than the GPU has."""


class Part:
    """Time limit, folders and files of one part."""

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
        """Run one case, and keep its result, even if it is incomplete."""
        if not any(only in case for only in self.options.only or [""]):
            return
        result: dict[str, Any] = {"about": self.about}
        self.cases[case] = result
        try:
            run(result)
        # Any error must leave the other cases to be measured.
        except Exception as error:
            result["error"] = str(error) if isinstance(error, Failed) else traceback.format_exc()
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

        Raises:
            Failed: If it exits with an error, or exceeds `limit` seconds or the time of the part.
        """
        self.write()
        left = self.deadline - time.monotonic()
        over = Failed(
            f"not finished: the {self.options.seconds:.0f} seconds of this part were over"
        )
        if left < 1:
            raise over
        arguments = [str(argument) for argument in command]
        values = {"PYTHONPATH": f"{ROOT}/benchmarks:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}
        values |= {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(self.folder / "huggingface"),
        }
        values |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NGPU": "1"}
        values |= {"CUDA_VISIBLE_DEVICES": ""} if self.cpu else {}
        values |= {name: str(value) for name, value in variables.items()}
        start = time.monotonic()
        begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(arguments)}\n".encode())
            log.flush()
            # Killing the process group ends all processes that the program started. A new session
            # would outlive this process.
            process = subprocess.Popen(
                arguments,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **values},
                process_group=0,
            )
            try:
                code = process.wait(timeout=min(left, limit))
            except subprocess.TimeoutExpired:
                raise (
                    over if left <= limit else Failed(f"no end after {limit:.0f} seconds")
                ) from None
            finally:
                for number in (signal.SIGTERM, signal.SIGKILL):
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=10)
        output = self.log.read_bytes()[begin:].decode(errors="replace")
        if code:
            kind = (
                OutOfMemory
                if re.search("OutOfMemoryError|out of memory|ALLOC_FAILED", output)
                else Failed
            )
            raise kind(f"exit code {code}: {output[-3000:]}")
        return time.monotonic() - start, output

    def works(self, works: dict[str, GpuWorkload]) -> Iterator[tuple[str, GpuWorkload]]:
        """Yield the cases, with tiny models on a CPU."""
        for name, work in works.items():
            if self.cpu:
                work = replace(work, flavor="debugmodel", tiny=True, rows=2, seq_len=64, steps=4)
            yield (name, work)


def about(cpu: bool) -> str:
    """Describe date, device, versions, commit and command of a measurement."""
    device = f"a CPU ({platform.machine()}) with a tiny model"
    if not cpu:
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
            "--id=0",
        ]
        device = "{}, driver {}, {}".format(
            *subprocess.run(query, capture_output=True, text=True, check=True)
            .stdout.strip()
            .split(", ")
        )
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "triton", "torchao", "torchtitan"):
        if importlib.util.find_spec(package) is not None:
            versions.append(f"{package} {version(package)}")
    command = shlex.join(["benchmarks/gpu.sh", *sys.argv[1:]]).replace(f"{ROOT}/", "")
    return f"{time.strftime('%Y-%m-%d', time.gmtime())}, {device}, {', '.join(versions)}, {commit()}, `{command}`"


def summary(result: dict[str, Any]) -> str:
    """Format the numbers of a case in one line."""
    if "error" in result:
        return result["error"].strip().splitlines()[-1]
    plain = {name: value for name, value in result.items() if isinstance(value, int | float | str)}
    plain.pop("about")
    return ", ".join(
        f"{name} {x:,.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in plain.items()
    )


# ----------------------------------------------------------------------------------------------------------- parts


def smoke(part: Part) -> None:
    """Run the first steps of a new user."""
    steps = 6 if part.cpu else 40
    folder = part.folder / "debug_model"
    train = ["./run_train.sh", "--job.dump_folder", folder, "--checkpoint.interval", steps // 2]
    train += ["--metrics.log_freq", 2, *(["--training.seq_len", 64] if part.cpu else [])]

    def started(result: dict[str, Any]) -> None:
        result["seconds"], _ = part.run([*train, "--training.steps", steps])
        lines = read_lines(folder / "metrics.jsonl")
        result |= {"first loss": lines[0]["loss"], "last loss": lines[-1]["loss"]}
        result["checkpoints"] = sorted(path.name for path in (folder / "checkpoint").glob("step-*"))
        result["tensorboard files"] = len(list((folder / "tb").iterdir()))
        if len(result["checkpoints"]) != 2 or not result["tensorboard files"]:
            raise Failed(
                f"two checkpoints and TensorBoard files are missing in {sorted(folder.iterdir())}"
            )

    def resumed(result: dict[str, Any]) -> None:
        result["seconds"], output = part.run([*train, "--training.steps", steps + 4])
        if f"Resumed after step {steps}" not in output:
            raise Failed(f"it did not resume: {output[-2000:]}")
        result["last loss"] = read_lines(folder / "metrics.jsonl")[-1]["loss"]

    def generated(result: dict[str, Any]) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "titanlite",
            "generate",
            "--checkpoint",
            folder,
            "--prompt",
            "def ",
        ]
        result["seconds"], output = part.run([*command, "--max-new-tokens", 20])
        result["text"] = "def " + output.rpartition("\ndef ")[2].strip()

    for case in (started, resumed, generated):
        part.measure(case.__name__, case)


def checks(part: Part) -> None:
    """Run tests/gpu and other tests that depend on the GPU, then compare the loss implementations."""

    def tests(result: dict[str, Any]) -> None:
        try:
            # The output names each test, so it shows the last test that ran.
            pytest = [
                sys.executable,
                "-m",
                "pytest",
                "-o",
                "addopts=--strict-markers",
                "-v",
                "-rs",
                *CHECKS,
            ]
            result["seconds"], _ = part.run(pytest, limit=part.options.seconds)
        finally:
            output = part.log.read_text(errors="replace").rpartition("\n$ ")[2]
            pattern = r"^tests/(\S+\.py::\S+) (PASSED|FAILED|ERROR|SKIPPED)"
            tests = re.findall(pattern, output, re.MULTILINE)
            outcomes = [outcome for _, outcome in tests]
            result["tests"] = dict(tests)
            for name in ("PASSED", "FAILED", "ERROR", "SKIPPED"):
                result[name.lower()] = outcomes.count(name)

    def loss(result: dict[str, Any]) -> None:
        options = [
            "--device",
            part.options.device,
            "--dtype",
            "bf16",
            "--out",
            part.folder if part.cpu else part.out,
        ]
        tiny = ["--dim", 64, "--tokens", 64, "--vocabulary", 512, "--only", "materialized", "fused"]
        command = [
            sys.executable,
            "benchmarks/loss.py",
            *options,
            *(tiny if part.cpu else ("--calls", 20)),
        ]
        result["seconds"], text = part.run(command, limit=part.options.seconds)
        result["text"] = text[text.index("| ") :].strip()

    part.measure("tests", tests)
    part.measure("loss", loss)


def titanlite(part: Part) -> None:
    """Measure throughput, memory and start of titanlite alone."""
    with suppress(Failed):  # the cases tell why
        part.run(
            [sys.executable, "-c", "import titanlite.train, torchao, datasets"]
        )  # from disk into memory

    def alone(work: GpuWorkload, cache: Path, result: dict[str, Any]) -> None:
        # A run of one step fills the compiler cache.
        if work.compile:
            shutil.rmtree(cache, ignore_errors=True)
            result["first step, cold cache"] = run_titanlite(
                part, replace(work, steps=1), cache, True
            )["first step"]
        result |= run_titanlite(part, work, cache, True)

    for case, work in part.works(WORKLOADS):
        part.measure(case, partial(first_that_fits, part, case, work, AC_MODES, alone))


def torchtitan(part: Part) -> None:
    """Compare both frameworks in alternating order."""

    def both(work: GpuWorkload, cache: Path, result: dict[str, Any]) -> None:
        if part.cpu or importlib.util.find_spec("torchtitan") is None:
            raise Failed("torchtitan needs a GPU" if part.cpu else "torchtitan is not installed")
        sides = {
            "titanlite": partial(run_titanlite, extra_features=False),
            "torchtitan": run_torchtitan,
        }
        runs = result["runs"] = {side: [] for side in sides}
        for pair in range(part.options.pairs):
            for side in sorted(
                sides,
                # torchtitan runs first, because it may need a mode with less memory.
                reverse=pair % 2 == 0,
            ):
                runs[side].append(sides[side](part, work, cache / side))
            for name in ("tokens/s", "memory reserved, GiB"):
                for side in sides:
                    result[f"{side}: {name}"] = statistics.median(run[name] for run in runs[side])
                pairs = zip(runs["titanlite"], runs["torchtitan"], strict=True)
                result[f"ratio of {name}"] = statistics.median(
                    ours[name] / theirs[name] for ours, theirs in pairs
                )

    for case, work in part.works(COMPARED):
        # Selective checkpointing saves every second matmul in titanlite, but no FP8 matmul in
        # torchtitan.
        modes = [mode for mode in AC_MODES if mode != "selective" or work.precision == "bf16"]
        part.measure(case, partial(first_that_fits, part, case, work, modes, both))


def first_that_fits(
    part: Part,
    case: str,
    work: GpuWorkload,
    modes: Sequence[str],
    run: Callable[[GpuWorkload, Path, dict[str, Any]], None],
    result: dict[str, Any],
) -> None:
    """Run a case with the first mode of activation checkpointing that fits into memory."""
    for mode in modes[modes.index(work.activation_checkpoint) :]:
        work = replace(work, activation_checkpoint=mode)
        result["work"] = asdict(work)
        try:
            return run(work, part.cache / re.sub(r"\W+", "-", f"{case} {mode}"), result)
        except OutOfMemory:
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
    found = re.findall(pattern, output)
    return [
        dict(zip(names, (float(x.replace(",", "")) for x in line), strict=True)) for line in found
    ]


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
    rate = statistics.median(line["tps"] for line in steady)
    shares = [line["mfu"] for line in steady if line["mfu"] is not None]
    return {
        "tokens/s": rate,
        "MFU": statistics.median(shares) if shares else None,
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

    def traced(case: str, work: GpuWorkload, cache: Path, result: dict[str, Any]) -> None:
        folder = Path(tempfile.mkdtemp(dir=part.folder))
        found = folder / "found.json"
        trace = part.out / f"gpu_profile_{case.replace(' ', '-')}.json.gz"
        command = [sys.executable, "-P", ROOT / "benchmarks/gpu_profile.py", found, trace]
        try:
            part.run(
                [
                    *command,
                    *titanlite_options(work, folder / "run", part.text, extra_features=True),
                ],
                **caches(cache),
            )
        finally:
            result |= json.loads(found.read_text()) if found.exists() else {}

    for case, work in part.works(WORKLOADS):
        if work.compile:
            # This sets the length of the schedule. Only a dozen steps run.
            work = replace(work, steps=1000)
            part.measure(
                case, partial(first_that_fits, part, case, work, AC_MODES, partial(traced, case))
            )


PARTS = {part.__name__: part for part in (smoke, checks, titanlite, torchtitan, profile)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--cache",
        type=Path,
        help="folder of compiled code: profile takes what titanlite left there",
    )
    parser.add_argument(
        "--only", action="append", help="cases with this in their name; may be given several times"
    )
    parser.add_argument("--seconds", type=float, default=520, help="time of each part")
    parser.add_argument("--pairs", type=int, default=2, help="torchtitan: runs of each side")
    options = parser.parse_args(argv)
    if options.device == "cuda" and shutil.which("nvidia-smi") is None:
        parser.error(
            "there is no NVIDIA GPU here; `--device cpu` runs the same scripts on a tiny model"
        )
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
