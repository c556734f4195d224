"""metrics.jsonl, validation.jsonl and TensorBoard contain the same numbers once for each step."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from ranks import run_small
from small_runs import read_log, read_metrics, read_tensorboard

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("metrics")]

KEYS = """
step loss loss_max_rank grad_norm clip_fraction lr tokens tps tps_per_device mfu tflops memory
memory_peak memory_active alloc_retries step_time data_time forward_backward_time optimizer_time
checkpoint_time other_time elapsed eta time token_utilization skipped_records skipped_steps spikes
roll_backs failed_saves save_waits failed_mirrors failed_writes source_tokens source_epochs
grad_norms
"""
PARTS = ("data_time", "forward_backward_time", "optimizer_time", "checkpoint_time", "other_time")
VALIDATION = "--validation.holdout 0.1 --validation.sequences 2 --validation.freq"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the output folder of two starts.

    According to its files, the first was killed at step 9, after a save at step 5.
    """
    out = tmp_path_factory.mktemp("metrics") / "out"
    options = f"{VALIDATION} 4 --lr_scheduler.decay_ratio 0 --training.max_norm 0.6"
    options += " --metrics.enable_tensorboard --metrics.details gradients --training.steps"
    run_small(out, options, 9)
    (out / "checkpoint" / "step-00000009").rename(out.with_name("gone"))
    run_small(out, options, 12)
    return out


def read_entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.open()]


def test_a_line_of_metrics_has_the_documented_numbers(folder):
    lines = read_metrics(folder)
    assert list(lines) == list(range(1, 13))
    assert list(lines[1]) == KEYS.split()

    for step, line in lines.items():
        assert line["tokens"] == step * 4 * 64
        assert line["loss_max_rank"] == line["loss"]
        assert line["clip_fraction"] == (line["grad_norm"] > 0.6)
        assert line["mfu"] is None
        assert line["step_time"] == pytest.approx(sum(line[part] for part in PARTS))
        assert line["tps"] == line["tps_per_device"] == pytest.approx(4 * 64 / line["step_time"])
        # torch alone takes 50 MiB.
        assert 0.05 < line["memory"] <= line["memory_peak"] < 64
        assert line["source_tokens"] == {"python_stdlib": line["tokens"]}

    assert {line["clip_fraction"] for line in lines.values()} == {0.0, 1.0}
    assert lines[10]["checkpoint_time"] == 0.0
    # Step 11 follows the save of step 10, and step 6 is the first of the second start.
    assert lines[11]["checkpoint_time"] > 0.0
    assert lines[6]["elapsed"] < lines[7]["elapsed"]
    assert lines[12]["eta"] == 0.0
    assert lines[8]["time"] < lines[9]["time"]


def test_repeated_steps_are_in_each_file_once_and_the_earlier_entries_are_archived(folder):
    archived = read_entries(folder / "archived-1" / "metrics.jsonl")
    assert [entry["step"] for entry in archived] == [6, 7, 8, 9]

    validations = read_entries(folder / "validation.jsonl")
    assert [entry["step"] for entry in validations] == [0, 4, 8, 12]
    assert list(validations[0]) == ["step", "loss", "perplexity", "bits_per_byte"]

    last_line = f"step 12/12  loss {read_metrics(folder)[12]['loss']:.4f}  grad_norm"
    assert last_line in read_log(folder)


def test_tensorboard_has_the_same_numbers_in_groups(folder):
    board = read_tensorboard(folder)
    points = {event.step: event.value for event in board.Scalars("train/loss")}

    losses = {step: line["loss"] for step, line in read_metrics(folder).items()}
    assert points == pytest.approx(losses)
    assert [event.step for event in board.Scalars("val/loss")] == [0, 4, 8, 12]

    tags = board.Tags()["scalars"]
    assert {"train/grad_norm", "train/lr", "perf/tokens_per_second", "memory/peak"} < {*tags}

    groups = "train val perf memory data progress counters grad_norms"
    assert {tag.split("/")[0] for tag in tags} == {*groups.split()}
    assert board.Tags()["histograms"]


def test_tensorboard_has_the_job_and_the_environment(folder):
    board = read_tensorboard(folder)

    def text_of(name: str) -> str:
        return board.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()

    # Markdown shows text that is indented by four spaces verbatim.
    assert "    steps = " in text_of("job")
    assert json.loads((folder / "environment.json").read_text())["run"] in text_of("environment")
    assert '"shard": 1' in text_of("environment")


def test_non_finite_numbers_are_written_as_valid_json_before_a_guard_stops_the_run(
    tmp_path,
):
    out = tmp_path / "out"
    diverging = "--optimizer.name SGD --optimizer.lr 1e30 --training.max_norm 0"

    run_small(out, diverging, f"{VALIDATION} 1", code=3)

    assert read_entries(out / "validation.jsonl")

    assert read_entries(out / "metrics.jsonl")[-1]["grad_norm"] is None


def fill_disk() -> None:
    """Let writes beyond the first 16 kB of a file fail."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard_limit))


def test_a_run_continues_without_metrics_if_the_disk_is_full(tmp_path):
    out = tmp_path / "out"
    options = "--metrics.enable_tensorboard --training.steps 60 --checkpoint.no-enable"

    log = run_small(out, options, before=fill_disk)

    for logger in ("JsonLines", "TensorBoard"):
        assert log.count(f"{logger} cannot write its metrics; training continues: [Errno 27]") == 1

    assert "Finished after step 60." in log

    *whole, cut = (out / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in whole]

    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 10
    assert len(cut) < len(whole[-1]) + 20
