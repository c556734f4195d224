"""training.mixed_precision_param = "auto" follows the hardware, once per run."""

import os
import shutil
from pathlib import Path

import pytest
import tomli
from ranks import run_small
from small_runs import read_log, read_metrics

from titanlite.checkpoint.find import read_compute_dtype
from titanlite.config import compute_dtype
from titanlite.config.run import Run
from titanlite.load_run import load_run
from titanlite.observe.gpus import Gpu, find_gpu
from titanlite.plan.trace import trace_run
from titanlite.train.trainer import Trainer

CPUS = {
    "AVX2": ("flags\t\t: fpu sse4_2 avx2 fma\n", "float32"),
    "AVX512": ("flags\t\t: avx2 avx512f avx512_vnni\n", "float32"),
    "AVX512-BF16": ("flags\t\t: avx2 avx512f avx512_bf16\n", "bfloat16"),
    "AMX": ("flags\t\t: avx2 amx_bf16 amx_tile\n", "bfloat16"),
    "ARM v8.2": ("Features\t: fp asimd asimdhp\n", "float32"),
    "ARM bf16": ("Features\t: fp asimd i8mm bf16\n", "bfloat16"),
    "not Linux": (None, "float32"),
}


@pytest.fixture
def use_cpu(tmp_path, monkeypatch):
    """Return a function that replaces /proc/cpuinfo by the description of a CPU."""

    def use(name: str) -> None:
        text, _ = CPUS[name]
        path = tmp_path / f"{name}.cpuinfo"
        if text is not None:
            path.write_text(f"processor\t: 0\n{text}\nprocessor\t: 1\n{text}")
        monkeypatch.setattr(compute_dtype, "CPU_INFO", path)

    return use


def load_small_run(job_file: Path, steps: int, options: str = "", ranks: int = 1) -> Run:
    """Load a run that trains `steps` steps and saves each of them in the folder `out`.

    The job uses the default compute dtype, "auto".
    """
    job_file.write_text(job_file.read_text().replace("mixed_precision_param", "# unset"))
    files = f"--job.config_file {job_file} --job.dump_folder {job_file.with_name('out')}"
    arguments = f"{files} --training.steps {steps} --checkpoint.interval 1 {options}"
    return load_run(arguments.split(), ranks)


def train(job_file: Path, steps: int, options: str = "") -> tuple[str, str]:
    """Train in this process, and return the compute dtypes of the trainer and of config.toml."""
    run = load_small_run(job_file, steps, options)
    with Trainer(run) as trainer:
        trainer.train()
        used = trainer.job.training.mixed_precision_param
    return used, read_saved_dtype(run.dump_folder)


def read_saved_dtype(folder: Path) -> str:
    config = tomli.loads((folder / "config.toml").read_text())
    return config["training"]["mixed_precision_param"]


@pytest.mark.parametrize("cpu", CPUS)
def test_a_new_run_computes_in_bfloat16_only_if_the_cpu_supports_it(cpu, job_file, use_cpu):
    use_cpu(cpu)
    _, expected = CPUS[cpu]
    assert train(job_file, 1) == (expected, expected)
    assert f"Computing in {expected}" in read_log(job_file.with_name("out"))


def test_a_dtype_in_the_job_is_used_on_any_cpu(job_file, use_cpu):
    use_cpu("AVX2")
    named = "--training.mixed_precision_param bfloat16"
    assert train(job_file, 1, named) == ("bfloat16", "bfloat16")


def test_a_resume_on_another_cpu_keeps_the_dtype_and_reports_no_change(job_file, use_cpu):
    out = job_file.with_name("out")
    use_cpu("AMX")
    train(job_file, 1)
    use_cpu("AVX2")

    assert train(job_file, 2) == ("bfloat16", "bfloat16")

    text = read_log(out)
    assert sorted(read_metrics(out)) == [1, 2]
    assert "CPU has no bfloat16 instructions" in text
    # A changed option would be logged in this form.
    assert "mixed_precision_param:" not in text


def test_a_run_that_resumes_from_its_mirror_keeps_its_dtype(job_file, use_cpu):
    out = job_file.with_name("out")
    mirror = job_file.with_name("mirror")
    mirrored = f"--checkpoint.mirror file://{mirror}"
    use_cpu("AMX")
    train(job_file, 1, mirrored)
    shutil.rmtree(out)
    use_cpu("AVX2")

    assert read_compute_dtype(load_small_run(job_file, 1, mirrored)) == "bfloat16"
    assert train(job_file, 2, mirrored) == ("bfloat16", "bfloat16")


def _hide_bfloat16_from_rank_1() -> None:
    is_rank_1 = os.environ["RANK"] == "1"
    text, _ = CPUS["AVX2" if is_rank_1 else "AMX"]
    compute_dtype.CPU_INFO = Path(os.environ["CPUS"], os.environ["RANK"])
    compute_dtype.CPU_INFO.write_text(str(text))


@pytest.mark.slow
def test_nodes_with_different_cpus_agree_on_one_dtype(tmp_path, monkeypatch):
    monkeypatch.setenv("CPUS", str(tmp_path))

    options = "--training.mixed_precision_param auto --training.steps 1"
    run_small(tmp_path / "out", options, ranks=2, before=_hide_bfloat16_from_rank_1)

    assert read_saved_dtype(tmp_path / "out") == "bfloat16"


@pytest.mark.parametrize("cpu", ["AVX2", "AMX"])
def test_a_plan_for_a_gpu_does_not_depend_on_this_cpu(cpu, job_file, use_cpu):
    use_cpu(cpu)
    run = load_small_run(job_file, 1, ranks=2)

    assert "bfloat16" in list_matmul_dtypes(run, find_gpu("H100"))
    assert ("bfloat16" in list_matmul_dtypes(run, None)) == (cpu == "AMX")


def list_matmul_dtypes(run: Run, gpu: Gpu | None) -> set[str]:
    (trace,) = trace_run(run, gpu)
    return {work.dtype for work in trace.work if work.op == "mm"}
