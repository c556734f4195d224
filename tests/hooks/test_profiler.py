"""Profiles: of which steps, in which files, by the command and in a run; the numbers of a run do not change."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import start_small, start_titanlite
from small_runs import logged

from titanlite.config.schema import Profiling
from titanlite.hooks.profiler import Profiler

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PAGES = (GUIDES / "memory_and_speed.md").read_text() + (GUIDES / "monitoring.md").read_text()
ALL = [
    *(
        "--profiling.enable_profiling",
        "--profiling.enable_memory_snapshot",
        "--profiling.profile_freq",
        "6",
    ),
    *(
        "--profiling.profiler_warmup",
        "2",
        "--profiling.profiler_active",
        "2",
        "--profiling.profiler_ranks",
        "0",
        "1",
    ),
]


def fill_disk_once() -> None:
    export: Any = torch.profiler.profile.export_chrome_trace

    def full(*_: object) -> None:
        torch.profiler.profile.export_chrome_trace = export
        raise OSError("No space left on device")

    torch.profiler.profile.export_chrome_trace = full  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_a_run_has_the_traces_of_its_schedule_and_the_numbers_of_a_run_without(
    tmp_path,
):
    """Its disk is full at the first trace, which ends no run."""
    start_small(tmp_path / "plain", ranks=2).ends_with(0)
    said = start_small(tmp_path / "profiled", *ALL, ranks=2, before=fill_disk_once).ends_with(0)

    assert said.count("No space left on device") == 2
    assert "aten::mm" in said

    plain, profiled = logged(tmp_path / "plain"), logged(tmp_path / "profiled")
    for name in ("loss", "grad_norm", "tokens"):
        assert [line[name] for line in plain.values()] == [line[name] for line in profiled.values()]
    folder = tmp_path / "profiled" / "profile"

    assert sorted(path.name[:20] for path in folder.iterdir()) == [
        "step-00000012-rank-0",
        "step-00000012-rank-1",
    ]

    (file,) = folder.glob("step-00000012-rank-1-*.trace.json.gz")
    trace = json.loads(gzip.decompress(file.read_bytes()))

    assert trace["distributedInfo"]["rank"] == 1

    ranges = [event["name"] for event in trace["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in ranges) == 2
    assert {"data", "forward", "loss", "backward", "clipping", "optimizer", "[memory]"} <= {*ranges}

    events = [json.loads(line) for line in (tmp_path / "profiled" / "events.jsonl").open()]
    assert [event["step"] for event in events if event["event"] == "profile"] == [12]

    start_small(tmp_path / "profiled", *ALL, "--checkpoint.load_step", "5", ranks=2).ends_with(0)
    # An earlier profile of the step is kept.
    assert len([*folder.glob("step-00000012-rank-0-*")]) == 2
    # Its cycle began before this start.
    assert not [*folder.glob("step-00000006-*")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", re.findall(r"```bash\n(titanlite profile .*)\n```", PAGES), ids=["short", "trace"]
)
def test_the_commands_of_the_page_do_what_it_says(command: str, tmp_path, monkeypatch):
    as_json = "--out" not in command
    ranks, folder = (2, "outputs/debug_model/profile") if as_json else (1, "traces/profile")
    monkeypatch.chdir(tmp_path)
    words = [*command.split()[1:], "--training.seq_len", "64", "--training.local_batch_size", "1"]
    said = start_titanlite(*words, *["--json"] * as_json, ranks=ranks).ends_with(0)
    (trace,) = (tmp_path / folder).iterdir()
    if as_json:
        (line,) = [line for line in said.splitlines() if line.startswith("{")]
        (profile,) = json.loads(line)["profiles"]
        assert (profile["rank"], profile["last_step"], Path(profile["trace"]).name) == (
            0,
            6,
            trace.name,
        )
        assert profile["operators"]["aten::mm"] > 0
        said = profile["table"]

    assert "Self CPU" in said
    assert re.search(r"s a step, [\d,]+ tokens/s, [\d.]+ GiB", said)
    assert re.search(r"aten::mm +[\d.]+%", said)
    assert [path.name for path in (tmp_path / folder).parent.iterdir()] == [
        "profile"
    ]  # no file of a run


def test_a_gpus_memory_is_written_on_the_schedule_and_where_it_was_not_enough(
    tmp_path, monkeypatch
):
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda max_entries: None)
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"blocks"))
    settings = Profiling(enable_memory_snapshot=True, profile_freq=2, profiler_warmup=1)
    profiler, trainer = (
        Profiler(settings, tmp_path),
        SimpleNamespace(rank=0, device=torch.device("cuda")),
    )
    profiler.built(trainer)  # pyright: ignore
    profiler.started(0)
    for step in range(1, 4):
        profiler.after_step(step, None)  # pyright: ignore
    profiler.failed(torch.OutOfMemoryError())
    profiler.close()
    written = sorted(
        path.name.rpartition("-rank-0-")[0]
        for path in (tmp_path / "profile").glob("*.memory.pickle")
    )

    assert written == ["out-of-memory", "step-00000002"]
