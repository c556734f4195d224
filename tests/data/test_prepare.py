"""Prepared shards: the same bytes by any route, the same rows as the text, and damage is refused by name."""

import gzip
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


# Small shards, and death by SIGKILL right after the file that the command line names is there for the n-th time.
CODE = """
import os, signal, sys
from pathlib import Path
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data import prepare as module
module._UNIT_CHARS, module._UNITS_PER_SHARD = 20_000, 10
replace, last = os.replace, sys.argv[4:]
def replaced(source, target):
    replace(source, target)
    if Path(target).name in last:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replaced
module.prepare(Run(JobConfig.model_validate_json(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_threads_and_kills_change_no_byte(dataset: Dataset, tmp_path: Path, packed: bool) -> None:
    if packed:  # parts of several files
        for i in range(3):
            write_jsonl(tmp_path / f"{i}.jsonl.gz", TEXTS[i::3], gzip.open)
        dataset = dataset.model_copy(update={"path": str(tmp_path / "*.gz")})
    job = run_of(dataset).job.model_dump_json(exclude_none=True)

    def run(out: str, threads: int, *last: str) -> int:
        command = [sys.executable, "-c", CODE, job, str(tmp_path / out), str(threads), *last]
        return subprocess.run(command, cwd=ROOT, check=False).returncode

    assert run("one", 1) == 0
    for last in ("shard-00000.bin", "shard-00002.hash", "shard-00004.idx"):
        assert run("killed", 2, last) == -signal.SIGKILL
    assert run("killed", 3) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "killed")
    assert len(contents(tmp_path / "one")) > 10
    if not packed:
        assert torch.equal(Ranks(dataset, 1).batch(), Ranks(shards_in(tmp_path / "killed"), 2).batch())


@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_rows_from_shards_equal_rows_from_the_text(
    dataset: Dataset, shards: Path, tmp_path: Path, holdout: float, capsys: pytest.CaptureFixture[str]
) -> None:
    text, tokens = Ranks(dataset, 1, holdout=holdout), Ranks(shards_in(shards), 2, holdout=holdout)
    assert "3,000 documents, " in tokens.loaders[0].describe()
    for _ in range(5):
        assert torch.equal(text.batch(), tokens.batch())
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:100])
    path.write_text(path.read_text().replace("\n", '\n{"text": null}\n', 3))
    bad = Dataset(source="jsonl", path=str(path), num_workers=0)
    with pytest.raises(UserError, match=r'a\.jsonl, line \d: .*on_bad_record = "skip"'):
        prepare(run_of(bad), tmp_path / "bad", 1)
    skipping = bad.model_copy(update={"on_bad_record": "skip"})
    prepare(run_of(skipping), tmp_path / "out", 1)
    assert capsys.readouterr().out.count("skipped a record: ") == 3
    one, two = (Ranks(dataset, 1, holdout=holdout) for dataset in (skipping, shards_in(tmp_path / "out")))
    assert torch.equal(one.batch(), two.batch())


def test_a_mix_goes_to_a_folder_for_each_source(tmp_path: Path) -> None:
    gz = write_jsonl(tmp_path / "b.jsonl.gz", TEXTS[:200], gzip.open)
    first = write_jsonl(tmp_path / "a.jsonl", TEXTS[:100])
    mix = tuple(DataSource(source="jsonl", path=str(p), weight=w) for p, w in ((first, 0.3), (gz, 1.0)))
    folders = prepare(run_of(Dataset(sources=mix)), tmp_path / "out", 2)
    sources = tuple(DataSource(source="shards", path=str(tmp_path / "out" / f"{i}-jsonl")) for i in range(2))
    assert [str(folder) for folder in folders] == [source.path for source in sources]
    sources = (sources[0].model_copy(update={"weight": 0.3}), sources[1])
    here, there = (Ranks(Dataset(sources=s, num_workers=0), 1).batch() for s in (mix, sources))
    # Those of the first source: the order of a sequential one is not that of its shards.
    assert sum(torch.equal(a, b) for a, b in zip(here, there, strict=True)) >= 5
    for other, message in ((sources[0], "is prepared already"), (mix[0], "no_such_file")):
        other = other.model_copy(update={"path": "no_such_file"}) if other is mix[0] else other
        with pytest.raises(UserError, match=message):  # before the first one is prepared
            prepare(run_of(Dataset(sources=(mix[0], other))), tmp_path / "new", 1)
    assert not (tmp_path / "new").exists()


def test_a_complete_folder_is_left_alone_and_another_one_refused(
    dataset: Dataset, shards: Path, tmp_path: Path
) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in shards.iterdir()}
    prepare(run_of(dataset), shards, 1)
    assert {file.name: file.stat().st_mtime_ns for file in shards.iterdir()} == before
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("[]")
    for other, out, message in [
        (dataset_of(tmp_path, TEXTS[:50]), shards, "made with another source"),
        (dataset.model_copy(update={"on_bad_record": "skip"}), shards, "made with another on bad record"),
        (dataset, tmp_path, "is not empty and holds no prepared shards"),
        (dataset, tmp_path / "file" / "out", "file is a file"),
        (dataset, tmp_path / "other", "is not empty and holds no prepared shards"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(run_of(other), out, 1)


def flip(file: str, place: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        raw = bytearray((folder / file).read_bytes())
        raw[place] ^= 1
        (folder / file).write_bytes(raw)

    return change


def edit(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / "manifest.json").read_text()
        assert old in text
        (folder / "manifest.json").write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "shard-00000.bin").unlink(), r"shard-00000\.bin"),
        (lambda folder: (folder / "shard-00000.bin").write_bytes(b"x"), r"shard-00000\.bin is truncated or altered"),
        (flip("shard-00000.bin", 70_000), r"shard-00000\.bin is altered: .* block 1"),
        (flip("shard-00000.idx", 0), r"shard-00000\.idx is altered"),
        (flip("shard-00000.hash", 0), r"shard-00000\.hash is altered"),
        (edit("{", ""), r"manifest\.json: .*damaged"),
        (edit("uint16", "float64"), r"manifest\.json: .*dtype"),
        (edit("shard-00000", "../../etc/passwd"), r"manifest\.json: .*name"),
        (edit('"format": 2', '"format": 3'), r"manifest\.json: .*format"),
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
    with pytest.raises(UserError, match=r"made with another tokenizer \(tokenizer\.model\) than .*tokenizer\.model"):
        Ranks(shards_in(shards), 1, tokenizer=load_tokenizer(tmp_path / "tokenizer.model"))
    old = shutil.copytree(shards, tmp_path / "old")
    value = json.loads((old / "manifest.json").read_text()) | {"format": 1, "tokenizer": TOKENIZER.file_fingerprint}
    for entry in value["shards"]:
        del entry["hash_checksum"]
        (old / f"{entry['name']}.hash").unlink()
    (old / "manifest.json").write_text(json.dumps(value))
    assert torch.equal(Ranks(shards_in(old), 1).batch(), Ranks(shards_in(shards), 1).batch())
    with pytest.raises(UserError, match=r"older titanlite.*Prepare it again"):
        Ranks(shards_in(old), 1, holdout=0.1)
