"""training.mixed_precision_param = "auto" follows the hardware, once per run."""

import os
import shutil
from pathlib import Path

import pytest
import tomli
from ranks import start_titanlite
from small_runs import SMALL_WITHOUT_WORKERS, read_metrics

from titanlite.checkpoint.find import read_compute_dtype
from titanlite.config import compute_dtype
from titanlite.load_run import load_run
from titanlite.observe.gpus import find_gpu
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


@pytest.fixture
def job_file(tmp_path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL_WITHOUT_WORKERS.replace('mixed_precision_param = "float32"\n', ""))
    return path


def make_options(job_file: Path, steps: int, *options: str) -> list[str]:
    """Return options that train `steps` steps and save each of them."""
    files = [
        "--job.config_file",
        str(job_file),
        "--job.dump_folder",
        str(job_file.with_name("out")),
    ]
    return [*files, "--training.steps", str(steps), "--checkpoint.interval", "1", *options]


def train(*options: str) -> tuple[str, str]:
    """Train in this process, and return the compute dtypes of the trainer and of config.toml."""
    run = load_run(options, world_size=1)
    with Trainer(run) as trainer:
        trainer.train()
        used = trainer.job.training.mixed_precision_param
    config = tomli.loads((run.dump_folder / "config.toml").read_text())
    return used, config["training"]["mixed_precision_param"]


@pytest.mark.parametrize("cpu", CPUS)
def test_a_new_run_computes_in_bfloat16_only_if_the_cpu_supports_it(cpu, job_file, use_cpu):
    use_cpu(cpu)
    _, expected = CPUS[cpu]
    assert train(*make_options(job_file, 1)) == (expected, expected)
    assert f"Computing in {expected}" in (job_file.with_name("out") / "train.log").read_text()


def test_a_dtype_in_the_job_is_used_on_any_cpu(job_file, use_cpu):
    use_cpu("AVX2")
    named = ("--training.mixed_precision_param", "bfloat16")
    assert train(*make_options(job_file, 1, *named)) == ("bfloat16", "bfloat16")


def test_a_resume_on_another_cpu_keeps_the_dtype_and_reports_no_change(job_file, use_cpu):
    out = job_file.with_name("out")
    use_cpu("AMX")
    train(*make_options(job_file, 1))
    use_cpu("AVX2")

    assert train(*make_options(job_file, 2)) == ("bfloat16", "bfloat16")

    text = (out / "train.log").read_text()
    assert sorted(read_metrics(out)) == [1, 2]
    assert "CPU has no bfloat16 instructions" in text
    # A changed option would be logged in this form.
    assert "mixed_precision_param:" not in text


def test_a_run_that_resumes_from_its_mirror_keeps_its_dtype(job_file, use_cpu):
    out = job_file.with_name("out")
    mirror = job_file.with_name("mirror")
    arguments = make_options(job_file, 1, "--checkpoint.mirror", f"file://{mirror}")
    use_cpu("AMX")
    train(*arguments)
    shutil.rmtree(out)
    use_cpu("AVX2")

    assert read_compute_dtype(load_run(arguments, world_size=1)) == "bfloat16"
    assert train(*arguments[:4], "--training.steps", "2", *arguments[6:]) == (
        "bfloat16",
        "bfloat16",
    )


def _hide_bfloat16_from_rank_1() -> None:
    is_rank_1 = os.environ["RANK"] == "1"
    text, _ = CPUS["AVX2" if is_rank_1 else "AMX"]
    compute_dtype.CPU_INFO = Path(os.environ["CPUS"], os.environ["RANK"])
    compute_dtype.CPU_INFO.write_text(str(text))


@pytest.mark.slow
def test_nodes_with_different_cpus_agree_on_one_dtype(job_file, tmp_path, monkeypatch):
    monkeypatch.setenv("CPUS", str(tmp_path))
    arguments = make_options(job_file, 1, "--metrics.log_freq", "1")
    start_titanlite("train", *arguments, ranks=2, before=_hide_bfloat16_from_rank_1).wait_for_exit(
        0
    )
    text = (tmp_path / "out" / "config.toml").read_text()

    assert tomli.loads(text)["training"]["mixed_precision_param"] == "bfloat16"


@pytest.mark.parametrize("cpu", ["AVX2", "AMX"])
def test_a_plan_for_a_gpu_does_not_depend_on_this_cpu(cpu, job_file, use_cpu):
    use_cpu(cpu)
    run = load_run(make_options(job_file, 1), world_size=2)
    (trace,) = trace_run(run, find_gpu("H100"))

    assert "bfloat16" in {work.dtype for work in trace.work if work.op == "aten.mm"}

    (trace,) = trace_run(run)
    assert ("bfloat16" in {work.dtype for work in trace.work if work.op == "aten.mm"}) == (
        cpu == "AMX"
    )
