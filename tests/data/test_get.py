"""`titanlite get` downloads from a hub, a mirror or a folder, and its job file lines work."""

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_helpers import ROOT, some_texts, write_jsonl, write_parquet
from hub import Hub, listed

from titanlite import cli

TOKENIZER = (ROOT / "assets/tokenizer/tokenizer.json").read_bytes()
FINEWEB = "datasets/HuggingFaceFW/fineweb-edu"
Output = pytest.CaptureFixture[str]


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A hub with small versions of the presets, and a folder to start in."""
    write_parquet(tmp_path / "texts", [path.read_text() for path in ROOT.glob("titanlite/**/*.py")])
    raw, model = (
        (tmp_path / "texts").read_bytes(),
        {"tokenizer.json": TOKENIZER, "model.safetensors": b"no"},
    )
    files = {"models/openai-community/gpt2": model, "models/meta-llama/Llama-3.1-8B": model}
    files[FINEWEB] = {
        f"sample/{size}BT/00{i}_00000.parquet": raw for size in (10, 100) for i in range(2)
    }
    files["datasets/me/mine"] = {
        "test.jsonl": b"no",
        "train.jsonl": b'{"text": "a"}\n',
        "train.csv": b"no",
    }
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(
        logging.getLogger("huggingface_hub"), "handlers", []
    )  # to what another test had as stderr
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Hub(files) as server:
        yield server


def run(capsys: Output, *words: str, code: int = 0) -> str:
    """Run a command and return its output, without the line breaks of boxes."""
    assert cli.main(words) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return out + re.sub(r"[\s│]+", " ", err)


def test_the_preset_jobs_name_the_downloads_that_they_need(hub, capsys):
    needed = dict[str, list[str]]()
    for preset in sorted((ROOT / "train_configs").glob("fineweb_*.toml")):
        needed[preset.name] = re.findall(
            r"^#   titanlite ((?:get|tokenizer) .*)$", preset.read_text(), re.M
        )
        answer = run(capsys, "check", "--job.config_file", preset.name, code=2)
        assert [" ".join(command.split()[:3]) in answer for command in needed[preset.name]] == [
            True
        ] * 2
    for preset, commands in needed.items():
        for command in commands:
            run(
                capsys,
                *shlex.split(command),
                *(["--from", hub.url] if command.startswith("get") else []),
            )
        answer = run(
            capsys,
            "check",
            "--job.config_file",
            preset,
            "--world-size",
            "64" if "8b" in preset else "8",
        )
        assert ("titanlite get tokenizer llama3" in answer) == (
            preset in ("fineweb_1b.toml", "fineweb_8b.toml")
        )
    assert [*needed] == [f"fineweb_{size}.toml" for size in ("150m", "1b", "8b", "debugmodel")]
    assert {name for name, _ in hub.asked} == {*hub.files[FINEWEB], "tokenizer.json"}


def test_a_dry_run_lists_files_and_a_folder_can_replace_the_hub(hub, tmp_path, capsys):
    answer = run(capsys, "get", "data", "fineweb-edu-10bt", "--from", hub.url, "--dry-run")
    size = len(next(iter(hub.files[FINEWEB].values())))
    assert re.findall(r"^ *([\d,]+)  (\S+)$", answer, re.M) == [
        (f"{size:,}", f"sample/10BT/00{i}_00000.parquet") for i in range(2)
    ]
    assert (hub.asked, os.listdir()) == ([], [])
    (tmp_path / "mirror" / "train-0.jsonl").mkdir(parents=True)
    for name, content in hub.files["datasets/me/mine"].items():
        (tmp_path / "mirror" / name).write_bytes(content)
    for out, origin in ("one", hub.url), ("one", hub.url), ("two", str(tmp_path / "mirror")):
        answer = run(capsys, "get", "data", "me/mine", "--from", origin, "--out", out)
        assert [path.name for path in Path(out).glob("[!.]*")] == ["train.jsonl"]
        assert f'source = "jsonl"\npath = "{out}/**/*.jsonl"' in answer
    assert hub.asked == [("train.jsonl", 0)]


def test_a_download_resumes_after_a_broken_connection(hub, capsys):
    hub.cut, content = (
        "train.txt",
        b"a line\n" * 3_000_000,
    )  # the library goes on after whole blocks of 10 MB
    hub.files["datasets/me/large"] = {"train.txt": content}
    run(capsys, "get", "data", "me/large", "--from", hub.url)
    (_, first), (_, second) = hub.asked
    assert first == 0 < second
    assert Path("data/large/train.txt").read_bytes() == content


@pytest.mark.parametrize("size", [10, 5000], ids=["git", "lfs"])
def test_only_files_with_the_stated_checksum_are_kept_and_none_is_overwritten(
    hub, size: int, capsys
):
    content, name, command = b"x" * size, "train.txt", ["get", "data", "me/sums", "--from", hub.url]
    hub.files["datasets/me/sums"], out = {name: content}, Path("data/sums")
    hub.instead[name] = b"y" * size
    assert name in run(capsys, *command, code=2)
    assert not os.listdir(out)
    hub.instead.clear()
    run(capsys, *command)
    assert (out / name).read_bytes() == content
    (out / name).write_bytes(b"z" * size)
    assert f"{out}/{name}" in run(capsys, *command, code=2)
    assert (out / name).read_bytes() == b"z" * size


def test_a_stream_is_not_read_beyond_the_size_of_the_file(hub, capsys):
    hub.files["datasets/me/endless"], hub.endless = {"train.txt": b"a line\n" * 1000}, "train.txt"
    assert "train.txt" in run(capsys, "get", "data", "me/endless", "--from", hub.url, code=2)
    assert hub.sent < 32_000_000  # the client reads 10 MB at once, and sockets hold some more
    assert not os.listdir("data/endless")


LISTS = {
    "no JSON": b"[{",
    "no list": b'{"path": "train.jsonl"}',
    "no size": b'[{"type": "file", "path": "train.jsonl", "size": "1"}]',
    "bad checksum": b'[{"type": "file", "path": "train.jsonl", "size": 1, "lfs": {"oid": "../x"}}]',
    "deep": b"[" * 100_000,
    **{
        path: json.dumps([listed(path, b"x")]).encode()
        for path in ("../../evil.jsonl", "/evil.jsonl", "a//b.jsonl")
    },
}


@pytest.mark.parametrize("tree", LISTS.values(), ids=LISTS)
def test_a_malformed_list_of_files_is_an_error(hub, tree: bytes, capsys):
    hub.tree = tree
    assert "/api/datasets/me/mine" in run(
        capsys, "get", "data", "me/mine", "--from", hub.url, code=2
    )
    assert not [*Path("..").rglob("evil.jsonl")]


@pytest.mark.parametrize("tree", [b"[]", b""], ids=["empty", "full"])
def test_a_list_of_files_that_links_to_itself_is_an_error(hub, tree: bytes, capsys):
    hub.tree, hub.link = tree, f"{hub.url}/api/datasets/me/mine/tree/main?cursor=1"
    assert "/api/datasets/me/mine" in run(
        capsys, "get", "data", "me/mine", "--from", hub.url, code=2
    )


@pytest.mark.slow
def test_ctrl_c_stops_a_download_and_the_same_command_resumes_it(hub):
    files = {name: raw for name, raw in hub.files[FINEWEB].items() if "/10BT/" in name}
    first, hub.held = files
    words = [
        sys.executable,
        "-P",
        "-m",
        "titanlite",
        "get",
        "data",
        "fineweb-edu-10bt",
        "--from",
        hub.url,
    ]
    process = subprocess.Popen(words, stderr=subprocess.PIPE)
    assert hub.waits.wait(60)
    process.send_signal(signal.SIGINT)
    assert b"Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    home, second, hub.held = Path("data/fineweb-edu-10bt"), hub.held, ""
    assert [*home.rglob("*.parquet")] == [home / first]
    subprocess.run(words, check=True, capture_output=True)
    assert [name for name, _ in hub.asked] == [first, second, second]
    assert all((home / name).read_bytes() == raw for name, raw in files.items())


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("tokenizer gpt-2", "did you mean `titanlite get tokenizer gpt2`"),
        ("data gpt2", "titanlite get tokenizer gpt2"),
        ("data zzz", "tinystories"),
        ("tokens gpt2", "tokenizer"),
        ("data nobody/nothing --from {hub}", "nobody/nothing"),
        ("tokenizer llama3 --from {hub}", "meta-llama/Llama-3.1-8B, then create a token on"),
        ("data me/mine --include *.csv --from {hub}", "train.csv"),
        ("data c4 --from http://127.0.0.1:9", "--from FOLDER"),
        ("data c4 --from nowhere", "--from nowhere"),
        ("data me/mine --from {hub} --out /proc/none", "/proc"),
    ],
)
def test_a_failed_download_reports_how_to_fix_it(hub, command: str, named: str, capsys):
    hub.gated = {"models/meta-llama/Llama-3.1-8B"}
    assert named in run(capsys, "get", *command.format(hub=hub.url).split(), code=2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("llama_8b.toml --world-size 8", {"data", "tokenizer llama3"}),
        ("debug_model.toml", set()),
        ("debug_model.toml --training.steps 40000", {"data"}),
        ("debug_model.toml --training.steps 40000 --dataset.max_epochs 30", set()),
        ("debug_model.toml --dataset.source jsonl --dataset.path train.jsonl", {"data"}),
        ("debug_model.toml --dataset.source jsonl --dataset.path train.jsonl.gz", {"data"}),
        ("debug_model.toml --dataset.source shards --dataset.path shards", {"data"}),
        (
            "debug_model.toml --dataset.source shards --dataset.path shards --training.steps 1",
            set(),
        ),
        ("debug_model.toml --model.vocab_size 65408", set()),
        ("debug_model.toml --model.vocab_size 65536", {"tokenizer gpt2"}),
    ],
)
def test_check_warns_that_a_run_trains_on_a_toy(
    tmp_path, monkeypatch, words: str, told: set[str], capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "train.jsonl.gz"):
        write_jsonl(tmp_path / name, some_texts(100))
    if "shards" in words:
        run(
            capsys,
            "prepare",
            "--out",
            "shards",
            "--dataset.source",
            "jsonl",
            "--dataset.path",
            "train.jsonl",
        )
    answer = run(
        capsys, "check", "--job.config_file", *words.split(), "--training.global_batch_size", "8"
    )
    found = re.findall(r"titanlite get (data|tokenizer \S+)", answer)
    assert (len(found), {*found}) == (len(told), told)
    if steps := re.search(r"--training.steps (\d+)$", answer, re.MULTILINE):
        words += f" --training.steps {steps[1]} --training.global_batch_size 8"
        assert "titanlite get data" not in run(capsys, "check", "--job.config_file", *words.split())
