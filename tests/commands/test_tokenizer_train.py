"""`titanlite tokenizer train`: two files of one tokenizer, made again the same, and never over another one."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import SMALL, launched, losses

from titanlite.cli import main
from titanlite.config.load import resolve_path
from titanlite.config.schema import Tokenizer
from titanlite.data.tokenizer import llama3_special_tokens, load_tokenizer

TEXTS = [f"{i} Zürich grüßt die Welt, don't 日本語 " * 3 + "\n    return self.value\n" for i in range(200)]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Of a job that reads 200 texts and leaves out a line that is none."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    file.write_text("\n".join([*(json.dumps({"text": text}) for text in TEXTS), "no json"]))
    return ["--dataset.source", "jsonl", "--dataset.path", file, "--dataset.on_bad_record", "skip"]


def train(*words):
    return main(["tokenizer", "train", *map(str, words)])


def test_both_files_give_the_same_ids_and_the_same_text_the_same_files(keys, tmp_path, capsys):
    made = []
    for name in ("one", "two"):
        assert train(*keys, "--vocab-size", 600, "--out", tmp_path / name) == 0
        made.append([(tmp_path / name / file).read_bytes() for file in ("tokenizer.model", "tokenizer.json")])
    assert made[0] == made[1]
    both = [load_tokenizer(tmp_path / "one" / file) for file in ("tokenizer.model", "tokenizer.json")]
    size, tokens = len("".join(TEXTS).encode()), sum(len(both[0].encode(text)) for text in TEXTS)
    assert f"200 documents ({size:,} bytes, {size / tokens:.2f} a token)" in capsys.readouterr().out
    assert [(tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) for tokenizer in both] == [(600, 344, 345)] * 2
    assert both[0].decode([344 + i for i in range(256)]) == "".join(llama3_special_tokens())

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=60))
    def same_ids(text):
        assert both[0].encode(text) == both[1].encode(text)

    same_ids()


def test_a_mix_is_read_by_its_weights_up_to_a_limit(keys, tmp_path, capsys):
    table = f"[[dataset.sources]]\nsource = 'jsonl'\npath = '{keys[3]}'\nweight = "
    (tmp_path / "job.toml").write_text(f"{table}1.0\n{table}0.0\n")
    words = ["--job.config_file", tmp_path / "job.toml", "--dataset.on_bad_record", "skip", "--max-bytes", 9000]
    assert train(*words, "--vocab-size", 600, "--out", tmp_path / "out") == 0
    (size,) = re.findall(r"\(([\d,]+) bytes", capsys.readouterr().out)
    assert 9000 <= int(size.replace(",", "")) < 9200


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vocab-size", "512"], "512"),
        (["--dataset.path", "none.txt"], "matches no file"),
        (["--vocab-size", "100000"], "too little text for 100,000 ids"),
        (["--dataset.source", "jsonl", "--dataset.path", "a.jsonl"], "a.jsonl, line 1"),
        (["--out", "made"], "tokenizer.json exists already"),
        (["make"], "make"),
    ],
)
def test_mistakes_are_answered(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a few words, a few words")
    Path("a.jsonl").write_text("{}")
    Path("made").mkdir()
    Path("made/tokenizer.json").write_text("mine")
    good = ["--dataset.source", "text", "--dataset.path", "a.txt", "--vocab-size", "600", "--out", "out"]
    assert train(*(words if words == ["make"] else good + words)) == 2
    assert said in capsys.readouterr().err
    assert [file.read_text() for file in Path("made").iterdir()] == ["mine"]


@pytest.mark.slow
def test_a_run_uses_the_tokenizer_that_was_made_and_generates_with_it(keys, tmp_path, capsys):
    """The printed lines, pasted into a job file, are all that it takes."""
    assert train(*keys, "--vocab-size", 600, "--out", tmp_path / "tokenizer") == 0
    printed = capsys.readouterr().out
    lines = printed[printed.index("[tokenizer]") :]
    assert tomli.loads(lines)["model"] == {"vocab_size": 640}
    job, out = tmp_path / "job.toml", tmp_path / "out"
    data = f'[dataset]\nsource = "jsonl"\npath = "{keys[3]}"\non_bad_record = "skip"\n'
    job.write_text(lines + SMALL.replace("\n[model]", "").replace("2e-3", "1e-2") + data)
    said = launched(job, out, "--training.steps", "20")
    assert "40 of 640 rows of the embedding (model.vocab_size) stand for no token" in said
    found = losses(out)
    assert found[1] == pytest.approx(math.log(640), abs=0.1)  # each of the 640 rows is as likely as any
    assert found[20] < found[1] - 1
    assert main(["generate", "--checkpoint", str(out), "--prompt", "日本語 die Welt", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("日本語 die Welt")


@pytest.mark.long
@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="it is made of this Python's standard library")
def test_the_command_makes_the_shipped_tokenizer(tmp_path):
    assert train("--vocab-size", 4096, "--out", tmp_path) == 0
    assert (tmp_path / "tokenizer.model").read_bytes() == resolve_path(Tokenizer().path).read_bytes()
