"""The two file formats give equal ids on any text, and text is only text."""

import json
import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data import tokenizer as module
from titanlite.data.sources import open_source
from titanlite.data.sources.base import RandomAccess
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.tokenizer_file import llama3_special_tokens, read_vocab_size

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "assets" / "tokenizer"
MODEL, JSON = ASSETS / "tokenizer.model", ASSETS / "tokenizer.json"


def stdlib():
    source = open_source(Dataset())
    assert isinstance(source, RandomAccess)
    return source


@pytest.fixture(scope="module")
def both():
    return load_tokenizer(MODEL), load_tokenizer(JSON)


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


@settings(max_examples=600, deadline=None)
@given(text=ANY_TEXT)
def test_both_formats_give_equal_ids_and_the_text_back(both, text):
    model, hf = both
    ids = model.encode(text)
    assert hf.encode(text) == ids
    assert model.decode(ids) == hf.decode(ids) == text
    assert all(0 <= i < model.bos_id for i in ids)  # no special token comes out of any text


def test_both_formats_split_every_assigned_character_alike(both):
    model, hf = both
    characters = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn", "Co")]
    for neighbour in ("a", " ", "-"):
        text = "".join(c + neighbour for c in characters)
        assert model.encode(text) == hf.encode(text)


def test_both_formats_give_equal_ids_on_the_standard_library(both):
    model, hf = both
    source = stdlib()
    for i in range(0, len(source), 7):
        assert model.encode(source[i]) == hf.encode(source[i])


def test_long_texts_are_cut_only_where_no_id_changes(both, monkeypatch):
    source = stdlib()
    text = "".join(str(source[i]) for i in range(20)) + "\n \n  x\r\n\r\n y\n\n=====\n\n\n1"
    whole = [tokenizer.encode(text) for tokenizer in both]
    monkeypatch.setattr(module, "_PIECE_CHARS", 999)
    assert [tokenizer.encode(text) for tokenizer in both] == whole
    for blank in (" " * 5000, "x" * 5000, "\n" * 5000, "\n " * 2500):  # no such place: cut elsewhere, nothing lost
        for tokenizer in both:
            assert tokenizer.decode(tokenizer.encode(blank)) == blank


def test_a_megabyte_without_a_break_is_no_problem(both):
    for tokenizer in both:
        for text in (" " * 1_000_000, "=" * 1_000_000):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogates_become_replacement_characters(both):
    model, hf = both
    assert model.encode("a\ud800b") == hf.encode("a\ud800b") == model.encode("a\ufffdb")


def test_special_tokens_are_those_of_llama_3_1():
    names = llama3_special_tokens()
    assert len(set(names)) == 256
    at = {0: "begin_of_text", 1: "end_of_text", 2: "reserved_special_token_0", 4: "finetune_right_pad_id"}
    at |= {5: "reserved_special_token_2", 8: "eom_id", 9: "eot_id", 10: "python_tag", 11: "reserved_special_token_3"}
    at |= {255: "reserved_special_token_247"}
    assert {i: names[i] for i in at} == {i: f"<|{name}|>" for i, name in at.items()}


def test_sizes_ids_and_bytes(both):
    for tokenizer, path in zip(both, (MODEL, JSON), strict=True):
        assert tokenizer.vocab_size == read_vocab_size(path) == 4096
        assert (tokenizer.bos_id, tokenizer.eos_id) == (3840, 3841)
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("def f(x):\n    pass"))) == b"def f(x):\n    pass"
        assert tokenizer.token_bytes(3841) == b"<|end_of_text|>"


def test_two_files_that_compute_the_same_ids_have_one_fingerprint(both):
    assert both[0].fingerprint == both[1].fingerprint
    assert both[0].file_fingerprint != both[1].file_fingerprint
    for tokenizer in both:
        assert tokenizer.is_known_as(tokenizer.fingerprint)
        assert tokenizer.is_known_as(tokenizer.file_fingerprint)  # of a checkpoint of version 0.1
    assert not both[0].is_known_as(both[1].file_fingerprint)


def test_the_fingerprint_is_that_of_version_0_1_for_its_checkpoints():
    assert load_tokenizer(MODEL).file_fingerprint.startswith("e8f9d8852a8b9f07")
    assert load_tokenizer(JSON).file_fingerprint.startswith("1b4abe1e931d046d")


@pytest.mark.parametrize("spaces", [*range(1, 20), 37, 64, 200])
def test_runs_of_one_character_have_the_same_ids_in_both_formats(both, spaces):
    """Where several neighbours make the same token, the order in which they are joined could differ."""
    for text in (" " * spaces, "=" * spaces, "a" * spaces, "\n" * spaces, "\t" * spaces):
        assert both[0].encode(text) == both[1].encode(text)


@pytest.mark.parametrize(
    ("keys", "value", "same"),
    [
        (("truncation",), {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}, True),
        (("post_processor",), None, True),
        (("decoder", "trim_offsets"), False, True),
        (("model", "ignore_merges"), False, False),
        (("model", "dropout"), 0.1, False),
        (("normalizer",), {"type": "NFC"}, False),
        (("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"), "[a-z]+", False),
        (("pre_tokenizer", "pretokenizers", 0, "behavior"), "Removed", False),
        (("pre_tokenizer", "pretokenizers", 1, "add_prefix_space"), True, False),
        (("added_tokens", 3, "special"), False, False),
    ],
)
def test_the_fingerprint_follows_what_a_tokenizer_json_computes(tmp_path, keys, value, same):
    content = json.loads(JSON.read_text())
    table = content
    for key in keys[:-1]:
        table = table[key]
    table[keys[-1]] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=2))
    changed = load_tokenizer(tmp_path / "tokenizer.json")
    assert (changed.fingerprint == load_tokenizer(JSON).fingerprint) == same


def test_a_merge_less_is_another_tokenizer(tmp_path):
    content = json.loads(JSON.read_text())
    del content["model"]["merges"][100]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint != load_tokenizer(JSON).fingerprint


def test_the_fingerprint_follows_the_vocabulary(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(MODEL.read_bytes()[: MODEL.read_bytes().rindex(b"\n", 0, -1) + 1])
    assert load_tokenizer(path).fingerprint != load_tokenizer(MODEL).fingerprint


def test_the_vocabulary_size_needs_no_slow_import():
    code = (
        "import sys; from titanlite.data.tokenizer_file import read_vocab_size as r; "
        f"assert r({str(MODEL)!r}) == r({str(JSON)!r}) == 4096; "
        "print([m for m in ('torch', 'tiktoken', 'tokenizers', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"


def test_a_rank_that_encodes_nothing_does_not_build_the_encoder():
    code = (
        "import sys; from titanlite.data.tokenizer import load_tokenizer; "
        f"tokenizer = load_tokenizer({str(MODEL)!r}); print(tokenizer.vocab_size, 'tiktoken' in sys.modules); "
        "print(tokenizer.decode(tokenizer.encode('abc')), 'tiktoken' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout
    assert output == "4096 False\nabc True\n"


def test_tokenizer_config_beside_the_file_names_bos_and_eos(tmp_path):
    shutil.copy(JSON, tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": None, "eos_token": {"content": "<|eot_id|>"}}))
    assert load_tokenizer(tmp_path / "tokenizer.json").eos_id == 3849
    config.write_text(json.dumps({"eos_token": "<nothing>"}))
    with pytest.raises(UserError, match=r"eos_token is '<nothing>', which tokenizer\.json does"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.model", b"hello world\n", "line 1: not a tiktoken tokenizer"),
        ("tokenizer.model", b"IQ== 0\nIg== 0\n", "the ranks of its 2 tokens are not 0 to 1"),
        ("tokenizer.model", b"", "the file is empty"),
        ("tokenizer.model", b"IQ== -1\n", "not 0 to 0"),
        ("tokenizer.model", b"IQ== 0\nIQ== 1\n", "line 2: the token is there already, with the rank 0"),
        ("tokenizer.model", b"IQ== 0\n", "255 of the 256 bytes are no tokens, 0x00 for one"),
        ("tokenizer.model", b"IQ== 1" + b"0" * 5000, "line 1"),
        ("tokenizer.model", b"A" * 2000 + b" 0", "line 1: a token of more than 1024 bytes"),
        ("tokenizer.json", b'{"a":' * 10**5, "recursion limit"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": -1}}}', "model.vocab.*a is -1, expected greater"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 1e99}}}', "vocab"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 0, "</s>": 4000000000}}}', "expected less than 16777216"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 1, "</s>": 1}}}', "two of its tokens have the same id"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 1}}, "added_tokens": [7]}', "added_tokens.0 is 7"),
        ("tokenizer.json", b"{", "not valid JSON"),
        ("tokenizer.json", b"[]", "expected an object"),
        ("tokenizer.json", b"{}", "model is missing"),
    ],
)
@pytest.mark.parametrize("load", [load_tokenizer, read_vocab_size])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, name, content, message, load):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("load", [load_tokenizer, read_vocab_size])
def test_a_missing_file_and_a_folder_are_named(tmp_path, load):
    with pytest.raises(UserError, match=r"cannot read .*none\.json: No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(UserError, match="is a folder"):
        load(tmp_path)


@pytest.mark.parametrize("load", [load_tokenizer, read_vocab_size])
@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path, name, load):
    shutil.copy(JSON, tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"{name} is a pipe"):
        load(tmp_path / (name if name == "tokenizer.model" else "tokenizer.json"))


def with_pattern(folder: Path, pattern: str) -> Path:
    value = json.loads(JSON.read_text())
    value["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"(a+)+$", "retry-limit-in-match"),  # the library's own bound, which it meets with a panic
        (r"[ab]*?c|.", "too long on some texts"),
        ("(" * 5000 + ")" * 5000, "parse depth limit"),
        (r"(?<name", "invalid group name"),
    ],
)
@pytest.mark.parametrize("load", [load_tokenizer, read_vocab_size])
def test_a_pattern_without_an_end_is_refused(tmp_path, load, pattern, message):
    with pytest.raises(UserError, match=message):
        load(with_pattern(tmp_path, pattern))


def test_a_pattern_of_ones_own_is_tried_and_taken(tmp_path):
    tokenizer = load_tokenizer(with_pattern(tmp_path, r"\p{L}+|\p{N}| +|[^\p{L}\p{N} ]+"))
    assert tokenizer.decode(tokenizer.encode("one two  3")) == "one two  3"


def test_a_link_beside_the_tokenizer_stays_in_its_folder_or_in_hugging_faces_cache(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(JSON, model)
    (tmp_path / "secret.json").write_text('{"eos_token": "<|eot_id|>"}')
    (model / "tokenizer_config.json").symlink_to("../secret.json")
    with pytest.raises(UserError, match="is a link that leaves its folder"):
        load_tokenizer(model / "tokenizer.json")
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for blob, file in (("1", JSON), ("2", tmp_path / "secret.json")):
        shutil.copy(file, blobs / blob)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    (snapshot / "tokenizer_config.json").symlink_to("../../blobs/2")
    assert load_tokenizer(snapshot / "tokenizer.json").eos_id == 3849


def test_a_text_for_which_there_is_no_token_is_said_in_words_with_the_remedy(tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = [("<s>", 0.0), ("</s>", 0.0), ("a", -1.0)]
    Tokenizer(models.Unigram(vocabulary, None, False)).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("aa") == [2, 2]
    with pytest.raises(UserError, match=r"tokenizer\.json: .* cannot encode a text .*byte fallback.*unknown token"):
        tokenizer.encode("b")
