"""Sources that are read from front to back: compressed lines, parquet, and what `datasets` streams."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from data_helpers import (
    ROOT,
    TOKENIZER,
    Ranks,
    make_loader,
    some_texts,
    write_hub,
    write_jsonl,
    write_parquet,
    write_zst,
)

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data import documents
from titanlite.data.documents import Encoder, epoch_order, num_streams, open_documents
from titanlite.data.sources import open_source
from titanlite.data.sources.base import BadRecord, Sequential

TEXTS = some_texts(230)


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


def test_capped_epochs_of_a_sequential_source_end(sources):
    from titanlite.data.loader import OutOfData

    loader = make_loader(sources["gz"].model_copy(update={"max_epochs": 1}), global_batch_size=4)
    with pytest.raises(OutOfData, match=r"\.gz has been read once"):
        sum(1 for _ in iter(loader.next_global_batch, None))
    tokens = sum(len(TOKENIZER.encode(text)) + 2 for text in TEXTS)
    assert tokens - 4 * 33 <= loader.state_dict()["schedule"]["step"] * 4 * 32 <= tokens
