"""Writers: how one of a user's own is added, and what Weights & Biases gets from each start of a run."""

import json
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import run_process
from small_runs import SMALL

from titanlite.config.errors import UserError
from titanlite.load_run import load_run

PAGE = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text()
OWN_WRITER = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class LossTable" in block)
MORE = """

class Locked(Writer):
    def __init__(self, start):
        raise PermissionError("no permission")
"""
ENTRY_POINTS = """[titanlite.writers]
loss_table = loss_table:LossTable
locked = loss_table:Locked
plain = loss_table:csv
uninstalled = missing_module:Writer
twice = loss_table:LossTable
"""


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages with one that offers a writer."""
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "loss_table.py").write_text(OWN_WRITER + MORE)
    offer(folder, "loss_table", ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("loss_table", None)


def offer(folder: Path, package: str, entry_points: str) -> None:
    """Describe an installed package with these entry points."""
    described = folder / f"{package}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0")
    (described / "entry_points.txt").write_text(entry_points)


def train_with_it(folder: str, job_file: str, out: str) -> None:
    from titanlite import cli

    sys.path.insert(0, folder)
    words = ["train", "--job.config_file", job_file, "--training.steps", "3", "--checkpoint.no-enable"]
    assert cli.main([*words, "--job.dump_folder", out, "--metrics.writers", "loss_table"]) == 0
    assert cli.main([*words, "--job.dump_folder", f"{out}-locked", "--metrics.writers", "locked"]) == 2
    said = Path(f"{out}-locked", "train.log").read_text()
    assert "no permission" in said
    assert "Training starts" not in said


@pytest.mark.slow
def test_a_writer_of_an_installed_package_needs_no_change_elsewhere(own_package: Path, tmp_path: Path):
    (tmp_path / "small.toml").write_text(SMALL)
    run_process(train_with_it, str(own_package), str(tmp_path / "small.toml"), str(tmp_path / "out"))
    expected = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    table = [line.split(",") for line in (tmp_path / "out" / "loss.csv").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in table] == [(line["step"], line["loss"]) for line in expected]


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
    pytest.importorskip("wandb")
    (tmp_path / "small.toml").write_text(SMALL)
    first, second = run_process(log_to_wandb, str(tmp_path / "small.toml"), str(tmp_path / "out"))
    last = {line["step"]: line["loss"] for line in map(json.loads, (tmp_path / "out/metrics.jsonl").open())}
    (aside,) = (tmp_path / "out").glob("metrics.jsonl.superseded*")
    left = {line["step"]: line["loss"] for line in map(json.loads, aside.open())}
    assert {step: values["loss/train"] for step, values in first.items()} == {**last, **left}
    assert {step: values["loss/train"] for step, values in second.items()} == {s: last[s] for s in (3, 4, 5)}
    assert list(first) == [1, 2, 3, 4, 5, 6]
    assert first[1]["speed/tokens_per_second"] > 0


def refused_by_wandb(job_file: str, folder: str) -> list[str]:
    from titanlite import Trainer, load_job

    said = []
    for mode in ("sideways", "online"):  # an odd variable, and no key
        os.environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": folder, "NETRC": f"{folder}/none"}
        os.environ["WANDB_MODE"] = mode
        words = ["--job.config_file", job_file, "--job.dump_folder", f"{folder}/out", "--metrics.enable_wandb"]
        with pytest.raises(UserError) as refused:
            Trainer(load_job(words))
        said.append(str(refused.value))
    return said


@pytest.mark.slow
def test_wandb_without_a_key_or_with_an_odd_variable_is_a_mistake_of_the_user(tmp_path: Path):
    pytest.importorskip("wandb")
    (tmp_path / "small.toml").write_text(SMALL)
    for said in run_process(refused_by_wandb, str(tmp_path / "small.toml"), str(tmp_path)):
        assert "metrics.enable_wandb" in said
        assert "WANDB_MODE" in said


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("los_table", "There are: loss_table, locked, plain"),
        ("plain", "titanlite.observe.writers.Writer"),
        ("uninstalled", "missing_module"),
        ("twice", "loss_table:LossTable, other_table:LossTable"),
    ],
)
def test_a_writer_that_cannot_be_used_is_refused_before_the_start(
    own_package: Path, tmp_path: Path, named: str, problem: str
):
    offer(own_package, "other_table", "[titanlite.writers]\ntwice = other_table:LossTable\n")
    said = refused(tmp_path, "--metrics.writers", *named.split())
    assert "metrics.writers" in said
    assert problem in said


def test_wandb_that_is_not_installed_is_said_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titanlite.load_run.find_spec", lambda name: None)
    assert "titanlite[wandb]" in refused(tmp_path, "--metrics.enable_wandb")


def refused(tmp_path: Path, *words: str) -> str:
    with pytest.raises(UserError) as failure:
        load_run(["--job.dump_folder", str(tmp_path / "out"), *words], 1)
    return " ".join(str(failure.value).split())
