"""Documents at random access, and what a person is told about those that cannot be read."""

import gzip
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data import sources
from titanlite.data.sources import files, find_files
from titanlite.data.sources.base import RandomAccess
from titanlite.data.sources.files import TEXT_DOCUMENT_BYTES


def open_source(dataset) -> RandomAccess:
    source = sources.open_source(dataset)
    assert isinstance(source, RandomAccess)
    return source


def write_jsonl(path, texts, column="text"):
    path.write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)))
    return path


def texts(source) -> list[Any]:
    return [source[i] for i in range(len(source))]


def test_python_stdlib_is_the_library_without_packages_and_tests():
    source = open_source(Dataset())
    files = find_files(Dataset())
    names = [file.relative_to(sysconfig.get_paths()["stdlib"]).as_posix() for file in files]
    assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [n for n in names if {"site-packages", "dist-packages", "test", "tests"} & set(n.split("/"))]
    assert files == sorted(files, key=lambda f: f.relative_to(sysconfig.get_paths()["stdlib"]))
    assert source[names.index("json/decoder.py")] == Path(json.decoder.__file__).read_text(encoding="utf-8")
    assert len(source) == len(files) > 500
    assert source.describe().startswith(f"python_stdlib: {len(files):,} documents, ")
    assert open_source(Dataset()).fingerprint == source.fingerprint


def test_python_stdlib_leaves_out_empty_files_and_dangling_links(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").touch()
    (tmp_path / "c.py").symlink_to("nowhere.py")
    monkeypatch.setattr(files, "_stdlib", lambda: tmp_path)
    assert find_files(Dataset()) == [tmp_path / "a.py"]


def test_jsonl_gives_the_texts_of_all_files_in_order(tmp_path):
    first = ["one", "zwei\n\u2028", "\U0001f600", ""]
    write_jsonl(tmp_path / "a.jsonl", first)
    (tmp_path / "b.jsonl").write_bytes(b'\n  \n{"text": "three"}\r\n\n{"text": "four"}')
    source = open_source(Dataset(source="jsonl", path=str(tmp_path / "*.jsonl")))
    assert texts(source) == [*first, "three", "four"]
    assert [source[i] for i in (5, 0, 3)] == ["four", "one", ""]


@given(
    lines=st.lists(st.sampled_from([b"", b"  ", b'{"text":"x"}', b' {"text":"' + b"y" * 40 + b'"}']), max_size=20),
    block=st.integers(1, 64),
    last=st.booleans(),
)
def test_jsonl_finds_the_lines_whatever_the_size_of_a_read(tmp_path_factory, lines, block, last):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n" * last)
    expected = [json.loads(line)["text"] for line in lines if line.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_SCAN_BYTES", block)
        if expected:
            assert texts(open_source(Dataset(source="jsonl", path=str(path)))) == expected
        else:
            with pytest.raises(UserError, match="holds no document"):
                open_source(Dataset(source="jsonl", path=str(path)))


def test_jsonl_takes_the_named_column(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x"], column="content")
    assert open_source(Dataset(source="jsonl", path=str(path), text_column="content"))[0] == "x"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "line 4, column 9: not valid JSON: Expecting value"),
        pytest.param(b"[" * 100_000, "line 4: JSON that is nested too deeply", id="deep"),
        (b"[1]", "line 4: a JSON object is needed, this is a list"),
        (b'{"body": "x", "id": 1}', r"line 4: no field 'text' \(dataset.text_column\); there are: 'body', 'id'"),
        (b'{"text": null}', "line 4: field 'text' must be a string, it is null"),
        (b'{"text": 5}', "line 4: field 'text' must be a string, it is int"),
        (b'{"text": "\xff"}', r"line 4, byte 11: not valid UTF-8 \(0xff\)"),
        (rb'{"text": "x\ud83d"}', r"line 4: field 'text' is not valid Unicode: character 2 is \\ud83d, half of a"),
    ],
)
def test_a_broken_line_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n{"text": "fine"}\n' + line + b'\n{"text": "fine"}\n')
    source = open_source(Dataset(source="jsonl", path=str(path)))
    assert [source[i] for i in (0, 1, 3)] == ["fine"] * 3
    with pytest.raises(UserError, match=message) as error:
        source[2]
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ['[{"text": "one"}]', '\n [\n  {"text": "one"}\n]', '["one"]', "["])
@pytest.mark.parametrize("packed", [False, True])
def test_a_json_array_is_refused_with_the_command_that_converts_it(tmp_path, text, packed):
    path = tmp_path / ("a.json.gz" if packed else "a.json")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    with pytest.raises(UserError, match=r"is one JSON array, .* one JSON object on each line.*jq -c '\.\[\]' a\.json"):
        sources.open_source(Dataset(source="jsonl", path=str(path)))


def test_small_text_files_are_documents_with_or_without_a_byte_order_mark(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"file {name}\n", encoding="utf-8-sig" if name == "b" else "utf-8")
    assert texts(open_source(Dataset(source="text", path=str(tmp_path / "*.txt")))) == ["file a\n", "file b\n"]


@pytest.mark.parametrize("line", ["x" * 99 + "\n", "é" * 999, "日本" * 40_000 + "\n", "\U0001f600" * 50_001])
def test_large_text_files_are_cut_at_line_ends_or_else_between_characters(tmp_path, line):
    whole = line * (300_000 // len(line.encode()) + 1)
    path = tmp_path / "a.txt"
    path.write_text(whole, encoding="utf-8", newline="")
    parts = texts(open_source(Dataset(source="text", path=str(path))))
    assert "".join(parts) == whole
    sizes = [len(part.encode()) for part in parts]
    assert max(sizes) <= TEXT_DOCUMENT_BYTES
    assert min(sizes[:-1]) > TEXT_DOCUMENT_BYTES / 2 or "\n" in line
    if len(line) == 100:
        assert all(part.endswith("\n") for part in parts)
        assert min(sizes[:-1]) > TEXT_DOCUMENT_BYTES - 100


def test_invalid_utf8_is_named_by_file_and_byte(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"a\ngr\xfc\xdfe\n")
    with pytest.raises(UserError, match=r"latin\.txt, line 2 \(byte 4 of the file\): not valid UTF-8 \(0xfc\)"):
        open_source(Dataset(source="text", path=str(path)))[0]


def test_missing_and_empty_sources_are_errors(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.txt.gz").touch()
    for dataset, message in [
        (Dataset(source="text"), r"dataset\.path is missing"),
        (Dataset(source="jsonl", path=str(tmp_path / "*.jsonl")), r"\*\.jsonl' matches no file"),
        (Dataset(source="text", path=str(tmp_path)), "is a folder; name files"),
        (Dataset(source="text", path=str(tmp_path / "*.gz")), r'a\.txt\.gz: source "text" reads plain files only'),
    ]:
        with pytest.raises(UserError, match=message):
            find_files(dataset)
    with pytest.raises(UserError, match=r"text .* is empty: .*empty\.txt holds no document"):
        open_source(Dataset(source="text", path=str(tmp_path / "empty.txt")))


def test_the_fingerprint_follows_the_contents(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    dataset = Dataset(source="jsonl", path=str(path))
    before = open_source(dataset).fingerprint
    assert open_source(dataset).fingerprint == before
    for name in ("a.jsonl", "a.jsonl.gz"):
        write_jsonl(tmp_path / name, ["one", "two"])
        if name.endswith(".gz"):
            (tmp_path / name).write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        keys: Any = {"source": "jsonl", "path": str(tmp_path / name)}
        columns = [sources.open_source(Dataset(**keys, text_column=column)) for column in ("text", "id")]
        assert columns[0].fingerprint != columns[1].fingerprint
    write_jsonl(path, ["one", "twO"])
    assert open_source(dataset).fingerprint != before
