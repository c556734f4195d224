"""Each source reads the texts that its files contain, and names the location of bad records."""

import gzip
import itertools
import json
import sysconfig
from typing import Any

import datasets
import numpy as np
import pytest
from data_helpers import (
    jsonl_dataset,
    make_loader,
    some_texts,
    write_hub,
    write_jsonl,
    write_parquet,
)
from hypothesis import given
from hypothesis import strategies as st

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data.sources.files import find_files, open_source
from titanlite.data.sources.records import BadRecord

TEXTS = some_texts(60)


def open_path(source, path, **keys):
    return open_source(Dataset(source=source, path=str(path), **keys))


def read_all(source, path, **keys) -> list[Any]:
    """Return all documents, and a message for each document that cannot be read."""
    records = open_path(source, path, **keys)
    return [str(record) if isinstance(record, BadRecord) else record for record in records]


def test_python_stdlib_is_the_library_without_packages_and_tests():
    files = find_files(Dataset())

    stdlib = sysconfig.get_paths()["stdlib"]
    names = [file.relative_to(stdlib).as_posix() for file in files]

    assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)

    folders = set().union(*(name.split("/") for name in names))
    assert not folders & {"site-packages", "dist-packages", "test", "tests"}

    texts = [file.read_text(encoding="utf-8") for file in sorted(files)]
    assert list(open_source(Dataset())) == texts


RECORD = b' {"text":"' + b"y" * 40 + b'"}'
LINE = st.sampled_from([b"", b"  ", b"\t\r", RECORD, rb'{"text":"\n\u2028"}'])


@given(
    lines=st.lists(LINE),
    has_end=st.booleans(),
    is_compressed=st.booleans(),
)
def test_blank_lines_are_not_documents(tmp_path_factory, lines, has_end, is_compressed):
    name = "a.jsonl.gz" if is_compressed else "a.jsonl"
    path = tmp_path_factory.mktemp("lines") / name
    raw = b"\n".join([*lines, b""] if has_end else lines)
    path.write_bytes(gzip.compress(raw) if is_compressed else raw)

    expected = [json.loads(line)["text"] for line in lines if line.strip()]
    if expected or is_compressed:
        assert read_all("jsonl", path) == expected
    else:
        with pytest.raises(UserError, match="contains no documents"):
            read_all("jsonl", path)


def test_all_formats_of_the_same_texts_give_the_same_documents(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:20])
    write_jsonl(tmp_path / "b.jsonl", TEXTS[20:])
    write_jsonl(tmp_path / "a.gz", TEXTS)
    write_jsonl(tmp_path / "a.zst", TEXTS)
    write_parquet(tmp_path / "a.parquet", TEXTS)
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "one")
    splits = datasets.DatasetDict({"held": datasets.Dataset.from_dict({"text": TEXTS})})
    splits.save_to_disk(tmp_path / "splits")

    for name in ("*.jsonl", "a.gz", "a.zst"):
        assert read_all("jsonl", tmp_path / name) == TEXTS

    assert read_all("parquet", tmp_path / "a.parquet") == TEXTS
    assert read_all("arrow", tmp_path / "one", text_column="body") == TEXTS
    assert read_all("arrow", tmp_path / "splits", split="held") == TEXTS


def test_a_repository_gives_the_same_documents_loaded_or_streamed(tmp_path):
    hub = write_hub(tmp_path / "hub", TEXTS)
    # The first file of a repository can be empty.
    (hub / "train--.jsonl").touch()

    loaded = read_all("huggingface", hub)

    assert sorted(loaded) == sorted(TEXTS)
    assert read_all("huggingface", hub, streaming=True) == loaded


def test_c4_is_streamed_from_its_repository(tmp_path, monkeypatch):
    hub = write_hub(tmp_path / "hub", TEXTS)
    load = datasets.load_dataset
    calls = []

    def load_hub(path, **keys):
        calls.append((path, keys))
        return load(str(hub), **{**keys, "name": None})

    monkeypatch.setattr("datasets.load_dataset", load_hub)

    assert sorted(open_source(Dataset(source="c4"))) == sorted(TEXTS)  # type: ignore[type-var]
    assert calls == [("allenai/c4", {"name": "en", "split": "train", "streaming": True})]


@pytest.mark.parametrize(
    "line", ["x" * 99 + "\n", "é" * 999, "日本" * 40_000 + "\n", "\U0001f600" * 50_001]
)
def test_large_text_files_are_cut_at_line_ends_or_else_between_characters(tmp_path, line):
    text = line * (300_000 // len(line.encode()) + 1)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "b.txt").write_text("file b\n", encoding="utf-8-sig")

    *parts, last = read_all("text", tmp_path / "*.txt")

    assert last == "file b\n"  # without its byte order mark
    assert "".join(parts) == text

    sizes = [len(part.encode()) for part in parts]
    assert max(sizes) <= 64 * 1024

    if "\n" not in line:
        assert min(sizes[:-1]) > 32 * 1024
    if len(line) == 100:
        assert all(part.endswith("\n") for part in parts[:-1])
        assert min(sizes[:-1]) > 64 * 1024 - 100


BAD_LINES = {
    b'{"text": ': "column 9",
    b'{"text": ' + b"[" * 100_000: "",
    b"[1]": "must be a JSON object",
    b'{"body": "x", "id": 1}': "no field 'text'. Set text_column to one of 'body'",
    b'{"text": null}': "must be a string",
    b'{"text": "\xff"}': "0xff",
    rb'{"text": "x\ud83d"}': "\\ud83d",
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.gz"])
def test_a_bad_line_is_named_by_file_and_line(tmp_path, name):
    file = tmp_path / name
    raw = b"\n\n".join([b'{"text": "fine"}', *BAD_LINES, b'{"text": "fine"}'])
    file.write_bytes(gzip.compress(raw) if name == "a.gz" else raw)

    first, *messages, last = read_all("jsonl", file)

    assert first == last == "fine"

    for i, (message, reason) in enumerate(zip(messages, BAD_LINES.values(), strict=True)):
        assert f"{file}, line {2 * i + 3}: " in message
        assert reason in message


def test_a_bad_record_is_named_by_its_location(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"a\ngr\xfc\xdfe\n")
    write_parquet(tmp_path / "a.parquet", ["fine", None])
    write_hub(tmp_path / "hub", ["fine", None], files=1)

    def read_last(source, name, **keys):
        return read_all(source, tmp_path / name, **keys)[-1]

    assert "latin.txt, line 2: " in read_last("text", "latin.txt")

    problem = ": field 'text' must be a string"
    assert f"a.parquet, row group 0, row 2{problem}" in read_last("parquet", "a.parquet")

    streamed = read_last("huggingface", "hub", streaming=True)
    assert f"part 0, document 1{problem}" in streamed
    assert f"row 1{problem}" in read_last("huggingface", "hub")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Create files that cannot be read."""
    folder = tmp_path_factory.mktemp("damaged")
    noise = [str(np.random.default_rng(i).bytes(99)) for i in range(500)]
    raw = write_jsonl(folder / "a.gz", noise).read_bytes()
    (folder / "short.gz").write_bytes(raw[:-2000])
    (folder / "middle.gz").write_bytes(raw[:9000] + b"\xff" * 99 + raw[9099:])
    (folder / "end.gz").write_bytes(raw[:-8] + b"checksum")
    write_parquet(folder / "a.parquet", noise[:20], id=list(range(20)))
    raw = (folder / "a.parquet").read_bytes()
    (folder / "group.parquet").write_bytes(raw[:100] + b"\xff" * 300 + raw[400:])
    (folder / "foot.parquet").write_bytes(raw[:-200] + b"\xff" * 190 + raw[-10:])
    (folder / "empty.txt").touch()
    write_hub(folder / "hub", ["fine"], files=1)
    return folder


# Source, path and options, and a pattern of the error.
UNREADABLE = r"""
jsonl short.gz => short\.gz.*again
jsonl middle.gz => middle\.gz.*again
jsonl end.gz => end\.gz.*again
parquet a.parquet text_column=body => a.parquet.* no field 'body'.* one of 'id', 'text'
parquet a.parquet loss_mask_column=mask => a\.parquet.*'mask'.*Set loss_mask_column
parquet foot.parquet => foot\.parquet
parquet group.parquet => group\.parquet
text . => is a folder; .*/\* names
text empty.txt => empty.txt is empty
huggingface hub text_column=body => hub: no field 'body'.* one of 'id', 'text'
huggingface hub split=held => hub.*split held.*local folder
huggingface nobody/nothing => Hub, because no such local folder exists
"""


@pytest.mark.parametrize("case", UNREADABLE.strip().split("\n"))
def test_a_source_that_cannot_be_read_is_an_error_that_names_it(damaged, monkeypatch, case):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(damaged)
    arguments, message = case.split(" => ")
    source, path, *options = arguments.split()
    keys = dict(option.split("=") for option in options)

    with pytest.raises(UserError, match=message):
        list(open_path(source, path, **keys))


def test_the_fingerprint_depends_on_contents_and_column(tmp_path):
    texts = ["one two".split(), "one twO".split()]
    fingerprints = set()
    for content, name, column in itertools.product(texts, ("a.jsonl", "a.gz"), ("text", "id")):
        path = write_jsonl(tmp_path / name, content)
        fingerprints.add(open_path("jsonl", path, text_column=column).fingerprint)

    assert len(fingerprints) == 8


def test_empty_documents_before_the_first_text_are_read(tmp_path):
    loader = make_loader(jsonl_dataset(tmp_path, [""] * 50 + ["word " * 40]))

    assert loader.prefetch(1) is None
