"""What changed in a job between a save and its resume, and what that means for the run.

Invariant: each difference has one verdict, and one remedy fits all of them. The result depends on the two job files,
and on what the loader says of the data, because the loader compares its contents. A key that is not listed here counts
as one that changes the curve.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from pydantic import ValidationError

from titanlite.config.files import short
from titanlite.config.run import architecture
from titanlite.config.schema import Model

HARMLESS, CURVE = "harmless", "changes the curve"
MODEL, ORDER, DATA = "refused: another model", "refused: another order of data", "refused: other data"
REMEDIES = {
    MODEL: "Restore what was saved, or start a new run in another job.dump_folder.",
    ORDER: "Restore that, or start a new run from the weights of this one: another job.dump_folder, and "
    'checkpoint.initial_load_path = "{checkpoint}".',
    DATA: 'Restore the data, or go on with the new data by dataset.on_change = "warn".',
}
"""Of what is refused. The first verdict that was given decides, because its remedy fits those after it."""

_ORDER_OF_VERDICTS = (HARMLESS, CURVE, *REMEDIES)
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

DataChanges = tuple[list[str], list[str]]
"""`Loader.compare`: what makes the saved place meaningless, and other contents, for which dataset.on_change decides."""


def compare_jobs(
    before: dict[str, Any], now: dict[str, Any], *, same_tokenizer: bool = True, data: DataChanges | None = None
) -> list[tuple[str, str]]:
    """Compare the job of a checkpoint with the one that resumes from it.

    Args:
        before, now: `JobConfig.model_dump(mode="json")`. Keys that only one has (of another version) are skipped.
        same_tokenizer: whether the ids still mean what they meant; a tokenizer that only moved is the same.
        data: what the loader says of the place in the data; None if the data starts afresh. The loader decides about
            the keys that say where the data lies and how it is ordered.

    Returns:
        Verdict and line of each difference, what is refused last. The line is "section.key: before -> now" where it is
        a difference of a key.
    """
    old, new = _flat(before), _flat(now)
    changes = []
    if not same_tokenizer:
        path = f"{short(str(old.pop('tokenizer.path', None)))} -> {short(str(new['tokenizer.path']))}"
        changes.append((MODEL, f"tokenizer.path: {path}, whose ids mean other text"))
    for name in old.keys() & new.keys():
        if old[name] != new[name] and (verdict := _verdict(name, old, new, data)):
            changes.append((verdict, f"{name}: {short(str(old[name]))} -> {short(str(new[name]))}"))
    for verdict, lines in zip((ORDER, _of_other_data(new)), data or (), strict=False):
        changes += [(verdict, line) for line in lines]
    return sorted(changes, key=lambda change: (_ORDER_OF_VERDICTS.index(change[0]), change[1]))


def _flat(job: dict[str, Any]) -> dict[str, Any]:
    """Each key by its full name, those of a mix such as dataset.sources.0.path. A flavor and its keys written out are
    the same model, so the model is what they stand for; that of another version is left out."""
    flat = {f"{section}.{key}": value for section in job.keys() - {"model"} for key, value in job[section].items()}
    with contextlib.suppress(ValidationError, KeyError, TypeError):
        flat |= {
            f"model.{key}": value for key, value in dataclasses.asdict(architecture(Model(**job["model"]))).items()
        }
    tables = flat.get("dataset.sources") or []
    for number, table in enumerate(tables):
        flat |= {f"dataset.sources.{number}.{key}": value for key, value in table.items()}
    return flat | {"dataset.sources": f"{len(tables)} tables"}


def _of_other_data(new: dict[str, Any]) -> str:
    return DATA if new["dataset.on_change"] == "error" else CURVE


def _verdict(name: str, old: dict[str, Any], new: dict[str, Any], data: DataChanges | None) -> str | None:
    """None: the loader says it in its own words."""
    section, key = name.split(".")[0], name.split(".")[-1]
    if section == "model":
        return MODEL if key in _SHAPE else CURVE
    if name.startswith("dataset.sources."):
        if key in _MIX_KEYS:
            return CURVE if data is None else _of_other_data(new)
        name = f"dataset.{key}"
    if data is not None and (name in _LOADER_KEYS or (name == "training.seed" and new["dataset.seed"] is None)):
        return None if any(data) else HARMLESS
    if name == "training.local_batch_size" and old.get("training.global_batch_size", -1) != -1:
        # A global batch size that is written out fixes what a step sees; another one has a line of its own.
        return HARMLESS
    return HARMLESS if {name, section} & _HARMLESS and name not in _CURVE_KEYS else CURVE
