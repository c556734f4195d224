"""torchtitan's keys, from `keys.toml` beside this file, and its Llama flavors.

Invariant: each key of torchtitan's schemas is in exactly one of EQUIVALENT, CONVERTED and WITHOUT.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import tomli

from titanlite.config.flavors import FLAVORS, Architecture

Version = Literal["0.1", "0.2"]
ROPE_SCALING_FACTOR: dict[Version, float] = {"0.1": 1.0, "0.2": 8.0}
"""The rotary scaling of all models of a version: 0.1 has none, 0.2 has that of Llama 3.1."""

_FILE: dict[str, Any] = tomli.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8"))
EQUIVALENT: dict[str, str] = {
    f"{section}.{key}": f"{section}.{key}" for section, keys in _FILE["same"].items() for key in keys.split()
} | _FILE["renamed"]
"""Key of torchtitan's -> key of ours. `titanlite.torchtitan.migrate` translates the values of some."""
CONVERTED: frozenset[str] = frozenset(_FILE["converted"]["keys"].split())
"""Keys that several keys of ours follow from together."""
WITHOUT: dict[str, str] = {key: group["reason"] for group in _FILE["without"] for key in group["keys"].split()}
"""Key without an equivalent -> the reason, and what to do."""
DEFAULTS: dict[str, Any] = _FILE["defaults"]
"""What torchtitan does where a file says nothing, and titanlite does otherwise: key of ours -> value."""
SECTIONS = frozenset(key.partition(".")[0] for key in (*EQUIVALENT, *CONVERTED, *WITHOUT))

_DEBUG = Architecture(256, 6, 16, 16, 768, vocab_size=2048, rope_theta=500000.0)
_MODELS = {"debugmodel": _DEBUG, **{name.upper(): FLAVORS[name] for name in ("8b", "70b", "405b")}}
MASKED = ("debugmodel_flex_attn", "debugmodel_varlen_attn", "8B_flex", "8B_varlen")
"""Flavors in which a token attends to its own document only."""
TORCHTITAN_FLAVORS = _MODELS | {name: _MODELS[name.partition("_")[0]] for name in MASKED}


def version_of(keys: Collection[str]) -> Version:
    """The version of a job file with these keys. What both versions have is read as 0.2, and so is a mixture."""
    words = {*keys, *(key.partition(".")[0] for key in keys)}
    old, new = (words.intersection(_FILE["only_in"][version].split()) for version in ("0.1", "0.2"))
    return "0.1" if old and not new else "0.2"
