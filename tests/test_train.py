"""Whole runs: they resume exactly, stop when told, and never save what is spoiled.

Where the launcher has a part a run is started as a user starts it, elsewhere as the launcher starts
each rank.
"""

import functools
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from ranks import descendants, start_small, titanlite
from small_runs import SMALL, as_logged, launched, logged, start, wait_for_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.commands import check
from titanlite.config.errors import UserError
from titanlite.config.load import load_job
from titanlite.load_run import load_run
from titanlite.report.run_files import read_status
from titanlite.train.request_exchange import REQUEST_DELAY
from titanlite.train.trainer import Trainer

pytestmark = pytest.mark.slow


@pytest.fixture
def job_file(tmp_path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def run(job_file: Path, folder: Path, *options: str, ranks: int = 1, code: int = 0) -> str:
    """What the ranks said; all of them ended with `code`."""
    words = ("train", "--job.config_file", job_file, "--job.dump_folder", folder, *options)
    return titanlite(*words, ranks=ranks, code=code)


def curve(folder: Path) -> dict[int, tuple[float, float, float, int]]:
    return {
        step: (e["loss"], e["grad_norm"], e["lr"], e["tokens"])
        for step, e in logged(folder).items()
    }


def test_exact_resume(job_file, tmp_path):
    """Invariant 4: killed outright after a save and started again, a run has the bits of one that nothing disturbed.

    What it logged after its last save is trained, and logged, again: each file has it once. (Weights: test_kill.py.)
    """
    words = "--lr_scheduler.decay_ratio 0 --validation.freq 5 --validation.holdout 0.02 --validation.sequences 2"
    options = (*words.split(), "--training.steps")
    resumed, reference = tmp_path / "killed", tmp_path / "reference"
    killed = start_small(resumed, *options, "200")
    killed.wait_for("step +7/")
    killed.kill(0, signal.SIGKILL)

    assert killed.wait() == [-signal.SIGKILL]
    assert "Resumed after step 5" in run(job_file, resumed, *options, "30")

    run(job_file, reference, *options, "30")
    assert curve(resumed) == curve(reference)
    assert sorted(curve(resumed)) == list(range(1, 31))
    assert (resumed / "validation.jsonl").read_text() == (
        reference / "validation.jsonl"
    ).read_text()


def test_usr2_saves_and_goes_on_and_ctrl_c_saves_and_starting_again_goes_on(job_file, tmp_path):
    out, words = tmp_path / "stopped", ["--checkpoint.interval", "1000"]
    process = start(job_file, out, "--training.steps", "500", *words, ranks=2)
    wait_for_step(process, 4)
    process.send_signal(signal.SIGUSR2)
    wait_for_step(process, 9)
    process.send_signal(signal.SIGINT)
    said, err = process.communicate(timeout=60)

    assert process.returncode == 75, said + err
    assert "Traceback" not in said + err

    last = max(logged(out))
    first, saved = sorted((out / "checkpoint").glob("step-*"))

    assert first.name < saved.name == f"step-{last:08d}"

    command = f"--job.config_file {job_file} --job.dump_folder {out} --training.steps 500 {' '.join(words)}"
    closing = f"The newest checkpoint is step {last} in {saved}. To resume: NGPU=2 titanlite launch {command}\n"
    log = (out / "train.log").read_text()

    assert err.endswith(closing)
    assert log.endswith(closing)
    assert log.count(f"Stopped by SIGINT after step {last}: saved.") == 1
    assert f"Resumed after step {last}" in run(
        job_file, out, *words, "--training.steps", str(last + 2)
    )
    assert sorted(logged(out)) == list(range(1, last + 3))

    events = [json.loads(line) for line in (out / "events.jsonl").open()]
    starts_and_ends = [
        (event["event"], event["step"])
        for event in events
        # Ranks are slow on a busy machine.
        if event["event"] not in ("save", "data", "straggler")
    ]

    assert starts_and_ends == [
        ("start", 0),
        ("stop", last),
        ("start", last),
        ("finish", last + 2),
    ]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_whose_last_save_fails_does_not_say_that_it_is_saved(tmp_path, stopped):
    """And starting again, once there is room, ends as if nothing had happened."""
    words = [tmp_path / "out", "--checkpoint.interval", 900]
    # As where a disk is full.
    full = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (50_000, 50_000))
    world = start_small(*words, *["--training.steps", 5000] * stopped, before=full)
    if stopped:
        world.wait_for("step +6/")
        world.kill(0, signal.SIGINT)
    # Neither 0 nor 75, which would mean saved.
    said = world.ends_with(4)
    last = max(logged(tmp_path / "out"))

    assert "Traceback" not in said
    assert f"Saving step {last} FAILED (OSError: [Errno 27] File too large" in said
    assert f"Saving the last step, {last}, FAILED" in said
    assert not list((tmp_path / "out" / "checkpoint").glob("step-*"))
    assert "Saved step 12" in start_small(*words).ends_with(0)


@pytest.mark.parametrize("signalled", [True, False])
def test_a_terminal_that_goes_away_costs_no_save(job_file, tmp_path, signalled):
    ours, theirs = pty.openpty()
    out, steps = tmp_path / "out", 5000 if signalled else 50
    command = [
        sys.executable,
        "-m",
        "titanlite",
        "launch",
        "--job.config_file",
        str(job_file),
        "--job.dump_folder",
    ]
    command += [str(out), "--training.steps", str(steps)]
    # Tests under nohup would hand on that it is ignored.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    signal.signal(signal.SIGHUP, before)
    os.close(theirs)
    while not (out / "metrics.jsonl").exists() or len(logged(out)) < 8:
        # A full one would hold the run up.
        os.read(ours, 65536)
    os.close(ours)
    if signalled:
        process.send_signal(signal.SIGHUP)

    assert process.wait(timeout=60) == (75 if signalled else 0)
    assert (out / "checkpoint" / f"step-{max(logged(out)):08d}").is_dir()


def as_on_a_gpu():
    """Read the requests of other ranks one step later."""
    REQUEST_DELAY["cpu"] = 1


@pytest.mark.parametrize(
    ("number", "rank", "saves", "code", "before"),
    [
        (signal.SIGTERM, 1, True, 75, None),
        (signal.SIGTERM, 1, True, 75, as_on_a_gpu),
        (signal.SIGUSR1, None, True, 75, None),
        (signal.SIGUSR1, 1, False, 128 + signal.SIGUSR1, None),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    tmp_path, number, rank, saves, code, before
):
    """A scheduler such as Slurm may signal every process (None): those that read data leave the answer to the ranks.
    A stop that saves nothing ends as the signal itself does."""
    options = [] if saves else ["--checkpoint.no-enable"]
    world = start_small(
        tmp_path / "out", "--training.steps", "5000", *options, ranks=2, before=before
    )
    world.wait_for("step +6/")
    own = [process.pid for process in world.processes if process.pid is not None]
    for pid in (
        [own[rank]]
        if rank is not None
        else [*own, *(pid for each in own for pid in descendants(each))]
    ):
        os.kill(pid, number)
    said = world.ends_with(code)

    assert "Traceback" not in said

    last = max(logged(tmp_path / "out"))
    assert (
        f"Stopped by {number.name} after step {last}: {'saved.' if saves else 'nothing saved'}"
        in said
    )
    assert (tmp_path / "out" / "checkpoint" / f"step-{last:08d}").is_dir() == saves
    assert "ERROR" not in (tmp_path / "out" / "train.log").read_text()


def test_outputs_reload_to_an_equal_job_and_a_finished_run_does_nothing_more(job_file, tmp_path):
    out = tmp_path / "out"
    # "auto" would be replaced in config.toml.
    words = ["--model.vocab_size", "65536", "--model.attention_backend", "sdpa", "--training.steps"]

    # Because this one has 4,096 tokens.
    assert "titanlite get tokenizer" in run(job_file, out, *words, "2")

    environment = json.loads((out / "environment.json").read_text())
    assert environment["world_size"] == 1
    assert environment["packages"]["torch"] == version("torch")
    assert "Training: debugmodel" in (out / "train.log").read_text()

    # A kill came before step 3 was saved.
    (out / "metrics.jsonl").write_text(measured := '{"step": 3, "loss": 8.0, "grad_norm": 1.0}\n')
    assert "Nothing to do: step 2 is done" in run(job_file, out, *words, "1")  # fewer than are done
    assert (out / "metrics.jsonl").read_text() == measured

    job = load_job(["--job.config_file", str(out / "config.toml")])
    assert (
        job
        == load_run(
            ["--job.config_file", str(job_file), "--job.dump_folder", str(out), *words, "2"], 1
        ).job
    )


def test_a_second_start_that_waits_does_not_write_into_the_log_of_the_first(job_file, tmp_path):
    """Nor does it set aside what is being written, whether it would save or not."""
    first = start_small(tmp_path / "out", "--training.steps", "5000")
    first.wait_for("step +6/")
    options = [
        "--training.steps",
        "5000",
        "--comm.init_timeout_seconds",
        "2",
        "--checkpoint.no-enable",
    ]
    output = run(job_file, tmp_path / "out", *options, code=2)

    assert re.search(r"is in use by process \d+ on \S+; waiting up to 1 s", output)
    assert "choose another job.dump_folder" in output
    assert "To resume" not in output

    first.kill(0, signal.SIGINT)
    first.ends_with(75)

    assert "is using it" not in (tmp_path / "out" / "train.log").read_text()
    assert not list((tmp_path / "out").glob("archived*"))


def test_a_start_that_trains_nothing_leaves_no_folder_and_a_refused_one_touches_none(
    job_file, tmp_path, capsys
):
    (tmp_path / "bad.jsonl").write_text("no JSON\n" * 50)
    out, bad = (
        tmp_path / "new" / "out",
        ["--dataset.source", "jsonl", "--dataset.path", str(tmp_path / "bad.jsonl")],
    )

    assert "bad.jsonl, line 1" in launched(job_file, out, *bad, ranks=2, code=2)
    assert not out.parent.exists()

    launched(job_file, out, "--training.steps", "2")
    job = ["--job.config_file", str(job_file), "--job.dump_folder", str(out)]
    check.main(job)

    assert str(out / "checkpoint") in capsys.readouterr().out
    with pytest.raises(UserError, match="model"):  # as of a start
        check.main([*job, "--model.dim", "32"])

    launched(job_file, out, *bad, code=2)
    assert (read_status(out).state, read_status(out).step) == ("finished", 2)
    assert "bad.jsonl, line 1" in read_status(out).exit_reason
    assert (out / "checkpoint" / "step-00000002").is_dir()


REFUSING_HOOK = """
from pathlib import Path
from titanlite import UserError, register
from titanlite.hooks.hook import Hook

@register("hook", "refusing")
class Refusing(Hook):
    def built(self, training):
        file = training.run.dump_folder / "other_run" / "model.bin"
        file.parent.mkdir()
        file.write_text("not of this run")
        raise UserError("refused")
"""


def test_a_refused_start_deletes_nothing_that_it_did_not_write(job_file, tmp_path, monkeypatch):
    (tmp_path / "refusing_hook.py").write_text(REFUSING_HOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out"

    launched(job_file, out, "--job.plugins", "refusing_hook", "--job.hooks", "refusing", code=2)

    assert (out / "other_run" / "model.bin").read_text() == "not of this run"


LEAVING_HOOK = """
import os, sys
from titanlite import register
from titanlite.hooks.hook import Hook

@register("hook", "leaving")
class Leaving(Hook):
    def after_step(self, step, result):
        if step == 2 and os.environ["RANK"] == "1":
            {call}
"""


@pytest.mark.parametrize("call", ["sys.exit(0)", "os._exit(0)"])
def test_a_hook_that_exits_with_0_is_no_success(job_file, tmp_path, monkeypatch, call: str):
    (tmp_path / "leaving_hook.py").write_text(LEAVING_HOOK.format(call=call))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = ["--job.plugins", "leaving_hook", "--job.hooks", "leaving"]

    output = launched(job_file, tmp_path / "out", *options, ranks=2, code=1)

    assert "Rank 1 failed first" in output
    assert read_status(tmp_path / "out").state == "crashed"


@pytest.mark.parametrize(
    "name",
    ["train.log", "events.jsonl", "metrics.jsonl", "config.toml", ".run.lock", ".checkpoint.lock"],
)
def test_a_run_never_writes_through_a_symbolic_link(job_file, tmp_path, name: str):
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(target)

    assert name in run(job_file, tmp_path / "out", code=2)

    assert target.read_text() == "mine"


@pytest.mark.parametrize("create", [os.mkfifo, os.mkdir])
def test_a_run_refuses_an_output_file_that_is_not_regular(
    job_file, tmp_path, create: Callable[[Path], None]
):
    (tmp_path / "out").mkdir()
    create(tmp_path / "out" / "train.log")

    assert "train.log" in run(job_file, tmp_path / "out", code=2)


def test_a_run_does_not_overwrite_a_job_file_in_its_output_folder(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.toml").write_text(SMALL)

    run(out / "config.toml", out, code=2)

    assert (out / "config.toml").read_text() == SMALL


def test_a_non_finite_gradient_stops_the_run_unsaved(job_file, tmp_path):
    """Exit code 3, and the newest checkpoint is from before the damage."""
    diverging = ["--optimizer.name", "SGD", "--optimizer.lr", "1e30", "--training.max_norm", "0"]
    options = [*diverging, "--metrics.log_freq", "100"]
    output = launched(job_file, tmp_path / "out", *options, ranks=2, code=3)

    assert "Traceback" not in output
    assert not list((tmp_path / "out" / "checkpoint").glob("step-*"))

    log = (tmp_path / "out" / "train.log").read_text()
    assert log.count("ERROR: Step 5:") == 1
    assert "Nothing is saved. To start again: NGPU=2 titanlite launch" in log
    assert log.rpartition("ERROR: ")[2] == as_logged(
        output[output.index("Step 5:") :]
    )  # what the terminal says, too


def test_when_the_data_ends_all_ranks_save_and_stop_with_0(job_file, tmp_path):
    """And the validation on held-out documents has the same rows for any number of ranks, and comes once at the end."""
    texts = [
        f"document {i}: " + "some words to learn from, again and again. " * (5 + i % 7)
        for i in range(200)
    ]
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    source = f'[dataset]\nsource = "jsonl"\npath = "{tmp_path}/text.jsonl"\nmax_epochs = 1\n'
    job_file.write_text(SMALL + source + "[validation]\nfreq = 20\nsequences = 5\nholdout = 0.2\n")

    def validations(name: str, *options: str, ranks: int = 1) -> list[dict[str, Any]]:
        output = run(job_file, tmp_path / name, "--training.steps", "1000", *options, ranks=ranks)
        last = max(logged(tmp_path / name))
        assert f"The data ends after step {last}:" in output
        assert (tmp_path / name / "checkpoint" / f"step-{last:08d}").is_dir()
        return [json.loads(line) for line in (tmp_path / name / "validation.jsonl").open()]

    one, two = validations("one"), validations("two", ranks=2)

    assert [entry["step"] for entry in one] == [entry["step"] for entry in two]
    assert len(one) >= 3

    for key in ("loss", "bits_per_byte"):
        assert [a[key] for a in one] == pytest.approx(
            [b[key] for b in two], rel=1e-5
        )  # sums in another order

    assert one[-1]["loss"] < one[0]["loss"] - 1

    last = one[-1]["step"]
    assert [line["step"] for line in validations("due", "--validation.freq", str(last))] == [
        0,
        last,
    ]

    output = run(
        job_file, tmp_path / "none", "--training.global_batch_size", "4000", ranks=2, code=2
    )
    assert "Traceback" not in output
    assert "smaller than one global batch: jsonl" in output
    assert not list((tmp_path / "none" / "checkpoint").glob("step-*"))


def test_ranks_notice_the_end_of_the_data_in_time_on_a_gpu(tmp_path):
    (tmp_path / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{i} and more. " * 40}) for i in range(30))
    )
    data = f"--dataset.source jsonl --dataset.path {tmp_path}/text.jsonl --dataset.max_epochs 1".split()
    for name, before in (("cpu", None), ("gpu", as_on_a_gpu)):
        world = start_small(
            tmp_path / name, *data, "--training.steps", "5000", ranks=2, before=before
        )
        assert "The data ends after step" in world.ends_with(0)

    assert 3 < max(logged(tmp_path / "cpu")) == max(logged(tmp_path / "gpu"))


plain_step = Trainer.step


class NoReads(TorchDispatchMode):
    """What `.item()`, `bool()`, `int()`, `float()` come down to, whoever calls them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a step read a tensor"
        return func(*args, **(kwargs or {}))


def without_recompiling(self, **arguments):
    torch._dynamo.config.error_on_recompile = self.steps_done >= 2  # pyright: ignore
    return plain_step(self, **arguments)


def without_reading(self, **arguments):
    if self.meter.is_log_step(self.steps_done + 1):
        return plain_step(self, **arguments)
    refused = AssertionError("a step read a tensor")
    with (
        NoReads(),
        patch.multiple(Tensor, cpu=Mock(side_effect=refused), tolist=Mock(side_effect=refused)),
    ):
        return plain_step(self, **arguments)


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (
            without_reading,
            ["--training.mixed_precision_param", "bfloat16", "--optimizer.state_dtype", "bfloat16"],
        ),
        (
            without_reading,
            ["--float8.enable", "--float8.min_features", "0", "--dataset.document_mask"],
        ),
        (
            without_recompiling,
            ["--compile.enable", "--compile.components", "model", "loss", "optimizer", "clip"],
        ),
    ],
)
def test_a_step_neither_waits_for_the_device_nor_compiles_again(tmp_path, step, options):
    before = functools.partial(setattr, Trainer, "step", step)
    start_small(tmp_path / "out", "--metrics.log_freq", 4, *options, before=before).ends_with(0)
    assert list(logged(tmp_path / "out")) == [1, 4, 8, 12]
