"""Every part of benchmarks/gpu.sh runs on a CPU with a tiny model, and keeps partial results."""

import argparse
import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_parts as script
import performance_page
import pytest
from small_runs import ROOT, run_program

VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def gpu(out: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """Run `benchmarks/gpu.sh`, and return the cases that it writes."""
    command = ["benchmarks/gpu.sh", *options, "--device", "cpu", "--out", out]
    run_program(*command, folder=ROOT, variables=VARIABLES, code=code)
    return json.loads((out / f"gpu_{options[0]}.json").read_text())


@pytest.mark.long
def test_smoke_starts_resumes_and_generates(tmp_path):
    cases = gpu(tmp_path, "smoke")

    assert list(cases) == ["started", "resumed", "generated"]
    assert not any("error" in case for case in cases.values())
    assert cases["started"]["checkpoints"] == ["step-00000003", "step-00000006"]
    assert cases["generated"]["text"].startswith("def ")
    assert "`benchmarks/gpu.sh smoke --device cpu" in cases["started"]["about"]
    assert "$ ./run_train.sh" in (tmp_path / "gpu_smoke.txt").read_text()


@pytest.mark.slow
@pytest.mark.long
def test_titanlite_adds_the_measurements_of_a_run_to_the_existing_file(tmp_path):
    (tmp_path / "gpu_titanlite.json").write_text('{"8b bf16 compiled": {"tokens/s": 1}}')
    cases = gpu(tmp_path, "titanlite", "--only", "8b bf16 eager")

    assert cases["8b bf16 compiled"] == {"tokens/s": 1}

    measured = cases["8b bf16 eager"]
    assert min(measured[name] for name in ("tokens/s", "first step", "memory reserved, GiB")) > 0
    assert (measured["work"]["activation_checkpoint"], measured["MFU"]) == ("none", None)


@pytest.fixture
def part(tmp_path) -> script.Part:
    options = argparse.Namespace(
        device="cpu", out=tmp_path / "out", seconds=60.0, only=None, pairs=2, cache=None
    )
    return script.Part("titanlite", options, tmp_path)


def test_a_case_that_hangs_or_fails_does_not_stop_the_others(part):
    def hangs(result: dict[str, Any]) -> None:
        part.run(["sh", "-c", "sleep 100 & echo $!; wait"], limit=0.5)

    def breaks(result: dict[str, Any]) -> None:
        result["first step"] = 2.5
        part.run([sys.executable, "-c", "print('Starting')"])[1].index("step")

    for case in (hangs, breaks):
        part.measure(case.__name__, case)
    cases = json.loads(part.path.read_text())

    assert cases["hangs"]["error"] == "no end after 0 seconds"

    child = int(part.log.read_text().splitlines()[2])
    assert not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text()
    assert cases["breaks"]["first step"] == 2.5
    assert cases["breaks"]["error"].endswith("ValueError: substring not found\n")
    assert part.failed == ["hangs", "breaks"]


def test_a_case_is_measured_with_the_first_mode_that_fits(part):
    def run(work: script.GpuWorkload, cache: Path, result: dict[str, Any]) -> None:
        if work.activation_checkpoint != "full":
            part.run([sys.executable, "-c", "raise SystemExit('CUDA error: out of memory')"])

    result = {}
    script.first_that_fits(part, "8b", script.GpuWorkload(), script.AC_MODES, run, result)

    assert result["work"]["activation_checkpoint"] == "full"
    assert result["out of memory with"] == ["none", "selective"]


@pytest.mark.slow
@pytest.mark.long
def test_a_profile_contains_kernels_and_lower_bounds_of_each_part(tmp_path):
    work = replace(
        script.WORKLOADS["8b bf16 eager"],
        flavor="debugmodel",
        tiny=True,
        local_batch_size=2,
        seq_len=64,
        steps=100,
    )
    out = tmp_path / "out.json"
    trace = tmp_path / "trace.json.gz"
    text = script.write_text(tmp_path).parent
    options = script.titanlite_options(work, tmp_path / "run", text, extra_features=True)
    command = [sys.executable, "benchmarks/gpu_profile.py", out, trace, *options]
    run_program(*command, folder=ROOT, variables=VARIABLES | {"CUDA_VISIBLE_DEVICES": ""})
    measured = json.loads(out.read_text())
    parts = "batch,forward,loss and its gradients,backward,clipping,optimizer,rest".split(",")

    assert list(measured["parts"]) == parts
    assert measured["step, ms"] == pytest.approx(
        sum(part["ms"] for part in measured["parts"].values())
    )

    for part in parts[1:-1]:
        times = measured["parts"][part]
        assert 0 < times["lower bound by bytes, ms"] < times["ms"]
    assert len(measured["kernels"]) == 10

    page = "\n".join(performance_page.gpu_tables({"8b": measured}))
    assert "| rates: copy, bytes/s | " in page
    assert "| attention, ms: FLASH_ATTENTION | " in page

    with gzip.open(trace, "rt") as file:
        assert json.load(file)["traceEvents"]


def test_idle_time_excludes_all_kernels_and_copies():
    from gpu_profile import summarize_kernels

    def event(name: str, start: float, duration: float, kind: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration}

    events = [
        event("b", 6, 2),
        event("a", 0, 4),
        event("a", 2, 3),
        event("copy", 9, 1, "gpu_memcpy"),
        event("launch", 0, 100, "cuda_runtime"),
    ]
    measured = summarize_kernels(events, "cuda")

    assert measured["traced, ms"] == pytest.approx(0.010)
    # The device is idle from 5 to 6 and from 8 to 9.
    assert measured["idle share"] == pytest.approx(0.2)

    shares = {kernel["name"]: kernel["share"] for kernel in measured["kernels"]}
    assert shares == {"a": 0.7, "b": 0.2, "copy": 0.1}
