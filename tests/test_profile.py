"""Profiles of whole runs: the numbers of the run do not change, and its folder has the files."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from ranks import run_process, start_titanlite
from small_runs import SMALL, logged

from titanlite.observe.step_profile import PARTS, StepProfile

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("profile")]


def train(folder: Path, *options: str, ranks: int = 1, code: int = 0) -> str:
    job = folder.with_suffix(".toml")
    job.write_text(SMALL)
    words = ("train", "--job.config_file", job, "--job.dump_folder", folder, *options)
    return start_titanlite(*words, ranks=ranks).ends_with(code)


def numbers(folder: Path) -> dict[int, tuple[float, float, int]]:
    return {step: (entry["loss"], entry["grad_norm"], entry["tokens"]) for step, entry in logged(folder).items()}


def events(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == "profile"]


def weights(folder: Path) -> dict[str, bytes]:
    """The files of the last checkpoint."""
    last = max((folder / "checkpoint").glob("step-*"))
    return {path.name: path.read_bytes() for path in last.glob("*.distcp")}


PROFILING = [
    "--profiling.enable-profiling", "--profiling.enable-memory-snapshot", "--profiling.profile-freq", "6",
    "--profiling.profiler-warmup", "2", "--profiling.profiler-active", "2", "--profiling.profiler-ranks", "0", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A run of two ranks without a profile, one with all of them, and what that one said."""
    plain, profiled = (tmp_path_factory.mktemp("runs") / name for name in ("plain", "profiled"))
    train(plain, ranks=2)
    profiled.mkdir()
    (profiled / "profile.now").touch()
    return plain, profiled, train(profiled, *PROFILING, ranks=2)


def test_profiles_change_no_number_of_a_run(both: tuple[Path, Path, str]) -> None:
    plain, profiled, _ = both
    assert numbers(profiled) == numbers(plain)
    assert weights(profiled) == weights(plain)
    assert weights(plain)


def test_a_run_has_the_traces_of_its_schedule_and_of_a_file_that_asked(both: tuple[Path, Path, str]) -> None:
    _, folder, said = both
    # The file asks after the first logged step, which all ranks know a step later: steps 3 and 4 are the warm-up. The
    # cycle whose warm-up would begin meanwhile is left out.
    traced, counted = [6, 12], [4, 10]
    names = [f"step-{step:08d}-rank-{rank}{end}" for step in traced for rank in (0, 1)
             for end in (".trace.json.gz", ".summary.json")]  # fmt: skip
    names += [f"step-{step:08d}-rank-{rank}.memory.json.gz" for step in counted for rank in (0, 1)]
    assert sorted(path.name for path in (folder / "profile").iterdir()) == sorted(names)
    assert [event["step"] for event in events(folder)] == [4, 6, 10, 12]
    assert "profile.now: steps 5 to 6 will be profiled." in said
    assert not (folder / "profile.now").exists()
    assert re.search(r"part of a step +ms +share\n", said)
    for path in (folder / "profile").glob("*.summary.json"):
        profile = TypeAdapter(StepProfile).validate_json(path.read_text())
        assert sum(profile.parts.values()) == pytest.approx(profile.seconds)
        assert {*PARTS} - {"pipeline"} <= profile.parts.keys()
        assert profile.parts["collectives"] > 0
        assert all(seconds >= 0 for seconds in profile.parts.values())
        with gzip.open(folder / "profile" / profile.trace, "rt") as file:
            assert json.load(file)["distributedInfo"]["rank"] == profile.rank


def test_a_resumed_run_and_a_new_one_keep_earlier_profiles(both: tuple[Path, Path, str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(both[1], folder)
    train(folder, "--training.steps", "18", *PROFILING, ranks=2)
    assert {"step-00000012-rank-0.summary.json", "step-00000018-rank-0.summary.json"} <= {
        path.name for path in (folder / "profile").iterdir()
    }


COMMANDS = re.findall(
    r"```bash\n(titanlite profile .*)\n```", (Path(__file__).parents[1] / "docs/profiling.md").read_text()
)


@pytest.mark.parametrize("command", COMMANDS, ids=["in one go", "read a trace"])
def test_the_commands_of_the_page_do_what_it_says(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = 2 if "--out" not in command else 1
    tiny = ["--training.seq_len", "64", "--training.local_batch_size", "1"]  # instead of a minute on two ranks
    said = start_titanlite(*command.split()[1:], *tiny, ranks=ranks).ends_with(0)
    assert re.search(r"rank 0, steps \d to \d: [\d.]+ ms a step", said)
    for part in ("data", "forward", "loss", "backward", "clipping", "optimizer", "other"):
        assert re.search(rf"^  {part} +[\d.,]+ +[\d.]+%", said, re.MULTILINE)
    assert re.search(r"^  aten::mm +[\d.,]+ +[\d.]+% +\d", said, re.MULTILINE)
    (folder,) = tmp_path.rglob("profile")
    assert folder == tmp_path / ("traces/profile" if ranks == 1 else "outputs/debug_model/profile")
    named = set(
        re.findall(r"traces/profile/(\S+\.gz)", Path(__file__).parents[1].joinpath("docs/profiling.md").read_text())
    )
    if ranks == 1:
        assert named <= {path.name for path in folder.iterdir()}
    assert [path.name for path in folder.parent.iterdir()] == ["profile"]  # no file of a run


def test_a_program_gets_the_profiles(tmp_path: Path) -> None:
    said = run_process(profile_in_python, str(tmp_path))
    assert said == [(0, 2, 3, ["step-00000003-rank-0.trace.json.gz"])]


def profile_in_python(folder: str) -> list[Any]:
    from titanlite import load_job, profile_steps

    job = Path(folder, "small.toml")
    job.write_text(SMALL)
    profiles = profile_steps(load_job(["--job.config_file", str(job)]), steps=2, warmup=1, out=folder)
    return [
        (p.rank, p.first_step, p.last_step, [path.name for path in Path(folder, "profile").glob("*.gz")])
        for p in profiles
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps 0: must be"),
        (["--profiling.profiler_ranks", "3"], "names rank 3, and the last of 1 is 0."),
        (["--profiling.enable-memory-snapshot", "--compile.enable"], "compiled code has none"),
        (["--out", "/proc/none"], "/proc/none"),
    ],
)
def test_a_profile_that_cannot_be_made_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    job = tmp_path / "small.toml"
    job.write_text(SMALL)
    words = ["profile", "--job.config_file", str(job), "--job.dump_folder", str(tmp_path / "out"), *words]
    text = start_titanlite(*words).ends_with(2)
    assert said in text
    assert "Traceback" not in text
