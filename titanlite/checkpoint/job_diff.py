"""What changed in a job between a save and its resume, and what that means for the run.

Invariant: each difference has one verdict. The result depends on the two jobs, and on what the loader says of the data,
because the loader compares its contents. A key that is not listed here counts as one that changes the curve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from titanlite.config.errors import UserError
from titanlite.config.mistakes import short
from titanlite.config.schema import SECTIONS

HARMLESS, CURVE, REFUSED = "harmless", "changes the curve", "refused"
REMEDY = (
    "Restore that, or start a new run in another job.dump_folder: from these weights, if model and tokenizer are the "
    'same, by checkpoint.initial_load_path = "{checkpoint}". If nothing but the data is another one, go on with it by '
    'dataset.on_change = "warn"; if it is the optimizer, by checkpoint.exclude_from_loading = ["optimizer"].'
)

_SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "tied_embeddings", "head_dim")
_SHAPE += ("qkv_bias", "qk_norm", "architecture")
_HARMLESS = {
    *("job", "validation", "parallelism", "activation_checkpoint", "compile", "checkpoint", "metrics", "profiling"),
    *("samples", "comm", "ema", "training.enable_cpu_offload", "training.deterministic"),
    *("training.init_dtype", "optimizer.implementation", "dataset.path", "dataset.streaming", "dataset.num_workers"),
    *("dataset.prefetch", "dataset.on_change", "training.num_threads"),
}
"""Sections and keys."""
_CURVE_KEYS = ("validation.holdout", "checkpoint.exclude_from_loading", "job.hooks")  # in harmless sections
_LOADER_KEYS = {  # where the data lies and how it is ordered: the loader compares what follows from them
    *("dataset.source", "dataset.path", "dataset.config", "dataset.split", "dataset.text_column", "dataset.sources"),
    *("dataset.seed", "dataset.packing", "training.seq_len", "validation.holdout"),
}
_MIX_KEYS = ("weight", "max_epochs")  # of a table of dataset.sources, beside those of any source

DataChanges = tuple[list[str], list[str]]
"""`Loader.compare`: what makes the saved place meaningless, and other contents, for which dataset.on_change decides."""


def compare_jobs(
    before: Mapping[str, Any], now: Mapping[str, Any], data: DataChanges | None = None
) -> list[tuple[str, str]]:
    """Compare the job of a checkpoint with the one that resumes from it.

    Args:
        before, now: `JobConfig.model_dump(mode="json")`, with the architecture for [model]. Keys that only one has (of
            another version) are skipped, and so are the keys of the tokenizer, because its ids are compared.
        data: what the loader says of the place in the data; None if the data starts afresh. The loader decides about
            the keys that say where the data lies and how it is ordered.

    Returns:
        Verdict and line of each difference, what is refused last. The line is "section.key: before -> now" where it is
        a difference of a key.
    """
    old, new = flat(before), flat(now)
    other_data = REFUSED if new["dataset.on_change"] == "error" else CURVE
    changes = []
    for name in old.keys() & new.keys() - {"tokenizer.path", "tokenizer.name"}:
        if old[name] != new[name] and (verdict := _verdict(name, old, new, data, other_data)):
            changes.append((verdict, f"{name}: {short(str(old[name]))} -> {short(str(new[name]))}"))
    for verdict, lines in zip((REFUSED, other_data), data or (), strict=False):
        changes += [(verdict, line) for line in lines]
    return sorted(changes, key=lambda change: ((HARMLESS, CURVE, REFUSED).index(change[0]), change[1]))


def say_changes(path: PurePath, changes: Sequence[tuple[str, str]], log: Callable[[str], None]) -> None:
    """Log what has changed since a checkpoint. Raises UserError: this job cannot go on from there."""
    for verdict, line in (change for change in changes if change[0] != REFUSED):
        log(f"changed since {path.name}: {line} ({verdict})")
    if refused := [line for verdict, line in changes if verdict == REFUSED]:
        listed = "\n  ".join([f"{path} cannot be resumed from by this job:", *refused])
        raise UserError(f"{listed}\n{REMEDY.format(checkpoint=path)}")


def flat(table: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    """Each value of nested tables by its full name, those of a list of tables by its number, too, such as
    dataset.sources.0.path."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            found[f"{above}{name}"] = f"{len(value)} tables"
            value = dict(enumerate(value))
        found |= flat(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return found


def _verdict(
    name: str, old: dict[str, Any], new: dict[str, Any], data: DataChanges | None, other_data: str
) -> str | None:
    """None: another line says it, such as the loader's own words."""
    section, key = name.split(".")[0], name.split(".")[-1]
    if name == "optimizer.name":  # its state has other tensors
        return CURVE if "optimizer" in new["checkpoint.exclude_from_loading"] else REFUSED
    if section == "model" and f"{new['model.architecture']}.{key}" in new:
        return None  # it has a line already, as a key of the architecture's own table
    if section == "model":
        return REFUSED if key in _SHAPE else CURVE
    if name.startswith("dataset.sources."):
        if key in _MIX_KEYS:
            return CURVE if data is None else other_data
        name = f"dataset.{key}"
    if data is not None and (name in _LOADER_KEYS or (name == "training.seed" and new["dataset.seed"] is None)):
        return None if any(data) else HARMLESS
    if name == "training.local_batch_size" and old.get("training.global_batch_size", -1) != -1:
        # A global batch size that is written out fixes what a step sees; another one has a line of its own.
        return HARMLESS
    if {name, section} & _HARMLESS and name not in _CURVE_KEYS:
        return HARMLESS
    return SECTIONS[section].on_resume if section in SECTIONS else CURVE
