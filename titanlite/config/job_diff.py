"""Compare the job of a checkpoint with the job that resumes from it.

Each changed key is classified as compatible, affecting training, or incompatible. Keys that this
module does not list affect training. Changes of the data are found by the data loader, which
compares its contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

from titanlite.config.errors import UserError
from titanlite.config.mistakes import shorten
from titanlite.config.models import Section
from titanlite.config.schema import SECTIONS

Effect = Literal["compatible", "affects training", "incompatible"]
COMPATIBLE: Effect = "compatible"
AFFECTS_TRAINING: Effect = "affects training"
INCOMPATIBLE: Effect = "incompatible"
_ORDER = (COMPATIBLE, AFFECTS_TRAINING, INCOMPATIBLE)
_EFFECTS_IN_OLD_PLUGINS: dict[str, Effect] = {
    "harmless": COMPATIBLE,
    "changes the curve": AFFECTS_TRAINING,
    "refused": INCOMPATIBLE,
}
"""Value of `on_resume` in plugins written for titanlite 0.2 -> current value."""

DataChanges = tuple[list[str], list[str]]
"""Result of `Loader.compare`, two lists of descriptions:

- changes that make the saved data position meaningless, for example another sequence length;
- changed contents of files, which `dataset.on_change` allows or forbids.
"""

_REMEDY = """\
Restore these values, or start a new run in another job.dump_folder. If model and tokenizer are \
the same, it can start from these weights: checkpoint.initial_load_path = "{checkpoint}".
To resume although only data has changed, set dataset.on_change = "warn". To resume with a new \
optimizer state, set checkpoint.exclude_from_loading = ["optimizer"]."""

_COMPATIBLE_SECTIONS = {
    "activation_checkpoint",
    "checkpoint",
    "comm",
    "compile",
    "ema",
    "job",
    "metrics",
    "parallelism",
    "profiling",
    "samples",
    "validation",
}
_COMPATIBLE_KEYS = {
    "dataset.num_workers",
    "dataset.on_change",
    "dataset.path",
    "dataset.prefetch",
    "dataset.streaming",
    "optimizer.implementation",
    "training.deterministic",
    "training.enable_cpu_offload",
    "training.init_dtype",
    "training.num_threads",
}
# Exceptions: keys in compatible sections that affect training.
_AFFECTING_KEYS = {"checkpoint.exclude_from_loading", "job.hooks", "validation.holdout"}
# Location and order of the data. `Loader.compare` compares what follows from these keys.
_DATA_KEYS = {
    "dataset.config",
    "dataset.loss_mask_column",
    "dataset.packing",
    "dataset.path",
    "dataset.seed",
    "dataset.source",
    "dataset.sources",
    "dataset.split",
    "dataset.text_column",
    "dataset.token_dtype",
    "training.seq_len",
    "validation.holdout",
}
# Keys of [model] that change the shapes or names of parameters.
_SHAPE_KEYS = {
    "architecture",
    "dim",
    "ffn_dim",
    "head_dim",
    "n_heads",
    "n_kv_heads",
    "n_layers",
    "qk_norm",
    "qkv_bias",
    "tied_embeddings",
    "vocab_size",
}


def compare_jobs(
    before: Mapping[str, Any], now: Mapping[str, Any], data: DataChanges | None = None
) -> list[tuple[Effect, str]]:
    """List the differences between the job in a checkpoint and the job that resumes from it.

    Keys that only one of the jobs has are not compared: another version of titanlite has saved the
    checkpoint, or plugins have changed.

    Args:
        before: Job in the checkpoint: section -> key -> value. The section "model" contains all
            fields of the architecture.
        now: Job that resumes from the checkpoint, in the same form.
        data: Differences of the data, from `Loader.compare`. None if the run does not resume from
            the data position in the checkpoint.

    Returns:
        Effect and description of each difference, sorted by effect, incompatible ones last. A
        changed key is described as "section.key: before -> now".
    """
    old = flatten(before)
    new = flatten(now)
    changes: list[tuple[Effect, str]] = []
    data_key_changes: list[str] = []
    for name in old.keys() & new.keys():
        if old[name] == new[name] or _is_ignored(name, new):
            continue
        description = f"{name}: {shorten(str(old[name]))} -> {shorten(str(new[name]))}"
        if data is not None and _determines_data(name, new):
            data_key_changes.append(description)
        else:
            effect = _classify(name, old, new, resumes_data=data is not None)
            changes.append((effect, description))

    if data is not None:
        changes += _classify_data_changes(data, data_key_changes, new)
    return sorted(changes, key=lambda change: (_ORDER.index(change[0]), change[1]))


def _classify_data_changes(
    data: DataChanges, key_changes: list[str], new: dict[str, Any]
) -> list[tuple[Effect, str]]:
    """Return the effect and description of each difference of the data.

    If only keys have changed, but not the data, for example because its folder was renamed, return
    these keys as compatible.

    Args:
        data: Differences of the data, from `Loader.compare`.
        key_changes: Descriptions of changed keys that determine the data.
        new: Values of the job that resumes, by full name.
    """
    position_changes, content_changes = data
    if not position_changes and not content_changes:
        return [(COMPATIBLE, description) for description in key_changes]
    content_effect = INCOMPATIBLE if new["dataset.on_change"] == "error" else AFFECTS_TRAINING
    return [
        *((INCOMPATIBLE, description) for description in position_changes),
        *((content_effect, description) for description in content_changes),
    ]


def report_changes(
    path: PurePath, changes: Sequence[tuple[Effect, str]], log: Callable[[str], None]
) -> None:
    """Log the differences between a checkpoint and the job that resumes from it.

    Args:
        path: Path or URL of the checkpoint, for messages.
        changes: Effect and description of each difference, from `compare_jobs`.
        log: Called with one line of text for each difference that is not incompatible.

    Raises:
        UserError: If there are incompatible differences. The message lists them.
    """
    incompatible = []
    for effect, description in changes:
        if effect == INCOMPATIBLE:
            incompatible.append(description)
        else:
            log(f"Changed since {path.name}: {description} ({effect})")

    if incompatible:
        lines = "\n  ".join([f"This job cannot resume from {path}:", *incompatible])
        remedy = _REMEDY.format(checkpoint=path)
        raise UserError(f"{lines}\n{remedy}")


def flatten(table: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested dictionaries to a flat dictionary, with keys such as "training.steps".

    Dictionaries in a list are numbered. For example, {"sources": [{"path": "a"}]} becomes
    {"sources": "1 tables", "sources.0.path": "a"}.

    Args:
        table: The nested dictionaries.
        prefix: Text to put in front of each key, such as "dataset.".
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        is_list_of_tables = isinstance(value, list) and value and isinstance(value[0], dict)
        if is_list_of_tables:
            flat[name] = f"{len(value)} tables"
            numbered_tables = dict(enumerate(value))
            flat |= flatten(numbered_tables, f"{name}.")
        elif isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _is_ignored(name: str, new: dict[str, Any]) -> bool:
    """Return whether a changed key does not count as a difference, for example "auto".

    Args:
        name: Full name of the key, such as "model.dim".
        new: Values of the job that resumes, by full name.
    """
    if name in ("tokenizer.path", "tokenizer.name"):
        return True  # token IDs are compared instead
    # "auto" keeps the dtype of the checkpoint, and chooses a backend for the device.
    has_auto = name in ("training.mixed_precision_param", "model.attention_backend")
    if has_auto and new[name] == "auto":
        return True

    # The keys of a plugin architecture are also in the section of the plugin. Report them there.
    section, *_, key = name.split(".")
    return section == "model" and f"{new['model.architecture']}.{key}" in new


def _determines_data(name: str, new: dict[str, Any]) -> bool:
    """Return whether a key determines the documents that a run trains on, or their order.

    Args:
        name: Full name of the key, such as "dataset.sources.0.path".
        new: Values of the job that resumes, by full name.
    """
    if name == "training.seed":  # the default of dataset.seed
        return new["dataset.seed"] is None
    section, *_, key = name.split(".")
    return f"{section}.{key}" in _DATA_KEYS


def _classify(name: str, old: dict[str, Any], new: dict[str, Any], *, resumes_data: bool) -> Effect:
    """Return the effect of a changed key on a resumed run.

    The first rule that applies decides. Special cases come first, then the effect of the whole
    section.

    Args:
        name: Full name of the key, such as "training.seed" or "dataset.sources.0.path".
        old: Values of the job in the checkpoint, by full name.
        new: Values of the job that resumes, by full name.
        resumes_data: Whether the run resumes from the data position in the checkpoint.
    """
    section, *_, key = name.split(".")
    if section == "model" and key in _SHAPE_KEYS:
        return INCOMPATIBLE
    if name == "optimizer.name" and "optimizer" not in new["checkpoint.exclude_from_loading"]:
        return INCOMPATIBLE  # another optimizer has other state tensors

    is_share_of_mixture = name.startswith("dataset.sources.") and key in ("weight", "max_epochs")
    if is_share_of_mixture and resumes_data and new["dataset.on_change"] == "error":
        return INCOMPATIBLE

    has_global_batch_size = old.get("training.global_batch_size", -1) != -1
    if name == "training.local_batch_size" and has_global_batch_size:
        return COMPATIBLE  # otherwise, it determines the global batch size

    short_name = f"{section}.{key}"  # dataset.sources.0.path has the effect of dataset.path
    if short_name in _AFFECTING_KEYS:
        return AFFECTS_TRAINING
    if section in _COMPATIBLE_SECTIONS or short_name in _COMPATIBLE_KEYS:
        return COMPATIBLE

    # A plugin declares the effect of its section. The default of `Section` is AFFECTS_TRAINING.
    effect = SECTIONS.get(section, Section).on_resume
    return _EFFECTS_IN_OLD_PLUGINS.get(effect, effect)
