"""Training runs resume exactly, stop on signals, and never save a corrupted state.

Tests of the launcher start `titanlite launch`. Other tests start the ranks directly.
"""

import functools
import logging
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from data_helpers import write_jsonl
from ranks import descendants, run_ranks, run_small, small_trainer, start_small, titanlite
from small_runs import (
    indent_like_log,
    launch_job,
    list_saved_steps,
    read_jsonl,
    read_log,
    read_metrics,
    start,
    wait_for_step,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.commands import check
from titanlite.config.errors import UserError
from titanlite.config.load import load_job
from titanlite.hooks import stop_signals
from titanlite.hooks.hook import Hook, Request
from titanlite.load_run import load_run
from titanlite.report.run_files import read_status
from titanlite.train.request_exchange import REQUEST_DELAY
from titanlite.train.trainer import Trainer

pytestmark = pytest.mark.slow


def test_usr2_saves_without_stopping_and_a_run_stopped_by_ctrl_c_resumes(job_file, tmp_path):
    out = tmp_path / "stopped"
    interval = "--checkpoint.interval 1000"
    options = f"--training.steps 500 {interval}"
    process = start(job_file, out, *options.split(), ranks=2)
    wait_for_step(process, 4)
    process.send_signal(signal.SIGUSR2)
    wait_for_step(process, 9)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)

    assert process.returncode == 75, output + errors
    assert "Traceback" not in output + errors

    last = max(read_metrics(out))
    first, second = list_saved_steps(out)
    assert first < second == last

    files = f"--job.config_file {job_file} --job.dump_folder {out}"
    command = f"NGPU=2 titanlite launch {files} {options}"
    saved = out / "checkpoint" / f"step-{last:08d}"
    closing = f"The newest checkpoint is step {last} in {saved}. To resume: {command}\n"
    log = read_log(out)
    assert errors.endswith(closing)
    assert log.endswith(closing)
    assert log.count(f"Stopped by SIGINT after step {last}: saved.") == 1

    output = run_small(out, interval, "--training.steps", last + 2)
    assert f"Resumed after step {last}" in output
    assert sorted(read_metrics(out)) == list(range(1, last + 3))

    starts_and_ends = [
        (event["event"], event["step"])
        for event in read_jsonl(out / "events.jsonl")
        # On a busy machine, any rank can be a straggler.
        if event["event"] not in ("save", "data", "straggler")
    ]
    assert starts_and_ends == [
        ("start", 0),
        ("stop", last),
        ("start", last),
        ("finish", last + 2),
    ]


def signal_while_flags_are_read():
    """Send SIGUSR2 to this rank just after it has read its received signals for the first time."""
    has_sent = []

    def make_request(**actions: Any) -> Request:
        request = Request(**actions)
        if not has_sent:
            has_sent.append(True)
            os.kill(os.getpid(), signal.SIGUSR2)
        return request

    stop_signals.Request = make_request  # type: ignore[misc]


def test_usr2_that_arrives_while_signals_are_read_saves_after_the_next_step(tmp_path):
    options = "--training.steps 4 --checkpoint.interval 900"
    run_small(tmp_path / "out", options, before=signal_while_flags_are_read)

    assert list_saved_steps(tmp_path / "out") == [2, 4]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_failed_last_save_is_reported_and_the_next_start_trains_to_the_end(tmp_path, stopped):
    options = [tmp_path / "out", "--checkpoint.interval 900"]
    # A limit on the file size has the effect of a full disk.
    limit_file_size = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (50_000, 50_000))

    steps = "--training.steps 5000" if stopped else ""
    world = start_small(*options, steps, before=limit_file_size)
    if stopped:
        world.wait_for("step +6/")
        world.kill(0, signal.SIGINT)
    # Exit codes 0 and 75 would mean that the step is saved.
    output = world.wait_for_exit(4)

    last = max(read_metrics(tmp_path / "out"))
    assert "Traceback" not in output
    assert f"Could not save step {last}: OSError: [Errno 27] File too large" in output
    assert f"Could not save the last step, {last}" in output
    assert list_saved_steps(tmp_path / "out") == []
    assert "Saved step 12" in run_small(*options)


@pytest.mark.parametrize(
    "signalled",
    [True, pytest.param(False, marks=pytest.mark.long)],
)
def test_a_run_whose_terminal_closes_saves_its_last_step(job_file, tmp_path, signalled):
    ours, theirs = pty.openpty()
    out = tmp_path / "out"
    steps = 5000 if signalled else 50
    options = f"--job.config_file {job_file} --job.dump_folder {out} --training.steps {steps}"
    command = [sys.executable, "-m", "titanlite", "launch", *options.split()]
    # If the tests run under nohup, the process would inherit that SIGHUP is ignored.
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    signal.signal(signal.SIGHUP, handler)
    os.close(theirs)
    while not (out / "metrics.jsonl").exists() or len(read_metrics(out)) < 8:
        # The run blocks when the buffer of the terminal is full.
        os.read(ours, 65536)

    os.close(ours)
    if signalled:
        process.send_signal(signal.SIGHUP)

    assert process.wait(timeout=60) == (75 if signalled else 0)
    assert list_saved_steps(out)[-1] == max(read_metrics(out))


def delay_requests_as_on_a_gpu():
    """Read the requests of other ranks one step later."""
    REQUEST_DELAY["cpu"] = 1


@pytest.mark.parametrize(
    ("number", "rank", "saves", "code", "before"),
    [
        (signal.SIGTERM, 1, True, 75, None),
        (signal.SIGTERM, 1, True, 75, delay_requests_as_on_a_gpu),
        # Schedulers such as Slurm can signal every process, including those that read data.
        (signal.SIGUSR1, None, True, 75, None),
        # A stop that saves nothing ends with the exit code of the signal itself.
        (signal.SIGUSR1, 1, False, 128 + signal.SIGUSR1, None),
    ],
)
def test_a_signal_to_one_rank_or_every_process_stops_all_ranks_at_the_same_step(
    tmp_path, number, rank, saves, code, before
):
    out = tmp_path / "out"
    options = "--dataset.num_workers 1" if saves else "--checkpoint.no-enable"
    world = start_small(out, "--training.steps 5000", options, ranks=2, before=before)
    world.wait_for("step +6/")

    ranks = [process.pid for process in world.processes if process.pid is not None]
    pids = [ranks[rank]] if rank is not None else [*descendants(ranks[0]), *descendants(ranks[1])]
    for pid in pids:
        os.kill(pid, number)
    output = world.wait_for_exit(code)

    last = max(read_metrics(out))
    ending = "saved." if saves else "nothing saved"
    assert "Traceback" not in output
    assert f"Stopped by {number.name} after step {last}: {ending}" in output
    assert (last in list_saved_steps(out)) == saves
    assert "ERROR" not in read_log(out)


def test_config_toml_loads_to_the_same_job_and_a_finished_run_does_not_train(tmp_path):
    out = tmp_path / "out"
    # "auto" would be replaced in config.toml.
    options = "--model.vocab_size 65536 --model.attention_backend sdpa --training.steps"

    # The default tokenizer has only 4,096 tokens, so a warning suggests a larger one.
    assert "titanlite get tokenizer" in run_small(out, options, 2)
    assert "Training: debugmodel" in read_log(out)

    # Files of a run that was killed after it had logged, but not saved, step 3.
    metrics = '{"step": 3, "loss": 8.0, "grad_norm": 1.0}\n'
    (out / "metrics.jsonl").write_text(metrics)
    assert "Nothing to do: step 2 is done" in run_small(out, options, 1)
    assert (out / "metrics.jsonl").read_text() == metrics

    reloaded = load_job(f"--job.config_file {out}/config.toml".split())
    files = f"--job.config_file {out}.toml --job.dump_folder {out}"
    assert reloaded == load_run(f"{files} {options} 2".split(), 1).job


def test_a_second_start_in_a_used_folder_fails_and_changes_no_file_of_the_first(tmp_path):
    out = tmp_path / "out"
    first = start_small(out, "--training.steps 5000")
    first.wait_for("step +6/")
    options = "--training.steps 5000 --comm.init_timeout_seconds 2 --checkpoint.no-enable"

    output = run_small(out, options, code=2)

    assert re.search(r"is in use by process \d+ on \S+; waiting up to 1 s", output)
    assert "choose another job.dump_folder" in output
    assert "To resume" not in output

    first.kill(0, signal.SIGINT)
    first.wait_for_exit(75)
    assert "is using it" not in read_log(out)
    assert not list(out.glob("archived*"))


TRY_LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def probe_lock(folder: Path) -> list[bool]:
    """Try to lock the output folder when the end of the run is logged, and after the run."""
    could_lock = []

    def try_lock() -> None:
        command = [sys.executable, "-c", TRY_LOCK, str(folder / "out/.run.lock")]
        process = subprocess.run(command, capture_output=True, check=False)
        could_lock.append(process.returncode == 0)

    def try_lock_at_end(record: logging.LogRecord) -> bool:
        if "Finished" in str(record.msg):
            try_lock()
        return True

    trainer = small_trainer(folder, Hook(), "--training.steps 2")
    logging.getLogger("titanlite").addFilter(try_lock_at_end)
    trainer.train()
    try_lock()
    return could_lock


def test_a_run_logs_its_end_before_the_next_run_may_use_the_folder(tmp_path):
    assert run_ranks(1, probe_lock, tmp_path) == [[False, True]]


def test_a_failed_start_creates_no_folder_and_keeps_the_checkpoints_of_a_finished_run(
    job_file, tmp_path, capsys
):
    bad_file = tmp_path / "bad.jsonl"
    bad_file.write_text("no JSON\n" * 50)
    bad_data = f"--dataset.source jsonl --dataset.path {bad_file}".split()
    out = tmp_path / "new" / "out"

    assert "bad.jsonl, line 1" in launch_job(job_file, out, *bad_data, ranks=2, code=2)
    assert not out.parent.exists()

    job = f"--job.config_file {job_file} --job.dump_folder {out}".split()
    titanlite("train", *job, "--training.steps", 2)
    check.main(job)
    assert str(out / "checkpoint") in capsys.readouterr().out

    # `check` compares the job with the checkpoint, as a start does.
    with pytest.raises(UserError, match="model"):
        check.main([*job, "--model.dim", "32"])

    launch_job(job_file, out, *bad_data, code=2)
    status = read_status(out)
    assert (status.state, status.step) == ("finished", 2)
    assert "bad.jsonl, line 1" in status.exit_reason
    assert list_saved_steps(out) == [2]


REJECTING_HOOK = """
from pathlib import Path
from titanlite import UserError, register
from titanlite.hooks.hook import Hook

@register("hook", "rejecting")
class Rejecting(Hook):
    def built(self, training):
        file = training.run.dump_folder / "other_run" / "model.bin"
        file.parent.mkdir()
        file.write_text("not of this run")
        raise UserError("rejected")
"""


def test_a_rejected_start_deletes_nothing_that_it_did_not_write(tmp_path, write_plugin):
    write_plugin("rejecting_hook", REJECTING_HOOK)
    out = tmp_path / "out"

    run_small(out, "--job.plugins rejecting_hook --job.hooks rejecting", code=2)

    assert (out / "other_run" / "model.bin").read_text() == "not of this run"


LEAVING_HOOK = """
import os, sys
from titanlite import register
from titanlite.hooks.hook import Hook

@register("hook", "leaving")
class Leaving(Hook):
    def after_step(self, step, result):
        if step == 2 and os.environ["RANK"] == "1":
            sys.exit(0)
"""


def test_a_rank_that_exits_with_0_during_training_has_crashed(job_file, tmp_path, write_plugin):
    write_plugin("leaving_hook", LEAVING_HOOK)
    options = "--job.plugins leaving_hook --job.hooks leaving"

    output = launch_job(job_file, tmp_path / "out", *options.split(), ranks=2, code=1)

    assert "Rank 1 failed first" in output
    assert read_status(tmp_path / "out").state == "crashed"


@pytest.mark.parametrize(
    "name",
    ["train.log", "events.jsonl", "metrics.jsonl", "config.toml", ".run.lock", ".checkpoint.lock"],
)
def test_a_run_never_writes_through_a_symbolic_link(tmp_path, name):
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(target)

    assert name in run_small(tmp_path / "out", code=2)

    assert target.read_text() == "mine"


def test_non_finite_gradients_stop_the_run_with_exit_code_3_and_without_a_save(job_file, tmp_path):
    options = "--optimizer.name SGD --optimizer.lr 1e30 --training.max_norm 0"
    options += " --metrics.log_freq 100"

    output = launch_job(job_file, tmp_path / "out", *options.split(), ranks=2, code=3)

    log = read_log(tmp_path / "out")
    assert "Traceback" not in output
    assert list_saved_steps(tmp_path / "out") == []
    assert log.count("ERROR: Step 5:") == 1
    assert "Nothing is saved. To start again: NGPU=2 titanlite launch" in log

    # The terminal shows the same message.
    message = output[output.index("Step 5:") :]
    assert log.rpartition("ERROR: ")[2] == indent_like_log(message)


def write_documents(file: Path, texts: list[str]) -> str:
    """Write a file for the source jsonl, and return the options that read it once."""
    write_jsonl(file, texts)
    return f"--dataset.source jsonl --dataset.path {file} --dataset.max_epochs 1"


def test_a_run_whose_data_ends_saves_and_its_validation_does_not_depend_on_the_ranks(tmp_path):
    sentence = "some words to learn from, again and again. "
    texts = [f"document {i}: " + sentence * (5 + i % 7) for i in range(200)]
    data = write_documents(tmp_path / "text.jsonl", texts)
    data += " --dataset.num_workers 1"
    data += " --validation.freq 20 --validation.sequences 5 --validation.holdout 0.2"

    def train_to_end(name: str, *options: object, ranks: int = 1) -> list[dict[str, Any]]:
        """Train until the data ends, and return the lines of validation.jsonl."""
        out = tmp_path / name
        output = run_small(out, data, "--training.steps 1000", *options, ranks=ranks)
        last = max(read_metrics(out))
        assert f"The data ends after step {last}:" in output
        assert list_saved_steps(out)[-1] == last
        return read_jsonl(out / "validation.jsonl")

    one = train_to_end("one")
    two = train_to_end("two", ranks=2)

    assert [entry["step"] for entry in one] == [entry["step"] for entry in two]
    assert len(one) >= 3
    for key in ("loss", "bits_per_byte"):
        # Two ranks add the losses in another order.
        expected = pytest.approx([entry[key] for entry in two], rel=1e-5)
        assert [entry[key] for entry in one] == expected
    assert one[-1]["loss"] < one[0]["loss"] - 1

    # A validation that is due at the last step runs once.
    last = one[-1]["step"]
    due_at_end = train_to_end("due", "--validation.freq", last)
    assert [entry["step"] for entry in due_at_end] == [0, last]

    too_large = "--training.global_batch_size 4000"
    output = run_small(tmp_path / "none", data, too_large, ranks=2, code=2)
    assert "Traceback" not in output
    assert "smaller than one global batch: jsonl" in output
    assert list_saved_steps(tmp_path / "none") == []


def test_delayed_requests_do_not_change_the_step_at_which_the_data_ends(tmp_path):
    data = write_documents(tmp_path / "text.jsonl", [f"{i} and more. " * 40 for i in range(30)])

    for name, before in (("cpu", None), ("gpu", delay_requests_as_on_a_gpu)):
        output = run_small(tmp_path / name, data, "--training.steps 5000", ranks=2, before=before)
        assert "The data ends after step" in output

    assert 3 < max(read_metrics(tmp_path / "cpu")) == max(read_metrics(tmp_path / "gpu"))


plain_step = Trainer.step


class ForbidReads(TorchDispatchMode):
    """Fails on `.item()`, `bool()`, `int()` and `float()` of a tensor, which share one operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a step read a tensor"
        return func(*args, **(kwargs or {}))


def step_without_recompiling(self, **arguments):
    """Fail if a step after the first two recompiles."""
    torch._dynamo.config.error_on_recompile = self.steps_done >= 2  # pyright: ignore
    return plain_step(self, **arguments)


def step_without_reading(self, **arguments):
    """Fail if a step that is not a log step reads a tensor on the CPU."""
    if self.meter.is_log_step(self.steps_done + 1):
        return plain_step(self, **arguments)
    fail = Mock(side_effect=AssertionError("a step read a tensor"))
    with ForbidReads(), patch.multiple(Tensor, cpu=fail, tolist=fail):
        return plain_step(self, **arguments)


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (
            step_without_reading,
            "--training.mixed_precision_param bfloat16 --optimizer.state_dtype bfloat16",
        ),
        (step_without_reading, "--float8.enable --float8.min_features 0 --dataset.document_mask"),
        (
            step_without_recompiling,
            "--compile.enable --compile.components model loss optimizer clip",
        ),
    ],
    ids=["bf16 does not read", "FP8 does not read", "compiled does not recompile"],
)
def test_a_step_neither_reads_tensors_between_log_steps_nor_recompiles(tmp_path, step, options):
    before = functools.partial(setattr, Trainer, "step", step)
    run_small(tmp_path / "out", "--metrics.log_freq 4", options, before=before)
    assert list(read_metrics(tmp_path / "out")) == [1, 4, 8, 12]
