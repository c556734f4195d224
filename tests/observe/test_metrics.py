"""What a run measures: metrics.jsonl, validation.jsonl and TensorBoard have the same numbers, in every start once."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from ranks import start_small
from small_runs import logged

pytestmark = pytest.mark.slow

KEYS = [
    *(
        "step",
        "loss",
        "loss_max_rank",
        "grad_norm",
        "clip_fraction",
        "lr",
        "tokens",
        "tps",
        "tps_per_device",
        "mfu",
        "tflops",
    ),
    *(
        "memory",
        "memory_peak",
        "memory_active",
        "alloc_retries",
        "step_time",
        "data_time",
        "forward_backward_time",
    ),
    *(
        "optimizer_time",
        "checkpoint_time",
        "other_time",
        "elapsed",
        "eta",
        "time",
        "token_utilization",
    ),
    *(
        "skipped_records",
        "skipped_steps",
        "spikes",
        "roll_backs",
        "failed_saves",
        "save_waits",
        "failed_mirrors",
    ),
    *("failed_writes", "source_tokens", "source_epochs"),
]
PARTS = ("data_time", "forward_backward_time", "optimizer_time", "checkpoint_time", "other_time")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What two starts have left.

    The first was killed at step 9, as far as its files can tell, after a save at 5.
    """
    tmp_path = tmp_path_factory.mktemp("metrics")
    words = [
        tmp_path / "out",
        "--metrics.enable_tensorboard",
        "--validation.freq",
        "4",
        "--validation.holdout",
        "0.1",
    ]
    words += [
        "--validation.sequences",
        "2",
        "--lr_scheduler.decay_ratio",
        "0",
        "--training.max_norm",
        "0.6",
    ]
    words += ["--metrics.details", "gradients", "--training.steps"]
    start_small(*words, "9").ends_with(0)
    (tmp_path / "out" / "checkpoint" / "step-00000009").rename(tmp_path / "gone")
    start_small(*words, "12").ends_with(0)
    return tmp_path / "out"


def test_a_line_has_these_numbers(folder: Path):
    lines = logged(folder)
    assert list(lines) == list(range(1, 13))
    assert list(lines[1]) == [*KEYS, "grad_norms"]
    for step, line in lines.items():
        assert line["tokens"] == step * 4 * 64
        assert line["loss_max_rank"] == line["loss"]
        assert line["clip_fraction"] == (line["grad_norm"] > 0.6)
        assert line["mfu"] is None
        assert line["step_time"] == pytest.approx(sum(line[part] for part in PARTS))
        assert line["tps"] == line["tps_per_device"] == pytest.approx(4 * 64 / line["step_time"])
        assert (
            0.05 < line["memory"] <= line["memory_peak"] < 64
        )  # torch alone takes more than 50 MiB
        assert line["source_tokens"] == {"python_stdlib": line["tokens"]}
    assert {line["clip_fraction"] for line in lines.values()} == {0.0, 1.0}
    assert (
        lines[10]["checkpoint_time"] == 0.0 < lines[11]["checkpoint_time"]
    )  # of the save after step 10
    assert lines[6]["elapsed"] < lines[7]["elapsed"]  # since the second start
    assert lines[12]["eta"] == 0.0
    assert lines[8]["time"] < lines[9]["time"]


def test_what_is_trained_again_stands_in_each_file_once_and_is_kept(folder: Path):
    first = [json.loads(line)["step"] for line in (folder / "archived-1" / "metrics.jsonl").open()]
    assert first == [6, 7, 8, 9]
    validated = [json.loads(line) for line in (folder / "validation.jsonl").open()]
    assert [line["step"] for line in validated] == [0, 4, 8, 12]
    assert list(validated[0]) == ["step", "loss", "perplexity", "bits_per_byte"]
    assert (
        f"step 12/12  loss {logged(folder)[12]['loss']:.4f}  grad_norm"
        in (folder / "train.log").read_text()
    )


def test_tensorboard_has_the_same_numbers_in_groups(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board: Any = EventAccumulator(str(folder / "tb"))
    board.Reload()
    points = {event.step: event.value for event in board.Scalars("train/loss")}
    assert points == pytest.approx({step: line["loss"] for step, line in logged(folder).items()})
    assert [event.step for event in board.Scalars("val/loss")] == [0, 4, 8, 12]
    tags = board.Tags()["scalars"]
    assert {"train/grad_norm", "train/lr", "perf/tokens_per_second", "memory/peak"} < {*tags}
    assert {tag.split("/")[0] for tag in tags} == {
        *("train", "val", "perf", "memory", "data", "progress", "counters", "grad_norms"),
    }
    assert board.Tags()["histograms"]
    job, environment = (
        board.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()
        for name in ("job", "environment")
    )
    assert "    steps = " in job  # four spaces: shown as it is written
    assert json.loads((folder / "environment.json").read_text())["run"] in environment
    assert '"shard": 1' in environment


def test_non_finite_numbers_are_valid_json_and_the_guard_comes_after_the_line(
    tmp_path,
):
    diverging = ["--optimizer.name", "SGD", "--optimizer.lr", "1e30", "--training.max_norm", "0"]
    words = [tmp_path / "out", *diverging, "--validation.freq", "1"]
    said = start_small(
        *words, "--validation.holdout", "0.1", "--validation.sequences", "2"
    ).ends_with(3)
    for name in ("validation.jsonl", "metrics.jsonl"):
        lines = (tmp_path / "out" / name).read_text().splitlines()
        line = [json.loads(text, parse_constant=pytest.fail) for text in lines][-1]
    assert line["grad_norm"] is None
    assert f"Step {line['step']}: " in said
    assert "guards.max_skipped" in said


def fill_disk() -> None:
    """What is written beyond 16 kB of a file fails."""
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (16_384, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


def test_a_full_disk_costs_metrics_and_not_the_run(tmp_path):
    words = [
        tmp_path / "out",
        "--metrics.enable_tensorboard",
        "--training.steps",
        "60",
        "--checkpoint.no-enable",
    ]
    said = start_small(*words, before=fill_disk).ends_with(0)
    for logger in ("JsonLines", "TensorBoard"):
        assert said.count(f"{logger} cannot write its metrics; training continues: [Errno 27]") == 1
    assert "Finished after step 60." in said
    *whole, cut = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in whole]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 10
    assert len(cut) < len(whole[-1]) + 20
