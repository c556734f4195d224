"""List the keys of torchtitan job files, from keys.toml, and the flavors of Llama 3 and Qwen3.

A flavor is a named model size, such as "8B".

Invariant: Each key of the torchtitan schemas is in exactly one of EQUIVALENT, CONVERTED and
WITHOUT_EQUIVALENT.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import tomli

from titanlite.config.flavors import FLAVORS, Architecture

Version = Literal["0.1", "0.2"]
"""torchtitan version of a job file. Version 0.3 has no job files, only resolved configs."""
ROPE_SCALING_FACTOR = {"0.1": 1.0, "0.2": 8.0, "0.3": 8.0}
"""RoPE scaling factor of llama3 in each torchtitan version. Version 0.1 does not scale."""

_FILE: dict[str, Any] = tomli.loads(
    Path(__file__).with_name("keys.toml").read_text(encoding="utf-8")
)


def _list_equivalents() -> dict[str, str]:
    """Map each torchtitan key to the titanlite key with the same meaning.

    For example, {"training.steps": "training.steps", "training.compile": "compile.enable", ...}.
    """
    equivalents: dict[str, str] = {}
    for section, names in _FILE["same"].items():
        for name in names.split():
            key = f"{section}.{name}"
            equivalents[key] = key
    return equivalents | _FILE["renamed"]


EQUIVALENT: dict[str, str] = _list_equivalents()
"""titanlite key with the same meaning, by torchtitan key.

For some keys, `titanlite.torchtitan.migrate` also converts the value.
"""
CONVERTED: frozenset[str] = frozenset(_FILE["converted"]["keys"].split())
"""torchtitan keys that affect several titanlite keys. `migrate.Migration` converts them."""
WITHOUT_EQUIVALENT: dict[str, str] = {
    key: group["reason"] for group in _FILE["without"] for key in group["keys"].split()
}
"""Reason why a torchtitan key has no equivalent, and what to do instead, by torchtitan key."""
DEFAULTS: dict[str, Any] = _FILE["defaults"]
"""torchtitan default of each titanlite key whose default differs."""
MOVED: dict[str, str] = _FILE["moved"]
"""Name in torchtitan 0.2 of each key or section that 0.3 renamed."""
UNUSED: dict[str, Any] = _FILE["unused"]
"""Default of each torchtitan 0.3 key without an equivalent. Only other values are reported."""
KEYS = frozenset((*EQUIVALENT, *CONVERTED, *WITHOUT_EQUIVALENT))
"""torchtitan keys of all versions. Keys that 0.3 renamed (see `MOVED`) have their 0.2 names."""
SECTIONS = frozenset(key.partition(".")[0] for key in KEYS)

_LLAMA3 = {
    "debugmodel": Architecture(256, 6, 16, 16, 768, vocab_size=2048, rope_theta=500000.0),
    "1B": FLAVORS["1b"],
    "3B": FLAVORS["3b"],
    "8B": FLAVORS["8b"],
    "70B": FLAVORS["70b"],
    "405B": FLAVORS["405b"],
}
FLAVORS_WITH_DOCUMENT_MASK = {
    "debugmodel_flex_attn": _LLAMA3["debugmodel"],
    "debugmodel_varlen_attn": _LLAMA3["debugmodel"],
    "8B_flex": _LLAMA3["8B"],
    "8B_varlen": _LLAMA3["8B"],
}
"""Flavors of llama3 in which tokens attend only to tokens of the same document."""
TORCHTITAN_FLAVORS: dict[str, dict[str, Architecture]] = {
    "llama3": _LLAMA3 | FLAVORS_WITH_DOCUMENT_MASK,
    "qwen3": {
        "0.6B": FLAVORS["qwen3-0.6b"],
        "1.7B": FLAVORS["qwen3-1.7b"],
        "4B": FLAVORS["qwen3-4b"],
        "8B": FLAVORS["qwen3-8b"],
    },
}
"""Architectures by model.name and model.flavor. RoPE scaling of llama3 depends on the version."""


def detect_version(keys: Collection[str]) -> Version:
    """Detect from the keys of a job file which torchtitan version it was written for.

    Returns:
        "0.1" if the file has keys that exist only in 0.1 and none that exist only in 0.2, otherwise
        "0.2".
    """
    names = {*keys, *(key.partition(".")[0] for key in keys)}  # keys and sections
    only_in_01 = _FILE["only_in"]["0.1"].split()
    only_in_02 = _FILE["only_in"]["0.2"].split()
    is_01 = not names.isdisjoint(only_in_01) and names.isdisjoint(only_in_02)
    return "0.1" if is_01 else "0.2"


def rename_key(key: str) -> str:
    """Return the torchtitan 0.2 name of a torchtitan 0.3 key. The names may be equal.

    For example, "profiler.enable_profiling" becomes "profiling.enable_profiling".
    """
    for name, old_name in MOVED.items():
        # `name` is the whole key, or its first parts.
        if f"{key}.".startswith(f"{name}."):
            return old_name + key.removeprefix(name)
    return key


def drop_unused(values: dict[str, Any]) -> dict[str, Any]:
    """Remove values that need not be converted from a resolved torchtitan config.

    These are null values, and default values of keys without a titanlite equivalent (`UNUSED`).
    """
    return {
        key: value
        for key, value in values.items()
        if value is not None and (key not in UNUSED or UNUSED[key] != value)
    }
