"""Writers: how one of a user's own is added, and what Weights & Biases gets from each start of a run."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_process
from small_runs import SMALL

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.config.schema import Checkpoint, Job, JobConfig, Metrics, Samples
from titanlite.observe.metrics import MetricsRecorder
from titanlite.observe.writers import RunStart, open_writers

# The example of CONTRIBUTING.md.
OWN_WRITER = '''
import csv

from titanlite.observe.logged_step import LoggedStep
from titanlite.observe.writers import RunStart, Writer


class LossTable(Writer):
    """Step and loss in a file that a spreadsheet opens."""

    def __init__(self, start: RunStart) -> None:
        super().__init__(start)
        self._file = (start.folder / "loss.csv").open("a", encoding="utf-8")

    def logged(self, entry: LoggedStep) -> None:
        csv.writer(self._file).writerow([entry.step, entry.loss])
        self._file.flush()

    def close(self) -> None:
        self._file.close()
'''
MORE = """

class Locked(Writer):
    def __init__(self, start):
        raise PermissionError("no permission")


class Plain:
    pass
"""
ENTRY_POINTS = """[titanlite.writers]
loss_table = loss_table:LossTable
locked = loss_table:Locked
plain = loss_table:Plain
misnamed = loss_table:Missing
uninstalled = missing_module:Writer
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
    assert "the writer Locked cannot begin: no permission" in said
    assert "Training starts" not in said


@pytest.mark.slow
def test_a_writer_of_an_installed_package_needs_no_change_elsewhere(own_package: Path, tmp_path: Path):
    (tmp_path / "small.toml").write_text(SMALL)
    run_process(train_with_it, str(own_package), str(tmp_path / "small.toml"), str(tmp_path / "out"))
    expected = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    table = [line.split(",") for line in (tmp_path / "out" / "loss.csv").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in table] == [(line["step"], line["loss"]) for line in expected]


def test_contributing_shows_this_writer():
    text = Path(__file__).parents[2].joinpath("CONTRIBUTING.md").read_text()
    assert OWN_WRITER.strip() in text
    assert "loss_table:LossTable" in text


class FakeRun:
    """A run of W&B on its server, as a client sees it. It stands in for the server, which a test has not."""

    def __init__(self, have: dict[int, dict], **arguments):
        self.have, self.arguments = have, arguments
        self.starting_step = max(have, default=-1) + 1

    def log(self, values: dict, step: int) -> None:
        assert step >= self.starting_step, "W&B leaves out a step that it has"
        self.have.setdefault(step, {}).update(values)

    def finish(self) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, dict]]:
    """Id of a run -> step -> values."""
    runs: dict[str, dict[int, dict]] = {}
    fake = SimpleNamespace(
        init=lambda **arguments: FakeRun(runs.setdefault(arguments["id"], {}), **arguments),
        Settings=lambda **_: None,
        Table=lambda columns, data: data,
        Error=RuntimeError,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return runs


def start(folder: Path, step: int, steps: range, load_step: int = -1) -> None:
    """A start of a run that logs `steps` and ends without a word; loss 8 - step / 10."""
    for path in folder.glob("*.jsonl"):  # as the output folder does it
        kept = [line for line in path.read_text().splitlines(True) if json.loads(line)["step"] <= step]
        path.write_text("".join(kept))
    job = JobConfig(
        job=Job(dump_folder=str(folder)),
        metrics=Metrics(log_freq=1, enable_wandb=True, enable_tensorboard=False),
        checkpoint=Checkpoint(load_step=load_step),
        samples=Samples(freq=1, prompts=("x",)),
    )
    writers = open_writers(RunStart(Run(job), step, {"run": "abc"}), rank=0)
    recorder = MetricsRecorder(Run(job), writers, torch.device("cpu"), None, step)
    for number in steps:
        recorder.record(torch.tensor(1.0), 10, {})
        recorder.log(
            number, 0.1, torch.tensor([8 - number / 10, 8.0], dtype=torch.float64), source_tokens={"a": number}
        )
    recorder.sampled(steps[-1], [{"prompt": "x", "completion": "y"}])


def test_a_resumed_run_gives_wandb_what_it_lacks_and_nothing_twice(tmp_path: Path, server: dict[str, dict[int, dict]]):
    start(tmp_path, 0, range(1, 9))
    assert list(server) == ["abc"]
    for step in (4, 5, 6, 7, 8):  # what it had in memory when the run was killed
        del server["abc"][step]
    start(tmp_path, 5, range(6, 12))
    assert list(server) == ["abc"]
    assert {step: values["loss/train"] for step, values in server["abc"].items()} == {
        step: 8 - step / 10 for step in range(1, 12)
    }
    assert all(values["progress/source_tokens/a"] == step for step, values in server["abc"].items())
    assert server["abc"][11]["samples"] == [["x", "y"]]
    assert all("_timestamp" in values for values in server["abc"].values())


def test_a_run_that_goes_back_to_train_otherwise_has_its_steps_in_a_run_of_its_own(
    tmp_path: Path, server: dict[str, dict[int, dict]]
):
    start(tmp_path, 0, range(1, 9))
    start(tmp_path, 3, range(4, 6), load_step=3)
    start(tmp_path, 5, range(6, 8), load_step=3)  # the next start resumes from what was saved since
    first, second = server
    assert first == "abc"
    assert list(server[first]) == list(range(1, 9))
    assert second.startswith("abc-")
    assert list(server[second]) == list(range(1, 8))


def refused_by_wandb(folder: str) -> list[str]:
    import os

    said = []
    for mode in ("sideways", "online"):
        os.environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": folder, "NETRC": f"{folder}/none"}
        os.environ["WANDB_MODE"] = mode
        try:
            start(Path(folder), 0, range(1, 2))
        except UserError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_wandb_without_a_key_or_with_an_odd_variable_is_a_mistake_of_the_user(tmp_path: Path):
    pytest.importorskip("wandb")
    odd, no_key = run_process(refused_by_wandb, str(tmp_path))
    for said in (odd, no_key):
        assert "metrics.enable_wandb: Weights & Biases cannot begin" in said
        assert "WANDB_MODE=offline" in said
    assert "WANDB_MODE: Input should be 'online', 'offline'" in odd


def test_wandb_goes_on_with_an_empty_id_which_a_full_disk_left(tmp_path: Path, server: dict[str, dict[int, dict]]):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "id").touch()
    start(tmp_path, 0, range(1, 3))
    assert list(server) == ["abc"]


def test_a_writer_that_nothing_offers_is_refused_with_those_that_there_are(own_package: Path, tmp_path: Path):
    said = titanlite_check(tmp_path, "--metrics.writers", "los_table")
    assert 'metrics.writers = ["los_table"]' in said
    there_are = "There are: loss_table, locked, plain, misnamed, uninstalled."
    assert f'no installed package offers a writer "los_table". {there_are}' in " ".join(said.split())


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("plain", "is not a class on titanlite.observe.writers.Writer"),
        ("misnamed", "cannot be imported: AttributeError: module 'loss_table' has no attribute 'Missing'"),
        ("uninstalled", "cannot be imported: ModuleNotFoundError: No module named 'missing_module'"),
        ("loss_table loss_table", 'names "loss_table" twice'),
    ],
)
def test_a_writer_that_cannot_be_used_is_refused_before_the_start(
    own_package: Path, tmp_path: Path, named: str, problem: str
):
    said = titanlite_check(tmp_path, "--metrics.writers", *named.split())
    assert problem in " ".join(said.split())


def test_a_writer_that_two_packages_offer_is_refused(own_package: Path, tmp_path: Path):
    offer(own_package, "other_table", "[titanlite.writers]\nloss_table = other_table:LossTable\n")
    said = titanlite_check(tmp_path, "--metrics.writers", "loss_table")
    assert 'several packages offer a writer "loss_table": loss_table, other_table.' in " ".join(said.split())


def titanlite_check(tmp_path: Path, *words: str) -> str:
    from titanlite.load_run import load_run

    with pytest.raises(UserError) as refused:
        load_run(["--job.dump_folder", str(tmp_path / "out"), *words], 1)
    return str(refused.value)


def test_wandb_that_is_not_installed_is_said_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("titanlite.load_run.find_spec", lambda name: None)
    said = titanlite_check(tmp_path, "--metrics.enable_wandb")
    assert "metrics.enable_wandb = true" in said
    assert "pip install 'titanlite[wandb]'" in said
