"""Errors about unreadable data name a remedy, and the remedy works for this data."""

import errno
import json
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
from data_helpers import ROOT, write_jsonl
from small_runs import run_program

SMALL = "check --training.seq_len 64 --training.steps 4 --training.global_batch_size 8"
JSONL = "--dataset.source jsonl --dataset.path"
WORDS = "grüße " * 40
CHAT = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": WORDS}]


def json_lines(record):
    records = [record | {"id": i} for i in range(400)]
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


ROWS = "".join(f'{i},"{WORDS}, {i}\n{WORDS}"\n' for i in range(400))
FILES = {
    "a.csv": ("id,text\n" + ROWS).encode(),
    "a.tsv": ("id,text\n" + ROWS).replace(",", "\t").encode(),
    "chat.jsonl": json_lines({"messages": CHAT}).encode(),
    "alpaca.jsonl": json_lines({"instruction": WORDS, "input": "", "output": WORDS}).encode(),
    "array.jsonl": json.dumps([{"text": WORDS}] * 400).encode(),
    "pretty.jsonl": json.dumps([{"text": WORDS}] * 400, indent=1).encode(),
    "objects.jsonl": (json.dumps({"text": WORDS}, indent=1) * 400).encode(),
    "latin1.jsonl": json_lines({"text": WORDS}).encode("latin-1"),
    "utf16.jsonl": json_lines({"text": WORDS}).encode("utf-16"),
    "latin1.txt": WORDS.encode("latin-1") * 400,
}


@pytest.fixture
def check(run_command):
    """Return a function that checks a small job."""
    return lambda options, code=0: run_command(f"{SMALL} {options}", code)


# Part of the command in the guide that converts each file
CONVERSIONS = {
    "a.csv": "newlines_in_values=True)",
    "a.tsv": "delimiter=",
    "chat.jsonl": ".messages[]",
    "alpaca.jsonl": ".instruction",
    "array.jsonl": "'.[]'",
    "pretty.jsonl": "'.[]'",
    "objects.jsonl": "jq -c . ",
    "latin1.jsonl": "-f LATIN1",
    "utf16.jsonl": "-f UTF-16",
    "latin1.txt": "-f LATIN1",
}


@pytest.mark.parametrize("name", FILES)
def test_a_message_names_the_guide_whose_command_converts_the_file(
    name, tmp_path, monkeypatch, check
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(FILES[name])
    source = JSONL.replace("jsonl", "text") if name.endswith("txt") else JSONL
    message = check(f"{source} {name}", code=2)
    (guide,) = re.findall(r"see (docs/\S+\.md)", message, re.IGNORECASE)
    commands = re.findall("^(?:jq|python|iconv) .*", (ROOT / guide).read_text(), re.MULTILINE)
    (command,) = [command for command in commands if CONVERSIONS[name] in command]
    command = re.sub("^python ", f"{sys.executable} ", command)
    command = command.replace("FILE", name).replace("NEW", "new")
    subprocess.run(command, shell=True, check=True)

    (made,) = (path for path in tmp_path.iterdir() if path.name != name)
    if name.endswith("sv"):
        source = source.replace("jsonl", "parquet")
    assert "OK" in check(f"{source} {made}")


def test_a_message_lists_the_columns_and_one_with_text_can_be_selected(tmp_path, check):
    file = tmp_path / "alpaca.jsonl"
    file.write_bytes(FILES[file.name])
    message = check(f"{JSONL} {file}", code=2)

    assert "Set dataset.text_column to one of 'instruction', 'input', 'output'" in message
    assert "OK" in check(f"{JSONL} {file} --dataset.text_column output")


@pytest.mark.parametrize("holdout", ["1e-4", "1e-9", "0.999999"])
def test_a_holdout_without_a_document_is_an_error_that_names_its_key(holdout, tmp_path, check):
    file = write_jsonl(tmp_path / "text.jsonl", [f"{i} {WORDS}" for i in range(400)])
    options = f"{JSONL} {file} --validation.freq 2 --validation.holdout"

    assert "change validation.holdout" in check(f"{options} {holdout}", code=2)
    assert "OK" in check(f"{options} 0.1")


def test_models_of_the_hub_are_valid_flavors(check, tmp_path, monkeypatch):
    # The repository contains outputs of earlier runs.
    monkeypatch.chdir(tmp_path)
    for name in ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B", "llama-3.2-1b", "1B"):
        assert "OK" in check(f"--model.flavor {name}")


PEAK_OF_A_LONG_LINE = """
import gzip, resource, sys
from titanlite.config.schema import Dataset
from titanlite.data.sources.files import open_source

def write(path, megabytes):
    parts = [b'{"text": "first"}\\n{"text": "', b"a" * 1_000_000, b'"}\\n{"text": "last"}\\n']
    if path.endswith("gz"):
        parts = [gzip.compress(part) for part in parts]  # members of a file
    first, middle, last = parts
    with open(path, "wb") as file:
        file.write(first)
        for _ in range(megabytes):
            file.write(middle)
        file.write(last)

def read(path):
    first, long, last = open_source(Dataset(source="jsonl", path=path))
    assert (first, last) == ("first", "last")
    return long, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

write(sys.argv[1], 1)
long, baseline = read(sys.argv[1])
assert len(long) == 1_000_000
write(sys.argv[1], 1500)
long, peak = read(sys.argv[1])
assert "line 2" in str(long)
print(peak - baseline)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "suffix",
    ["jsonl", pytest.param("jsonl.gz", marks=pytest.mark.long)],
)
def test_a_line_of_any_length_is_a_bad_record_and_takes_little_memory(suffix, tmp_path):
    # A child process measures its own peak memory. Without the variables, glibc would keep a number
    # of freed blocks that depends on the machine.
    command = (sys.executable, "-c", PEAK_OF_A_LONG_LINE, tmp_path / f"long.{suffix}")
    variables = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0"}
    growth = int(run_program(*command, variables=variables).stdout) / 1024

    # In MiB. The source keeps and copies 256 MiB of the line, which has 1,430 MiB.
    assert growth < 900


@pytest.mark.parametrize(
    ("write", "command"),
    [
        ("os.replace", "data show --dataset.source text --dataset.path"),
        ("shutil.copyfile", "check --tokenizer.path"),
    ],
)
def test_a_full_disk_of_the_cache_is_an_error_that_names_its_variable(
    write, command, tmp_path, monkeypatch, run_command
):
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(write, Mock(side_effect=full))
    (tmp_path / "file").write_text("text")

    errors = run_command(f"{command} file://{tmp_path}/file", code=2)

    assert "No space left on device" in errors
    assert "TITANLITE_CACHE" in errors
