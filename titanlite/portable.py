"""What export and import share: the folder that they make, and the tokenizer in the format that others read.

Invariant: the converted tokenizer gives the same ids as the original.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pydantic import RootModel

from titanlite.config.errors import UserError
from titanlite.config.files import exists, file_inside, not_writable, parse_json, read_file


def make_folder(path: Path) -> Path:
    """Raises UserError: `path` is a file or under one, or cannot be written to."""
    if problem := not_writable(path.absolute()):
        raise UserError(f"{path} cannot be made: {problem}")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_tokenizer(path: Path, out: Path, max_seq_len: int) -> dict[str, int | None]:
    """Put a tokenizer into a Hugging Face folder; tiktoken's format is converted.

    Returns:
        bos_token_id and eos_token_id.
    """
    from titanlite.data.bpe import tiktoken_to_json
    from titanlite.data.tokenizer import MOST_BYTES, load_tokenizer

    tokenizer = load_tokenizer(path)
    if path.suffix == ".json":
        shutil.copyfile(path, out / "tokenizer.json")
    else:
        tiktoken_to_json(path, out / "tokenizer.json")
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    names = {key.removesuffix("_id"): tokenizer.decode([token]) for key, token in ids.items() if token is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": max_seq_len}
    if path.suffix == ".json" and exists(path.with_name("tokenizer_config.json")):
        original = file_inside(path.parent, "tokenizer_config.json")  # with a chat template, say, or other names
        config = parse_json(original, read_file(original, MOST_BYTES), RootModel[dict[str, Any]]).root
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return ids
