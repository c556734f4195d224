"""What changed in a job between a save and its resume, and what that means for the run.

Invariant: each difference has one verdict, and one remedy fits all of them. The result depends on the two job files,
and on what the loader says of the data, because the loader compares its contents. A key that is not listed here counts
as one that changes the curve.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titanlite.config.flavors import architecture
from titanlite.config.mistakes import shown
from titanlite.config.schema import Model

_SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "tied_embeddings")
_HARMLESS = {
    *("job", "validation", "parallelism", "activation_checkpoint", "compile", "checkpoint", "metrics", "profiling"),
    *("samples", "comm", "training.enable_cpu_offload", "training.deterministic", "training.num_threads"),
    *("training.init_dtype", "optimizer.implementation", "dataset.path", "dataset.streaming", "dataset.num_workers"),
    *("dataset.prefetch", "dataset.on_change", "tokenizer"),  # whose file is compared by its fingerprint
}
"""Sections and keys."""
_CURVE_KEYS = ("validation.holdout", "checkpoint.exclude_from_loading")  # exceptions from harmless sections
_LOADER_KEYS = {  # where the data lies and how it is ordered: the loader compares what follows from them
    *("dataset.source", "dataset.path", "dataset.config", "dataset.split", "dataset.text_column", "dataset.sources"),
    *("dataset.seed", "dataset.packing", "training.seq_len", "validation.holdout"),
}
_MIX_KEYS = ("weight", "max_epochs")  # of a table of dataset.sources, beside those of any source

DataChanges = tuple[list[str], list[str], list[str]]
"""`Loader.compare`: what makes the saved place meaningless; what else is refused; what the user has accepted."""


@dataclass(frozen=True)
class Changes:
    """One line for each difference, "section.key: before -> now" where it is one of a key, by what it means."""

    harmless: list[str] = field(default_factory=list)
    """The same curve, up to the order of floating-point sums."""
    curve: list[str] = field(default_factory=list)
    """The run goes on, but not as it would have."""
    other_model: list[str] = field(default_factory=list)
    """Refused: the weights mean nothing in this job."""
    other_order: list[str] = field(default_factory=list)
    """Refused: the weights fit, the place in the data does not."""
    other_data: list[str] = field(default_factory=list)
    """Refused, unless dataset.on_change = "warn"."""
    saved_model: list[str] = field(default_factory=list)
    """The keys of the model that differ, as the checkpoint has them: "model.dim = 256"."""

    @property
    def refused(self) -> list[str]:
        """All that keeps the run from going on."""
        return [*self.other_model, *self.other_order, *self.other_data]

    def differences(self) -> list[str]:
        """All lines, without what they mean for the run."""
        return [*self.harmless, *self.curve, *self.refused]

    def lines(self) -> list[str]:
        """For the log; empty if nothing changed."""
        labelled = [("harmless", self.harmless), ("changes the curve", self.curve), ("refused", self.refused)]
        return [f"{line} ({label})" for label, lines in labelled for line in lines]

    def remedy(self, path: Path) -> str:
        """What a person does about what is refused.

        Args:
            path: the checkpoint.
        """
        if self.other_model:
            keys = f" ({', '.join(self.saved_model)})" if self.saved_model else ""
            return f"Restore that{keys}, or start a new run in another job.dump_folder."
        if self.other_order:
            new = f'another job.dump_folder, and checkpoint.initial_load_path = "{path}"'
            return f"Restore that, or start a new run from the weights of this one: {new}."
        return 'Restore the data, or go on with the new data by dataset.on_change = "warn".'


def compare_jobs(
    before: dict[str, Any], now: dict[str, Any], *, same_tokenizer: bool = True, data: DataChanges | None = None
) -> Changes:
    """Compare the job of a checkpoint with the one that resumes from it.

    Args:
        before, now: `JobConfig.model_dump(mode="json")`. Keys that only one has (of another version) are skipped.
        same_tokenizer: whether the ids still mean what they meant; a tokenizer that only moved is the same.
        data: what the loader says of the place in the data; None if the data starts afresh. The loader decides about
            the keys that say where the data lies and how it is ordered.
    """
    changes = Changes()
    if not same_tokenizer:
        old, new = (_value(job, "tokenizer.path") for job in (before, now))
        where = f"{old} has other contents" if old == new else f"{_shown(old)} -> {_shown(new)}"
        changes.other_model.append(f"tokenizer.path: {where}, which gives the ids of the vocabulary another meaning")
        before, now = ({**job, "tokenizer": {}} for job in (before, now))
    _compare_models(before.get("model"), now["model"], changes)
    before, now = ({**job, "dataset": _table_by_table(job.get("dataset", {}))} for job in (before, now))
    for section in before.keys() & now.keys() - {"model"}:
        for key in before[section].keys() & now[section].keys():
            if before[section][key] != now[section][key]:
                line = f"{section}.{key}: {_shown(before[section][key])} -> {_shown(now[section][key])}"
                _class_of(f"{section}.{key}", before, now, data, changes).append(line)
    for lines, found in zip((changes.other_order, changes.other_data, changes.curve), data or ((),) * 3, strict=True):
        lines.extend(found)
    for lines in vars(changes).values():
        lines.sort()
    return changes


def _value(job: dict[str, Any], name: str) -> Any:
    section, key = name.split(".")
    return job.get(section, {}).get(key)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _table_by_table(dataset: dict[str, Any]) -> dict[str, Any]:
    """Each key of a mix by a name of its own, such as sources.0.path."""
    sources = dataset.get("sources")
    if not isinstance(sources, list) or not all(isinstance(table, dict) for table in sources):
        return dataset  # of another version
    flat = {f"sources.{number}.{key}": value for number, table in enumerate(sources) for key, value in table.items()}
    return dataset | {"sources": f"{len(sources)} tables"} | flat


def _compare_models(before: Any, now: dict[str, Any], changes: Changes) -> None:
    """A flavor and its keys written out are the same model: compare what they stand for."""
    try:
        old, new = (dataclasses.asdict(architecture(Model(**model))) for model in (before, now))
    except (ValidationError, KeyError, TypeError):
        return  # of another version; the tensors' shapes will tell
    for key in old:
        if old[key] != new[key]:
            lines = changes.other_model if key in _SHAPE else changes.curve
            lines.append(f"model.{key}: {old[key]} -> {new[key]}")
            if key in _SHAPE:
                changes.saved_model.append(f"model.{key} = {shown(old[key])}")


def _class_of(name: str, before: Any, now: Any, data: DataChanges | None, changes: Changes) -> list[str]:
    section, key = name.split(".")[0], name.split(".")[-1]
    if name.startswith("dataset.sources."):
        if key in _MIX_KEYS:
            refused = data is not None and _value(now, "dataset.on_change") == "error"
            return changes.other_data if refused else changes.curve
        name = f"dataset.{key}"
    if data is not None and (name in _LOADER_KEYS or (name == "training.seed" and _value(now, "dataset.seed") is None)):
        return [] if any(data) else changes.harmless  # the loader says it in its own words
    if name in _HARMLESS or (section in _HARMLESS and name not in _CURVE_KEYS):
        return changes.harmless
    if name == "training.local_batch_size":  # a global batch size that is written out fixes what a step sees
        size = _value(now, "training.global_batch_size")
        return changes.harmless if _value(before, "training.global_batch_size") == size != -1 else changes.curve
    return changes.curve
