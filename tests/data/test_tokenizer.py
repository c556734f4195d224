"""The two file formats give equal ids on any text, text is only text, and what is no tokenizer is refused by name."""

import json
import os
import shutil
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data.sources import open_source
from titanlite.data.tokenizer import llama3_special_tokens, load_tokenizer
from titanlite.data.tokenizer_files import write_tokenizer

ASSETS = Path(__file__).parents[2] / "assets" / "tokenizer"
MODEL, JSON = ASSETS / "tokenizer.model", ASSETS / "tokenizer.json"
BOTH = load_tokenizer(MODEL), load_tokenizer(JSON)

RUNS = st.builds(
    lambda piece, count: piece * count,
    st.sampled_from([" ", "=", "-", "\t", "\n", "\r\n", "\r", " \n", "a", "aa", "0", "_", "#", "é", "\u3000", "'s"]),
    st.integers(1, 70),
)
SPECIAL = st.sampled_from(["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_3|>", "<|eot_id|>", "<|"])
CODE = st.sampled_from(
    ["def ", "return", "self.x", "import os", "    ", "class", "'ll", "'S", "\u017f", "'\u017f", "123456"]
)
ANY_TEXT = st.lists(st.one_of(st.text(max_size=30), RUNS, SPECIAL, CODE), max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=ANY_TEXT)
def test_both_formats_give_equal_ids_and_the_text_back(text: str) -> None:
    model, other = BOTH
    ids = model.encode(text)
    assert other.encode(text) == ids
    assert model.decode(ids) == other.decode(ids) == text
    assert b"".join(map(model.token_bytes, ids)) == b"".join(map(other.token_bytes, ids)) == text.encode()
    assert model.bos_id is not None
    assert all(0 <= i < model.bos_id for i in ids)  # no special token comes out of any text


def test_both_formats_split_characters_runs_and_programs_alike() -> None:
    model, other = BOTH
    characters = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn", "Co")]
    texts = ["".join(c + neighbour for c in characters) for neighbour in ("a", " ", "-")]
    texts += [c * count for c in " =a\n\t" for count in (*range(1, 20), 37, 64, 200)]  # joined in which order?
    texts += [text for text in list(open_source(Dataset()))[::11] if isinstance(text, str)]
    texts += ["a\ud800b", "x" * 300_000, " " * 300_000, "line\n" * 100_000 + "\n \n  x\r\n\r\n y\n\n=====\n\n\n1"]
    for text in texts:
        assert model.encode(text) == other.encode(text)
    assert model.encode("a\ud800b") == model.encode("a\ufffdb")

    lines = [f"    return {i}  # {'x' * (i % 90)}\n\n" for i in range(9000)]
    for tokenizer in BOTH:  # a long text is cut only where no id changes
        ids = [token for line in lines for token in tokenizer.encode(line.rstrip("\n"))]
        assert [i for i in tokenizer.encode("".join(lines)) if i not in tokenizer.encode("\n\n")] == ids


def test_ids_names_and_sizes() -> None:
    names = llama3_special_tokens()
    assert len(set(names)) == 256
    at = {0: "begin_of_text", 1: "end_of_text", 2: "reserved_special_token_0", 4: "finetune_right_pad_id"}
    at |= {5: "reserved_special_token_2", 8: "eom_id", 9: "eot_id", 10: "python_tag", 11: "reserved_special_token_3"}
    assert {i: names[i] for i in at} == {i: f"<|{name}|>" for i, name in at.items()}
    for tokenizer in BOTH:
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (4096, 3840, 3841)
        assert tokenizer.token_bytes(3841) == b"<|end_of_text|>"


def test_fingerprints_of_checkpoints_and_shards_stay_known(tmp_path: Path) -> None:
    """Version 0.1 took the file's; then those of a tokenizer.model stood for a tokenizer.json with its ids, too."""
    model, other = BOTH
    assert model.fingerprint.startswith("ids:cbc823eb5a")
    assert model.file_fingerprint.startswith("e8f9d8852a8b9f07")
    assert other.file_fingerprint.startswith("1b4abe1e931d046d")
    assert model.is_known_as(model.file_fingerprint)
    assert not model.is_known_as(other.file_fingerprint)
    for tokenizer in BOTH:
        assert tokenizer.is_known_as(tokenizer.fingerprint)
        assert tokenizer.is_known_as(model.fingerprint)
    saved = json.loads(JSON.read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved | {"truncation": None, "decoder": None}, indent=2))
    assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint == other.fingerprint
    for key, value in (("normalizer", {"type": "NFC"}), ("model", saved["model"] | {"ignore_merges": False})):
        (tmp_path / "tokenizer.json").write_text(json.dumps(saved | {key: value}))
        assert not load_tokenizer(tmp_path / "tokenizer.json").is_known_as(other.fingerprint)


def test_tokenizer_config_beside_the_file_names_bos_and_eos(tmp_path: Path) -> None:
    shutil.copy(JSON, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": None, "eos_token": {"content": "<|eot_id|>"}}))
    assert load_tokenizer(tmp_path / "tokenizer.json").eos_id == 3849
    for wrong in ("<nothing>", ["<s>"], 7):
        config.write_text(json.dumps({"eos_token": wrong}))
        with pytest.raises(UserError, match=r"tokenizer_config\.json: eos_token is"):
            load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.model", b"hello world\n"),
        ("tokenizer.model", b"IQ== 0\nIg== 0\n"),  # a rank twice
        ("tokenizer.model", MODEL.read_bytes().replace(b"AA==", b"aGVsbG8gd29ybGQ=")),  # a byte that is no token
        ("tokenizer.json", b'{"a":' * 10**5),
        ("tokenizer.json", b'{"model": {"vocab": {"a": -1}}}'),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'),  # nothing ends documents
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_what_is_no_file_or_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=words):
            load_tokenizer(path)
    model = tmp_path / "models--x" / "snapshots" / "abc"
    model.mkdir(parents=True)
    shutil.copy(JSON, model)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        os.mkfifo(model / name)
        with pytest.raises(UserError, match=f"{name} is a pipe"):
            load_tokenizer(model / ("tokenizer.model" if name == "tokenizer.model" else "tokenizer.json"))
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for folder in (tmp_path, blobs):
        (folder / "1.json").write_text('{"eos_token": "<|eot_id|>"}')
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").symlink_to("../../../1.json")
    with pytest.raises(UserError, match="is a link that leaves its folder"):
        load_tokenizer(model / "tokenizer.json")
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").symlink_to("../../blobs/1.json")  # as in Hugging Face's cache
    assert load_tokenizer(model / "tokenizer.json").eos_id == 3849


def test_a_tokenizer_that_cannot_encode_a_text_says_so(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.Unigram([("<s>", 0.0), ("</s>", 0.0), ("a", -1.0)], None, False)).save(str(tmp_path / "a.json"))
    tokenizer = load_tokenizer(tmp_path / "a.json")
    assert tokenizer.encode("aa") == [2, 2]
    with pytest.raises(UserError, match=r"a\.json: .* cannot encode a text"):
        tokenizer.encode("b")
    content = json.loads(JSON.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"(a+)+$"
    (tmp_path / "slow.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"slow\.json: .* cannot encode"):
        load_tokenizer(tmp_path / "slow.json").encode("a" * 50 + "!")  # the library's code panics


@pytest.mark.parametrize("path", [MODEL, JSON])
@pytest.mark.parametrize("given", [None, {"eos_token": "<|eot_id|>", "split_special_tokens": False}])
def test_an_exported_tokenizer_reads_hostile_text_as_training_does(
    tmp_path: Path, path: Path, given: dict[str, object] | None
) -> None:
    """What looks like a control token in a document is text, in transformers, too."""
    from transformers import AutoTokenizer

    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    shutil.copy(path, source)
    if given:
        (source / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **given})
        )
    write_tokenizer(source / path.name, out, 64)
    theirs = AutoTokenizer.from_pretrained(out)
    hostile = ["<|end_of_text|>", "a<|end_of_text|> b", "<|begin_of_text|><|eot_id|>\n"]
    for text in [*hostile, "plain text", "Zürich 日本語 \r\n\n 12345"]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == load_tokenizer(path).encode(text)
    if path == MODEL:  # our conversion lets other programs begin with bos, as training does
        assert theirs("a")["input_ids"][0] == theirs.convert_tokens_to_ids("<|begin_of_text|>") == 3840
