"""Prepared shards: the same bytes by any route, the same rows as the text, and damage is refused by name."""

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from data_helpers import ROOT, TOKENIZER, TOKENIZER_PATH, Ranks, dataset_of, run_of, some_texts, write_jsonl

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset, DataSource
from titanlite.data.prepare import prepare
from titanlite.data.shuffle import permuted
from titanlite.data.sources.files import open_source
from titanlite.data.sources.shards import Shards
from titanlite.data.tokenizer import load_tokenizer

TEXTS = some_texts(3000, words=120)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return dataset_of(tmp_path_factory.mktemp("text"), TEXTS)


def shards_in(folder):
    return Dataset(source="shards", path=str(folder), num_workers=0)


@pytest.fixture(scope="module")
def shards(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "out"
    prepare(run_of(dataset), folder, 1)
    return folder


# Small shards and few open files; death by SIGKILL right after the file that the command line names is there.
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
def test_threads_and_kills_change_no_byte(tmp_path):
    for i in range(3):  # parts that end within a shard
        write_jsonl(tmp_path / f"{i}.gz", TEXTS[i::3])
    text = Dataset(source="jsonl", path=str(tmp_path / "*.gz"))
    job = run_of(text).job.model_dump_json(exclude_none=True)

    def run(out, threads, *last):
        command = [sys.executable, "-c", CODE, job, str(tmp_path / out), str(threads), *last]
        return subprocess.run(command, cwd=ROOT, check=False).returncode

    assert run("one", 1) == 0
    for last in ("shard-00000.bin", "shard-00004.idx"):
        assert run("killed", 2, last) == -signal.SIGKILL
    assert run("killed", 3) == 0
    one, killed = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("one", "killed"))
    assert one == killed
    assert len(one) > 10
    prepared, texts = open_source(shards_in(tmp_path / "one")), list(open_source(text))
    assert isinstance(prepared, Shards)
    for i in permuted(np.arange(100), len(TEXTS), "some").tolist():
        assert prepared.record(i).tokens[1:-1].tolist() == TOKENIZER.encode(texts[i])


def test_rows_from_shards_equal_rows_from_the_text(dataset, shards, tmp_path, capsys):
    text, tokens = Ranks(dataset, 1, holdout=0.3), Ranks(shards_in(shards), 2, holdout=0.3)
    assert "3,000 documents" in tokens.loaders[0].describe()
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
    one, two = (Ranks(dataset, 1, holdout=0.3) for dataset in (skipping, shards_in(tmp_path / "out")))
    assert torch.equal(one.batch(), two.batch())


def test_a_mix_goes_to_a_folder_for_each_source(tmp_path):
    first = DataSource(source="jsonl", path=str(write_jsonl(tmp_path / "a.jsonl", TEXTS[:100])), weight=0.3)
    second = DataSource(source="jsonl", path=str(write_jsonl(tmp_path / "b.jsonl.gz", TEXTS[:200])))
    folders = prepare(run_of(Dataset(sources=(first, second))), tmp_path / "out", 2)
    assert folders == [tmp_path / "out" / "0-jsonl", tmp_path / "out" / "1-jsonl"]
    ready = [DataSource(source="shards", path=str(f), weight=w) for f, w in zip(folders, (0.3, 1.0), strict=True)]
    here, there = (Ranks(Dataset(sources=s, num_workers=0), 1).batch() for s in ((first, second), tuple(ready)))
    # Those of the first source: the order of a sequential one is not that of its shards.
    assert sum(torch.equal(a, b) for a, b in zip(here, there, strict=True)) >= 5
    missing = Dataset(sources=(first, DataSource(source="jsonl", path="no_file")))
    with pytest.raises(UserError, match="no_file"):  # before the first one is prepared
        prepare(run_of(missing), tmp_path / "new", 1)
    assert not (tmp_path / "new").exists()


def test_a_complete_folder_is_left_alone_and_another_one_refused(dataset, shards, tmp_path):
    before = {file.name: file.stat().st_mtime_ns for file in shards.iterdir()}
    prepare(run_of(dataset), shards, 1)
    assert {file.name: file.stat().st_mtime_ns for file in shards.iterdir()} == before
    (tmp_path / "file").touch()
    (tmp_path / "manifest.json").write_text("[]")
    damaged = shutil.copytree(shards, tmp_path / "damaged")
    manifest = json.loads((damaged / "manifest.json").read_text())
    (damaged / "manifest.json").write_text(json.dumps(manifest | {"shards": None}))
    (tmp_path / "another's").mkdir()
    (tmp_path / "another's" / "shard-00000.bin").touch()
    for other, out, message in [
        (dataset_of(tmp_path, TEXTS[:50]), shards, "made with another source"),
        (dataset.model_copy(update={"on_bad_record": "skip"}), shards, "made with another on bad record"),
        (dataset, tmp_path, "manifest.json"),
        (dataset, damaged, "manifest.json: .*damaged"),
        (dataset, tmp_path / "another's", "is not empty"),
        (dataset, tmp_path / "file" / "out", "cannot be made"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(run_of(other), out, 1)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("shard-00000.bin", lambda raw: raw[:1], r"shard-00000\.bin is truncated"),
        ("shard-00000.bin", lambda raw: raw[:70_000] + b"\xff" + raw[70_001:], r"shard-00000\.bin .* block 1"),
        ("shard-00000.idx", lambda raw: b"\xff" + raw[1:], r"shard-00000\.idx is altered"),
        ("shard-00000.hash", lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), r"shard-00000\.hash is altered"),
        ("manifest.json", lambda raw: raw.replace(b"uint16", b"float64"), r"manifest\.json: .*dtype"),
        ("manifest.json", lambda raw: raw.replace(b"shard-0", b"../../etc/"), r"manifest\.json: .*name"),
        ("manifest.json", lambda raw: raw.replace(b'"format": 2', b'"format": 3'), r"manifest\.json: .*format"),
    ],
)
def test_damaged_shards_are_refused_by_name(shards, tmp_path, file, change, message):
    folder = shutil.copytree(shards, tmp_path / "a")
    (folder / file).write_bytes(change((folder / file).read_bytes()))
    with pytest.raises(UserError, match=message):
        list(zip(range(60), Ranks(shards_in(folder), 1, global_batch=64, holdout=0.1).loaders[0], strict=False))


def test_shards_know_their_tokenizer_and_their_version(shards, tmp_path):
    Ranks(shards_in(shards), 1, tokenizer=load_tokenizer(ROOT / "assets/tokenizer/tokenizer.json"))  # the same ids
    (tmp_path / "tokenizer.model").write_bytes(TOKENIZER_PATH.read_bytes().rsplit(b"\n", 2)[0])
    with pytest.raises(UserError, match=r"made with another tokenizer \(tokenizer\.model\) than .*tokenizer\.model"):
        Ranks(shards_in(shards), 1, tokenizer=load_tokenizer(tmp_path / "tokenizer.model"))
    old = shutil.copytree(shards, tmp_path / "old")
    value = json.loads((old / "manifest.json").read_text()) | {"format": 1, "tokenizer": TOKENIZER.fingerprints[1]}
    for entry in value["shards"]:
        del entry["hash_checksum"]
        (old / f"{entry['name']}.hash").unlink()
    (old / "manifest.json").write_text(json.dumps(value))
    assert torch.equal(Ranks(shards_in(old), 1).batch(), Ranks(shards_in(shards), 1).batch())
    with pytest.raises(UserError, match=r"older titanlite.*Prepare it again"):
        Ranks(shards_in(old), 1, holdout=0.1)
