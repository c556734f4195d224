"""What happens before a run starts: plans that are handed down, refusals, and the dry run."""

import json
import os
from pathlib import Path

import pytest
from ranks import start_titanlite, titanlite
from small_runs import SMALL, launched, logged
from traces import GIB, matmul, run, trace

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.observe import forecast as forecasts
from titanlite.observe.forecast import PLAN, Forecast
from titanlite.observe.gpus import find_gpu
from titanlite.plan import before_start
from titanlite.plan.before_start import foresee, without_dry_run
from titanlite.plan.forecast import forecast


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """A machine with an H100."""
    monkeypatch.delenv(PLAN, raising=False)
    monkeypatch.setattr(before_start, "device_memory", lambda: ("NVIDIA H100 80GB HBM3", int(79.1 * GIB)))


def plans(monkeypatch: pytest.MonkeyPatch, peak: float) -> list[tuple[object, ...]]:
    """Plans are of a run with such a peak, in GiB. Returns how they were asked for."""
    asked: list[tuple[object, ...]] = []

    def planned(argv: object, world_size: int, *options: str) -> Forecast:
        asked.append((argv, world_size, *options))
        return forecast(run(), (trace((matmul(4096, 4096, 4096),), peak=peak),), find_gpu("H100"))

    monkeypatch.setattr(before_start, "plan_in_child", planned)
    return asked


def test_a_small_run_starts_without_a_plan(gpu: None, monkeypatch: pytest.MonkeyPatch):
    asked = plans(monkeypatch, 1)
    foresee(Run(JobConfig()), [], 1)
    assert asked == []
    assert PLAN not in os.environ


def test_a_plan_is_made_once_a_machine_and_handed_down(gpu: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PLAN, "")  # so that it is restored
    monkeypatch.delenv(PLAN)
    asked = plans(monkeypatch, 60)
    foresee(run(), ["--model.flavor", "8b"], 8)
    foresee(run(), ["--model.flavor", "8b"], 8)
    assert len(asked) == 1
    assert asked[0][:4] == (["--model.flavor", "8b"], 8, "--gpu", "H100")
    handed_down = forecasts.handed_down()
    assert handed_down is not None
    assert handed_down.peak == 60 * GIB


def test_a_run_whose_tensors_cannot_fit_is_refused(gpu: None, monkeypatch: pytest.MonkeyPatch):
    plans(monkeypatch, 85)
    with pytest.raises(UserError, match=r"cannot fit.*85\.00 GiB at the peak.*backward of block 31.*activations 63"):
        foresee(run(), [], 8)


def test_a_state_that_cannot_fit_is_refused_without_a_trace(gpu: None, monkeypatch: pytest.MonkeyPatch):
    asked = plans(monkeypatch, 1)
    with pytest.raises(UserError, match=r"weights, gradients and optimizer state take 119\.7 GiB .* Cheapest change"):
        foresee(run(1), [], 1)
    assert asked == []


def test_a_plan_that_cannot_be_made_stops_no_run(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fails(*_: object) -> Forecast:
        raise UserError("The plan could not be made: why")

    monkeypatch.setattr(before_start, "plan_in_child", fails)
    foresee(run(), [], 8)
    assert capsys.readouterr().err == "The plan could not be made: why\n"


def test_the_dry_run_is_an_option_beside_the_keys():
    assert without_dry_run(["--dry-run", "--a.b", "1"]) == (["--a.b", "1"], True)
    assert without_dry_run(["--dry_run"]) == ([], True)
    assert without_dry_run(["--a.b", "1"]) == (["--a.b", "1"], False)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dry_run_does_a_step_and_makes_no_folder(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    before = sorted(tmp_path.rglob("*"))
    said = launched(job_file, tmp_path / "out", "--dry-run", ranks=ranks)
    assert "Dry run: built in " in said
    assert "GiB of the process; " in said
    assert "Plan: peak " in said
    assert "Measured: memory of a process " in said
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_dry_run_checks_what_a_start_checks(job_file: Path, tmp_path: Path):
    options = ("--dry-run", "--dataset.source", "jsonl", "--dataset.path", tmp_path / "none.jsonl")
    assert "none.jsonl" in launched(job_file, tmp_path / "out", *map(str, options), code=2)
    said = titanlite("train", "--job.config_file", job_file, "--dry-run", "--model.n_heads", 3, code=2)
    assert "model.n_heads = 3" in said


@pytest.mark.slow
def test_a_run_shows_its_plan_and_in_the_end_what_was_measured(job_file: Path, tmp_path: Path):
    said = launched(job_file, tmp_path / "out", "--job.plan", ranks=2)
    assert said.count("Plan: peak ") == 1
    assert said.count("Measured: memory of a process ") == 1
    assert said.index("Plan: peak ") < said.index("step  1/12") < said.index("Measured: ")
    assert len(logged(tmp_path / "out")) == 12
    events = map(json.loads, (tmp_path / "out" / "events.jsonl").read_text().splitlines())
    plans = [event for event in events if event["event"] == "plan"]
    planned = plans[0]["planned"]
    speed, words = planned["tps_per_device"], f"{planned['memory_peak']:.2f}"
    assert planned["tps"] == 2 * speed
    plan, measured = [event["text"] for event in plans]
    assert f"{speed:,.0f} tokens/s per device" in plan
    assert f"(plan {words}, " in measured


@pytest.mark.slow
def test_out_of_memory_is_said_in_words(job_file: Path, tmp_path: Path):
    """Clipping asks for a tensor of 2**50 bytes, which torch refuses as it refuses any tensor that is too large."""
    words = ("train", "--job.config_file", job_file, "--job.dump_folder", tmp_path / "out")
    said = start_titanlite(*words, before=_run_out).ends_with(1)
    assert "Out of memory at step 1: " in said
    assert "can't allocate memory" in said
    assert "The plan: " in said
    assert "weights" in said
    assert "Traceback" not in said
    assert "To start again: " in said


def _run_out() -> None:
    import torch

    from titanlite.train import step

    def clip(*_: object) -> torch.Tensor:
        return torch.empty(2**50, dtype=torch.uint8)

    step.clip_grad_norm_ = clip
