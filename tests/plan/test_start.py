"""Plans are printed, starts that cannot fit are rejected, and out-of-memory errors show a plan."""

import os
import time

import pytest
from ranks import start_titanlite, titanlite
from small_runs import read_printed_json

from titanlite import cli
from titanlite.config.errors import UserError
from titanlite.config.load import load_job
from titanlite.config.run import Run
from titanlite.observe import gpus
from titanlite.observe.gpus import list_gpus
from titanlite.plan.workers import workers
from titanlite.train.trainer import Trainer


def test_a_state_that_cannot_fit_is_rejected_before_the_start(tmp_path, monkeypatch, capsys):
    """The launcher, a rank and the Python API reject it, unless the size of a GPU is unknown."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho >> {tmp_path}/calls\necho NVIDIA H100 80GB HBM3, 81000\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for command in ("launch", "train"):
        options = f"--model.flavor 8b --job.dump_folder {tmp_path}/out".split()
        assert cli.main([command, *options]) == 2
        errors = capsys.readouterr().err
        for text in ("state take ", "has 79.1 GiB", "2 such devices", "`titanlite plan`"):
            assert text in errors
    assert (tmp_path / "calls").read_text() == "\n"
    job = load_job(["--model.flavor", "8b"])

    with pytest.raises(UserError, match="2 such devices"):
        Trainer(job)
    assert not (tmp_path / "out").exists()

    tool.write_text("#!/bin/sh\necho NVIDIA GB10, '[N/A]'\n")
    monkeypatch.setattr(gpus, "DRIVERS", (str(tool),))
    list_gpus.cache_clear()
    gpus.check_memory(Run(job))


@pytest.mark.slow
def test_an_out_of_memory_error_is_reported_with_a_plan(job_file, tmp_path):
    """In this run, gradient clipping allocates 2**50 bytes."""
    options = ("train", "--job.config_file", job_file, "--job.dump_folder", tmp_path / "out")
    output = start_titanlite(*options, before=exhaust_memory).wait_for_exit(1)
    reports = "Out of memory at step 1: ,can't allocate memory,The plan: ,weights,To start again: "
    for report in reports.split(","):
        assert report in output

    assert "Traceback" not in output


def exhaust_memory() -> None:
    import torch

    from titanlite.train import step

    def allocate(*_: object) -> torch.Tensor:
        return torch.empty(2**50, dtype=torch.uint8)

    step.reduce_step_sums = allocate


def test_mixed_precision_on_one_cpu_is_planned(job_file):
    options = ("--gpu", "cpu", "--quick", "--json", "--training.mixed_precision_param", "bfloat16")

    plan = read_printed_json(titanlite("plan", "--job.config_file", job_file, *options))

    assert plan["peak"] > plan["kinds"]["weights"] + plan["kinds"]["optimizer state"]


@pytest.mark.slow
def test_the_command_prints_a_plan_and_the_fastest_jobs(job_file, tmp_path):
    gpu_file = tmp_path / "gpu.toml"
    rates = "memory_gib bf16 fp32 bandwidth link network cpu_link gpus_per_node".split()
    gpu_file.write_text(
        'name = "mine"\n' + "".join(f"{key} = {n}\n" for n, key in enumerate(rates, 4))
    )
    options = ("plan", "--job.config_file", job_file, "--gpu", gpu_file)
    output = titanlite(*options, "--json", "--quick", "--tokens", "2.5e9")
    plan = read_printed_json(output)

    assert plan["memory"] == 4 * gpus.GIB
    assert 0 < plan["peak"] < gpus.GIB
    assert 0 < plan["mfu"] < plan["mfu_full_attention"]

    time = plan["training"]
    assert time["days"] == pytest.approx(2.5e9 / plan["tokens_per_second"] / 86400)
    assert time["gpu_hours"] == pytest.approx(24 * time["days"])  # on one GPU
    assert 0 < time["days_low"] < time["days_high"]

    output = titanlite(*options, "--memory", "0.000001", "--tokens", "2.5B")
    for number in ("days", "days_low", "days_high"):
        assert f"{time[number]:,.2f}" in output

    assert "DOES NOT FIT" in output
    assert "tokens/s per device" in output
    assert "No single change of the job makes it fit" in output

    output = titanlite(*options, "--write", tmp_path / "best.toml", "--tokens", "2.5B")
    assert "Fastest of " in output
    assert "days" in output
    # The written job has no output folder and no job file.
    assert "[job]" not in (tmp_path / "best.toml").read_text()
    assert "OK" in titanlite("check", "--job.config_file", tmp_path / "best.toml")


def test_a_plan_writes_no_job_that_ends_during_its_warmup(job_file, tmp_path, capsys):
    path = tmp_path / "best.toml"
    command = f"plan --job.config_file {job_file} --training.steps 1 --write {path}"

    assert cli.main(command.split()) == 2

    assert f"--write {path}" in capsys.readouterr().err
    assert not path.exists()


def test_a_plan_ends_if_one_of_its_waiting_processes_is_killed():
    with pytest.raises(UserError, match="killed"), workers() as pool:  # noqa: PT012
        pool.submit(time.sleep, 2)
        # The killed process holds the lock of the queue that the other process waits for.
        os.kill(pool.submit(os.getpid).result(), 9)
        pool.submit(int).result()
