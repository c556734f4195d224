"""Which steps are profiled, what is written, and that a profile which fails ends nothing."""

import gzip
import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite.config.schema import Profiling
from titanlite.observe.counter import Counter
from titanlite.observe.profiler import Profiler
from titanlite.runtime.events import Event

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@contextmanager
def count() -> Iterator[Counter]:
    counter = Counter()
    with counter.watching():
        counter.begin()
        yield counter


class Steps:
    """A run with a profiler."""

    def __init__(self, folder: Path, *, rank: int = 0, device: torch.device = CPU, **settings: Any) -> None:
        self.lines: list[str] = []
        self.profiler = Profiler(Profiling(**settings), folder, rank, device, self.lines.append, count)
        self.folder, self.done, self.matmuls = folder, 0, 1

    def do(self, steps: int) -> None:
        for _ in range(steps):
            self.done += 1
            with self.profiler.step(self.done), torch.profiler.record_function("forward"):
                for _ in range(self.matmuls):
                    torch.mm(torch.ones(8, 8), torch.ones(8, 8))

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "profile").glob("*"))

    def events(self) -> list[tuple[str, int | None]]:
        return [(line.kind, line.step) for line in self.lines if isinstance(line, Event)]


def names(rank: int, *steps: int) -> list[str]:
    return [f"step-{step:08d}-rank-{rank}.{end}" for step in steps for end in ("summary.json", "trace.json.gz")]


def test_the_last_steps_of_a_cycle_are_traced_until_the_cycles_end(tmp_path: Path) -> None:
    run = Steps(
        tmp_path, enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=2, profiler_repeat=2
    )
    run.do(13)
    assert run.files() == names(0, 4, 8)
    assert run.events() == [("profile", 4), ("profile", 8)]
    with gzip.open(tmp_path / "profile" / names(0, 8)[1], "rt") as file:
        trace = json.load(file)["traceEvents"]
    assert [event["name"] for event in trace if event["name"].startswith("ProfilerStep")] == [
        "ProfilerStep#1",
        "ProfilerStep#2",
    ]
    summary = json.loads((tmp_path / "profile" / names(0, 8)[0]).read_text())
    assert (summary["first_step"], summary["last_step"], summary["rank"]) == (7, 8, 0)
    assert summary["trace"] == names(0, 8)[1]
    assert {"forward", "other"} <= summary["parts"].keys()
    assert "aten::mm" in run.lines[-1]


def test_a_rank_that_is_not_chosen_writes_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "enable_profiling": True,
        "profile_freq": 2,
        "profiler_warmup": 0,
        "profiler_ranks": (1,),
    }
    for rank in (0, 1):
        run = Steps(tmp_path, rank=rank, **settings)
        run.do(2)
        assert run.events() == ([("profile", 2)] if rank == 0 else [])  # rank 0 writes the events
    assert run.files() == names(1, 2)
    settings["profiler_ranks"] = ()  # all of them
    Steps(tmp_path, rank=5, **settings).do(2)
    assert run.files() == names(1, 2) + names(5, 2)


def test_an_earlier_profile_of_the_same_step_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        Steps(tmp_path, enable_profiling=True, profile_freq=1, profiler_warmup=0).do(1)
    first, trace = names(0, 1)
    assert set((tmp_path / "profile").iterdir()) == {
        tmp_path / "profile" / name for name in (first, trace, first.replace("0.", "0-2."), trace.replace("0.", "0-2."))
    }


def test_a_file_asks_for_the_next_steps_and_is_removed(tmp_path: Path) -> None:
    run, other = (Steps(tmp_path, rank=rank, profiler_warmup=1) for rank in (0, 1))
    run.do(2)
    assert not run.profiler.is_asked()
    (tmp_path / "profile.now").touch()
    assert not other.profiler.is_asked()  # rank 0 looks, and tells the others
    assert run.profiler.is_asked()
    assert not (tmp_path / "profile.now").exists()
    run.profiler.ask()
    run.do(4)
    assert run.files() == names(0, 4)
    assert run.lines[0] == "profile.now: step 4 will be profiled."


def test_a_request_that_cannot_be_removed_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Steps(tmp_path)
    (tmp_path / "profile.now").mkdir()
    assert [run.profiler.is_asked() for _ in range(3)] == [False] * 3
    assert len([record for record in caplog.records if "profile.now cannot be removed" in record.message]) == 1


def test_a_profile_that_the_run_does_not_complete_is_dropped(tmp_path: Path) -> None:
    run = Steps(tmp_path, enable_profiling=True, profile_freq=10, profiler_warmup=1, profiler_active=4)
    run.do(8)
    run.profiler.close()
    assert run.lines == ["The run ends before the profile of steps 6 to 10 is complete."]
    assert run.files() == []
    Steps(tmp_path, enable_profiling=True, profile_freq=1, profiler_warmup=0).do(1)  # torch can profile again
    assert run.files() == names(0, 1)


def test_a_request_that_comes_too_late_is_answered(tmp_path: Path) -> None:
    run = Steps(tmp_path)
    run.do(2)
    (tmp_path / "profile.now").touch()
    assert run.profiler.is_asked()
    run.profiler.close()
    assert run.lines == ["profile.now: the run ends before a step can be profiled."]


def test_a_folder_that_cannot_be_made_is_said_once_for_each_profile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").symlink_to(tmp_path / "gone" / "disk")
    run = Steps(tmp_path, enable_profiling=True, enable_memory_snapshot=True, profile_freq=2, profiler_warmup=1)
    run.do(6)
    assert run.done == 6
    assert len(caplog.records) == 3
    for record in caplog.records:
        assert record.levelno == logging.ERROR
        assert record.message.startswith("Training goes on, but a profile failed: ")
    assert run.events() == []


@pytest.mark.parametrize("limit", [0, 1000, 100_000])
def test_a_full_disk_is_said_once_for_each_profile_and_leaves_no_part_of_a_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int
) -> None:
    run = Steps(tmp_path, enable_profiling=True, profile_freq=2, profiler_warmup=1)
    run.matmuls = 400  # so that torch writes the trace in several parts
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # the system refuses to write on, as a full disk does
    try:
        run.do(4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "Training goes on" in "".join(record.message for record in caplog.records)
    assert len(caplog.records) == 2
    assert run.files() == []
    run.do(2)
    assert run.files() == names(0, 6)  # there is room again


def test_the_bytes_of_a_step_are_counted_on_a_cpu(tmp_path: Path) -> None:
    run = Steps(tmp_path, enable_memory_snapshot=True, profile_freq=4, profiler_warmup=1)
    run.do(4)
    assert run.files() == ["step-00000003-rank-0.memory.json.gz"]
    (line,) = run.lines
    assert line.startswith("Counted the bytes of step 3 on rank 0, at most 0.0 MiB (forward: start): other 0.0.")
    with gzip.open(tmp_path / "profile" / run.files()[0], "rt") as file:
        events = json.load(file)["traceEvents"]
    sizes = [event["args"]["MiB"] * 2**20 for event in events if event["ph"] == "C" and event["name"] == "other"]
    assert max(sizes) == 3 * 8 * 8 * 4  # two matrices and their product
    assert [event["name"] for event in events if event["ph"] == "X"] == ["forward: start"]


def test_an_error_of_a_step_that_is_counted_is_the_steps_own(tmp_path: Path) -> None:
    run = Steps(tmp_path, enable_memory_snapshot=True, profile_freq=1, profiler_warmup=0)
    with pytest.raises(KeyError, match="theirs"), run.profiler.step(1):
        raise KeyError("theirs")


def test_a_gpus_memory_is_written_on_the_schedule_and_where_it_was_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda max_entries: recorded.append(max_entries))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"blocks"))
    run = Steps(tmp_path, device=GPU, enable_memory_snapshot=True, profile_freq=2, profiler_warmup=1)
    assert recorded == [100_000]
    run.do(5)
    run.profiler.out_of_memory()
    assert run.files() == [
        "out-of-memory-rank-0.memory.pickle", "step-00000002-rank-0.memory.pickle", "step-00000004-rank-0.memory.pickle"
    ]  # fmt: skip
    assert run.events() == [("profile", 2), ("profile", 4), ("profile", None)]
    (tmp_path / "off").mkdir()
    Steps(tmp_path / "off", device=GPU).profiler.out_of_memory()
    assert recorded == [100_000]
    assert not (tmp_path / "off" / "profile").exists()
