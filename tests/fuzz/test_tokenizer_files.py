"""A damaged tokenizer file is refused in words, or gives ids that its size and its library agree on."""

import base64
import json
from pathlib import Path

import pytest
from mutants import ALL, SAMPLE, ends_well, mutant

from titanlite.data.tokenizer import TiktokenTokenizer, load_tokenizer
from titanlite.data.tokenizer_files import tiktoken_to_json

TEXTS = ("def f(x):\n    return x  # Zürich 日本語 12345\r\n", "don't <|end_of_text|> \ud800 \x00", "", " " * 300)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    tokens = [bytes([byte]) for byte in range(256)] + [b"re", b"tu", b"rn", b"retu", b"return", b"  ", b"    ", b"ef"]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "tokenizer.model").write_text("".join(lines))
    tiktoken_to_json(TiktokenTokenizer(folder / "tokenizer.model")).save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>", "model_max_length": 10}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("count", [SAMPLE, ALL])
def test_mutants_of_a_tiktoken_file(tmp_path, good, count):
    content, taken = (good / "tokenizer.model").read_bytes(), 0
    for number in range(count):
        path = tmp_path / "tokenizer.model"
        path.write_bytes(mutant(content, number))

        def act(path=path):
            tokenizer = load_tokenizer(path)
            for text in TEXTS:
                ids = tokenizer.encode(text)
                assert tokenizer.decode(ids) == text.replace("\ud800", "\ufffd")
                assert max(ids, default=0) < tokenizer.vocab_size - 256

        taken += ends_well(number, act)
    assert 0 < taken < count / 2


@pytest.mark.parametrize("count", [SAMPLE, ALL])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_mutants_of_hugging_faces_files(tmp_path, good, count, name):
    from tokenizers import Tokenizer

    taken = 0
    for number in range(count if name == "tokenizer.json" else count // 4):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            content = (good / file).read_bytes()
            (tmp_path / file).write_bytes(mutant(content, number, is_json=True) if file == name else content)
        path = tmp_path / "tokenizer.json"

        def act(path=path):
            tokenizer = load_tokenizer(path)
            assert tokenizer.eos_id < tokenizer.vocab_size
            theirs = Tokenizer.from_file(str(path))
            theirs.no_truncation()
            theirs.no_padding()
            theirs.encode_special_tokens = True
            for text in TEXTS:
                ids = tokenizer.encode(text)
                assert ids == theirs.encode(text.replace("\ud800", "\ufffd"), add_special_tokens=False).ids
                assert max(ids, default=0) < tokenizer.vocab_size
                tokenizer.decode(ids)

        taken += ends_well(number, act)
    assert taken > 0
