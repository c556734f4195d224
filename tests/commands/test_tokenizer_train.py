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
from ranks import titanlite
from small_runs import losses

from titanlite.cli import main
from titanlite.completion import load_checkpoint
from titanlite.config.load import resolve_path
from titanlite.config.schema import Tokenizer
from titanlite.data.tokenizer import llama3_special_tokens, load_tokenizer

SHAPE = """dim = 64
n_layers = 2
n_heads = 2
n_kv_heads = 1
ffn_dim = 128
[training]
steps = 20
seq_len = 64
local_batch_size = 8
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 1
"""
TEXTS = [f"{i} Zürich grüßt die Welt, don't 日本語 " * 3 + "\n    return self.value\n" for i in range(200)]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    file.write_text("\n".join([*(json.dumps({"body": text}) for text in TEXTS), "no json"]))
    return file


def train(*words: object) -> int:
    return main(["tokenizer", "train", *map(str, words)])


def test_both_files_give_the_same_ids_and_the_same_text_the_same_files(text, tmp_path, capsys):
    printed = ""
    for name in ("one", "two"):
        out = tmp_path / name
        assert train("--data", text, "--text-column", "body", "--vocab-size", 600, "--out", out) == 0
        printed = capsys.readouterr().out
    for file in ("tokenizer.model", "tokenizer.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    for said in ("600 ids, from 196 documents", "1 records cannot be read", "4 documents were kept back"):
        assert said in printed
    ours, shipped = (float(number) for number in re.findall(r"^  (0\.\d+)  th", printed, re.MULTILINE))
    assert ours < shipped  # it knows this text, the shipped one does not
    job = tomli.loads(printed[printed.index("[tokenizer]") :])
    assert job == {"tokenizer": {"path": str(tmp_path / "two" / "tokenizer.json")}, "model": {"vocab_size": 640}}
    both = [load_tokenizer(tmp_path / "one" / file) for file in ("tokenizer.model", "tokenizer.json")]
    assert [(tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) for tokenizer in both] == [(600, 344, 345)] * 2
    assert both[0].decode([344 + i for i in range(256)]) == "".join(llama3_special_tokens())

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=60))
    def same_ids(text):
        assert both[0].encode(text) == both[1].encode(text)

    same_ids()


def test_the_data_of_a_job_will_do(text, tmp_path, capsys):
    keys = f"[[dataset.sources]]\nsource = 'jsonl'\npath = '{text}'\ntext_column = 'body'\nweight = "
    (tmp_path / "job.toml").write_text(f"{keys}1.0\n{keys}0.0\n")
    job = ["--job.config_file", tmp_path / "job.toml"]
    assert train(*job, "--vocab-size", 600, "--out", tmp_path / "out", "--max-bytes", 9000, "--holdout", 0) == 0
    size = re.search(r"\(([\d,]+) bytes\)", capsys.readouterr().out)
    assert size is not None
    assert 9000 <= int(size[1].replace(",", "")) < 9200


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vocab-size", "512", "--data", "a.txt"], "--vocab-size"),
        (["--vocab-size", "600", "--data", "a.pdf"], "a.pdf"),
        (["--vocab-size", "600", "--data", "none.txt"], "matches no file"),
        (["--vocab-size", "600", "--data", "a.txt", "--dataset.source", "text"], "not both"),
        (["--vocab-size", "100000", "--data", "a.txt"], "too little text for 100,000 ids"),
        (["--vocab-size", "600", "--data", "a.jsonl"], "a.jsonl, line 1"),
        (["--vocab-size", "600", "--dataset.source", "text"], "dataset.path is missing"),
        (["make"], "--vocab-size"),
        (["--vocab-size", "600", "--data", "a.txt", "--out", "made"], "tokenizer.json exists already"),
    ],
)
def test_mistakes_are_answered(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a few words, a few words")
    Path("a.jsonl").write_text("{}")
    Path("made").mkdir()
    Path("made/tokenizer.json").write_text("mine")
    assert train(*([] if words == ["make"] else ["--out", tmp_path / "out"]), *words) == 2
    assert said in capsys.readouterr().err
    assert [file.read_text() for file in Path("made").iterdir()] == ["mine"]


@pytest.mark.slow
def test_a_run_uses_the_tokenizer_that_was_made_and_generates_with_it(tmp_path, capsys):
    """The printed lines, pasted into a job file, are all that it takes."""
    text, out = tmp_path / "text.jsonl", tmp_path / "out"
    text.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    assert train("--data", text, "--vocab-size", 600, "--out", tmp_path / "tokenizer") == 0
    printed = capsys.readouterr().out
    lines = printed[printed.index("[tokenizer]") :]
    job = tmp_path / "job.toml"
    job.write_text(f'{lines}\n{SHAPE}\n[dataset]\nsource = "jsonl"\npath = "{text}"\n')
    said = titanlite("train", "--job.config_file", job, "--job.dump_folder", out)
    assert "40 of 640 rows of the embedding (model.vocab_size) stand for no token" in said
    found = losses(out)
    assert found[1] == pytest.approx(math.log(640), abs=0.1)  # each of the 640 rows is as likely as any
    assert found[20] < found[1] - 1
    loaded = load_checkpoint(out)
    assert loaded.model.arch.vocab_size == 640
    assert loaded.tokenizer.vocab_size == 600
    assert main(["generate", "--checkpoint", str(out), "--prompt", "日本語 die Welt", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("日本語 die Welt")


@pytest.mark.long
@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="it is made of this Python's standard library")
def test_the_command_makes_the_shipped_tokenizer(tmp_path):
    assert train("--vocab-size", 4096, "--holdout", 0, "--out", tmp_path) == 0
    assert (tmp_path / "tokenizer.model").read_bytes() == resolve_path(Tokenizer().path).read_bytes()
