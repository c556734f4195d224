"""Compare the job of a checkpoint with the job that resumes from it.

Each changed key is classified as compatible, affecting training, or incompatible. Keys that this
module does not list affect training. Keys do not show whether the data itself has changed, so
`Loader.compare` compares the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, NamedTuple

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
"""Current value for each value of `on_resume` in plugins written for titanlite 0.2."""


class Change(NamedTuple):
    """A difference between the job in a checkpoint and the job that resumes from it.

    Attributes:
        effect: Effect on the run that resumes. If it is "incompatible", the run cannot resume.
        description: One line, such as "training.seed: 1 -> 2".
    """

    effect: Effect
    description: str


DataChanges = tuple[list[str], list[str]]
"""Result of `Loader.compare`, two lists of descriptions:

- changes that make the saved data position meaningless, for example another sequence length;
- changed contents of files, which `dataset.on_change` allows or forbids.
"""
SAME_DATA: DataChanges = ([], [])

_REMEDY = """\
Restore these values, or start a new run in another job.dump_folder. If model and tokenizer are \
the same, it can start from these weights: checkpoint.initial_load_path = "{checkpoint}".
dataset.on_change = "warn" allows changed contents and weights of data sources, and a changed \
max_epochs if both values are above 0. It allows neither another number of sources or streams nor \
any other difference. To resume at the beginning of the data, set \
checkpoint.exclude_from_loading = ["data"]. To resume with a new optimizer state, set \
checkpoint.exclude_from_loading = ["optimizer"]."""

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
# Keys for the location and order of the data. `Loader.compare` compares the resulting data instead.
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
) -> list[Change]:
    """List the differences between the job in a checkpoint and the job that resumes from it.

    If the data differs, the result lists the differences of the data instead of the keys that
    determine it, such as dataset.path. Keys that only one of the jobs has are not compared.

    Args:
        before: Job in the checkpoint, as a dictionary of sections. The section "model" contains all
            fields of the architecture.
        now: Job that resumes from the checkpoint, in the same form.
        data: Differences of the data, from `Loader.compare`. None if the run does not resume from
            the data position in the checkpoint.

    Returns:
        Effect and description of each difference, sorted by effect, incompatible ones last. A
        changed key is described as "section.key: before -> now".
    """
    old_values = flatten(before)
    new_values = flatten(now)

    changes: list[Change] = []
    if data is not None:
        changes += _classify_data_changes(data, new_values)

    # Another version of titanlite, or other plugins, can have other keys. Skip those.
    common_names = old_values.keys() & new_values.keys()
    for name in common_names:
        old_value = old_values[name]
        new_value = new_values[name]
        if old_value == new_value or _is_ignored(name, new_values, data):
            continue
        effect = _get_effect(name, old_values, new_values, data)
        description = f"{name}: {shorten(str(old_value))} -> {shorten(str(new_value))}"
        changes.append(Change(effect, description))

    return sorted(changes, key=lambda change: (_ORDER.index(change.effect), change.description))


def _classify_data_changes(data: DataChanges, new_values: dict[str, Any]) -> list[Change]:
    """Convert data differences to `Change` objects, with their effect on a run that resumes.

    Args:
        data: Descriptions of the differences, from `Loader.compare`.
        new_values: Values of the job that resumes, by full key, such as "dataset.on_change".
    """
    position_changes, content_changes = data
    content_effect = _get_content_effect(new_values)
    changes = [Change(INCOMPATIBLE, description) for description in position_changes]
    changes += [Change(content_effect, description) for description in content_changes]
    return changes


def report_changes(path: PurePath, changes: Sequence[Change], log: Callable[[str], None]) -> None:
    """Log how a job differs from the checkpoint to resume from, and reject incompatible changes.

    Args:
        path: Path or URL of the checkpoint, for messages.
        changes: Effect and description of each difference, from `compare_jobs`.
        log: Function that is called with one line of text for each difference that is allowed.

    Raises:
        UserError: If there are incompatible differences. The message lists them.
    """
    for effect, description in changes:
        if effect != INCOMPATIBLE:
            log(f"Changed since {path.name}: {description} ({effect})")
    check_changes(path, changes)


def check_changes(path: PurePath, changes: Sequence[Change]) -> None:
    """Check that the differences between two jobs allow a run to resume from a checkpoint.

    Args:
        path: Path or URL of the checkpoint, for messages.
        changes: Effect and description of each difference, from `compare_jobs`.

    Raises:
        UserError: If there are incompatible differences. The message lists them.
    """
    incompatible = [description for effect, description in changes if effect == INCOMPATIBLE]
    if incompatible:
        lines = "\n  ".join([f"This job cannot resume from {path}:", *incompatible])
        remedy = _REMEDY.format(checkpoint=path)
        raise UserError(f"{lines}\n{remedy}")


def flatten(table: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested dictionaries to a flat dictionary, with keys such as "training.steps".

    Dictionaries in a list are numbered, and the list itself is replaced by its length. For example,
    {"sources": [{"path": "a"}]} becomes {"sources": "1 tables", "sources.0.path": "a"}.

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


def _is_ignored(name: str, new_values: dict[str, Any], data: DataChanges | None) -> bool:
    """Return whether to leave a changed key out of the comparison of two jobs.

    Args:
        name: Full name of the key, such as "model.dim".
        new_values: Values of the job that resumes, by full name.
        data: Differences of the data, or None if the run does not resume from the saved data
            position.
    """
    # Token IDs are compared instead of the name or path of the tokenizer.
    if name in ("tokenizer.path", "tokenizer.name"):
        return True

    # If the data differs, `data` already describes the change.
    has_other_data = data not in (None, SAME_DATA)
    if has_other_data and _determines_data(name, new_values):
        return True

    # "auto" keeps the dtype of the checkpoint, or chooses an attention backend for the device.
    accepts_auto = name in ("training.mixed_precision_param", "model.attention_backend")
    if accepts_auto and new_values[name] == "auto":
        return True

    # The keys of a plugin architecture are also in the section of the plugin. Report them there.
    section, *_, key = name.split(".")
    if section != "model":
        return False
    plugin_section = new_values["model.architecture"]
    return f"{plugin_section}.{key}" in new_values


def _determines_data(name: str, new_values: dict[str, Any]) -> bool:
    """Return whether a key determines the documents that a run trains on, or their order.

    Args:
        name: Full name of the key, such as "dataset.sources.0.path".
        new_values: Values of the job that resumes, by full name.
    """
    if name == "training.seed":  # the default of dataset.seed
        return new_values["dataset.seed"] is None
    section, *_, key = name.split(".")
    return f"{section}.{key}" in _DATA_KEYS


def _get_effect(
    name: str, old_values: dict[str, Any], new_values: dict[str, Any], data: DataChanges | None
) -> Effect:
    """Return the effect of a changed key on a run that resumes.

    Args:
        name: Full name of the key, such as "training.seed" or "dataset.sources.0.path".
        old_values: Values of the job in the checkpoint, by full name.
        new_values: Values of the job that resumes, by full name.
        data: Differences of the data, or None if the run does not resume from the saved data
            position.
    """
    # Changed keys that give the same data have no effect, such as the path of a renamed folder.
    if data == SAME_DATA and _determines_data(name, new_values):
        return COMPATIBLE

    # A new weight or limit of a data source counts as a change of the data contents.
    if data is not None and _is_mixture_key(name):
        return _get_content_effect(new_values)

    # The effect of these keys depends on other keys.
    if name == "training.local_batch_size":
        return _get_local_batch_effect(old_values)
    if name == "optimizer.name":
        return _get_optimizer_effect(new_values)

    return _get_effect_of_key(name)


def _is_mixture_key(name: str) -> bool:
    """Return whether a key limits or weights a data source, such as dataset.sources.0.weight."""
    return name.startswith("dataset.sources.") and name.endswith((".weight", ".max_epochs"))


def _get_optimizer_effect(new_values: dict[str, Any]) -> Effect:
    """Return the effect of a changed optimizer on a run that resumes.

    The new optimizer cannot load the saved optimizer state. The run can resume only if
    `checkpoint.exclude_from_loading` resets this state.
    """
    loads_state = "optimizer" not in new_values["checkpoint.exclude_from_loading"]
    return INCOMPATIBLE if loads_state else AFFECTS_TRAINING


def _get_local_batch_effect(old_values: dict[str, Any]) -> Effect:
    """Return the effect of a changed `training.local_batch_size` on a run that resumes.

    Training is affected only if `training.global_batch_size` is not set, because the global batch
    size then depends on the local batch size.
    """
    # Old checkpoints do not have this key. Its default, -1, means that it is not set.
    global_batch_size = old_values.get("training.global_batch_size", -1)
    return AFFECTS_TRAINING if global_batch_size == -1 else COMPATIBLE


def _get_content_effect(new_values: dict[str, Any]) -> Effect:
    """Return the effect of changed data contents, which `dataset.on_change` can forbid."""
    is_forbidden = new_values["dataset.on_change"] == "error"
    return INCOMPATIBLE if is_forbidden else AFFECTS_TRAINING


def _get_effect_of_key(name: str) -> Effect:
    """Return the effect of a changed key on a run that resumes, based only on the key's name.

    If the key is in none of the lists in this module, it has the effect of its section.

    Args:
        name: Full name of the key. "dataset.sources.0.path" is treated like "dataset.path".
    """
    section, *_, key = name.split(".")
    if section == "model" and key in _SHAPE_KEYS:
        return INCOMPATIBLE
    if f"{section}.{key}" in _AFFECTING_KEYS:
        return AFFECTS_TRAINING
    if f"{section}.{key}" in _COMPATIBLE_KEYS:
        return COMPATIBLE
    return _get_effect_of_section(section)


def _get_effect_of_section(section: str) -> Effect:
    """Return the effect of changed keys in a section on a run that resumes.

    The sections in `_COMPATIBLE_SECTIONS` are compatible. A plugin section has the effect that it
    declares. All other sections, and plugin sections that declare none, affect training.
    """
    if section in _COMPATIBLE_SECTIONS:
        return COMPATIBLE
    effect = SECTIONS.get(section, Section).on_resume
    return _EFFECTS_IN_OLD_PLUGINS.get(effect, effect)
