"""Sources that are read from front to back: compressed lines, parquet, and what `datasets` streams."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from data_helpers import ROOT, TOKENIZER, Ranks, make_loader, some_texts, write_jsonl

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data import documents
from titanlite.data.documents import Encoder, epoch_order, num_streams, open_documents
from titanlite.data.sources import BadRecord, Sequential, open_source

TEXTS = some_texts(230)


def write_zst(path, texts):
    raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.CompressedOutputStream(file, "zstd") as stream:
        stream.write(raw)


def write_parquet(path, texts, **columns):
    pyarrow.parquet.write_table(pyarrow.table({**columns, "text": texts}), path, row_group_size=20)


def write_hub(folder, texts, files=6):
    """A local repository as `datasets` reads it: jsonl files."""
    folder.mkdir()
    for i in range(files):
        write_jsonl(folder / f"train-{i}.jsonl", texts[i::files])
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequential")
    for i in range(5):
        write_jsonl(folder / f"a{i}.jsonl.gz", TEXTS[i::5], gzip.open)
        write_zst(folder / f"a{i}.jsonl.zst", TEXTS[i::5])
    write_parquet(folder / "a.parquet", TEXTS[:100])
    write_parquet(folder / "b.parquet", TEXTS[100:])
    write_hub(folder / "hub", TEXTS)
    return {
        "gz": Dataset(source="jsonl", path=str(folder / "*.gz"), num_workers=0),
        "zst": Dataset(source="jsonl", path=str(folder / "*.zst"), num_workers=0),
        "parquet": Dataset(source="parquet", path=str(folder / "*.parquet"), num_workers=0),
        "streaming": Dataset(source="huggingface", path=str(folder / "hub"), streaming=True, num_workers=0),
    }


KINDS = ["gz", "zst", "parquet", "streaming"]


def sequential(dataset) -> Sequential:
    source = open_source(dataset)
    assert isinstance(source, Sequential)
    return source


@pytest.mark.parametrize("kind", KINDS)
def test_parts_hold_every_document_once_and_can_be_read_from_any_place(sources, kind):
    source = sequential(sources[kind])
    parts = [list(source.read(part, 0)) for part in range(source.num_parts)]
    assert sorted(str(text) for part in parts for text in part) == sorted(TEXTS)
    for part, whole in enumerate(parts):
        for start in (1, len(whole) // 2, len(whole)):
            assert list(source.read(part, start)) == whole[start:]
    assert open_source(sources[kind]).fingerprint == source.fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_reads_each_document_once_in_another_order(sources, kind, monkeypatch):
    monkeypatch.setattr(documents, "_WINDOW_DOCUMENTS", 7)
    source = sequential(sources[kind])
    streams, order = num_streams(source, 0), epoch_order(source, 0)
    read = []
    for number in range(streams):
        stream = open_documents(source, Encoder(TOKENIZER), order, number, 0)
        seen = []
        while stream.place.turn < 2 * source.num_parts:
            document = stream.current()
            seen.append((stream.place, document.part, document.number))
            stream.advance()
        read.append([(place.turn * streams + number, part, doc) for place, part, doc in seen])
    epochs = [[], []]
    for position, part, number in (entry for stream in read for entry in stream):
        if position < 2 * source.num_parts:
            epochs[position // source.num_parts].append((part, number))
    assert len(epochs[0]) == len(TEXTS)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(set(epochs[0]))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_rows_do_not_depend_on_the_layout_or_on_restarts(sources, kind, packing, monkeypatch):
    monkeypatch.setattr(documents, "_WINDOW_DOCUMENTS", 7)
    dataset = sources[kind].model_copy(update={"packing": packing})
    one, rows, states = Ranks(dataset, 1), [], []
    for _ in range(8):
        rows.append(one.batch())
        states.append(one.state())
    for sizes in ((2, 3), (8, 1)):
        ranks = Ranks(dataset, sizes[0])
        for row, state in zip(rows[:3], states[:3], strict=True):
            assert torch.equal(ranks.batch(), row)
            assert ranks.state() == state
        ranks = Ranks(dataset, sizes[1]).load(ranks.state())
        assert all(torch.equal(ranks.batch(), row) for row in rows[3:])


@pytest.mark.slow
def test_a_streaming_source_works_in_background_processes(sources):
    alone, ranks = Ranks(sources["streaming"], 1), Ranks(sources["streaming"].model_copy(update={"num_workers": 2}), 1)
    for _ in range(3):
        assert torch.equal(ranks.batch(), alone.batch())
    ranks.close()


def test_the_library_in_memory_mapped_and_streamed_form_holds_the_same_documents(sources, tmp_path):
    import datasets

    mapped = open_source(sources["streaming"].model_copy(update={"streaming": False}))
    streamed = sequential(sources["streaming"])
    texts = [text for part in range(streamed.num_parts) for text in streamed.read(part, 0)]
    assert [mapped[i] for i in range(len(mapped))] == texts  # type: ignore[index]
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"held": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(tmp_path / "dict")
    one = open_source(Dataset(source="arrow", path=str(tmp_path / "one"), text_column="body"))
    two = open_source(Dataset(source="arrow", path=str(tmp_path / "dict"), split="held"))
    for source in (one, two):
        assert [source[i] for i in range(len(source))] == TEXTS  # type: ignore[index]
    again = open_source(Dataset(source="arrow", path=str(tmp_path / "one"), text_column="body"))
    assert again.fingerprint == one.fingerprint


def test_a_stream_may_begin_with_an_empty_file(tmp_path):
    folder = write_hub(tmp_path / "hub", ["fine"], files=1)
    (folder / "train--.jsonl").touch()
    source = sequential(Dataset(source="huggingface", path=str(folder), streaming=True))
    assert [list(source.read(part, 0)) for part in range(source.num_parts)] == [[], ["fine"]]


def test_c4_is_preconfigured(sources, monkeypatch):
    import datasets

    asked, load = [], datasets.load_dataset

    def fake(path, **keys):
        asked.append((path, keys))
        return load(sources["streaming"].path, split="train", streaming=True)

    monkeypatch.setattr("datasets.load_dataset", fake)
    assert sequential(Dataset(source="c4")).num_parts == 6
    assert asked == [("allenai/c4", {"name": "en", "split": "train", "streaming": True})]


def test_skipping_after_a_restart_says_how_far_it_is(sources, monkeypatch, caplog):
    ticks = iter(range(0, 1000, 3))
    monkeypatch.setattr("time.monotonic", lambda: next(ticks))
    with caplog.at_level("INFO", "titanlite"):
        next(sequential(sources["gz"]).read(0, 7))
    assert "a0.jsonl.gz: skipped 2 of 7 documents" in caplog.messages[0]
    assert len(caplog.messages) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    """Peak memory of a run over 4 and over 60 MB differs by less than 20 MiB."""
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]; from data_helpers import *\n"
        "loader = make_loader(Dataset(source=sys.argv[2], path=sys.argv[3], num_workers=0), seq_len=2048)\n"
        "for _ in range(20): loader.next_global_batch()\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"  # KiB
    )
    text, peaks = "def function(argument):\n    return argument + 1  # a comment\n" * 1000, []
    for megabytes in (4, 60):
        path, count = tmp_path / f"{megabytes}.{kind}", megabytes * 10**6 // len(text)
        if kind == "text":
            path.write_text(text * count)
        else:
            with gzip.open(path, "wt", compresslevel=1) as file:
                file.writelines(json.dumps({"text": text}) + "\n" for _ in range(count))
        command = [sys.executable, "-c", code, str(ROOT / "tests/data"), kind.split(".")[0], str(path)]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout))
    assert peaks[1] - peaks[0] < 20 * 1024


def test_a_truncated_or_damaged_file_is_named(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl.gz", [str(np.random.default_rng(i).bytes(99)) for i in range(500)], gzip.open
    )
    raw = path.read_bytes()
    for damaged in (raw[:-2000], raw[:9000] + b"\xff" * 99 + raw[9099:], raw[:-8] + b"checksum"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.jsonl\.gz: damaged or truncated after [\d,]+ bytes of text"):
            list(sequential(Dataset(source="jsonl", path=str(path))).read(0, 0))


def test_broken_records_are_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"text": "fine"}\n\n{"text": null}\nnot json\n{"text": "fine"}')
    records = list(sequential(Dataset(source="jsonl", path=str(path))).read(0, 0))
    assert [records[0], records[3]] == ["fine", "fine"]
    assert isinstance(records[1], BadRecord)
    assert "a.jsonl.gz, line 3: field 'text' must be a string, it is null" in str(records[1])
    assert "a.jsonl.gz, line 4, column 1: not valid JSON" in str(records[2])
    write_parquet(tmp_path / "a.parquet", ["fine", None])
    records = list(sequential(Dataset(source="parquet", path=str(tmp_path / "a.parquet"))).read(0, 0))
    assert "a.parquet, row group 0, row 2: field 'text' must be a string, it is null" in str(records[1])
    write_hub(tmp_path / "hub", ["fine", None], files=1)
    records = list(sequential(Dataset(source="huggingface", path=str(tmp_path / "hub"), streaming=True)).read(0, 0))
    assert "part 0, document 1: field 'text' must be a string, it is null" in str(records[1])


@pytest.mark.parametrize("streaming", [False, True])
def test_what_datasets_cannot_load_is_an_error_that_says_what_was_tried(tmp_path, streaming, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"no local folder 'nobody/nothing' here, so the Hugging Face hub was asked"):
        open_source(Dataset(source="huggingface", path="nobody/nothing", streaming=streaming))
    folder = write_hub(tmp_path / "hub", ["fine"], files=1)
    dataset = Dataset(source="huggingface", path=str(folder), streaming=streaming)
    with pytest.raises(UserError, match=r"no field 'body' \(dataset\.text_column\); there are: 'id', 'text'"):
        open_source(dataset.model_copy(update={"text_column": "body"}))
    with pytest.raises(UserError, match=r"split held.*tried the local folder .*hub"):
        open_source(dataset.model_copy(update={"split": "held"}))


def test_parquet_without_the_column_or_rows_is_an_error(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["fine"], id=[1])
    with pytest.raises(UserError, match=r"a\.parquet: no field 'body' .* there are: 'id', 'text'"):
        open_source(Dataset(source="parquet", path=str(tmp_path / "a.parquet"), text_column="body"))
    write_parquet(tmp_path / "lists.parquet", [["one"], ["two"]])
    with pytest.raises(UserError, match=r"lists\.parquet: field 'text' .* must be a string, it is list<.*string>"):
        open_source(Dataset(source="parquet", path=str(tmp_path / "lists.parquet")))
    write_parquet(tmp_path / "b.parquet", [])
    with pytest.raises(UserError, match="holds no document"):
        open_source(Dataset(source="parquet", path=str(tmp_path / "b.parquet")))
    (tmp_path / "c.parquet").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"c\.parquet: not a parquet file"):
        open_source(Dataset(source="parquet", path=str(tmp_path / "c.parquet")))


def test_damaged_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, [str(np.random.default_rng(i).bytes(99)) for i in range(20)])
    raw = path.read_bytes()
    path.write_bytes(raw[:100] + b"\xff" * 300 + raw[400:])
    with pytest.raises(UserError, match=r"a\.parquet, row group 0: damaged: .* Copy or download it again"):
        list(sequential(Dataset(source="parquet", path=str(path))).read(0, 0))
    path.write_bytes(raw[:-200] + b"\xff" * 190 + raw[-10:])
    with pytest.raises(UserError, match=r"a\.parquet: not a parquet file, or a damaged one"):
        open_source(Dataset(source="parquet", path=str(path)))


def test_capped_epochs_of_a_sequential_source_end(sources):
    from titanlite.data.loader import OutOfData

    loader = make_loader(sources["gz"].model_copy(update={"max_epochs": 1}), global_batch_size=4)
    with pytest.raises(OutOfData, match=r"\.gz has been read once"):
        sum(1 for _ in iter(loader.next_global_batch, None))
    tokens = sum(len(TOKENIZER.encode(text)) + 2 for text in TEXTS)
    assert tokens - 4 * 33 <= loader.state_dict()["schedule"]["step"] * 4 * 32 <= tokens
