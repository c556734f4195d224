"""Each source gives the texts that are there, and what cannot be read is named: file, place, and what to do."""

import gzip
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import (
    ROOT,
    dataset_of,
    make_loader,
    make_validation,
    some_texts,
    write_hub,
    write_jsonl,
    write_parquet,
    write_zst,
)
from hypothesis import given
from hypothesis import strategies as st

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset, Validation
from titanlite.data.sources import find_files, open_source
from titanlite.data.sources.base import BadRecord

TEXTS = some_texts(60)


def texts(source: str, path: Path | str, **keys: Any) -> list[Any]:
    """All documents; for one that cannot be read, what is said about it."""
    records = open_source(Dataset.model_validate({"source": source, "path": str(path), **keys}))
    return [str(record) if isinstance(record, BadRecord) else record for record in records]


def test_python_stdlib_is_the_library_without_packages_and_tests() -> None:
    source, files = open_source(Dataset()), find_files(Dataset())
    names = [file.relative_to(sysconfig.get_paths()["stdlib"]).as_posix() for file in files]
    assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [n for n in names if {"site-packages", "dist-packages", "test", "tests"} & set(n.split("/"))]
    assert files == sorted(files)
    assert list(source)[names.index("json/decoder.py")] == Path(json.decoder.__file__).read_text(encoding="utf-8")
    assert source.num_documents == len(files) > 500
    assert open_source(Dataset()).fingerprint == source.fingerprint


def test_jsonl_gives_the_texts_of_all_files_in_order(tmp_path: Path) -> None:
    first = ["one", "zwei\n\u2028", "\U0001f600", ""]
    write_jsonl(tmp_path / "a.jsonl", first)
    (tmp_path / "b.jsonl").write_bytes(b'\n  \n{"text": "three"}\r\n\n{"text": "four"}')
    assert texts("jsonl", tmp_path / "*.jsonl") == [*first, "three", "four"]
    assert texts("jsonl", tmp_path / "a.jsonl", text_column="id")[1].endswith("field 'id' must be a string, it is int")


LINES = st.lists(
    st.sampled_from([b"", b"  ", b"\t\r", b'{"text":"x"}', b' {"text":"' + b"y" * 40 + b'"}']), max_size=20
)


@given(lines=LINES, last=st.booleans(), packed=st.booleans())
def test_lines_are_found_whatever_lies_between_them(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], last: bool, packed: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / ("a.jsonl.gz" if packed else "a.jsonl")
    raw = b"\n".join(lines) + b"\n" * last
    path.write_bytes(gzip.compress(raw) if packed else raw)
    expected = [json.loads(line)["text"] for line in lines if line.strip()]
    if expected or packed:
        assert texts("jsonl", path) == expected
    else:
        with pytest.raises(UserError, match="holds no document"):
            texts("jsonl", path)


def test_what_holds_the_same_texts_gives_the_same_documents(tmp_path: Path) -> None:
    import datasets

    write_jsonl(tmp_path / "a.jsonl.gz", TEXTS, gzip.open)
    write_zst(tmp_path / "a.jsonl.zst", TEXTS)
    write_parquet(tmp_path / "a.parquet", TEXTS)
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"held": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(tmp_path / "dict")
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        assert texts(name.split(".")[1], tmp_path / name) == TEXTS
    assert (
        texts("arrow", tmp_path / "one", text_column="body") == texts("arrow", tmp_path / "dict", split="held") == TEXTS
    )
    hub = write_hub(tmp_path / "hub", TEXTS)
    (hub / "train--.jsonl").touch()  # a stream may begin with an empty file
    assert texts("huggingface", hub) == texts("huggingface", hub, streaming=True)
    assert sorted(texts("huggingface", hub)) == sorted(TEXTS)


def test_c4_is_preconfigured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    hub, asked, load = write_hub(tmp_path / "hub", TEXTS), [], datasets.load_dataset

    def fake(path: str, **keys: Any) -> Any:
        asked.append((path, keys))
        return load(str(hub), split="train", streaming=True)

    monkeypatch.setattr("datasets.load_dataset", fake)
    assert sorted(open_source(Dataset(source="c4"))) == sorted(TEXTS)  # type: ignore[type-var]
    assert asked == [("allenai/c4", {"name": "en", "split": "train", "streaming": True})]


@pytest.mark.parametrize("line", ["x" * 99 + "\n", "é" * 999, "日本" * 40_000 + "\n", "\U0001f600" * 50_001])
def test_large_text_files_are_cut_at_line_ends_or_else_between_characters(tmp_path: Path, line: str) -> None:
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "line 4, column 9: not valid JSON"),
        pytest.param(b"[" * 100_000, "line 4: not valid JSON", id="deep"),
        (b"[1]", "line 4: a JSON object is needed, this is a list"),
        (b'{"body": "x", "id": 1}', "line 4: no field 'text' (dataset.text_column); there are: 'body', 'id'"),
        (b'{"text": null}', "line 4: field 'text' must be a string, it is null"),
        (b'{"text": "\xff"}', "line 4, byte 11: not valid UTF-8 (0xff)"),
        (rb'{"text": "x\ud83d"}', "line 4: field 'text' is not valid Unicode: character 2 is \\ud83d, half of a"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_broken_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, message: str, packed: bool) -> None:
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    raw = b'{"text": "fine"}\n\n{"text": "fine"}\n' + line + b'\n{"text": "fine"}\n'
    path.write_bytes(gzip.compress(raw) if packed else raw)
    first, second, bad, last = texts("jsonl", path)
    assert (first, second, last) == ("fine",) * 3
    assert f"{path}, {message}" in bad


def test_broken_records_of_other_kinds_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"a\ngr\xfc\xdfe\n")
    assert "latin.txt, line 2 (byte 4 of the file): not valid UTF-8 (0xfc)" in texts("text", tmp_path / "latin.txt")[0]
    write_parquet(tmp_path / "a.parquet", ["fine", None])
    hub = write_hub(tmp_path / "hub", ["fine", None], files=1)
    for (first, bad), place in (
        (texts("parquet", tmp_path / "a.parquet"), "a.parquet, row group 0, row 2"),
        (texts("huggingface", hub, streaming=True), "part 0, document 1"),
        (texts("huggingface", hub), "row 1"),
    ):
        assert first == "fine"
        assert f"{place}: field 'text' must be a string, it is null" in bad


def write_damaged(folder: Path) -> None:
    """Files of which none can be a source."""
    noise = [str(np.random.default_rng(i).bytes(99)) for i in range(500)]
    write_jsonl(folder / "a.jsonl.gz", noise, gzip.open)
    raw = (folder / "a.jsonl.gz").read_bytes()
    (folder / "short.jsonl.gz").write_bytes(raw[:-2000])
    (folder / "middle.jsonl.gz").write_bytes(raw[:9000] + b"\xff" * 99 + raw[9099:])
    (folder / "end.jsonl.gz").write_bytes(raw[:-8] + b"checksum")
    (folder / "no.jsonl.zst").write_bytes(b"nonsense")
    write_parquet(folder / "a.parquet", noise[:20], id=list(range(20)))
    write_parquet(folder / "lists.parquet", [["one"], ["two"]])
    write_parquet(folder / "none.parquet", [])
    raw = (folder / "a.parquet").read_bytes()
    (folder / "group.parquet").write_bytes(raw[:100] + b"\xff" * 300 + raw[400:])
    (folder / "foot.parquet").write_bytes(raw[:-200] + b"\xff" * 190 + raw[-10:])
    for name, text in (("a", '[{"text": "one"}]'), ("b", '\n [\n  {"text": "one"}\n]'), ("c", '["one"]'), ("d", "[")):
        (folder / f"{name}.json").write_text(text)
    (folder / "packed.json.gz").write_bytes(gzip.compress(b'[{"text": "one"}]'))
    (folder / "empty.txt").touch()
    (folder / "a.txt.gz").touch()
    write_hub(folder / "hub", ["fine"], files=1)


@pytest.mark.parametrize(
    ("source", "path", "keys", "message"),
    [
        ("jsonl", "short.jsonl.gz", {}, "short.jsonl.gz: damaged or truncated after"),
        ("jsonl", "middle.jsonl.gz", {}, "middle.jsonl.gz: damaged or truncated after"),
        ("jsonl", "end.jsonl.gz", {}, "end.jsonl.gz: damaged or truncated after"),
        ("jsonl", "no.jsonl.zst", {}, "no.jsonl.zst: damaged or truncated after"),
        *(("jsonl", f"{name}.json", {}, "is one JSON array, .*jq -c") for name in "abcd"),
        ("jsonl", "packed.json.gz", {}, "is one JSON array, .*jq -c"),
        ("jsonl", "*.nothing", {}, r"\*\.nothing' matches no file"),
        ("parquet", "a.parquet", {"text_column": "body"}, "a.parquet: no field 'body' .* there are: 'id', 'text'"),
        ("parquet", "lists.parquet", {}, "lists.parquet: field 'text' .* must be a string, it is list"),
        ("parquet", "none.parquet", {}, "holds no document"),
        ("parquet", "empty.txt", {}, "empty.txt: not a parquet file"),
        ("parquet", "group.parquet", {}, "group.parquet, row group 0: damaged"),
        ("parquet", "foot.parquet", {}, "foot.parquet: not a parquet file, or a damaged one"),
        ("text", ".", {}, "is a folder; name files"),
        ("text", "*.gz", {}, 'source "text" reads plain files only'),
        ("text", "empty.txt", {}, "is empty: .*empty.txt holds no document"),
        ("arrow", "hub", {}, "is not a folder made by datasets' save_to_disk"),
        ("shards", "hub", {}, "is not a folder made by titanlite prepare"),
        ("huggingface", "hub", {"text_column": "body"}, "no field 'body' .* there are: 'id', 'text'"),
        (
            "huggingface",
            "hub",
            {"text_column": "body", "streaming": True},
            "no field 'body' .* there are: 'id', 'text'",
        ),
        ("huggingface", "hub", {"split": "held"}, "split held.*tried the local folder .*hub"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, source: str, path: str, keys: dict[str, Any], message: str
) -> None:
    write_damaged(tmp_path)
    with pytest.raises(UserError, match=message):
        texts(source, tmp_path / path, **keys)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_that_is_not_there_is_said_with_what_was_tried(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"no local folder 'nobody/nothing' here, so the Hugging Face hub was asked"):
        texts("huggingface", "nobody/nothing", streaming=streaming)
    with pytest.raises(UserError, match=r"dataset\.path is missing"):
        open_source(Dataset(source="text"))


def test_the_fingerprint_follows_contents_and_column(tmp_path: Path) -> None:
    def fingerprints() -> list[str]:
        return [
            open_source(Dataset(source="jsonl", path=str(tmp_path / name), text_column=column)).fingerprint
            for name in ("a.jsonl", "a.jsonl.gz")
            for column in ("text", "id")
        ]

    for name, opener in (("a.jsonl", open), ("a.jsonl.gz", gzip.open)):
        write_jsonl(tmp_path / name, ["one", "two"], opener)
    before = fingerprints()
    assert len(set(before)) == 4
    assert fingerprints() == before
    for name, opener in (("a.jsonl", open), ("a.jsonl.gz", gzip.open)):
        write_jsonl(tmp_path / name, ["one", "twO"], opener)
    assert not set(fingerprints()) & set(before)


def test_the_first_look_ends_a_run_over_what_it_finds(tmp_path: Path) -> None:
    for found, message in (
        (["x"], r"have 3 tokens together, fewer than one sequence: training\.seq_len is 32"),
        ([""] * 50, "are empty: none of the first 50 has any text"),
        ([*TEXTS, None], r'a\.jsonl, line 61: .* null\. Mend the record, or leave .* dataset\.on_bad_record = "skip"'),
    ):
        with pytest.raises(UserError, match=message):
            make_loader(dataset_of(tmp_path, found))
    validation = Validation(source="jsonl", path=str(tmp_path / "a.jsonl"), freq=1)
    with pytest.raises(UserError, match=r"or leave such records out by validation\.on_bad_record"):
        make_validation(validation, Dataset(num_workers=0))
    make_loader(dataset_of(tmp_path, [""] * 50 + ["word " * 40]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
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
