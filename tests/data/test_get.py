"""`titanlite get` downloads from a hub, a mirror or a folder, and its job file lines work."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from data_helpers import ROOT, some_texts, write_jsonl, write_parquet
from hub import Hub, list_file
from small_runs import run_program

TOKENIZER = (ROOT / "assets/tokenizer/tokenizer.json").read_bytes()
FINEWEB = "datasets/HuggingFaceFW/fineweb-edu"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """Serve small versions of the presets from a hub, and change to a new folder."""
    write_parquet(tmp_path / "texts", [path.read_text() for path in ROOT.glob("titanlite/**/*.py")])
    raw = (tmp_path / "texts").read_bytes()
    model = {"tokenizer.json": TOKENIZER, "model.safetensors": b"no"}
    parts = []
    for size in (10, 100):
        parts += [f"sample/{size}BT/00{i}_00000.parquet" for i in range(2)]
    files = {
        "models/openai-community/gpt2": model,
        "models/meta-llama/Llama-3.1-8B": model,
        FINEWEB: dict.fromkeys(parts, raw),
        "datasets/me/mine": {
            "test.jsonl": b"no",
            "train.jsonl": b'{"text": "a"}\n',
            "train.csv": b"no",
        },
    }
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # The log handler would write to the captured standard error of an earlier test.
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Hub(files) as server:
        yield server


@pytest.fixture
def get(hub, run_command) -> Callable[..., str]:
    """Return a function that runs `titanlite get data` with the hub."""

    def run(data: str, code: int = 0) -> str:
        return run_command(f"get data {data} --from {hub.url}", code)

    return run


@pytest.mark.parametrize(
    ("preset", "ranks", "is_toy_tokenizer"),
    [
        ("fineweb_150m.toml", 8, False),
        ("fineweb_1b.toml", 8, True),
        ("fineweb_8b.toml", 64, True),
        ("fineweb_debugmodel.toml", 8, False),
    ],
)
def test_a_preset_job_names_the_downloads_that_it_needs(
    hub, run_command, preset, ranks, is_toy_tokenizer
):
    text = (ROOT / "train_configs" / preset).read_text()
    commands = re.findall(r"^#   titanlite ((?:get|tokenizer) .*)$", text, re.M)
    check = f"check --job.config_file {preset} --world-size {ranks}"

    before = run_command(check, code=2)
    for command in commands:
        source = f" --from {hub.url}" if command.startswith("get") else ""
        run_command(command + source)
    after = run_command(check)

    assert len(commands) == 2
    assert all(" ".join(command.split()[:3]) in before for command in commands)
    assert ("titanlite get tokenizer llama3" in after) == is_toy_tokenizer


def test_a_dry_run_lists_files_and_downloads_none(hub, get):
    output = get("fineweb-edu-10bt --dry-run")

    listed = {name: size for size, name in re.findall(r"^ *([\d,]+)  (\S+)$", output, re.M)}
    files = {name: f"{len(raw):,}" for name, raw in hub.files[FINEWEB].items() if "10BT" in name}
    assert listed == files
    assert (hub.requests, os.listdir()) == ([], [])


def test_a_folder_can_replace_the_hub_and_files_are_downloaded_once(hub, tmp_path, run_command):
    mirror = tmp_path / "mirror"
    (mirror / "train-0.jsonl").mkdir(parents=True)
    for name, content in hub.files["datasets/me/mine"].items():
        (mirror / name).write_bytes(content)
    for out, origin in (("one", hub.url), ("one", hub.url), ("two", mirror)):
        output = run_command(f"get data me/mine --from {origin} --out {out}")
        assert [path.name for path in Path(out).glob("[!.]*")] == ["train.jsonl"]
        assert f'source = "jsonl"\npath = "{out}/**/*.jsonl"' in output

    assert hub.requests == [("train.jsonl", 0)]


def test_a_download_resumes_after_a_broken_connection(hub, get):
    # huggingface_hub writes, and therefore resumes after, whole blocks of 10 MB.
    content = b"a line\n" * 3_000_000
    hub.files["datasets/me/large"] = {"train.txt": content}
    hub.cut = "train.txt"

    get("me/large")

    (_, first), (_, second) = hub.requests

    assert first == 0 < second
    assert Path("data/large/train.txt").read_bytes() == content


@pytest.mark.parametrize("size", [10, 5000], ids=["git", "lfs"])
def test_only_files_with_the_stated_checksum_are_kept_and_none_is_overwritten(hub, size, get):
    out = Path("data/sums/train.txt")
    hub.files["datasets/me/sums"] = {out.name: b"x" * size}

    hub.replaced[out.name] = b"y" * size

    assert out.name in get("me/sums", code=2)
    assert not os.listdir(out.parent)

    hub.replaced.clear()
    get("me/sums")

    assert out.read_bytes() == b"x" * size

    out.write_bytes(b"z" * size)
    assert str(out) in get("me/sums", code=2)
    assert out.read_bytes() == b"z" * size


def test_a_stream_is_not_read_beyond_the_size_of_the_file(hub, get):
    hub.files["datasets/me/endless"] = {"train.txt": b"a line\n" * 1000}
    hub.endless = "train.txt"

    assert "train.txt" in get("me/endless", code=2)

    # The client reads blocks of 10 MB, and sockets buffer some more.
    assert hub.sent < 32_000_000
    assert not os.listdir("data/endless")


LISTS = {
    "no JSON": b"[{",
    "no list": b'{"path": "train.jsonl"}',
    "no size": b'[{"type": "file", "path": "train.jsonl", "size": "1"}]',
    "bad checksum": b'[{"type": "file", "path": "train.jsonl", "size": 1, "lfs": {"oid": "../x"}}]',
    "deep": b"[" * 100_000,
}
for path in ("../../evil.jsonl", "/evil.jsonl", "a//b.jsonl"):
    LISTS[path] = json.dumps([list_file(path, b"x")]).encode()


@pytest.mark.parametrize("tree", LISTS.values(), ids=LISTS)
def test_a_malformed_list_of_files_is_an_error(hub, tree, get):
    hub.tree = tree
    assert "/api/datasets/me/mine" in get("me/mine", code=2)
    assert not [*Path("..").rglob("evil.jsonl")]


@pytest.mark.parametrize("tree", [b"[]", b""], ids=["empty", "full"])
def test_a_list_of_files_that_links_to_itself_is_an_error(hub, tree, get):
    hub.tree = tree
    hub.link = f"{hub.url}/api/datasets/me/mine/tree/main?cursor=1"
    assert "/api/datasets/me/mine" in get("me/mine", code=2)


@pytest.mark.slow
def test_ctrl_c_stops_a_download_and_the_same_command_resumes_it(hub):
    files = {name: raw for name, raw in hub.files[FINEWEB].items() if "/10BT/" in name}
    first, hub.held = files
    options = f"{sys.executable} -P -m titanlite get data fineweb-edu-10bt --from {hub.url}".split()
    process = subprocess.Popen(options, stderr=subprocess.PIPE)

    assert hub.stalled.wait(60)

    process.send_signal(signal.SIGINT)
    assert b"Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == 130

    home = Path("data/fineweb-edu-10bt")
    second = hub.held
    hub.held = ""

    assert [*home.rglob("*.parquet")] == [home / first]

    run_program(*options)
    assert [name for name, _ in hub.requests] == [first, second, second]
    assert all((home / name).read_bytes() == raw for name, raw in files.items())


FAILURES = """
tokenizer gpt-2 => gpt2, llama3
data zzz => tinystories
data https://huggingface.co/nobody => https://huggingface.co/nobody: unknown name
tokens gpt2 => tokenizer
data nobody/nothing --from {hub} => nobody/nothing
tokenizer llama3 --from {hub} => meta-llama/Llama-3.1-8B cannot be downloaded
data me/mine --include *.csv --from {hub} => train.csv
data c4 --from http://127.0.0.1:9 => --from FOLDER
data c4 --from nowhere => --from nowhere
data me/mine --from {hub} --out /proc/none => /proc
"""


@pytest.mark.parametrize("case", FAILURES.strip().split("\n"))
def test_a_failed_download_reports_how_to_fix_it(hub, case, run_command):
    hub.gated = {"models/meta-llama/Llama-3.1-8B"}
    command, named = case.format(hub=hub.url).split(" => ")

    assert named in run_command(f"get {command}", code=2)


# Job file and options => downloads that `check` proposes
TOYS = """
llama_8b.toml --world-size 8 => data, tokenizer llama3
debug_model.toml =>
debug_model.toml --training.steps 40000 => data
debug_model.toml --training.steps 40000 --dataset.max_epochs 30 =>
debug_model.toml --dataset.source jsonl --dataset.path train.jsonl => data
debug_model.toml --dataset.source jsonl --dataset.path train.jsonl.gz => data
debug_model.toml --dataset.source shards --dataset.path shards => data
debug_model.toml --dataset.source shards --dataset.path shards --training.steps 1 =>
debug_model.toml --model.vocab_size 65408 =>
debug_model.toml --model.vocab_size 65536 => tokenizer gpt2
"""


@pytest.mark.parametrize("case", TOYS.strip().split("\n"))
def test_check_warns_that_a_run_trains_on_a_toy(tmp_path, monkeypatch, case, run_command):
    arguments, expected = case.split(" =>")
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "train.jsonl.gz"):
        write_jsonl(tmp_path / name, some_texts(100))
    if "shards" in arguments:
        run_command("prepare --out shards --dataset.source jsonl --dataset.path train.jsonl")
    check = f"check --training.global_batch_size 8 --job.config_file {arguments}"

    output = run_command(check)

    downloads = re.findall(r"titanlite get (data|tokenizer \S+)", output)
    assert ", ".join(sorted(downloads)) == expected.strip()

    if steps := re.search(r"--training.steps (\d+)$", output, re.MULTILINE):
        assert "titanlite get data" not in run_command(f"{check} {steps[0]}")
