"""What export and import share: the folder that they make, and the tokenizer in the format that others read.

Invariant: the converted tokenizer gives the same ids as the original.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from titanlite.config.errors import UserError


def make_folder(path: Path) -> Path:
    """Raises UserError: `path` is a file or under one, or may not be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be made: {error.strerror}. Choose another folder.") from None
    return path


def write_tokenizer(path: Path, out: Path, max_seq_len: int) -> dict[str, int | None]:
    """Put a tokenizer into a Hugging Face folder; tiktoken's format is converted.

    Returns:
        bos_token_id and eos_token_id.
    """
    from titanlite.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    if path.suffix == ".json":
        shutil.copyfile(path, out / "tokenizer.json")
    else:
        tiktoken_to_json(path, out / "tokenizer.json")
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    names = {key.removesuffix("_id"): tokenizer.decode([token]) for key, token in ids.items() if token is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": max_seq_len}
    original = path.with_name("tokenizer_config.json")
    if path.suffix == ".json" and original.is_file():  # it may hold a chat template, and names that are no standard
        config = json.loads(original.read_text())
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return ids


def tiktoken_to_json(path: Path, out: Path) -> None:
    """Convert Llama 3's tokenizer.model into a tokenizer.json that gives the same ids, and puts bos before a text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    from titanlite.data.tokenizer import LLAMA3_PATTERN, TiktokenTokenizer, byte_level_symbols, llama3_special_tokens

    source = TiktokenTokenizer(path)
    specials = llama3_special_tokens()
    symbols = {byte: symbol for symbol, byte in byte_level_symbols().items()}
    tokens = [
        "".join(symbols[byte] for byte in source.token_bytes(token))
        for token in range(source.vocab_size - len(specials))
    ]
    known = set(tokens)
    # tiktoken joins any neighbours whose bytes together are a token; tokenizers joins listed pairs only: list them all.
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    result = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore[assignment]
    result.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    result.add_special_tokens([AddedToken(name, special=True) for name in specials])
    bos = specials[0]
    begin = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, len(tokens))])
    result.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])  # type: ignore[assignment]
    result.save(str(out), pretty=False)
