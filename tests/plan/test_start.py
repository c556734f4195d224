"""What happens before a run starts: plans that are handed down, refusals, and the dry run."""

import json
import os
from pathlib import Path

import pytest
from ranks import start_titanlite, titanlite
from small_runs import SMALL, launched
from traces import GIB, run

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.observe.forecast import PLAN, handed_down
from titanlite.plan.start import foresee


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose driver says that it has an H100, and no plan so far; its nvidia-smi."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho NVIDIA H100 80GB HBM3, 81000\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv(PLAN, "")  # so that it is restored
    monkeypatch.delenv(PLAN)
    return tool


def test_only_a_run_that_might_not_fit_is_planned_and_the_plan_is_handed_down(h100: Path):
    foresee(Run(JobConfig(), 1), [], 1)
    assert PLAN not in os.environ
    words = ("--model.flavor", "1b", "--training.seq_len", "16384", "--training.local_batch_size", "2")
    job = {"model": {"flavor": "1b"}, "training": {"seq_len": 16384, "local_batch_size": 2}}
    foresee(Run(JobConfig.model_validate(job), 1), words, 1)
    plan = handed_down()
    assert plan is not None
    assert (plan.gpu, plan.memory) == ("H100", 81000 * 2**20)
    foresee(run(), ["--no-such-key"], 8)  # the plan that is there is not made again


@pytest.mark.usefixtures("h100")
def test_a_state_that_cannot_fit_is_refused_without_a_trace():
    with pytest.raises(UserError, match=r"state take 119\.7 GiB .* Take 2 such devices or more, training.dtype"):
        foresee(run(1), ["--no-such-key"], 1)


@pytest.mark.usefixtures("h100")
def test_a_plan_that_cannot_be_made_stops_no_run(capsys: pytest.CaptureFixture[str]):
    foresee(run(), ["--no-such-key"], 8)
    assert "The plan could not be made: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_whose_tensors_cannot_fit_is_refused_with_its_plan(h100: Path):
    h100.write_text(h100.read_text().replace("81000", "150"))
    rows = ("--training.seq_len", 8192, "--training.local_batch_size", 1, "--activation_checkpoint.mode", "none")
    said = titanlite("train", "--model.n_layers", 1, *rows, code=2)
    assert "This run cannot fit. The plan: " in said
    assert "GiB at the peak, on rank 0, in " in said


@pytest.mark.slow
def test_a_dry_run_does_a_step_and_makes_no_folder(job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    before = sorted(tmp_path.rglob("*"))
    said = launched(job_file, tmp_path / "out", "--dry-run", ranks=2)
    for words in ("Dry run: ", "GiB of the process", "Plan: peak ", "Measured: memory of a process "):
        assert words in said
    assert sorted(tmp_path.rglob("*")) == before
    options = ("--dry_run", "--dataset.source", "jsonl", "--dataset.path", str(tmp_path / "none.jsonl"))
    assert "none.jsonl" in launched(job_file, tmp_path / "out", *options, code=2)  # it checks what a start checks


@pytest.mark.slow
def test_out_of_memory_is_said_in_words(job_file: Path, tmp_path: Path):
    """Clipping asks for a tensor of 2**50 bytes, which torch refuses as it refuses any tensor that is too large."""
    words = ("train", "--job.config_file", job_file, "--job.dump_folder", tmp_path / "out")
    said = start_titanlite(*words, before=_run_out).ends_with(1)
    for words in ("Out of memory at step 1: ", "can't allocate memory", "The plan: ", "weights", "To start again: "):
        assert words in said
    assert "Traceback" not in said


def _run_out() -> None:
    import torch

    from titanlite.train import step

    def clip(*_: object) -> torch.Tensor:
        return torch.empty(2**50, dtype=torch.uint8)

    step.clip_grad_norm_ = clip


@pytest.mark.slow
def test_the_command_prints_a_plan_and_writes_the_fastest_job(job_file: Path, tmp_path: Path):
    own = tmp_path / "gpu.toml"
    rates = ("memory_gib", "bf16", "fp32", "bandwidth", "link", "network", "host", "machine")
    own.write_text('name = "mine"\n' + "".join(f"{key} = {n}\n" for n, key in enumerate(rates, 4)))
    words = ("plan", "--job.config_file", job_file, "--gpu", own)
    plan = json.loads(titanlite(*words, "--json", "--quick").splitlines()[-1])
    assert plan["memory"] == 4 * GIB
    assert 0 < plan["peak"] < GIB
    said = titanlite(*words, "--memory", "0.000001")
    assert "DOES NOT FIT" in said
    assert "No single change of the job makes it fit" in said
    best = tmp_path / "best.toml"
    assert "The best of " in titanlite(*words, "--search", "--write", best)
    assert "Memory of rank 0" in titanlite("plan", "--job.config_file", best, "--gpu", own, "--quick")
