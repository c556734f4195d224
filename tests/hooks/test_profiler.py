"""Profiles of a run and of `titanlite profile` cover the selected steps and change no loss."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_small, titanlite
from small_runs import ROOT, read_events, read_metrics, read_printed_json

from titanlite.config.schema import Profiling
from titanlite.hooks.profiler import Profiler

GUIDES = ROOT / "docs" / "guides"
PAGE = (GUIDES / "profiling.md").read_text()
ALL = """
--profiling.enable_profiling --profiling.enable_memory_snapshot --profiling.profile_freq 6
--profiling.profiler_warmup 2 --profiling.profiler_active 2 --profiling.profiler_ranks 0 1
"""


def fill_disk_once() -> None:
    """Let the first export of a trace fail as on a full disk."""
    export: Any = torch.profiler.profile.export_chrome_trace

    def fail(*_: object) -> None:
        torch.profiler.profile.export_chrome_trace = export
        raise OSError("No space left on device")

    torch.profiler.profile.export_chrome_trace = fail  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_a_profiled_run_writes_scheduled_traces_and_the_metrics_of_an_unprofiled_run(tmp_path):
    """The disk is full at the first trace, which must not end the run."""
    run_small(tmp_path / "plain", ranks=2)
    output = run_small(tmp_path / "profiled", ALL, ranks=2, before=fill_disk_once)

    assert output.count("No space left on device") == 2
    assert "aten::mm" in output

    plain = read_metrics(tmp_path / "plain")
    profiled = read_metrics(tmp_path / "profiled")
    for name in ("loss", "grad_norm", "tokens"):
        for step, line in plain.items():
            assert line[name] == profiled[step][name]

    folder = tmp_path / "profiled" / "profile"
    prefixes = sorted(path.name[:20] for path in folder.iterdir())
    assert prefixes == ["step-00000012-rank-0", "step-00000012-rank-1"]

    (file,) = folder.glob("step-00000012-rank-1-*.trace.json.gz")
    trace = json.loads(gzip.decompress(file.read_bytes()))
    assert trace["distributedInfo"]["rank"] == 1

    ranges = [event["name"] for event in trace["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in ranges) == 2
    assert {"data", "forward", "loss", "backward", "clipping", "optimizer", "[memory]"} <= {*ranges}

    (event,) = read_events(tmp_path / "profiled", "profile")
    assert event["step"] == 12

    run_small(tmp_path / "profiled", ALL, "--checkpoint.load_step 5", ranks=2)
    # The earlier profile of the step is kept.
    assert len([*folder.glob("step-00000012-rank-0-*")]) == 2
    # The warmup of this profile would have begun before step 5.
    assert not [*folder.glob("step-00000006-*")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", re.findall(r"```bash\n(titanlite profile .*)\n```", PAGE), ids=["short", "trace"]
)
def test_documented_profile_commands_write_one_trace_and_print_a_table(
    command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    is_json = "--out" not in command
    folder = tmp_path / ("outputs/debug_model/profile" if is_json else "traces/profile")
    # The first command profiles up to step 6, after the last step of the job.
    small = "--training.seq_len 64 --training.local_batch_size 1 --training.steps 5"
    options = [*command.split()[1:], *small.split()]
    if is_json:
        table = titanlite(*options, "--json", ranks=2)
    else:
        table = titanlite(*options)

    (trace,) = folder.iterdir()
    if is_json:
        (profile,) = read_printed_json(table)["profiles"]
        assert (profile["rank"], profile["last_step"]) == (0, 6)
        assert Path(profile["trace"]).name == trace.name
        assert profile["operators"]["aten::mm"] > 0
        table = profile["table"]
    assert "Self CPU" in table
    assert re.search(r"s a step, [\d,]+ tokens/s, [\d.]+ GiB", table)
    assert re.search(r"aten::mm +[\d.]+%", table)

    # `titanlite profile` writes no other files of a run.
    assert [path.name for path in folder.parent.iterdir()] == ["profile"]


def test_memory_snapshots_are_written_on_schedule_and_when_memory_runs_out(tmp_path, monkeypatch):
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda max_entries: None)
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"blocks"))
    settings = Profiling(enable_memory_snapshot=True, profile_freq=2, profiler_warmup=1)
    profiler = Profiler(settings, tmp_path)
    trainer = SimpleNamespace(rank=0, device=torch.device("cuda"))

    profiler.built(trainer)  # pyright: ignore
    profiler.started(0)
    for step in range(1, 4):
        profiler.after_step(step, None)  # pyright: ignore
    profiler.failed(torch.OutOfMemoryError())
    profiler.close()

    files = (tmp_path / "profile").glob("*.memory.pickle")
    written = sorted(path.name.rpartition("-rank-0-")[0] for path in files)
    assert written == ["out-of-memory", "step-00000002"]
