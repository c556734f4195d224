"""The two file formats give equal ids on any text, text is only text, and what is no tokenizer is refused by name."""

import json
import os
import shutil
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data.sources.files import open_source
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.tokenizer_files import write_tokenizer

ASSETS = Path(__file__).parents[2] / "assets" / "tokenizer"
MODEL, JSON = ASSETS / "tokenizer.model", ASSETS / "tokenizer.json"
BOTH = load_tokenizer(MODEL), load_tokenizer(JSON)

RUNS = st.builds(
    lambda piece, count: piece * count,
    st.sampled_from([" ", "=", "-", "\t", "\n", "\r\n", "\r", " \n", "a", "aa", "0", "_", "#", "é", "\u3000", "'s"]),
    st.integers(1, 70),
)
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_3|>", "<|eot_id|>", "<|"]
CODE = ["def ", "return", "self.x", "import os", "    ", "class", "'ll", "'S", "\u017f", "'\u017f", "123456"]
ANY_TEXT = st.lists(st.one_of(st.text(max_size=30), RUNS, st.sampled_from(SPECIAL + CODE)), max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=ANY_TEXT)
def test_both_formats_give_equal_ids_and_the_text_back(text):
    model, other = BOTH
    ids = model.encode(text)
    assert other.encode(text) == ids
    assert model.decode(ids) == other.decode(ids) == text
    assert b"".join(map(model.token_bytes, ids)) == b"".join(map(other.token_bytes, ids)) == text.encode()
    assert max(ids, default=0) < 3840  # no special token comes out of any text


def test_both_formats_split_characters_runs_and_programs_alike():
    model, other = BOTH
    characters = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn", "Co")]
    texts = ["".join(c + neighbour for c in characters) for neighbour in ("a", " ", "-")]
    texts += [c * count for c in " =a\n\t" for count in (*range(1, 20), 37, 64, 200)]  # joined in which order?
    texts += map(str, list(open_source(Dataset()))[::11])
    texts += ["a\ud800b", "x" * 300_000, " " * 300_000, "line\n" * 100_000 + "\n \n  x\r\n\r\n y\n\n=====\n\n\n1"]
    for text in texts:
        assert model.encode(text) == other.encode(text)
    assert model.encode("a\ud800b") == model.encode("a\ufffdb")
    lines = [f"    return {i}  # {'x' * (i % 90)}\n\n" for i in range(9000)]
    for tokenizer in BOTH:  # a long text is cut only where no id changes
        ids = [token for line in lines for token in tokenizer.encode(line.rstrip("\n"))]
        assert [i for i in tokenizer.encode("".join(lines)) if i not in tokenizer.encode("\n\n")] == ids
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (4096, 3840, 3841)
        names = {3840: "begin_of_text", 3841: "end_of_text", 3842: "reserved_special_token_0", 3848: "eom_id"}
        names |= {3844: "finetune_right_pad_id", 3845: "reserved_special_token_2", 3850: "python_tag"}
        names |= {3851: "reserved_special_token_3", 4095: "reserved_special_token_247"}
        assert {i: tokenizer.token_bytes(i).decode() for i in names} == {i: f"<|{n}|>" for i, n in names.items()}


def test_fingerprints_of_checkpoints_and_shards_stay_known(tmp_path):
    """Version 0.1 took the file's; then those of a tokenizer.model stood for a tokenizer.json with its ids, too."""
    model, other = BOTH
    assert [found[:14] for found in model.fingerprints] == ["ids:cbc823eb5a", "e8f9d8852a8b9f"]
    assert other.fingerprints[1].startswith("1b4abe1e931d046d")
    assert not model.is_known_as(other.fingerprint)
    assert all(tokenizer.is_known_as(own) for tokenizer in BOTH for own in (*tokenizer.fingerprints, model.fingerprint))
    saved = json.loads(JSON.read_text())
    for change, same in (
        ({"truncation": None, "decoder": None}, True),
        ({"normalizer": {"type": "NFC"}}, False),
        ({"model": saved["model"] | {"ignore_merges": False}}, False),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(saved | change, indent=2))
        found = load_tokenizer(tmp_path / "tokenizer.json")
        assert found.is_known_as(other.fingerprint) == found.is_known_as(model.fingerprint) == same


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.model", b"hello world\n"),
        ("tokenizer.model", b"IQ== 0\nIg== 0\n"),  # a rank twice
        ("tokenizer.model", MODEL.read_bytes().replace(b"AA==", b"aGVsbG8gd29ybGQ=")),  # a byte that is no token
        ("tokenizer.json", b'{"a":' * 10**5),
        ("tokenizer.json", b'{"model": {"vocab": {"a": -1}}}'),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'),  # nothing ends documents
        ("tokenizer_config.json", b'{"eos_token": "<nothing>"}'),
        ("tokenizer_config.json", b'{"eos_token": ["<s>"]}'),
        ("tokenizer_config.json", b'{"eos_token": 7}'),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, name, content):
    shutil.copy(JSON, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path / name.replace("_config", ""))
    assert str(tmp_path / name) in str(error.value)


def test_what_is_no_file_or_lies_elsewhere_is_refused(tmp_path):
    model, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    model.mkdir(parents=True)
    blobs.mkdir()
    shutil.copy(JSON, model)
    for path, words in ((tmp_path / "none.json", "No such file"), (tmp_path, "expected a file")):
        with pytest.raises(UserError, match=words):
            load_tokenizer(path)
    config = model / "tokenizer_config.json"
    for name in ("tokenizer.model", "tokenizer_config.json"):
        os.mkfifo(model / name)
        with pytest.raises(UserError, match=f"{name} is .*expected a file"):
            load_tokenizer(model / ("tokenizer.model" if name == "tokenizer.model" else "tokenizer.json"))
    for folder in (tmp_path, blobs):
        (folder / "1").write_text('{"bos_token": null, "eos_token": {"content": "<|eot_id|>"}}')
    config.unlink()
    config.symlink_to("../../../1")
    with pytest.raises(UserError, match="is a link that leaves its folder"):
        load_tokenizer(model / "tokenizer.json")
    config.unlink()
    config.symlink_to("../../blobs/1")  # as in Hugging Face's cache
    assert load_tokenizer(model / "tokenizer.json").eos_id == 3849


def test_a_tokenizer_that_cannot_encode_a_text_says_so(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.Unigram([("</s>", 0.0), ("a", -1.0)], None, False))
    content = json.loads(JSON.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"(a+)+$"
    for made, text in ((library.to_str(), "b"), (json.dumps(content), "a" * 50 + "!")):  # the library's code panics
        (tmp_path / "a.json").write_text(made)
        with pytest.raises(UserError, match=r"a\.json: .* cannot encode a text"):
            load_tokenizer(tmp_path / "a.json").encode(text)


@pytest.mark.parametrize("path", [MODEL, JSON])
@pytest.mark.parametrize("given", [None, {"eos_token": "<|eot_id|>", "split_special_tokens": False}])
def test_an_exported_tokenizer_reads_hostile_text_as_training_does(tmp_path, path, given):
    """What looks like a control token in a document is text, in transformers, too."""
    from transformers import AutoTokenizer

    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    shutil.copy(path, source)
    if given:
        given = {"tokenizer_class": "PreTrainedTokenizerFast", **given}
        (source / "tokenizer_config.json").write_text(json.dumps(given))
    write_tokenizer(source / path.name, out, 64)
    theirs = AutoTokenizer.from_pretrained(out)
    for text in ["a<|end_of_text|> b", "<|begin_of_text|><|eot_id|>\n", "plain", "Zürich 日本語 \r\n\n 12345"]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == load_tokenizer(path).encode(text)
    if path == MODEL:  # our conversion lets other programs begin with bos, as training does
        assert theirs("a")["input_ids"][0] == theirs.convert_tokens_to_ids("<|begin_of_text|>") == 3840
