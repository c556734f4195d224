"""Prepared shards: the same bytes by any route, the same rows as the text, and damage is refused by name."""

import gzip
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_helpers import ROOT, TOKENIZER, TOKENIZER_PATH, Ranks, dataset_of, some_texts, write_jsonl

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.config.schema import Dataset, DataSource, JobConfig, Tokenizer
from titanlite.data.prepare import prepare
from titanlite.data.tokenizer import load_tokenizer

TEXTS = some_texts(3000, words=120)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return dataset_of(tmp_path_factory.mktemp("text"), TEXTS)


def run_of(dataset: Dataset) -> Run:
    return Run(JobConfig(dataset=dataset, tokenizer=Tokenizer(path=str(TOKENIZER_PATH))))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def shards_in(folder: Path) -> Dataset:
    return Dataset(source="shards", path=str(folder), num_workers=0)


@pytest.fixture(scope="module")
def shards(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "out"
    prepare(run_of(dataset), folder, 1)
    return folder


# Small shards, and death by SIGKILL right after the file that the command line names is there.
CODE = """
import os, signal, sys
from pathlib import Path
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data import prepare as module
module._UNIT_CHARS, module._UNITS_PER_SHARD = 20_000, 10
replace = os.replace
def replaced(source, target):
    replace(source, target)
    if Path(target).name in sys.argv[4:]:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replaced
module.prepare(Run(JobConfig.model_validate_json(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.mark.slow
def test_threads_and_kills_change_no_byte(dataset: Dataset, tmp_path: Path) -> None:
    job = run_of(dataset).job.model_dump_json(exclude_none=True)

    def run(out: str, threads: int, *last: str) -> int:
        command = [sys.executable, "-c", CODE, job, str(tmp_path / out), str(threads), *last]
        return subprocess.run(command, cwd=ROOT, check=False).returncode

    assert run("one", 1) == run("three", 3) == 0
    for last in ("shard-00000.bin", "shard-00002.hash", "shard-00003.json"):
        assert run("killed", 2, last) == -signal.SIGKILL
    assert run("killed", 2) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "three") == contents(tmp_path / "killed")
    assert len(contents(tmp_path / "one")) > 10
    assert torch.equal(Ranks(dataset, 1).batch(), Ranks(shards_in(tmp_path / "killed"), 2).batch())


@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_rows_from_shards_equal_rows_from_the_text(
    dataset: Dataset, shards: Path, tmp_path: Path, holdout: float, capsys: pytest.CaptureFixture[str]
) -> None:
    text, tokens = Ranks(dataset, 1, holdout=holdout), Ranks(shards_in(shards), 2, holdout=holdout)
    assert "3,000 documents, " in tokens.loaders[0].describe()
    for _ in range(5):
        assert torch.equal(text.batch(), tokens.batch())
    assert json.loads((shards / "manifest.json").read_text())["dtype"] == "uint16"
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:100])
    path.write_text(path.read_text().replace("\n", '\n{"text": null}\n', 3))
    bad = Dataset(source="jsonl", path=str(path), num_workers=0)
    with pytest.raises(UserError, match=r'a\.jsonl, line \d: .* null.*on_bad_record = "skip"'):
        prepare(run_of(bad), tmp_path / "bad", 1)
    skipping = bad.model_copy(update={"on_bad_record": "skip"})
    prepare(run_of(skipping), tmp_path / "out", 1)
    assert capsys.readouterr().out.count("skipped a record: ") == 3
    (shard,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["shards"]
    assert (shard["documents"], shard["skipped"]) == (103, 3)  # a skipped one is there without a token
    assert torch.equal(
        Ranks(skipping, 1, holdout=holdout).batch(), Ranks(shards_in(tmp_path / "out"), 1, holdout=holdout).batch()
    )


def test_a_mix_goes_to_a_folder_for_each_source(tmp_path: Path) -> None:
    gz = write_jsonl(tmp_path / "b.jsonl.gz", TEXTS[:200], gzip.open)
    mix = (
        DataSource(source="jsonl", path=str(write_jsonl(tmp_path / "a.jsonl", TEXTS[:100])), weight=0.3),
        DataSource(source="jsonl", path=str(gz)),
    )
    folders = prepare(run_of(Dataset(sources=mix)), tmp_path / "out", 2)
    assert [folder.name for folder in folders] == ["0-jsonl", "1-jsonl"]
    sources = tuple(
        DataSource(source="shards", path=str(f), weight=w) for f, w in zip(folders, (0.3, 1.0), strict=True)
    )
    here, there = (Ranks(Dataset(sources=s, num_workers=0), 1).batch() for s in (mix, sources))
    # Those of the first source: the order of a sequential one is not that of its shards.
    assert sum(torch.equal(a, b) for a, b in zip(here, there, strict=True)) >= 5
    for other, message in [
        (DataSource(source="shards", path=str(folders[0])), "holds prepared shards already"),
        (DataSource(source="jsonl", path=str(tmp_path)), "is a folder"),
    ]:
        with pytest.raises(UserError, match=message):  # before the first one is prepared
            prepare(run_of(Dataset(sources=(mix[0], other))), tmp_path / "new", 1)
    assert not (tmp_path / "new").exists()


def test_a_complete_folder_is_left_alone_and_another_one_refused(
    dataset: Dataset, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in shards.iterdir()}
    prepare(run_of(dataset), shards, 1)
    assert {file.name: file.stat().st_mtime_ns for file in shards.iterdir()} == before
    assert "complete already" in capsys.readouterr().out
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("[]")
    for other, out, message in [
        (dataset_of(tmp_path, TEXTS[:50]), shards, "made with another source, another source fingerprint"),
        (dataset.model_copy(update={"on_bad_record": "skip"}), shards, "made with another on bad record"),
        (dataset, tmp_path, "is not empty and holds no shards"),
        (dataset, tmp_path / "file" / "out", r"cannot be made: .*file is a file; a folder is needed"),
        (dataset, tmp_path / "other", r"manifest\.json is not one of prepared shards"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(run_of(other), out, 1)


def flip(file: str, place: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        raw = bytearray((folder / file).read_bytes())
        raw[place] ^= 1
        (folder / file).write_bytes(raw)

    return change


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        value = change(json.loads((folder / "manifest.json").read_text()))
        (folder / "manifest.json").write_text(value if isinstance(value, str) else json.dumps(value))

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "shard-00000.bin").unlink(), r"shard-00000\.bin is missing"),
        (lambda folder: (folder / "shard-00000.bin").write_bytes(b"x"), r"shard-00000\.bin is truncated or altered"),
        (flip("shard-00000.bin", 70_000), r"shard-00000\.bin is altered: the checksum of block 1 does not match"),
        (flip("shard-00000.idx", 0), r"shard-00000\.idx is altered"),
        (flip("shard-00000.hash", 0), r"shard-00000\.hash is altered"),
        (edit(lambda value: {**value, "vocab_size": 3841}), r"\.bin holds token ids beyond its vocabulary of 3,841"),
        (edit(lambda value: "{"), r"manifest\.json: .*damaged"),
        (edit(lambda value: "[" * 10_000), r"manifest\.json: .*damaged"),
        (edit(lambda value: {key: value[key] for key in value if key != "dtype"}), r"manifest\.json: .*dtype"),
        (edit(lambda value: {**value, "dtype": "float64"}), r"manifest\.json: .*dtype"),
        (
            edit(lambda value: {**value, "shards": [{**value["shards"][0], "name": "../../etc/passwd"}]}),
            r"manifest\.json: .*name",
        ),
        (edit(lambda value: {**value, "format": 3}), "shards of format 3"),
    ],
)
def test_damaged_shards_are_refused_by_name(
    shards: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    folder = shutil.copytree(shards, tmp_path / "a")
    change(folder)
    with pytest.raises(UserError, match=message):
        list(zip(range(60), Ranks(shards_in(folder), 1, global_batch=64, holdout=0.1).loaders[0], strict=False))


def test_shards_know_their_tokenizer_and_their_version(shards: Path, tmp_path: Path) -> None:
    Ranks(shards_in(shards), 1, tokenizer=load_tokenizer(ROOT / "assets/tokenizer/tokenizer.json"))  # the same ids
    lines = TOKENIZER_PATH.read_bytes().splitlines(keepends=True)
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines[:-1]))
    other = load_tokenizer(tmp_path / "tokenizer.model")
    with pytest.raises(UserError, match=r"made with another tokenizer \(tokenizer\.model\) than .*tokenizer\.model"):
        Ranks(shards_in(shards), 1, tokenizer=other)
    old = shutil.copytree(shards, tmp_path / "old")
    value = json.loads((old / "manifest.json").read_text()) | {"format": 1, "tokenizer": TOKENIZER.file_fingerprint}
    for entry in value["shards"]:
        del entry["hash_checksum"]
        (old / f"{entry['name']}.hash").unlink()
    (old / "manifest.json").write_text(json.dumps(value))
    assert torch.equal(Ranks(shards_in(old), 1).batch(), Ranks(shards_in(shards), 1).batch())
    with pytest.raises(UserError, match=r"older titanlite.*Remove the folder and run titanlite prepare again"):
        Ranks(shards_in(old), 1, holdout=0.1)
