"""What changed in a job between a save and its resume, and what that means for the run.

Invariant: a pure function of two job files. A key that nobody thought of counts as one that changes the curve. May
import config and model.flavors.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from titanlite.config.schema import Model
from titanlite.model.flavors import FLAVORS, architecture

_SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "tied_embeddings")
_HARMLESS_SECTIONS = (
    "job",
    "tokenizer",  # its path; what lies there is compared by its fingerprint
    "validation",
    "parallelism",
    "activation_checkpoint",
    "compile",
    "checkpoint",
    "metrics",
    "comm",
)
_HARMLESS_KEYS = (
    "training.enable_cpu_offload",
    "training.deterministic",
    "training.num_threads",
    "training.init_dtype",
    "optimizer.implementation",
    "dataset.path",  # the loader compares the contents
    "dataset.streaming",
    "dataset.num_workers",
    "dataset.prefetch",
    "dataset.on_change",
)
_CURVE_KEYS = ("validation.holdout", "checkpoint.exclude_from_loading")  # exceptions from harmless sections
_DATA_KEYS = ("dataset.source", "dataset.config", "dataset.split", "dataset.text_column", "dataset.sources")
_MIX_KEYS = ("weight", "max_epochs")  # of a table of dataset.sources, beside those of any source
_ORDER_KEYS = ("dataset.seed", "dataset.packing", "training.seq_len")  # the saved place has no meaning without them


@dataclass(frozen=True)
class Changes:
    """One line for each key that differs, "section.key: before -> now", by what it means."""

    harmless: list[str]
    """The same curve, up to the order of floating-point sums."""
    curve: list[str]
    """The run goes on, but not as it would have."""
    refused: list[str]
    """The checkpoint does not fit."""

    def lines(self) -> list[str]:
        """For the log; empty if nothing changed."""
        labelled = [("harmless", self.harmless), ("changes the curve", self.curve), ("refused", self.refused)]
        return [f"{line} ({label})" for label, lines in labelled for line in lines]


def compare_jobs(
    before: dict[str, Any], now: dict[str, Any], *, keeps_data: bool = True, same_tokenizer: bool = True
) -> Changes:
    """Compare the job of a checkpoint with the one that resumes from it.

    Args:
        before, now: `JobConfig.model_dump(mode="json")`. Keys that only one has (of another version) are skipped.
        keeps_data: whether the place in the data is resumed, too.
        same_tokenizer: whether the ids still mean what they meant; a tokenizer that only moved is the same.
    """
    changes = Changes([], [], [])
    if not same_tokenizer:
        paths = [job["tokenizer"]["path"] for job in (before, now)]
        where = f"{paths[0]} -> {paths[1]}" if paths[0] != paths[1] else f"{paths[0]} has other contents"
        changes.refused.append(f"tokenizer.path: {where}, which gives the ids of the vocabulary another meaning")
        now = now | {"tokenizer": before["tokenizer"]}
    _compare_models(before["model"], now["model"], changes)
    before, now = (job | {"dataset": _table_by_table(job["dataset"])} for job in (before, now))
    for section in before.keys() & now.keys() - {"model"}:
        for key in before[section].keys() & now[section].keys():
            if before[section][key] != now[section][key]:
                line = f"{section}.{key}: {before[section][key]} -> {now[section][key]}"
                _class_of(f"{section}.{key}", before, now, keeps_data, changes).append(line)
    for lines in (changes.harmless, changes.curve, changes.refused):
        lines.sort()
    return changes


def _table_by_table(dataset: dict[str, Any]) -> dict[str, Any]:
    """Each key of a mix by a name of its own, such as sources.0.path."""
    sources = dataset["sources"]
    flat = {f"sources.{number}.{key}": value for number, table in enumerate(sources) for key, value in table.items()}
    return dataset | {"sources": f"{len(sources)} tables"} | flat


def _compare_models(before: dict[str, Any], now: dict[str, Any], changes: Changes) -> None:
    """A flavor and its keys written out are the same model: compare what they stand for."""
    if before["flavor"] not in FLAVORS:
        return  # of another version; the tensors' shapes will tell
    old, new = (dataclasses.asdict(architecture(Model(**model))) for model in (before, now))
    for key in old:
        if old[key] != new[key]:
            lines = changes.refused if key in _SHAPE else changes.curve
            lines.append(f"model.{key}: {old[key]} -> {new[key]}")


def _class_of(name: str, before: dict[str, Any], now: dict[str, Any], keeps_data: bool, changes: Changes) -> list[str]:
    section, key = name.split(".")[0], name.split(".")[-1]
    if name.startswith("dataset.sources."):
        name = "dataset.sources" if key in _MIX_KEYS else f"dataset.{key}"
    if name in _HARMLESS_KEYS or (section in _HARMLESS_SECTIONS and name not in _CURVE_KEYS):
        return changes.harmless
    if name == "training.local_batch_size":  # a global batch size that is written out fixes what a step sees
        fixed = before["training"]["global_batch_size"] == now["training"]["global_batch_size"] != -1
        return changes.harmless if fixed else changes.curve
    if name == "training.seed" and now["dataset"]["seed"] is None and keeps_data:
        return changes.refused
    if name in _ORDER_KEYS and keeps_data:
        return changes.refused
    if name in _DATA_KEYS and keeps_data and now["dataset"]["on_change"] == "error":
        return changes.refused
    return changes.curve
