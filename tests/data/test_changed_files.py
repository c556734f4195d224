"""Runs whose data changes, is damaged or hangs save their steps and name the file."""

import os
import re
import shutil
import signal
from pathlib import Path

import datasets
import pytest
from data_helpers import (
    encode,
    hide_bad_records,
    make_dataset,
    make_loader,
    make_run,
    some_texts,
    write_hub,
    write_jsonl,
    write_megatron,
    write_parquet,
)
from ranks import titanlite
from small_runs import (
    SMALL,
    indent_like_log,
    launch_job,
    list_saved_steps,
    read_losses,
    read_metrics,
    start,
    wait_for_step,
)
from test_worker import find_workers

from titanlite import Trainer, load_job
from titanlite.config.errors import UserError
from titanlite.data.prepare import prepare

TEXTS = some_texts(400, words=300)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Write data files of each kind."""
    tmp_path = tmp_path_factory.mktemp("originals")
    jsonl = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i:03}.txt").write_text(text)
    (tmp_path / "lines").mkdir()
    write_jsonl(tmp_path / "lines/a.gz", TEXTS[:50])
    write_jsonl(tmp_path / "lines/b.jsonl", TEXTS)
    write_parquet(tmp_path / "a.parquet", TEXTS)
    write_hub(tmp_path / "hub", TEXTS, files=1)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "arrow")
    prepare(make_run(make_dataset("jsonl", jsonl)), tmp_path / "shards", 1)
    write_megatron(tmp_path / "a.bin", [encode(text) for text in TEXTS])
    return tmp_path


def shorten(path):
    os.truncate(path, path.stat().st_size // 3)


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


def flip(path):
    """Change bytes in place, so that the size and an open file descriptor stay as they are."""
    with path.open("r+b") as file:
        first = file.read(64)
        file.seek(0)
        file.write(bytes(byte ^ 1 for byte in first))


@pytest.mark.parametrize("change", [shorten, replace, flip])
@pytest.mark.parametrize(
    ("source", "path", "name"),
    [
        ("jsonl", "a.jsonl", "a.jsonl"),
        ("text", "*.txt", "000.txt"),
        ("jsonl", "lines/*", "lines/b.jsonl"),
        ("parquet", "a.parquet", "a.parquet"),
        ("huggingface", "hub", "hub/train-0.jsonl"),
        ("arrow", "arrow", "arrow/data-00000-of-00001.arrow"),
        ("shards", "shards", "shards/shard-00000.bin"),
        ("shards", "shards", "shards/shard-00000.idx"),
        ("tokens", "a.bin", "a.bin"),
    ],
)
def test_a_file_that_changes_during_a_run_is_an_error_that_names_it(
    originals, tmp_path, source, path, name, change
):
    folder = shutil.copytree(originals, tmp_path / "copy")
    streaming = source == "huggingface"
    loader = make_loader(make_dataset(source, folder / path, streaming=streaming, max_epochs=3))
    loader.next_global_batch()

    change(folder / name)

    with pytest.raises(UserError, match=re.escape(name)) as error:
        list(loader)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("suffix", ["bin", "idx", "hash"])
def test_shards_that_change_without_a_new_modification_time_are_an_error(
    originals, tmp_path, suffix
):
    folder = shutil.copytree(originals / "shards", tmp_path / "copy")
    loader = make_loader(make_dataset("shards", folder, max_epochs=3), holdout=0.1)
    loader.next_global_batch()

    file = folder / f"shard-00000.{suffix}"
    before = file.stat()
    flip(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(UserError, match=rf"shard-00000\.{suffix} is altered") as error:
        list(loader)
    assert "on_change" not in str(error.value)


@pytest.fixture
def job(tmp_path):
    """Write a job file that reads text.jsonl beside it."""
    write_jsonl(tmp_path / "text.jsonl", TEXTS)
    (tmp_path / "job.toml").write_text(
        f'{SMALL}[dataset]\nsource = "jsonl"\npath = "{tmp_path}/text.jsonl"\n'
    )
    return tmp_path / "job.toml"


def test_data_that_fails_before_the_first_step_leaves_no_checkpoint(job, tmp_path):
    options = ["--job.config_file", str(job), "--job.dump_folder", str(tmp_path / "run")]
    with Trainer(load_job(options)) as trainer:
        trainer.loader.prefetch = lambda num_batches: UserError("it cannot be read")
        with pytest.raises(UserError, match="it cannot be read"):
            trainer.train()

    assert not [*tmp_path.glob("run/checkpoint/step-*")]


def stop_a_worker(process, folder):
    os.kill(find_workers(process.pid)[1], signal.SIGSTOP)


def shorten_text(process, folder):
    shorten(folder / "text.jsonl")


HANG = r"no progress for 5 seconds in jsonl \S*text\.jsonl, document \d+: \S*text\.jsonl"
CHANGE = r"text\.jsonl has changed while"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disturb", "code", "reason"),
    [
        pytest.param(stop_a_worker, 1, HANG, marks=pytest.mark.long),
        (shorten_text, 2, CHANGE),
    ],
)
def test_a_run_whose_worker_hangs_or_whose_file_changes_is_saved(
    job, tmp_path, disturb, code, reason
):
    out = tmp_path / "run"
    options = "--training.steps 100000 --checkpoint.interval 100000 --comm.train_timeout_seconds 10"
    process = start(job, out, *options.split(), ranks=2)
    wait_for_step(process, 8)

    disturb(process, tmp_path)

    output = "".join(process.communicate(timeout=240))

    assert process.returncode == code, output
    assert len(re.findall(reason, output)) == 1
    assert list_saved_steps(out)[-1] == max(read_losses(out))


BAD = r"text\.jsonl, line \d+: not valid JSON"


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [1, pytest.param(2, marks=pytest.mark.long)],
)
def test_a_run_that_a_bad_record_ends_resumes_if_such_records_are_skipped(job, tmp_path, ranks):
    def train(folder: Path, *options: str, code: int) -> str:
        if ranks > 1:  # the launcher prints an error of all ranks once
            return launch_job(job, folder, *options, ranks=ranks, code=code)
        command = ("train", "--job.config_file", job, "--job.dump_folder", folder, *options)
        return titanlite(*command, code=code)

    out = tmp_path / "run"
    whole = tmp_path / "whole"
    bad_lines = hide_bad_records(tmp_path / "text.jsonl", some_texts(200), count=3)

    output = train(out, code=2)
    last = max(read_losses(out))

    assert 3 < last < 12
    assert list_saved_steps(out)[-1] == last

    (error,) = re.findall(rf"\S*{BAD}", output)
    reason = output[output.index(error) :]
    assert (out / "train.log").read_text().endswith(indent_like_log(reason))
    # Without the option, a resumed run ends at the same step again.
    assert len(re.findall(BAD, train(out, code=2))) == 1
    assert max(read_losses(out)) == last

    skip = ("--dataset.on_bad_record", "skip")
    output = train(out, *skip, code=0)
    train(whole, *skip, code=0)

    assert read_losses(out) == read_losses(whole)
    assert max(read_losses(out)) == 12

    skipped = re.findall(r"[Ss]kipped a record: \S*text\.jsonl, line (\d+)", output)
    assert len(skipped) == read_metrics(out)[12]["skipped_records"] > 0
    assert len(set(skipped)) == len(skipped)
    assert {int(line) for line in skipped} <= set(bad_lines)
