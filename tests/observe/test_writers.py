"""Writers: how one of a user's own is added, and what Weights & Biases gets from each start of a run."""

import functools
import json
import os
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import run_process, start_titanlite
from small_runs import SMALL, losses

from titanlite.config.errors import UserError
from titanlite.load_run import load_run

PAGE = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text()
OWN_WRITER = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class LossTable" in block)
ENTRY_POINTS = """[titanlite.writers]
loss_table = loss_table:LossTable
plain = loss_table:csv
uninstalled = missing_module:Writer
twice = loss_table:LossTable
"""


@pytest.fixture
def own_package(tmp_path: Path) -> str:
    """A folder of two installed packages that offer writers."""
    folder = tmp_path / "installed"
    for name, offers in {"one": ENTRY_POINTS, "two": "[titanlite.writers]\ntwice = two:LossTable\n"}.items():
        described = folder / f"{name}-1.0.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0")
        (described / "entry_points.txt").write_text(offers)
    (folder / "loss_table.py").write_text(OWN_WRITER)
    (tmp_path / "small.toml").write_text(SMALL)
    return str(folder)


def install(folder: str) -> None:
    sys.path.insert(0, folder)


@pytest.mark.slow
def test_a_writer_of_an_installed_package_needs_no_change_elsewhere(own_package: str, tmp_path: Path):
    words = ["train", "--job.config_file", tmp_path / "small.toml", "--job.dump_folder", tmp_path / "out"]
    words += ["--training.steps", 3, "--checkpoint.no-enable", "--metrics.writers", "loss_table"]
    start_titanlite(*words, before=functools.partial(install, own_package)).ends_with(0)
    table = [line.split(",") for line in (tmp_path / "out" / "loss.csv").read_text().splitlines()]
    assert {int(step): float(loss) for step, loss in table} == losses(tmp_path / "out")


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        (["los_table"], "loss_table, plain"),
        (["plain"], "titanlite.observe.writers.Writer"),
        (["uninstalled"], "missing_module"),
        (["twice"], "two:LossTable"),
    ],
)
def test_a_writer_that_cannot_be_used_is_refused_before_the_start(
    own_package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: list[str], problem: str
):
    monkeypatch.syspath_prepend(own_package)
    with pytest.raises(UserError, match=r"(?s)metrics\.writers.*" + problem):
        load_run(["--job.dump_folder", str(tmp_path / "out"), "--metrics.writers", *named], 1)


def test_wandb_that_is_not_installed_is_said_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titanlite.load_run.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"titanlite\[wandb\]"):
        load_run(["--job.dump_folder", str(tmp_path / "out"), "--metrics.enable_wandb"], 1)


def log_to_wandb(job_file: str, out: str) -> list[dict[int, dict]]:
    """Three starts of a run: 4 steps, 6 steps, and 5 again from step 2. What a server has of each of W&B's runs."""
    from titanlite import Trainer, load_job

    runs: dict[str, dict[int, dict]] = {}

    class FakeRun:
        """A run of W&B on its server, as a client sees it. It stands in for the server, which a test has not."""

        def __init__(self, id: str, **_: object) -> None:
            self.have = runs.setdefault(id, {})
            self.starting_step = max(self.have, default=-1) + 1

        def log(self, values: dict, step: int) -> None:
            assert step >= self.starting_step, "W&B leaves out a step that it has"
            self.have.setdefault(step, {}).update(values)

        def finish(self) -> None: ...

    fake = SimpleNamespace(init=FakeRun, Settings=lambda **_: None, Table=lambda _, data: data, Error=RuntimeError)
    fake.__spec__ = ModuleSpec("wandb", None)
    sys.modules["wandb"] = fake  # pyright: ignore
    words = ["--job.config_file", job_file, "--job.dump_folder", out, "--metrics.enable_wandb"]
    words += ["--lr_scheduler.decay_ratio", "0", "--checkpoint.interval", "2"]
    for steps, more in ((4, []), (6, []), (5, ["--checkpoint.load_step", "2"])):
        with Trainer(load_job([*words, "--training.steps", str(steps), *more])) as trainer:
            trainer.train()
    return list(runs.values())


@pytest.mark.slow
def test_wandb_has_the_steps_of_all_starts_and_a_run_of_its_own_for_one_that_went_back(tmp_path: Path):
    (tmp_path / "small.toml").write_text(SMALL)
    first, second = run_process(log_to_wandb, str(tmp_path / "small.toml"), str(tmp_path / "out"))
    last = losses(tmp_path / "out")
    (aside,) = (tmp_path / "out").glob("metrics.jsonl.superseded*")
    left = {line["step"]: line["loss"] for line in map(json.loads, aside.open())}
    assert {step: values["loss/train"] for step, values in first.items()} == {**last, **left}
    assert {step: values["loss/train"] for step, values in second.items()} == {s: last[s] for s in (3, 4, 5)}
    assert list(first) == [1, 2, 3, 4, 5, 6]
    assert first[1]["speed/tokens_per_second"] > 0


def without_key() -> None:
    os.environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": "/none", "NETRC": "/none", "WANDB_MODE": "online"}


@pytest.mark.slow
def test_wandb_without_a_key_is_a_mistake_of_the_user(tmp_path: Path):
    pytest.importorskip("wandb")
    (tmp_path / "small.toml").write_text(SMALL)
    words = ["train", "--job.config_file", tmp_path / "small.toml", "--job.dump_folder", tmp_path / "out"]
    said = start_titanlite(*words, "--metrics.enable_wandb", before=without_key).ends_with(2)
    assert "metrics.enable_wandb" in said
    assert "WANDB_MODE=offline" in said
