"""Whole runs whose data changes or stands still: the steps that were done are saved, and the file is named."""

import gzip
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from data_helpers import TOKENIZER_PATH, dataset_of, make_loader, some_texts, write_jsonl, write_parquet
from small_runs import SMALL, losses, start, wait_for_step
from test_worker import workers

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.config.schema import Dataset, JobConfig, Tokenizer
from titanlite.data.prepare import prepare

TEXTS = some_texts(400, words=300)
KINDS = ("jsonl", "text", "lines", "parquet", "streaming", "arrow")


def make(folder: Path, kind: str) -> tuple[Dataset, Path]:
    """A dataset, and the file of it that will change."""
    import datasets

    if kind == "jsonl":
        path = write_jsonl(folder / "a.jsonl", TEXTS)
    elif kind == "text":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:03}.txt").write_text(text)
        return Dataset(source="text", path=str(folder / "*.txt"), num_workers=0), folder / "000.txt"
    elif kind == "lines":
        path = write_jsonl(folder / "b.jsonl", TEXTS)
        write_jsonl(folder / "a.jsonl.gz", TEXTS[:50], gzip.open)
        return Dataset(source="jsonl", path=str(folder / "*.jsonl*"), num_workers=0), path
    elif kind == "parquet":
        path = folder / "a.parquet"
        write_parquet(path, TEXTS)
    elif kind == "streaming":
        (folder / "hub").mkdir()
        path = write_jsonl(folder / "hub" / "train.jsonl", TEXTS)
        return Dataset(source="huggingface", path=str(folder / "hub"), streaming=True, num_workers=0), path
    elif kind == "arrow":
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "arrow")
        path = next((folder / "arrow").glob("*.arrow"))
        return Dataset(source="arrow", path=str(folder / "arrow"), num_workers=0), path
    else:
        text = dataset_of(folder, TEXTS)
        job = JobConfig(dataset=text, tokenizer=Tokenizer(path=str(TOKENIZER_PATH)))
        prepare(Run(job), folder / "shards", 1)
        path = folder / "shards" / "shard-00000.bin"
        return Dataset(source="shards", path=str(folder / "shards"), num_workers=0), path
    return Dataset.model_validate({"source": kind, "path": str(path), "num_workers": 0}), path


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("shards", shorten),  # one that is replaced stays open as it was
        *((kind, change) for kind in KINDS for change in (shorten, replace)),
    ],
)
def test_a_file_that_is_not_what_it_was_is_an_error_that_names_it(
    tmp_path: Path, kind: str, change: Callable[[Path], None]
) -> None:
    dataset, path = make(tmp_path, kind)
    loader = make_loader(dataset.model_copy(update={"max_epochs": 3}))
    loader.next_global_batch()
    change(path)
    with pytest.raises(UserError, match=re.escape(path.name)) as error:
        list(loader)
    assert error.value.exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_file_becomes_shorter_is_saved_and_says_so(tmp_path: Path, ranks: int) -> None:
    path = write_jsonl(tmp_path / "text.jsonl", TEXTS)
    (tmp_path / "job.toml").write_text(f'{SMALL}[dataset]\nsource = "jsonl"\npath = "{path}"\n')
    options = ["--training.steps", "100000", "--checkpoint.interval", "100000"]
    process = start(tmp_path / "job.toml", tmp_path / "run", *options, ranks=ranks)
    wait_for_step(process, 3)
    shorten(path)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 2, out + err
    assert len(re.findall(r"text\.jsonl has changed while it was read", out + err)) == 1
    assert f"The last good step is {max(losses(tmp_path / 'run'))}, saved in" in out + err


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
def test_a_reader_that_stands_still_on_one_rank_ends_in_a_save(tmp_path: Path, told: bool) -> None:
    """After the limit with a report that names source and file; at once where a signal asks for it."""
    path = write_jsonl(tmp_path / "text.jsonl", TEXTS)
    (tmp_path / "job.toml").write_text(f'{SMALL}[dataset]\nsource = "jsonl"\npath = "{path}"\n')
    limit = 600 if told else 10
    options = ["--training.steps", "100000", "--comm.train_timeout_seconds", str(limit)]
    process = start(tmp_path / "job.toml", tmp_path / "run", *options, ranks=2)
    wait_for_step(process, 8)
    os.kill(workers(process.pid)[1], signal.SIGSTOP)
    if told:
        seen = [-1, 0]
        while seen[-1] != seen[-2]:  # until the run waits, too; if it does not yet, it ends all the same
            time.sleep(3.0)
            seen.append((tmp_path / "run" / "metrics.jsonl").stat().st_size)
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=240)
    assert process.returncode == (75 if told else 1), out + err
    last = max(losses(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoint" / f"step-{last:08d}").is_dir()
    if not told:
        assert re.search(r"stood still for 5 seconds in jsonl \S*text\.jsonl, document \d+: \S*text\.jsonl", out + err)
