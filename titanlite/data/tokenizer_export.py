"""A tokenizer in the format of a Hugging Face folder, which other programs read.

Invariant: the converted tokenizer gives the same ids as the original.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pydantic import RootModel

from titanlite.config.files import exists, file_inside, parse_json, read_file
from titanlite.data.bpe import tiktoken_to_json
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.tokenizer_file import MOST_BYTES


def write_tokenizer(path: Path, out: Path, max_seq_len: int) -> dict[str, int | None]:
    """Write the tokenizer of the file `path` into a Hugging Face folder. Tiktoken's format is converted.

    Args:
        max_seq_len: longest sequence of the model, in tokens.

    Returns:
        bos_token_id and eos_token_id.
    """
    tokenizer = load_tokenizer(path)
    if path.suffix == ".json":
        shutil.copyfile(path, out / "tokenizer.json")
    else:
        tiktoken_to_json(path, out / "tokenizer.json")
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    names = {key.removesuffix("_id"): tokenizer.decode([token]) for key, token in ids.items() if token is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": max_seq_len}
    if path.suffix == ".json" and exists(path.with_name("tokenizer_config.json")):
        original = file_inside(path.parent, "tokenizer_config.json")  # it may have a chat template or other names
        config = parse_json(original, read_file(original, MOST_BYTES), RootModel[dict[str, Any]]).root
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return ids
