"""Both tokenizer formats encode any text to the same ids, and `tokenizer train` writes both."""

import json
import operator
import os
import shutil
import sys
import unicodedata

import pytest
import tokenizers
import tomli
from data_helpers import TOKENIZER_PATH as MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import run_program

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data.sources.files import open_source
from titanlite.data.tokenizer import llama3_special_tokens, load_tokenizer
from titanlite.data.tokenizer_files import write_tokenizer

JSON = MODEL.with_suffix(".json")
BOTH = load_tokenizer(MODEL), load_tokenizer(JSON)

PIECES = [*" =-\t\na0_#é\r\u3000", "\r\n", " \n", "aa", "'s"]
RUNS = st.builds(operator.mul, st.sampled_from(PIECES), st.integers(1, 70))
SPECIAL = "<|begin_of_text|>,<|end_of_text|>,<|reserved_special_token_3|>,<|eot_id|>,<|".split(",")
CODE = "def ,return,self.x,import os,    ,class,'ll,'S,\u017f,'\u017f,123456".split(",")
ANY_PIECE = st.one_of(st.text(max_size=30), RUNS, st.sampled_from(SPECIAL + CODE))
ANY_TEXT = st.lists(ANY_PIECE, max_size=12).map("".join)


@settings(max_examples=400)
@given(text=ANY_TEXT)
def test_both_formats_give_equal_ids_and_the_text_back(text):
    ids = BOTH[0].encode(text)
    assert max(ids, default=0) < 3840  # no text contains special tokens

    for tokenizer in BOTH:
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_both_formats_split_characters_runs_and_programs_in_the_same_way():
    model, other = BOTH
    excluded = ("Cs", "Cn", "Co")  # surrogates, unassigned and private use
    characters = map(chr, range(0x110000))
    assigned = [c for c in characters if unicodedata.category(c) not in excluded]
    texts = ["".join(c + neighbor for c in assigned) for neighbor in "a -"]
    run_lengths = (*range(1, 20), 37, 64, 200)
    for c in " =a\n\t":
        texts += [c * length for length in run_lengths]
    texts += map(str, list(open_source(Dataset()))[::11])
    texts += ["a\ud800b", "x" * 300_000, " " * 300_000]
    texts.append("line\n" * 100_000 + "\n \n  x\r\n\r\n y\n\n=====\n\n\n1")
    for text in texts:
        assert model.encode(text) == other.encode(text)

    assert model.encode("a\ud800b") == model.encode("a\ufffdb")


@pytest.mark.parametrize("tokenizer", BOTH, ids=["model", "json"])
def test_a_long_text_is_cut_only_where_no_id_changes(tokenizer):
    lines = [f"    return {i}  # {'x' * (i % 90)}" for i in range(9000)]
    between = tokenizer.encode("\n\n")

    ids = tokenizer.encode("\n\n".join(lines))

    assert [i for i in ids if i not in between] == [
        i for line in lines for i in tokenizer.encode(line)
    ]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (4096, 3840, 3841)


def test_fingerprints_of_earlier_versions_are_recognized(tmp_path):
    """Version 0.1 hashed the file. Version 0.2 gave both formats the same fingerprint."""
    model, other = BOTH
    prefixes = [fingerprint[:14] for fingerprint in model.fingerprints]
    assert prefixes == ["ids:cbc823eb5a", "e8f9d8852a8b9f"]
    assert other.fingerprints[1].startswith("1b4abe1e931d046d")
    assert not model.is_known_as(other.fingerprint)

    for tokenizer in BOTH:
        for fingerprint in (*tokenizer.fingerprints, model.fingerprint):
            assert tokenizer.is_known_as(fingerprint)
    saved = json.loads(JSON.read_text())
    for change, same in (
        ({"truncation": None, "decoder": None}, True),
        ({"normalizer": {"type": "NFC"}}, False),
        ({"model": saved["model"] | {"ignore_merges": False}}, False),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(saved | change, indent=2))
        changed = load_tokenizer(tmp_path / "tokenizer.json")
        assert changed.is_known_as(other.fingerprint) == same
        assert changed.is_known_as(model.fingerprint) == same


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.model", b"IQ== 0\nIg== 0\n"),  # a rank twice
        # One byte has no token, and there is no end-of-document token.
        ("tokenizer.model", MODEL.read_bytes().replace(b"AA==", b"aGVsbG8gd29ybGQ=")),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'),
        ("tokenizer_config.json", b'{"eos_token": "<nothing>"}'),
        ("tokenizer_config.json", b'{"eos_token": 7}'),
    ],
)
def test_a_file_that_is_not_a_tokenizer_is_an_error_that_names_it(tmp_path, name, content):
    shutil.copy(JSON, tmp_path)
    (tmp_path / name).write_bytes(content)

    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path / name.replace("_config", ""))
    assert str(tmp_path / name) in str(error.value)


def test_a_tokenizer_that_is_not_a_regular_file_in_its_folder_is_an_error(tmp_path):
    model = tmp_path / "models--x" / "snapshots" / "abc"
    blobs = tmp_path / "models--x" / "blobs"
    model.mkdir(parents=True)
    blobs.mkdir()
    shutil.copy(JSON, model)
    os.mkfifo(model / "tokenizer.model")
    for path in (tmp_path / "none.json", tmp_path, model / "tokenizer.model"):
        with pytest.raises(UserError, match=str(path)):
            load_tokenizer(path)
    for folder in (tmp_path, blobs):
        (folder / "1").write_text('{"bos_token": null, "eos_token": {"content": "<|eot_id|>"}}')
    config = model / "tokenizer_config.json"
    config.symlink_to("../../../1")

    with pytest.raises(UserError, match="is a link to"):
        load_tokenizer(model / "tokenizer.json")

    config.unlink()
    config.symlink_to("../../blobs/1")  # as in Hugging Face's cache

    assert load_tokenizer(model / "tokenizer.json").eos_id == 3849


def test_a_text_that_a_tokenizer_cannot_encode_is_an_error(tmp_path):
    unigram = tokenizers.models.Unigram([("</s>", 0.0), ("a", -1.0)], None, False)
    tokenizers.Tokenizer(unigram).save(str(tmp_path / "a.json"))

    with pytest.raises(UserError, match=r"a\.json: .* cannot encode a text"):
        load_tokenizer(tmp_path / "a.json").encode("b")


HOSTILE_TEXT = "a<|end_of_text|> b<|begin_of_text|><|eot_id|>\nplain Zürich 日本語 \r\n\n 12345"


@pytest.mark.parametrize("path", [MODEL, JSON])
@pytest.mark.parametrize("eos", ["<|end_of_text|>", "<|eot_id|>"])
def test_an_exported_tokenizer_reads_hostile_text_as_training_does(tmp_path, path, eos):
    """transformers also encodes text that looks like a control token as plain text."""
    from transformers import AutoTokenizer

    source = shutil.copy(path, tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    config["split_special_tokens"] = False
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    out.mkdir()

    write_tokenizer(load_tokenizer(source), out, 64)

    theirs = AutoTokenizer.from_pretrained(out)
    ids = theirs(HOSTILE_TEXT, add_special_tokens=False)["input_ids"]
    assert ids == load_tokenizer(path).encode(HOSTILE_TEXT)
    # The converted tokenizer adds BOS like training does.
    if path == MODEL:
        assert theirs("a")["input_ids"][0] == theirs.bos_token_id == 3840


TEXTS = [
    f"{i} Zürich grüßt die Welt, don't 日本語 " * 3 + "\n    return self.value\n"
    for i in range(200)
]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Return options that read 200 texts and skip a bad line."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [json.dumps({"text": text}) for text in TEXTS]
    file.write_text("\n".join([*lines, "no json"]))
    return f"--dataset.source jsonl --dataset.path {file} --dataset.on_bad_record skip"


def test_training_a_tokenizer_twice_writes_the_same_files(keys, tmp_path, run_command):
    one = tmp_path / "one"
    two = tmp_path / "two"
    for out in (one, two):
        printed = run_command(f"tokenizer train --out {out} --vocab-size 600 {keys}")

    for name in ("tokenizer.model", "tokenizer.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    size = len("".join(TEXTS).encode())
    tokens = sum(len(load_tokenizer(one / "tokenizer.model").encode(text)) for text in TEXTS)

    assert f"200 documents ({size:,} bytes, {size / tokens:.2f} per token)" in printed

    job = tomli.loads(printed[printed.rindex("[tokenizer]") :])
    path = str(two / "tokenizer.json")

    assert job == {"tokenizer": {"path": path}, "model": {"vocab_size": 640}}


def test_both_files_of_a_trained_tokenizer_give_the_same_ids(keys, tmp_path, run_command):
    run_command(f"tokenizer train --out {tmp_path} --vocab-size 600 {keys}")

    both = [load_tokenizer(tmp_path / f"tokenizer.{suffix}") for suffix in ("model", "json")]

    for tokenizer in both:
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (600, 344, 345)

    special_ids = list(range(344, 344 + 256))
    assert both[0].decode(special_ids) == "".join(llama3_special_tokens())

    @settings(max_examples=200)
    @given(st.text(max_size=60))
    def assert_same_ids(text):
        assert both[0].encode(text) == both[1].encode(text)

    assert_same_ids()


@pytest.mark.long
@pytest.mark.skipif(
    sys.version_info[:3] != (3, 11, 7), reason="it is made of this Python's standard library"
)
def test_training_reproduces_the_included_tokenizer(tmp_path, run_command):
    run_command(f"tokenizer train --out {tmp_path} --vocab-size 4096")

    assert (tmp_path / "tokenizer.model").read_bytes() == MODEL.read_bytes()


@pytest.mark.slow
def test_a_pattern_that_takes_too_long_is_an_error_without_a_backtrace(tmp_path):
    tokenizer = json.loads(JSON.read_text())
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(?:x+x+)+y"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "a.txt").write_text("x" * 40)
    options = "--tokenizer.path tokenizer.json --dataset.source text --dataset.path a.txt"
    command = (sys.executable, "-P", "-m", "titanlite", "check", *options.split())

    errors = run_program(
        *command, folder=tmp_path, variables={"RUST_BACKTRACE": "1"}, code=2
    ).stderr

    assert "tokenizer.json: " in errors
    assert "backtrace:" not in errors
