"""metrics.jsonl, TensorBoard and the console line: what stands in them, and that a step never waits for the device."""

import itertools
import json
import logging
import math
import resource
from unittest.mock import patch

import pytest
import torch

from titanlite.config.run import Run
from titanlite.config.schema import Job, JobConfig, Metrics, Training
from titanlite.observe import metrics
from titanlite.observe.logged_step import LoggedStep
from titanlite.observe.metrics import MetricsRecorder
from titanlite.observe.writers import RunStart, open_writers

KEYS = [
    *("step", "loss", "loss_max", "grad_norm", "clipped", "lr", "tokens", "tps", "tps_per_device", "mfu", "tflops"),
    *("memory", "memory_peak", "memory_active", "alloc_retries", "step_time", "data_time", "forward_backward_time"),
    *("optimizer_time", "checkpoint_time", "other_time", "elapsed", "time_left", "time", "utilization"),
    *("skipped_records", "failed_saves", "save_waits", "failed_writes"),
]


class Clock:
    """Stands in for the module `time`; a test moves it by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now


@pytest.fixture(autouse=True)
def _six_million_flops_per_token(monkeypatch):
    monkeypatch.setattr(metrics, "flops_per_token", lambda arch, seq_len: 6e6)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


ENVIRONMENT = {"run": "0123456789abcdef", "layout": {"shard": 2}}


def recorder(folder, rank=0, log_freq=10, tensorboard=False, total_steps=25, peak_flops=None, **more):
    job = JobConfig(
        job=Job(dump_folder=str(folder)),
        training=Training(steps=total_steps),
        metrics=Metrics(log_freq=log_freq, enable_tensorboard=tensorboard),
    )
    run = Run(job, world_size=2)
    writers = open_writers(RunStart(run, more.get("resumed_step", 0), ENVIRONMENT), rank)
    return MetricsRecorder(run, writers, torch.device("cpu"), peak_flops, **more)


def losses(loss):
    """Of the batch, and the largest of a rank."""
    return torch.tensor([loss, loss + 0.5])


def train(recorder, steps, clock=None, tokens: int | torch.Tensor = 1000):
    """Run the recorder as the trainer does: loss 8 - step / 10, grad_norm step; returns the console lines."""
    said: list[str] = []
    with patch.object(logging.getLogger("titanlite"), "info", said.append):
        for step in steps:
            if clock is not None:
                with recorder.timing("data"):
                    clock.now += 0.1
                clock.now += 0.4
            recorder.record(torch.tensor(float(step)), tokens, {"forward_backward": 0.2, "optimizer": 0.05})
            if recorder.is_log_step(step):
                recorder.log(step, lr=3e-4, losses=losses(8 - step / 10))
    return said


def entries(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_logs_the_first_every_nth_and_the_last_step(tmp_path):
    train(recorder(tmp_path), range(1, 26))
    assert [entry["step"] for entry in entries(tmp_path)] == [1, 10, 20, 25]


def test_numbers_of_a_logged_step(tmp_path, clock):
    lines = train(recorder(tmp_path, peak_flops=1e11), range(1, 11), clock)
    entry = entries(tmp_path)[-1]
    assert list(entry) == KEYS
    assert entry["step"] == 10
    assert entry["loss"] == 7.0
    assert entry["loss_max"] == 7.5
    assert entry["grad_norm"] == 10.0
    assert entry["clipped"] == 1.0  # the norms of steps 2 to 10 are above training.max_norm
    assert entry["lr"] == 3e-4
    assert entry["tokens"] == 10_000
    assert entry["tps"] == 2000.0  # 9 steps of 1000 tokens in 4.5 s
    assert entry["tps_per_device"] == 1000.0
    assert entry["mfu"] == pytest.approx(1000 * 6e6 / 1e11)
    assert entry["step_time"] == 0.5
    parts = ("data_time", "forward_backward_time", "optimizer_time", "checkpoint_time", "other_time")
    assert [entry[part] for part in parts] == pytest.approx([0.1, 0.2, 0.05, 0.0, 0.15])
    assert entry["tflops"] == pytest.approx(1000 * 6e6 / 1e12)
    assert entry["time_left"] == 7.5
    assert entry["elapsed"] == 5.0
    assert entry["time"] == 1.7e9 + 105
    memory = f"{entry['memory']:.2f} GiB"
    assert lines[-1] == (
        f"step 10/25  loss 7.0000  grad_norm 10.000  lr 3.00e-04  2,000 tokens/s  mfu 6.0%  {memory}  eta 0:00:08"
    )


def test_mfu_is_null_and_not_shown_where_the_peak_is_unknown(tmp_path):
    lines = train(recorder(tmp_path), [1])
    assert entries(tmp_path)[0]["mfu"] is None
    assert "mfu" not in lines[0]


def test_time_left_is_at_the_mean_pace_without_the_slow_first_step(tmp_path, clock):
    rec = recorder(tmp_path)
    clock.now += 60  # compilation
    assert train(rec, range(1, 11), clock)[-1].endswith("eta 0:00:08")  # 15 steps of 0.5 s
    clock.now += 10
    assert train(rec, range(11, 21), clock)[-1].endswith("eta 0:00:05")  # 5 steps of 19.5 s / 19


def test_memory_of_this_process(tmp_path):
    train(recorder(tmp_path), [1])
    entry = entries(tmp_path)[0]
    assert 0.05 < entry["memory"] <= entry["memory_peak"] < 64  # torch alone takes more than 50 MiB


class Unreadable(torch.Tensor):
    """A device tensor whose value the host must not see."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        names = ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy", "to")
        if getattr(func, "__name__", "") in names:
            raise AssertionError(f"the host waited for the device: {func}")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_step_that_is_not_logged_reads_nothing(tmp_path):
    rec = recorder(tmp_path)
    for _ in range(3):
        scalar = torch.tensor(2.0).as_subclass(Unreadable)
        count = torch.tensor(7).as_subclass(Unreadable)
        rec.record(scalar, count, {})
    with pytest.raises(AssertionError, match="the host waited"):
        rec.log(3, lr=0.1, losses=losses(1.0))  # the same tensors, so the trap works


def test_tokens_counted_by_the_device(tmp_path):
    rec = recorder(tmp_path, tokens=2**31)
    train(rec, range(1, 11), tokens=torch.tensor(3))
    assert entries(tmp_path)[-1]["tokens"] == 2**31 + 30
    rec.record(torch.tensor(1.0), torch.tensor(5), {})
    assert rec.tokens_so_far() == 2**31 + 35


@pytest.mark.parametrize(("value", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_non_finite_numbers_are_valid_json(tmp_path, value, name):
    rec = recorder(tmp_path)
    rec.record(torch.tensor(1.0), 10, {})
    entry = rec.log(1, lr=0.1, losses=torch.tensor([value, 1.0]), source_epochs={"a": 1.0, "b": value})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["loss"] is None
    assert line["nonfinite"] == {"loss": name}
    assert line["source_epochs"] == {"a": 1.0, "b": None, "nonfinite": {"b": name}}
    assert isinstance(entry, LoggedStep)
    assert str(entry.loss) == name  # guards see it as it is


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path):
    first = recorder(tmp_path)
    train(first, range(1, 13))
    first.close()
    train(recorder(tmp_path, resumed_step=12, tokens=12_000), range(13, 26))
    assert [entry["step"] for entry in entries(tmp_path)] == [1, 10, 13, 20, 25]
    assert [entry["tokens"] for entry in entries(tmp_path)] == [1000, 10_000, 13_000, 20_000, 25_000]


def test_only_rank_0_writes_and_the_others_still_have_a_line(tmp_path):
    lines = train(recorder(tmp_path, rank=1, tensorboard=True), [1])
    assert "loss 7.9000" in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.fixture
def full_disk():
    """What is written beyond 8 kB of a file fails, until the function that it yields makes space."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk_costs_metrics_and_not_the_run(tmp_path, full_disk, monkeypatch, tensorboard):
    warnings = []
    monkeypatch.setattr(logging.getLogger("titanlite"), "warning", warnings.append)
    rec = recorder(tmp_path, log_freq=1, total_steps=60, tensorboard=tensorboard)
    train(rec, range(1, 51))
    rec.validated(50, {"loss": 7.0})
    full_disk()
    train(rec, range(51, 61))
    rec.close()
    writers = {"JsonLines", "TensorBoard"} if tensorboard else {"JsonLines"}
    assert len(warnings) == len(writers)
    said = "Training goes on, but its metrics cannot be written by {}: [Errno 27] File too large"
    assert set(warnings) == {said.format(writer) for writer in writers}
    steps = [entry["step"] for entry in entries(tmp_path)]  # each line is whole
    assert steps == sorted(set(steps))
    assert steps[-1] == 60
    assert entries(tmp_path)[-1]["failed_writes"] > 0
    assert (tmp_path / "validation.jsonl").read_text() == '{"step": 50, "loss": 7.0}\n'


def accumulated(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tb"))
    accumulator.Reload()
    return accumulator


def read_tensorboard(folder, tag):
    return [(event.step, event.value) for event in accumulated(folder).Scalars(tag)]


def test_tensorboard_has_the_same_numbers_and_hides_what_a_crash_left(tmp_path):
    first = recorder(tmp_path, tensorboard=True)
    train(first, range(1, 22))
    first.close()
    resumed = recorder(tmp_path, tensorboard=True, resumed_step=12)
    train(resumed, range(13, 26))
    resumed.close()
    events = read_tensorboard(tmp_path, "1_loss/train")
    assert [step for step, _ in events] == [1, 10, 13, 20, 25]
    assert [value for _, value in events] == pytest.approx([7.9, 7.0, 6.7, 6.0, 5.5])


def test_tensorboard_shows_groups_in_the_order_of_what_matters_with_units(tmp_path):
    from tensorboard.plugins.custom_scalar import layout_pb2  # pyright: ignore

    rec = recorder(tmp_path, tensorboard=True, peak_flops=1e11)
    rec.validated(0, {"loss": 8.0, "perplexity": 2981.0, "bits_per_byte": 2.0})
    train(rec, [1])
    rec.close()
    board = accumulated(tmp_path)
    tags = sorted(board.Tags()["scalars"])  # as TensorBoard sorts them
    assert tags[:3] == ["1_loss/train", "1_loss/train_max", "1_loss/validation"]
    groups = list(dict.fromkeys(tag.split("/")[0] for tag in tags))
    assert groups == ["1_loss", "2_optimizer", "3_speed", "4_memory", "5_validation", "6_progress", "7_counters"]
    assert {tag.split("/")[1] for tag in tags if tag.startswith("7_")} == {
        *("skipped_records", "failed_saves", "save_waits", "failed_writes"),
    }
    descriptions = {tag: board.SummaryMetadata(tag).summary_description for tag in tags}
    assert all(descriptions.values())
    assert "GiB" in descriptions["4_memory/memory"]
    assert "nats" in descriptions["1_loss/validation"]
    layout = layout_pb2.Layout()  # pyright: ignore
    layout.ParseFromString(board.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    assert charts["loss"] == ["1_loss/train", "1_loss/train_max", "1_loss/validation"]
    not_here = {"4_memory/memory_active", "6_progress/source_tokens", "8_gradient_norms"}
    not_here |= {"9_float8_amax", "9_float8_overflow", "9_float8_underflow"}
    assert set(itertools.chain(*charts.values())) - set(tags) == not_here
    texts = {
        tag: board.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in board.Tags()["tensors"] if "/" in tag
    }
    assert "    steps = 25" in texts["job/text_summary"]  # four spaces: shown as it is written
    assert '    "shard": 2' in texts["layout/text_summary"]
    assert "0123456789abcdef" in texts["environment/text_summary"]
