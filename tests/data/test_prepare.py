"""Prepared shards have the same bytes on any route and the same sequences as the text."""

import json
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
from data_helpers import (
    ROOT,
    TOKENIZER,
    TOKENIZER_PATH,
    RankLoaders,
    change,
    jsonl_dataset,
    load_smaller_tokenizer,
    make_dataset,
    make_loader,
    make_mixture,
    make_run,
    some_texts,
    write_jsonl,
)
from small_runs import run_program

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset, DataSource
from titanlite.data.prepare import prepare
from titanlite.data.shuffle import permuted
from titanlite.data.sources.files import open_source
from titanlite.data.tokenizer import load_tokenizer

TEXTS = some_texts(3000, words=120)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return jsonl_dataset(tmp_path_factory.mktemp("text"), TEXTS)


@pytest.fixture(scope="module")
def shards(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "out"
    prepare(make_run(dataset), folder, 1)
    return folder


def read_files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# Writes small shards, and is killed after it has written the file that the command line names.
CODE = """
import os, signal, sys
from pathlib import Path
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data import prepare as module

replace = os.replace

def replace_and_die(source, target):
    replace(source, target)
    if Path(target).name in sys.argv[4:]:
        os.kill(os.getpid(), signal.SIGKILL)

os.replace = replace_and_die
module._UNIT_CHARS = 20_000
module._UNITS_PER_SHARD = 10
run = Run(JobConfig.model_validate_json(sys.argv[1]))
module.prepare(run, Path(sys.argv[2]), int(sys.argv[3]))
"""


@pytest.mark.slow
def test_threads_and_kills_change_no_byte(tmp_path):
    # The files are so small that their texts end within a shard.
    for i in range(3):
        write_jsonl(tmp_path / f"{i}.gz", TEXTS[i::3])
    text = make_dataset("jsonl", tmp_path / "*.gz")
    job = make_run(text).job.model_dump_json(exclude_none=True)

    def run(out, threads, *last, code=0):
        command = (sys.executable, "-c", CODE, job, tmp_path / out, threads, *last)
        run_program(*command, folder=ROOT, code=code)

    run("one", 1)
    for last in ("shard-00000.bin", "shard-00004.idx"):
        run("killed", 2, last, code=-signal.SIGKILL)
    run("killed", 3)

    files = read_files(tmp_path / "one")
    assert read_files(tmp_path / "killed") == files
    assert len(files) > 10

    prepared = list(open_source(make_dataset("shards", tmp_path / "one")))
    texts = list(open_source(text))
    for i in permuted(np.arange(100), len(TEXTS), "some").tolist():
        assert prepared[i].tokens[1:-1].tolist() == TOKENIZER.encode(texts[i])


def test_sequences_from_shards_equal_those_from_the_text(dataset, shards):
    text = RankLoaders(dataset, 1, holdout=0.3)
    tokens = RankLoaders(make_dataset("shards", shards), 2, holdout=0.3)

    assert "3,000 documents" in tokens.loaders[0].describe()

    for _ in range(5):
        assert torch.equal(text.batch(), tokens.batch())


def test_bad_records_are_an_error_or_are_skipped(tmp_path, capsys):
    bad = jsonl_dataset(tmp_path, [None] * 3 + TEXTS[:100])
    with pytest.raises(UserError, match=r'a\.jsonl, line \d: .*on_bad_record = "skip"'):
        prepare(make_run(bad), tmp_path / "bad", 1)

    skipping = change(bad, on_bad_record="skip")
    prepare(make_run(skipping), tmp_path / "out", 1)

    assert capsys.readouterr().out.count("kipped a record: ") == 3

    text = RankLoaders(skipping, 1, holdout=0.3)
    tokens = RankLoaders(make_dataset("shards", tmp_path / "out"), 1, holdout=0.3)

    assert torch.equal(text.batch(), tokens.batch())


def test_each_source_of_a_mixture_gets_its_own_folder(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", TEXTS[:100])
    second = write_jsonl(tmp_path / "b.jsonl.gz", TEXTS[:200])
    mixture = make_mixture((first, 0.3), (second, 1.0))

    folders = prepare(make_run(mixture), tmp_path / "out", 2)

    assert folders == [tmp_path / "out" / "0-jsonl", tmp_path / "out" / "1-jsonl"]

    prepared = (
        DataSource(source="shards", path=str(folders[0]), weight=0.3),
        DataSource(source="shards", path=str(folders[1])),
    )
    text = RankLoaders(mixture, 1).batch()
    tokens = RankLoaders(Dataset(sources=prepared, num_workers=0), 1).batch()
    is_equal = (text == tokens).flatten(1).all(dim=1)

    # Only sequences of the first source are equal: shards order sequential sources differently.
    assert is_equal.sum() >= 5


def test_all_sources_are_opened_before_the_first_is_prepared(dataset, tmp_path):
    mixture = make_mixture((dataset.path, 1.0), ("no_file", 1.0))

    with pytest.raises(UserError, match="no_file"):
        prepare(make_run(mixture), tmp_path / "new", 1)

    assert not (tmp_path / "new").exists()


def test_a_complete_folder_is_not_changed(dataset, shards):
    before = {file.name: file.stat().st_mtime_ns for file in shards.iterdir()}

    prepare(make_run(dataset), shards, 1)

    assert {file.name: file.stat().st_mtime_ns for file in shards.iterdir()} == before


def test_prepare_continues_after_a_kill_before_its_first_file_is_complete(dataset, tmp_path):
    (tmp_path / ".prepare.json.unfinished").touch()

    prepare(make_run(dataset), tmp_path, 1)

    assert (tmp_path / "manifest.json").exists()


def test_a_folder_with_other_contents_is_an_error(dataset, shards, tmp_path):
    damaged = shutil.copytree(shards, tmp_path / "damaged")
    manifest = json.loads((damaged / "manifest.json").read_text())
    (damaged / "manifest.json").write_text(json.dumps(manifest | {"shards": None}))

    def assert_rejected(dataset, out, message):
        with pytest.raises(UserError, match=message):
            prepare(make_run(dataset), out, 1)

    assert_rejected(jsonl_dataset(tmp_path, TEXTS[:50]), shards, "made with another source")
    skipping = change(dataset, on_bad_record="skip")
    assert_rejected(skipping, shards, "made with another on bad record")
    assert_rejected(dataset, damaged, "manifest.json: .*damaged")


def damage_start(raw):
    return b"\xff" + raw[1:]


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("shard-00000.bin", lambda raw: raw[:1], r"shard-00000\.bin is truncated"),
        (
            "shard-00000.bin",
            lambda raw: raw[:70_000] + b"\xff" + raw[70_001:],
            r"shard-00000\.bin .* block 1",
        ),
        ("shard-00000.idx", damage_start, r"shard-00000\.idx is altered"),
        ("shard-00000.hash", damage_start, r"shard-00000\.hash is altered"),
        ("manifest.json", lambda raw: raw.replace(b"uint16", b"float64"), "manifest.json: .*dtype"),
        ("manifest.json", lambda raw: raw.replace(b"shard-0", b"../../a"), "manifest.json: .*name"),
        (
            "manifest.json",
            lambda raw: raw.replace(b'"format": 2', b'"format": 3'),
            "manifest.json: .*format",
        ),
    ],
    ids="truncation tokens index hash dtype name format".split(),
)
def test_a_damaged_file_is_an_error_that_names_it(shards, tmp_path, file, damage, message):
    folder = shutil.copytree(shards, tmp_path / "a")
    (folder / file).write_bytes(damage((folder / file).read_bytes()))

    dataset = make_dataset("shards", folder, max_epochs=1)

    with pytest.raises(UserError, match=message):
        list(make_loader(dataset, holdout=0.1))


def test_shards_are_read_only_with_a_tokenizer_that_gives_the_same_ids(shards, tmp_path):
    dataset = make_dataset("shards", shards)
    same = load_tokenizer(TOKENIZER_PATH.with_suffix(".json"))
    smaller = load_smaller_tokenizer(tmp_path)

    RankLoaders(dataset, 1, tokenizer=same)

    with pytest.raises(UserError, match=r"another tokenizer .* than .*tokenizer\.model"):
        RankLoaders(dataset, 1, tokenizer=smaller)


def test_shards_of_version_1_are_read_without_a_holdout(shards, tmp_path):
    old = shutil.copytree(shards, tmp_path / "old")
    manifest = json.loads((old / "manifest.json").read_text())
    manifest |= {"format": 1, "tokenizer": TOKENIZER.fingerprints[1]}
    for entry in manifest["shards"]:
        del entry["hash_checksum"]
        (old / f"{entry['name']}.hash").unlink()
    (old / "manifest.json").write_text(json.dumps(manifest))

    expected = RankLoaders(make_dataset("shards", shards), 1).batch()

    assert torch.equal(RankLoaders(make_dataset("shards", old), 1).batch(), expected)
    with pytest.raises(UserError, match=r"older titanlite.*Prepare it again"):
        RankLoaders(make_dataset("shards", old), 1, holdout=0.1)
