"""Runs whose data is damaged, changes or stands still: the steps that were done are saved, and the file is named."""

import os
import re
import shutil
import signal
from functools import partial

import datasets
import pytest
from data_helpers import hide_bad_records, make_loader, run_of, some_texts, write_hub, write_jsonl, write_parquet
from small_runs import SMALL, as_logged, launched, logged, losses, start, wait_for_step
from test_worker import workers

from titanlite import Trainer, load_job
from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data.prepare import prepare

TEXTS = some_texts(400, words=300)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Data of each kind."""
    tmp_path = tmp_path_factory.mktemp("made")
    jsonl = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i:03}.txt").write_text(text)
    (tmp_path / "lines").mkdir()
    write_jsonl(tmp_path / "lines/a.gz", TEXTS[:50])
    write_jsonl(tmp_path / "lines/b.jsonl", TEXTS)
    write_parquet(tmp_path / "a.parquet", TEXTS)
    write_hub(tmp_path / "hub", TEXTS, files=1)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "arrow")
    prepare(run_of(Dataset(source="jsonl", path=str(jsonl))), tmp_path / "shards", 1)
    return tmp_path


def shorten(path):
    os.truncate(path, path.stat().st_size // 3)


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


@pytest.mark.parametrize("change", [shorten, replace])
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
    ],
)
def test_a_file_that_is_not_what_it_was_is_an_error_that_names_it(made, tmp_path, source, path, name, change):
    folder = shutil.copytree(made, tmp_path / "copy")
    path, streaming = str(folder / path), source == "huggingface"
    loader = make_loader(Dataset(source=source, path=path, streaming=streaming, num_workers=0, max_epochs=3))
    loader.next_global_batch()
    change(folder / name)
    if source == "shards" and change == replace:
        return  # it stays open as it was
    with pytest.raises(UserError, match=re.escape(name)) as error:
        list(loader)
    assert error.value.exit_code == 2


@pytest.fixture
def job(tmp_path):
    """The file of a job that reads text.jsonl beside it."""
    write_jsonl(tmp_path / "text.jsonl", TEXTS)
    (tmp_path / "job.toml").write_text(f'{SMALL}[dataset]\nsource = "jsonl"\npath = "{tmp_path}/text.jsonl"\n')
    return tmp_path / "job.toml"


def test_data_that_fails_before_the_first_step_leaves_no_checkpoint(job, tmp_path):
    words = ["--job.config_file", str(job), "--job.dump_folder", str(tmp_path / "run")]
    with Trainer(load_job(words)) as trainer:
        trainer.loader.failure = lambda batches=1: UserError("it cannot be read")
        with pytest.raises(UserError, match="it cannot be read"):
            trainer.train()
    assert not [*tmp_path.glob("run/checkpoint/step-*")]


STILL = r"stood still for 5 seconds in jsonl \S*text\.jsonl, document \d+: \S*text\.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize(("still", "code", "why"), [(True, 1, STILL), (False, 2, r"text\.jsonl has changed while")])
def test_a_run_whose_reader_stands_still_or_whose_file_becomes_shorter_is_saved(job, tmp_path, still, code, why):
    options = ("--training.steps", "100000", "--checkpoint.interval", "100000", "--comm.train_timeout_seconds", "10")
    process = start(job, tmp_path / "run", *options, ranks=2)
    wait_for_step(process, 8)
    if still:
        os.kill(workers(process.pid)[1], signal.SIGSTOP)
    else:
        shorten(tmp_path / "text.jsonl")
    said = "".join(process.communicate(timeout=240))
    assert process.returncode == code, said
    assert len(re.findall(why, said)) == 1
    assert f"The last good step is {max(losses(tmp_path / 'run'))}, saved in" in said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_saved_before_a_bad_record_ends_it_and_goes_on_where_such_records_are_skipped(job, tmp_path, ranks):
    run, out, whole = partial(launched, job, ranks=ranks), tmp_path / "run", tmp_path / "whole"
    lines = hide_bad_records(tmp_path / "text.jsonl", some_texts(200), count=3)
    bad, skip = r"text\.jsonl, line \d+: not valid JSON", ("--dataset.on_bad_record", "skip")
    said = run(out, code=2)
    last = max(losses(out))
    assert 3 < last < 12
    assert f"The last good step is {last}, saved in" in said
    assert len(re.findall(bad, said)) == 1
    reason = said[said.index(re.findall(rf"\S*{bad}", said)[0]) :]
    assert (out / "train.log").read_text().endswith(as_logged(reason))
    assert len(re.findall(bad, run(out, code=2))) == 1
    assert max(losses(out)) == last
    told = run(out, *skip, code=0)
    run(whole, *skip, code=0)
    assert losses(out) == losses(whole)
    assert max(losses(out)) == 12
    found = [int(line) for line in re.findall(r"skipped a record: \S*text\.jsonl, line (\d+)", told)]
    assert len(set(found)) == len(found) == logged(out)[12]["skipped_records"] > 0
    assert set(found) <= set(lines)
