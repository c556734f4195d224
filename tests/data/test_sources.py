"""Each source gives the texts that are there, and what cannot be read is named: file, place, and what to do."""

import gzip
import itertools
import json
import sysconfig
from typing import Any

import datasets
import numpy as np
import pytest
from data_helpers import dataset_of, make_loader, make_validation, some_texts, write_hub, write_jsonl, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset, Validation
from titanlite.data.sources.base import BadRecord
from titanlite.data.sources.files import find_files, open_source

TEXTS = some_texts(60)


def texts(source, path, **keys) -> list[Any]:
    """All documents; for one that cannot be read, what is said about it."""
    records = open_source(Dataset.model_validate({"source": source, "path": str(path), **keys}))
    return [str(record) if isinstance(record, BadRecord) else record for record in records]


def test_python_stdlib_is_the_library_without_packages_and_tests():
    source, files = open_source(Dataset()), find_files(Dataset())
    names = [file.relative_to(sysconfig.get_paths()["stdlib"]).as_posix() for file in files]
    assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [n for n in names if {"site-packages", "dist-packages", "test", "tests"} & set(n.split("/"))]
    assert list(source) == [file.read_text(encoding="utf-8") for file in sorted(files)]


LINE = st.sampled_from([b"", b"  ", b"\t\r", b' {"text":"' + b"y" * 40 + b'"}', rb'{"text":"\n\u2028"}'])


@given(lines=st.lists(LINE), last=st.booleans(), packed=st.booleans())
def test_lines_are_found_whatever_lies_between_them(tmp_path_factory, lines, last, packed):
    path = tmp_path_factory.mktemp("lines") / ("a.jsonl.gz" if packed else "a.jsonl")
    raw = b"\n".join(lines) + b"\n" * last
    path.write_bytes(gzip.compress(raw) if packed else raw)
    expected = [json.loads(line)["text"] for line in lines if line.strip()]
    if expected or packed:
        assert texts("jsonl", path) == expected
    else:
        with pytest.raises(UserError, match="holds no document"):
            texts("jsonl", path)


def test_what_holds_the_same_texts_gives_the_same_documents(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:20])
    write_jsonl(tmp_path / "b.jsonl", TEXTS[20:])
    write_jsonl(tmp_path / "a.gz", TEXTS)
    write_jsonl(tmp_path / "a.zst", TEXTS)
    write_parquet(tmp_path / "a.parquet", TEXTS)
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"held": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(tmp_path / "dict")
    for name in ("*.jsonl", "a.gz", "a.zst"):
        assert texts("jsonl", tmp_path / name) == TEXTS
    assert texts("parquet", tmp_path / "a.parquet") == TEXTS
    assert texts("arrow", tmp_path / "one", text_column="body") == TEXTS
    assert texts("arrow", tmp_path / "dict", split="held") == TEXTS
    hub, asked, load = write_hub(tmp_path / "hub", TEXTS), [], datasets.load_dataset
    (hub / "train--.jsonl").touch()  # a stream may begin with an empty file
    assert texts("huggingface", hub) == texts("huggingface", hub, streaming=True)
    assert sorted(texts("huggingface", hub)) == sorted(TEXTS)
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *a, **k: asked.append((a, k)) or load(str(hub), **{**k, "name": None})
    )
    assert sorted(open_source(Dataset(source="c4"))) == sorted(TEXTS)  # type: ignore[type-var]
    assert asked == [(("allenai/c4",), {"name": "en", "split": "train", "streaming": True})]


@pytest.mark.parametrize("line", ["x" * 99 + "\n", "é" * 999, "日本" * 40_000 + "\n", "\U0001f600" * 50_001])
def test_large_text_files_are_cut_at_line_ends_or_else_between_characters(tmp_path, line):
    whole = line * (300_000 // len(line.encode()) + 1)
    (tmp_path / "a.txt").write_text(whole, encoding="utf-8", newline="")
    (tmp_path / "b.txt").write_text("file b\n", encoding="utf-8-sig")
    *parts, last = texts("text", tmp_path / "*.txt")
    assert last == "file b\n"  # without its byte order mark
    assert "".join(parts) == whole
    sizes = [len(part.encode()) for part in parts]
    assert max(sizes) <= 64 * 1024
    assert min(sizes[:-1]) > 32 * 1024 or "\n" in line
    assert len(line) != 100 or all(part.endswith("\n") and len(part) > 64 * 1024 - 100 for part in parts[:-1])


def test_a_broken_record_is_named_by_file_and_place(tmp_path):
    good = b'{"text": "fine"}'
    lines = {
        b'{"text": ': "column 9",
        b'{"text": ' + b"[" * 100_000: "",
        b"[1]": "jq -c",
        b'{"body": "x", "id": 1}': "no field 'text' (text_column); there are: 'body', 'id'",
        b'{"text": null}': "must be a string",
        b'{"text": "\xff"}': "0xff",
        rb'{"text": "x\ud83d"}': "\\ud83d",
    }
    raw = b"\n\n".join([good, *lines, good])
    (tmp_path / "a.jsonl").write_bytes(raw)
    (tmp_path / "a.gz").write_bytes(gzip.compress(raw))
    for file in (tmp_path / "a.jsonl", tmp_path / "a.gz"):
        first, *bad, last = texts("jsonl", file)
        assert first == last == "fine"
        for number, (said, expected) in enumerate(zip(bad, lines.values(), strict=True), 1):
            assert f"{file}, line {2 * number + 1}: " in said
            assert expected in said
    (tmp_path / "latin.txt").write_bytes(b"a\ngr\xfc\xdfe\n")
    write_parquet(tmp_path / "a.parquet", ["fine", None])
    write_hub(tmp_path / "hub", ["fine", None], files=1)
    for source, name, keys, place in (
        ("text", "latin.txt", {}, "latin.txt, line 2: "),
        ("parquet", "a.parquet", {}, "a.parquet, row group 0, row 2: field 'text' must be a string"),
        ("huggingface", "hub", {"streaming": True}, "part 0, document 1: field 'text' must be a string"),
        ("huggingface", "hub", {}, "row 1: field 'text' must be a string"),
    ):
        assert place in texts(source, tmp_path / name, **keys)[-1]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Files of which none can be a source."""
    folder = tmp_path_factory.mktemp("damaged")
    noise = [str(np.random.default_rng(i).bytes(99)) for i in range(500)]
    raw = write_jsonl(folder / "a.gz", noise).read_bytes()
    (folder / "short.gz").write_bytes(raw[:-2000])
    (folder / "middle.gz").write_bytes(raw[:9000] + b"\xff" * 99 + raw[9099:])
    (folder / "end.gz").write_bytes(raw[:-8] + b"checksum")
    (folder / "no.zst").write_bytes(b"nonsense")
    write_parquet(folder / "a.parquet", noise[:20], id=list(range(20)))
    raw = (folder / "a.parquet").read_bytes()
    (folder / "group.parquet").write_bytes(raw[:100] + b"\xff" * 300 + raw[400:])
    (folder / "foot.parquet").write_bytes(raw[:-200] + b"\xff" * 190 + raw[-10:])
    (folder / "empty.txt").touch()
    write_hub(folder / "hub", ["fine"], files=1)
    return folder


@pytest.mark.parametrize(
    ("source", "path", "keys", "message"),
    [
        *(("jsonl", name, {}, f"{name}.*again") for name in ("short.gz", "middle.gz", "end.gz", "no.zst")),
        ("parquet", "a.parquet", {"text_column": "body"}, "a.parquet.* no field 'body' .* there are: 'id', 'text'"),
        *(("parquet", name, {}, name) for name in ("empty.txt", "foot.parquet", "group.parquet")),
        ("text", ".", {}, r"is a folder; .*/\* names"),
        ("text", "empty.txt", {}, "empty.txt is empty"),
        ("text", "", {"path": None}, r"dataset\.path is missing"),
        ("arrow", "hub", {}, "dataset_"),
        ("huggingface", "hub", {"text_column": "body"}, r"\['body'\] not in the dataset.*'id', 'text'"),
        ("huggingface", "hub", {"split": "held"}, r"hub.*split held.*local folder"),
        ("huggingface", "nobody/nothing", {"path": "nobody/nothing"}, "hub, as there is no such local folder"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_it(damaged, monkeypatch, source, path, keys, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=message):
        list(open_source(Dataset.model_validate({"source": source, "path": str(damaged / path), **keys})))


def test_the_fingerprint_follows_contents_and_column(tmp_path):
    found = set()
    for words in (["one", "two"], ["one", "twO"]):
        for name, column in itertools.product(("a.jsonl", "a.gz"), ("text", "id")):
            path = str(write_jsonl(tmp_path / name, words))
            found.add(open_source(Dataset(source="jsonl", path=path, text_column=column)).fingerprint)
    assert len(found) == 8


def test_the_first_look_ends_a_run_over_what_it_finds(tmp_path):
    for found, message in (
        (["x"], r"have 3 tokens together, fewer than one .*training\.seq_len is 32"),
        ([""] * 50, r"a\.jsonl have 0 tokens together"),
        ([*TEXTS, None], r'a\.jsonl, line 61: .* or leave .* dataset\.on_bad_record = "skip"'),
    ):
        with pytest.raises(UserError, match=message):
            make_loader(dataset_of(tmp_path, found))
    make_loader(dataset_of(tmp_path, [""] * 50 + ["word " * 40]))
    with pytest.raises(UserError, match=r"the held-out documents of jsonl .* have 0 tokens together"):
        make_validation(Validation(holdout=0.0001), dataset_of(tmp_path, TEXTS))
