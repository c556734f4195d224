"""A damaged tokenizer file is refused in words, or gives ids that its size and its library agree on."""

import base64
import json

import pytest
from mutants import ALL, SAMPLE, ends_well, mutant
from tokenizers import Tokenizer

from titanlite.data.tokenizer import TiktokenTokenizer, load_tokenizer
from titanlite.data.tokenizer_files import tiktoken_to_json

TEXTS = ("def f(x):\n    return x  # Zürich 日本語 12345\r\n", "don't <|end_of_text|> \ud800 \x00", "", " " * 300)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    tokens = [bytes([byte]) for byte in range(256)] + [b"re", b"tu", b"rn", b"retu", b"return", b"  ", b"    ", b"ef"]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (folder / "tokenizer.model").write_text("".join(lines))
    tiktoken_to_json(TiktokenTokenizer(folder / "tokenizer.model")).save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>", "model_max_length": 10}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("count", [SAMPLE, ALL])
@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", "tokenizer_config.json"])
def test_mutants(tmp_path, good, count, name):
    path, taken = tmp_path / ("tokenizer.model" if name == "tokenizer.model" else "tokenizer.json"), 0

    def act():
        tokenizer = load_tokenizer(path)
        if name == "tokenizer.model":
            size, expected = tokenizer.vocab_size - 256, lambda text: tokenizer.encode(text)
        else:
            size, theirs = tokenizer.vocab_size, Tokenizer.from_file(str(path))
            theirs.no_truncation()
            theirs.no_padding()
            theirs.encode_special_tokens = True
            expected = lambda text: theirs.encode(text, add_special_tokens=False).ids  # noqa: E731
        for text in TEXTS:
            ids, whole = tokenizer.encode(text), text.replace("\ud800", "\ufffd")
            assert ids == expected(whole)
            assert max(ids, default=0) < size
            assert tokenizer.decode(ids) == whole or name != "tokenizer.model"

    for number in range(count if name != "tokenizer_config.json" else count // 4):
        for file, content in good.items():
            damaged = mutant(content, number, is_json=name != "tokenizer.model") if file == name else content
            (tmp_path / file).write_bytes(damaged)
        taken += ends_well(number, act)
    assert taken > 0
    assert name != "tokenizer.model" or taken < count / 2
