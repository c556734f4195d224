"""Fingerprints of tokenizers: of the ids that they compute, not of the files that say so.

Invariant: what decides about an id of a text is in the fingerprint, and nothing else is: no path, no order of keys, no
setting that only other programs read. A tokenizer.json that computes what a tokenizer.model does has its fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_IGNORED = (
    "version",
    "truncation",
    "padding",
    "post_processor",
    "decoder",
)  # of a tokenizer.json; encoding does without them
_DEFAULTS = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}


def of_ranks(
    pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int], bos_id: int | None, eos_id: int
) -> str:
    """Of a byte-level BPE in tiktoken's way: texts are split by `pattern`; of the neighbours in a piece whose bytes
    together are a token, the one of the lowest rank is joined first."""
    digest = hashlib.sha256(json.dumps([pattern, sorted(special.items()), bos_id, eos_id]).encode())
    for token, rank in sorted(ranks.items()):
        digest.update(b"%d %d " % (rank, len(token)) + token)
    return f"ids:{digest.hexdigest()}"


def of_json(raw: bytes, byte_level: Mapping[str, int], bos_id: int | None, eos_id: int) -> str:
    """Of a tokenizer.json, which the tokenizers library has taken.

    Args:
        byte_level: the byte that a symbol of a byte-level vocabulary stands for.
    """
    value = json.loads(raw)
    if (pattern := _pattern_of_ranks(value)) is not None:
        vocab = value["model"]["vocab"]
        ranks = {bytes(byte_level[symbol] for symbol in token): rank for token, rank in vocab.items()}
        special = {token["content"]: token["id"] for token in value["added_tokens"]}
        return of_ranks(pattern, ranks, special, bos_id, eos_id)
    kept = {key: part for key, part in value.items() if key not in _IGNORED}
    text = json.dumps([kept, bos_id, eos_id], sort_keys=True)
    return f"ids:{hashlib.sha256(text.encode()).hexdigest()}"


def _pattern_of_ranks(value: Any) -> str | None:
    """The pattern, if this tokenizer.json is a byte-level BPE that joins by rank, as tiktoken does; else None."""
    model, before = value["model"], value.get("pre_tokenizer") or {}
    parts = before.get("pretokenizers", ())
    if value.get("normalizer") or [part.get("type") for part in parts] != ["Split", "ByteLevel"]:
        return None
    split, level = parts
    plain = (
        model.get("type") == "BPE"
        and model.get("ignore_merges") is True  # a piece that is a token is that token
        and not model.get("byte_fallback")
        and all(model.get(key) == default for key, default in _DEFAULTS.items())
        and (split.get("behavior"), bool(split.get("invert"))) == ("Isolated", False)
        and not level.get("add_prefix_space", True)
        and not level.get("use_regex", True)
        and all(token.get("special") for token in value.get("added_tokens") or [])
    )
    pattern = split.get("pattern", {}).get("Regex")
    return pattern if plain and _joins_by_rank(model["vocab"], model["merges"]) else None


def _joins_by_rank(vocab: dict[str, int], merges: list[Any]) -> bool:
    """Whether any neighbours that make a token are joined, and those of a lower rank first."""
    pairs = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in merges]
    made = [vocab.get("".join(pair), -1) for pair in pairs]
    splits = {(t[:cut], t[cut:]) for t in vocab for cut in range(1, len(t)) if t[:cut] in vocab and t[cut:] in vocab}
    return made == sorted(made) and len(pairs) == len(splits) and set(pairs) == splits
