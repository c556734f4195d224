"""Prepared shards: the same bytes by any route, the same rows as the text, and damage is refused by name."""

import gzip
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from data_helpers import ROOT, TOKENIZER, TOKENIZER_PATH, Ranks, dataset_of, some_texts, write_jsonl

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.config.schema import Dataset, DataSource, JobConfig, Tokenizer
from titanlite.data import prepare as module
from titanlite.data.prepare import prepare
from titanlite.data.sources.shards import BLOCK_BYTES

TEXTS = some_texts(3000, words=120)


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(module, "_UNIT_BYTES", 20_000)
    monkeypatch.setattr(module, "_UNITS_PER_SHARD", 10)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return dataset_of(tmp_path_factory.mktemp("text"), TEXTS)


def run_of(dataset, tokenizer=TOKENIZER_PATH):
    return Run(JobConfig(dataset=dataset, tokenizer=Tokenizer(path=str(tokenizer))))


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def shards(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_UNIT_BYTES", 20_000)
        patch.setattr(module, "_UNITS_PER_SHARD", 10)
        prepare(run_of(dataset), folder, 1)
    return folder


def test_any_number_of_processes_writes_the_same_bytes(dataset, shards, tmp_path):
    prepare(run_of(dataset), tmp_path / "out", 3)
    assert contents(tmp_path / "out") == contents(shards)
    names = sorted(file.name for file in shards.iterdir())
    assert names[:4] == ["manifest.json", "shard-00000.bin", "shard-00000.hash", "shard-00000.idx"]
    assert len(names) > 7


@pytest.mark.parametrize("holdout", [0.0, 0.3])
def test_rows_from_shards_equal_rows_from_the_text(dataset, shards, holdout):
    text = Ranks(dataset, 1, holdout=holdout)
    tokens = Ranks(Dataset(source="shards", path=str(shards), num_workers=0), 2, holdout=holdout)
    assert "3,000 documents, " in tokens.loaders[0].describe()
    for _ in range(5):
        assert torch.equal(text.batch(), tokens.batch())


def test_rows_from_shards_equal_rows_from_the_text_where_records_are_skipped(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:100])
    path.write_text(path.read_text().replace("\n", '\n{"text": null}\n', 3))
    text = Dataset(source="jsonl", path=str(path), num_workers=0, on_bad_record="skip")
    prepare(run_of(text), tmp_path / "out", 1)
    shards = Dataset(source="shards", path=str(tmp_path / "out"), num_workers=0)
    for holdout in (0.0, 0.3):
        assert torch.equal(Ranks(text, 1, holdout=holdout).batch(), Ranks(shards, 1, holdout=holdout).batch())


def test_shards_of_format_1_are_read_as_before_but_not_with_a_holdout(shards, tmp_path):
    dataset = copy(shards, tmp_path / "old")
    manifest = tmp_path / "old" / "manifest.json"
    value = json.loads(manifest.read_text()) | {"format": 1}
    for entry in value["shards"]:
        del entry["hash_checksum"]
        (tmp_path / "old" / f"{entry['name']}.hash").unlink()
    manifest.write_text(json.dumps(value))
    assert torch.equal(Ranks(dataset, 1).batch(), Ranks(Dataset(source="shards", path=str(shards)), 1).batch())
    with pytest.raises(UserError, match=r"older titanlite.*Remove the folder and run titanlite prepare again"):
        Ranks(dataset, 1, holdout=0.1)


@pytest.mark.slow
def test_killed_and_started_again_it_writes_the_same_bytes(dataset, shards, tmp_path):
    """Killed between a shard and the file that says it is whole: of the first one, then of a later one."""
    out = tmp_path / "out"
    code = (
        "import os, signal, sys, pathlib; from titanlite.data import prepare as m\n"
        "from titanlite.config.run import Run; from titanlite.config.schema import JobConfig\n"
        "rename = pathlib.Path.rename\n"
        "def renamed(path, target):\n"
        "    rename(path, target)\n"
        "    if target.name in sys.argv[3:]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "pathlib.Path.rename = renamed\n"
        "m._UNIT_BYTES, m._UNITS_PER_SHARD = 20_000, 10\n"
        "m.prepare(Run(JobConfig.model_validate_json(sys.argv[1])), pathlib.Path(sys.argv[2]), 2)"
    )
    command = [sys.executable, "-c", code, run_of(dataset).job.model_dump_json(exclude_none=True), str(out)]
    for shard in ("shard-00000", "shard-00002"):
        assert subprocess.run([*command, f"{shard}.bin"], cwd=ROOT).returncode == -signal.SIGKILL
        assert (out / f"{shard}.bin").exists()
        assert not (out / f"{shard}.json").exists()
    subprocess.run(command, cwd=ROOT, check=True)
    assert contents(out) == contents(shards)


def test_a_complete_folder_is_left_alone_and_another_one_refused(dataset, shards, tmp_path, capsys):
    before = {file.name: file.stat().st_mtime_ns for file in shards.iterdir()}
    prepare(run_of(dataset), shards, 1)
    assert {file.name: file.stat().st_mtime_ns for file in shards.iterdir()} == before
    assert "complete already" in capsys.readouterr().out
    with pytest.raises(UserError, match="holds shards made with another source, another source fingerprint"):
        prepare(run_of(dataset_of(tmp_path, TEXTS[:50])), shards, 1)
    with pytest.raises(UserError, match="holds shards made with another on bad record"):
        prepare(run_of(dataset.model_copy(update={"on_bad_record": "skip"})), shards, 1)
    with pytest.raises(UserError, match="is not empty and holds no shards"):
        prepare(run_of(dataset), tmp_path, 1)


@pytest.mark.parametrize("manifest", ["[]", "{"])
def test_a_place_that_cannot_take_shards_is_refused(dataset, tmp_path, manifest):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UserError, match=r"cannot be made: .*file is a file; a folder is needed"):
            prepare(run_of(dataset), out, 1)
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match=r"manifest\.json is not one of prepared shards"):
        prepare(run_of(dataset), tmp_path, 1)


def test_all_sources_of_a_mix_are_opened_before_the_first_is_prepared(dataset, shards, tmp_path):
    text = DataSource(source="jsonl", path=dataset.path)
    for other, message in [
        (DataSource(source="shards", path=str(shards)), "holds prepared shards already"),
        (DataSource(source="jsonl", path=str(shards)), "is a folder"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(run_of(Dataset(sources=(text, other))), tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


def test_a_mix_goes_to_a_folder_for_each_source(tmp_path):
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
    text = Ranks(Dataset(sources=mix, num_workers=0), 1)
    tokens = Ranks(Dataset(sources=sources, num_workers=0), 1)
    here, there = text.batch(), tokens.batch()
    firsts = [torch.equal(a, b) for a, b in zip(here, there, strict=True)]
    assert sum(firsts) >= 5  # of the first source: the order of a sequential one is not that of its shards
    assert (
        sorted(i["documents"] for f in folders for i in json.loads((f / "manifest.json").read_text())["shards"])[-1]
        <= 200
    )


@pytest.mark.parametrize("ids", [4096, 70_000])
def test_ids_take_two_bytes_where_the_vocabulary_allows(dataset, shards, ids):
    assert json.loads((shards / "manifest.json").read_text())["dtype"] == (
        "uint16" if TOKENIZER.vocab_size <= ids else ""
    )


def copy(shards, folder):
    folder.mkdir()
    for name, raw in contents(shards).items():
        (folder / name).write_bytes(raw)
    return Dataset(source="shards", path=str(folder), num_workers=0)


def test_damaged_shards_are_refused_by_name(shards, tmp_path):
    def read(dataset):
        ranks = Ranks(dataset, 1, global_batch=64)
        for _ in range(40):
            ranks.batch()

    dataset = copy(shards, tmp_path / "a")
    path = tmp_path / "a" / "shard-00001.bin"
    raw = path.read_bytes()
    path.write_bytes(raw[:-100])
    with pytest.raises(UserError, match=r"shard-00001\.bin is truncated or altered: [\d,]+ bytes, not [\d,]+"):
        read(dataset)
    path.write_bytes(raw[:BLOCK_BYTES] + bytes([raw[BLOCK_BYTES] ^ 1]) + raw[BLOCK_BYTES + 1 :])
    with pytest.raises(UserError, match=r"shard-00001\.bin is altered: the checksum of block 1 does not match"):
        read(dataset)
    path.unlink()
    with pytest.raises(UserError, match=r"shard-00001\.bin is missing"):
        read(dataset)
    dataset = copy(shards, tmp_path / "b")
    index = tmp_path / "b" / "shard-00000.idx"
    index.write_bytes(b"\1" + index.read_bytes()[1:])
    with pytest.raises(UserError, match=r"shard-00000\.idx is altered"):
        read(dataset)
    dataset = copy(shards, tmp_path / "d")
    hashes = tmp_path / "d" / "shard-00000.hash"
    hashes.write_bytes(b"\1" + hashes.read_bytes()[1:])
    with pytest.raises(UserError, match=r"shard-00000\.hash is altered"):
        Ranks(dataset, 1, holdout=0.1).batch()


@pytest.mark.parametrize(
    "change",
    [
        lambda value: "{",
        lambda value: "[" * 10_000,
        lambda value: json.dumps({**value, "shards": None}),
        lambda value: json.dumps({key: value[key] for key in value if key != "dtype"}),
        lambda value: json.dumps({**value, "dtype": "float64"}),
        lambda value: json.dumps({**value, "vocab_size": -1}),
        lambda value: json.dumps({**value, "shards": [{**value["shards"][0], "name": "../../etc/passwd"}]}),
        lambda value: json.dumps({**value, "shards": [{**value["shards"][0], "documents": "7"}]}),
    ],
)
def test_a_damaged_manifest_is_named(shards, tmp_path, change):
    dataset = copy(shards, tmp_path / "c")
    manifest = tmp_path / "c" / "manifest.json"
    manifest.write_text(change(json.loads(manifest.read_text())))
    with pytest.raises(UserError, match=r"manifest\.json: .*damaged"):
        Ranks(dataset, 1)


def test_a_folder_without_a_manifest_is_no_shards(tmp_path):
    with pytest.raises(UserError, match="is not a folder made by titanlite prepare"):
        Ranks(Dataset(source="shards", path=str(tmp_path)), 1)


def test_ids_beyond_the_vocabulary_are_refused(shards, tmp_path):
    dataset = copy(shards, tmp_path / "a")
    manifest = tmp_path / "a" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"vocab_size": 4096', '"vocab_size": 3841'))
    with pytest.raises(UserError, match=r"shard-\d+\.bin holds token ids beyond its vocabulary of 3,841"):
        Ranks(dataset, 1).batch()


def test_shards_of_another_tokenizer_are_refused(shards, tmp_path):
    from titanlite.data.tokenizer import load_tokenizer

    dataset = Dataset(source="shards", path=str(shards))
    Ranks(dataset, 1, tokenizer=load_tokenizer(ROOT / "assets/tokenizer/tokenizer.json"))  # it gives the same ids
    lines = (ROOT / "assets/tokenizer/tokenizer.model").read_bytes().splitlines(keepends=True)
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines[:-1]))
    other = load_tokenizer(tmp_path / "tokenizer.model")
    with pytest.raises(
        UserError, match=r"was made with another tokenizer \(tokenizer\.model\) than .*tokenizer\.model"
    ):
        Ranks(dataset, 1, tokenizer=other)


def test_shards_that_version_0_1_made_know_their_tokenizer_by_its_file(shards, tmp_path):
    from titanlite.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ROOT / "assets/tokenizer/tokenizer.model")
    dataset = copy(shards, tmp_path / "a")
    manifest = tmp_path / "a" / "manifest.json"
    assert tokenizer.fingerprint in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(tokenizer.fingerprint, tokenizer.file_fingerprint))
    now = Dataset(source="shards", path=str(shards))
    assert torch.equal(Ranks(dataset, 1, tokenizer=tokenizer).batch(), Ranks(now, 1, tokenizer=tokenizer).batch())


def test_bad_records_end_it_or_are_counted(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:50])
    with path.open("a") as file:
        file.write("not json\n")
    dataset = Dataset(source="jsonl", path=str(path))
    with pytest.raises(UserError, match=r'a\.jsonl, line 51, column 1: not valid JSON: .*on_bad_record = "skip"'):
        prepare(run_of(dataset), tmp_path / "one", 1)
    prepare(run_of(dataset.model_copy(update={"on_bad_record": "skip"})), tmp_path / "two", 1)
    (shard,) = json.loads((tmp_path / "two" / "manifest.json").read_text())["shards"]
    assert (shard["documents"], shard["skipped"]) == (51, 1)  # the skipped one is there without a token
    assert not os.path.exists(tmp_path / "two" / "prepare.json")
