"""Profiles: of which steps, in which files, by the command and from Python; the numbers of a run do not change."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_process, start_titanlite
from small_runs import SMALL, logged

from titanlite.config.schema import Profiling
from titanlite.hooks.profiler import Profiler

ALL = [
    *("--profiling.enable_profiling", "--profiling.enable_memory_snapshot", "--profiling.profile_freq", "6"),
    *("--profiling.profiler_warmup", "2", "--profiling.profiler_active", "2", "--profiling.profiler_ranks", "0", "1"),
]


def numbers(folder: Path) -> dict[int, tuple[float, float, int]]:
    return {step: (entry["loss"], entry["grad_norm"], entry["tokens"]) for step, entry in logged(folder).items()}


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    (tmp_path / "small.toml").write_text(SMALL)
    return ["--job.config_file", str(tmp_path / "small.toml")]


@pytest.mark.slow
def test_a_run_has_the_traces_of_its_schedule_and_the_numbers_of_a_run_without(job: list[str], tmp_path: Path) -> None:
    for name, options in (("plain", []), ("profiled", ALL)):
        said = start_titanlite("train", *job, "--job.dump_folder", tmp_path / name, *options, ranks=2).ends_with(0)
    assert numbers(tmp_path / "profiled") == numbers(tmp_path / "plain")
    folder = tmp_path / "profiled" / "profile"
    assert {path.name for path in folder.iterdir()} == {
        f"step-{step:08d}-rank-{rank}.trace.json.gz" for step in (6, 12) for rank in (0, 1)
    }
    assert "aten::mm" in said
    with gzip.open(folder / "step-00000012-rank-1.trace.json.gz", "rt") as file:
        trace = json.load(file)
    assert trace["distributedInfo"]["rank"] == 1
    ranges = [event["name"] for event in trace["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in ranges) == 2
    assert {"data", "forward", "loss", "backward", "clipping", "optimizer", "[memory]"} <= {*ranges}
    events = [json.loads(line) for line in (tmp_path / "profiled" / "events.jsonl").open()]
    assert [event["step"] for event in events if event["event"] == "profile"] == [6, 12]
    start_titanlite(
        *("train", *job, "--job.dump_folder", tmp_path / "profiled", *ALL[:-1], "--training.steps", "12"),
        *("--checkpoint.load_step", "5", "--training.steps", "12"),
    ).ends_with(0)
    assert (folder / "step-00000012-rank-0-2.trace.json.gz").exists()  # an earlier profile of the step is kept
    assert not (folder / "step-00000006-rank-0-2.trace.json.gz").exists()  # its cycle began before this start


def fill_disk() -> None:
    def export(*_: object) -> None:
        raise OSError("No space left on device")

    torch.profiler.profile.export_chrome_trace = export  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_ends_no_run(job: list[str], tmp_path: Path) -> None:
    words = ["train", *job, "--job.dump_folder", tmp_path / "out", *ALL[:8]]
    said = start_titanlite(*words, before=fill_disk).ends_with(0)
    assert said.count("Training goes on, but a profile failed: No space left on device") == 2
    assert len(logged(tmp_path / "out")) == 12


COMMANDS = re.findall(
    r"```bash\n(titanlite profile .*)\n```", (Path(__file__).parents[2] / "docs/profiling.md").read_text()
)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=["in one go", "read a trace"])
def test_the_commands_of_the_page_do_what_it_says(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = 2 if "--out" not in command else 1
    tiny = ["--training.seq_len", "64", "--training.local_batch_size", "1"]  # instead of a minute on two ranks
    said = start_titanlite(*command.split()[1:], *tiny, ranks=ranks).ends_with(0)
    assert "Self CPU" in said
    assert re.search(r"aten::mm +[\d.]+%", said)
    (folder,) = tmp_path.rglob("profile")
    assert folder == tmp_path / ("traces/profile" if ranks == 1 else "outputs/debug_model/profile")
    page = Path(__file__).parents[2].joinpath("docs/profiling.md").read_text()
    if ranks == 1:
        assert {*re.findall(r"traces/profile/(\S+\.gz)", page)} == {path.name for path in folder.iterdir()}
    assert [path.name for path in folder.parent.iterdir()] == ["profile"]  # no file of a run


def profile_in_python(folder: str) -> list[Any]:
    from titanlite import load_job, profile_steps

    job = load_job(["--job.config_file", f"{folder}/small.toml"])
    return [(p.rank, p.last_step, p.trace, "aten::mm" in p.operators) for p in profile_steps(job, 2, 1, out=folder)]


@pytest.mark.slow
def test_a_program_gets_the_profiles(job: list[str], tmp_path: Path) -> None:
    trace = str(tmp_path / "profile" / "step-00000003-rank-0.trace.json.gz")
    assert run_process(profile_in_python, str(tmp_path)) == [(0, 3, trace, True)]
    assert Path(trace).exists()


@pytest.mark.slow
def test_the_command_prints_one_object(job: list[str], tmp_path: Path) -> None:
    said = start_titanlite("profile", "--json", "--steps", "1", *job, "--job.dump_folder", tmp_path / "o").ends_with(0)
    (line,) = [line for line in said.splitlines() if line.startswith("{")]
    (profile,) = json.loads(line)["profiles"]
    assert profile["last_step"] == 4
    assert profile["operators"]["aten::mm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps 0: must be"),
        (["--profiling.profiler_ranks", "3"], "names rank 3, and the last of 1 is 0."),
        (["--out", "/proc/none"], "/proc/none"),
    ],
)
def test_a_profile_that_cannot_be_made_is_refused(words: list[str], said: str, job: list[str], tmp_path: Path) -> None:
    text = start_titanlite("profile", *job, "--job.dump_folder", tmp_path / "out", *words).ends_with(2)
    assert said in text
    assert "Traceback" not in text


def test_a_gpus_memory_is_written_on_the_schedule_and_where_it_was_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda max_entries: recorded.append(max_entries))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"blocks"))
    settings = Profiling(enable_memory_snapshot=True, profile_freq=2, profiler_warmup=1)
    profiler = Profiler(settings, tmp_path, 0, torch.device("cuda"))
    profiler.started(0)
    assert recorded == [100_000]
    for step in range(1, 6):
        profiler.after_step(step, None)  # pyright: ignore
    profiler.failed(torch.OutOfMemoryError())
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        *("out-of-memory-rank-0.memory.pickle", "step-00000002-rank-0.memory.pickle"),
        "step-00000004-rank-0.memory.pickle",
    ]
