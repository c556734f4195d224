"""Convert torchtitan job files to titanlite job files, as text.

Resolved configs of torchtitan 0.3 are read as job files of 0.2; see `resolved`.

Invariant: Each key of the torchtitan job file is carried over, or reported as lost with the reason.
The new job file is valid, or the torchtitan job file is rejected with a message about all invalid
values. This module reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from typing import Any, get_args

import tomlkit

from titanlite.config.errors import UserError
from titanlite.config.flavors import FLAVORS
from titanlite.config.mistakes import ConfigError, describe_unknown_name, format_value
from titanlite.config.other_formats import parse_json, parse_toml
from titanlite.config.schema import JobConfig, list_keys
from titanlite.torchtitan import resolved, tables
from titanlite.torchtitan.tables import TORCHTITAN_FLAVORS, Version

DEFAULT = "the torchtitan default"
C4_DATASETS = ("c4", "c4_validation")
C4_TEST_REASON = (
    "c4_test is a file of the torchtitan repository. The new job trains on "
    'python_stdlib instead. To train on c4_test, set source = "jsonl" and '
    'path = ".../tests/assets/c4_test/data.json".'
)
SMALL_LAYERS = "auto_filter_small_kn"
"""Keyword in filter_fqns that makes torchtitan keep small layers in high precision."""
SIZES_FROM_OTHER_KEYS = ("vocab_size", "max_seq_len", "head_dim")
"""Hyperparameters of a model that depend on other keys of the torchtitan job file."""


class Migration:
    """Convert one torchtitan job file (the old one) to a titanlite job file (the new one).

    Args:
        raw: Content of the torchtitan job file, or of a resolved config of torchtitan 0.3 (JSON).
        version: torchtitan version that the file was written for, which affects the RoPE
            frequencies of models. If None, the version is detected from the keys.

    Attributes:
        text: Content of the new job file.
        model: The torchtitan model.name, for example "llama3".
        version: torchtitan version that the file was written for, as passed or detected.
        added: Reason for each new setting "key = value", for example a torchtitan default that
            differs.
        lost: Keys of the torchtitan job file without an equivalent, by reason.

    Raises:
        UserError: If the file is neither TOML nor a resolved config, is not a torchtitan job file
            for a supported model, or has invalid values.
    """

    def __init__(self, raw: bytes, version: Version | None) -> None:
        config = parse_json(raw) or {}
        self._sizes: dict[str, Any] = {}  # hyperparameters in a resolved config
        try:
            if "model_spec" in config:
                sections, self._sizes = resolved.read_config(config)
                values = tables.drop_unused(_flatten(sections))
            else:
                values = _flatten(parse_toml(raw))
        except (ValueError, RecursionError) as error:  # not TOML, or tables are nested too deeply
            raise UserError(str(error)) from None
        self._names_in_file = {tables.rename_key(key): key for key in values}  # by name in 0.2
        self._old = {key: values[name] for key, name in self._names_in_file.items()}
        self.model = self._old.get("model.name", "llama3")
        _check_model(self.model)
        _check_is_job_file(self._old)
        self.version = "0.3" if self._sizes else version or tables.detect_version(self._old)

        self._new: dict[str, Any] = {}  # titanlite key -> value
        self._origin: dict[str, str] = {}  # titanlite key -> torchtitan key with its value
        self.added: dict[str, str] = {}
        self.lost: dict[str, list[str]] = {}

        for key, value in self._old.items():
            self._convert_key(key, value)
        # These keys depend on several torchtitan keys, and on values that were set above.
        self._convert_model()
        if self._sizes:
            self._convert_json_model()
        self._convert_data()
        self._shorten_warmup()
        self._convert_microbatches()
        self._report_converters()
        self._convert_float8()
        # Defaults come last, because they apply only to keys that are still missing.
        self._add_defaults()
        self._convert_initial_weights()
        if self._new.get("checkpoint.enable") is False:
            self._remove_weight_options()
        self.text = self._format_job_file()

    @property
    def carried(self) -> int:
        """Number of keys of the old job file that have the same name in the new job file."""
        return sum(self._origin.get(key) == key for key in self._new)

    @property
    def renamed(self) -> dict[str, str]:
        """Mapping from old to new names, for each key of the old job file with a new name."""
        # Skip new keys that were removed again, and origins that the old job file lacks.
        return {
            old: new
            for new, old in self._origin.items()
            if new != old and new in self._new and old in self._names_in_file.values()
        }

    @property
    def rope_scaling_factor(self) -> float:
        """RoPE scaling factor that torchtitan uses for the model."""
        return tables.ROPE_SCALING_FACTOR[self.version] if self.model == "llama3" else 1.0

    # Access to the torchtitan job file and the new job file.

    def _get_integer(self, key: str, default: int) -> int:
        """Return the integer value of a key in the new job file, or else in the old one.

        If neither file has the key, return `default`, which is the torchtitan default.

        Raises:
            UserError: If the value is not an integer.
        """
        value = self._new.get(key, self._old.get(key, default))
        if type(value) is not int:
            old_key = self._origin.get(key, key)
            raise UserError(f"{old_key} = {format_value(value)}: must be an integer.")
        return value

    def _set_converted(self, key: str, value: Any, old_key: str) -> None:
        """Set a key of the new job file to a value that was converted from the old job file.

        Args:
            key: Key of the new job file.
            value: Converted value.
            old_key: Key of the old job file from which the value was converted.

        Raises:
            UserError: If another old key has already set `key` to another value.
        """
        if key in self._new and self._new[key] != value:
            both = f"{self._origin[key]} and {old_key}"
            raise UserError(f"{both} both become {key}, with different values. Remove one of them.")
        self._new[key] = value
        self._origin[key] = self._names_in_file.get(old_key, old_key)

    def _set_if_missing(self, key: str, value: Any, reason: str = "") -> None:
        """Set a key of the new job file, unless it already has a value.

        If `reason` is not empty, report the key with this reason.
        """
        if key not in self._new:
            self._set(key, value, reason)

    def _set(self, key: str, value: Any, reason: str) -> None:
        """Set a key of the new job file to a value that the old job file does not contain.

        Args:
            key: Key of the new job file.
            value: Value, which replaces the current value of the key.
            reason: Reason to show in the report, such as the old key from which the value was
                computed. If empty, the key is not reported.
        """
        self._new[key] = value
        if reason:
            self.added[f"{key} = {format_value(value)}"] = reason

    def _report_lost(self, key: str, reason: str) -> None:
        """Report that the new job file has no equivalent of a key of the old one, and why."""
        self.lost.setdefault(reason, []).append(self._names_in_file.get(key, key))

    # Conversion.

    def _convert_key(self, key: str, value: Any) -> None:
        """Convert a key of the old job file and its value, and add them to the new job file.

        Report the key as lost if titanlite has no equivalent.
        """
        if key in tables.CONVERTED:
            return  # another method converts it, together with other keys
        if key not in tables.KEYS:
            self._report_lost(key, f"It is no key of torchtitan 0.1 to 0.3.{_suggest_keys([key])}")
            return
        if key in tables.WITHOUT_EQUIVALENT:
            self._report_lost(key, tables.WITHOUT_EQUIVALENT[key])
            return

        new_key = tables.EQUIVALENT[key]
        if new_key == "model.flavor":
            value = self._convert_flavor(value)
        elif new_key in VALUE_CONVERTERS:
            value = VALUE_CONVERTERS[new_key](value)
        self._set_converted(new_key, value, key)

    def _convert_flavor(self, flavor: Any) -> str:
        """Return the new name of an old flavor (model size), for example "8b" for "8B".

        Raises:
            UserError: If the flavor is not in `TORCHTITAN_FLAVORS`.
        """
        known = TORCHTITAN_FLAVORS[self.model]
        if not isinstance(flavor, str) or flavor not in known:
            raise UserError(
                f"model.flavor = {format_value(flavor)}: must be one of {', '.join(known)}. For "
                "another size, set one of them, and change the sizes in the new file."
            )
        # For example, "8B_flex" of llama3 becomes "8b", and "0.6B" of qwen3 becomes "qwen3-0.6b".
        size = flavor.partition("_")[0].lower()
        return size if self.model == "llama3" else f"{self.model}-{size}"

    def _convert_model(self) -> None:
        """Set the flavor (model size) of the new job file, and model keys that override its values.

        Also enable the document mask if the old flavor uses one, such as "8B_flex".
        """
        old_flavor = self._old.get("model.flavor", "debugmodel")
        new_flavor = self._convert_flavor(old_flavor)
        self._set_if_missing("model.flavor", new_flavor, reason=DEFAULT)
        self._convert_sizes(old_flavor, new_flavor)

        # torchtitan sets the context length of the model to the sequence length.
        seq_len = self._get_integer("training.seq_len", 2048)
        if seq_len > FLAVORS[new_flavor].max_seq_len:
            self._set_if_missing("model.max_seq_len", seq_len, reason="training.seq_len")

        if old_flavor in tables.FLAVORS_WITH_DOCUMENT_MASK:
            reason = f"the torchtitan flavor {old_flavor}"
            self._set_if_missing("dataset.document_mask", True, reason)

    def _convert_sizes(self, old_flavor: str, new_flavor: str) -> None:
        """Set each hyperparameter in which the old flavor differs from the new flavor."""
        old_sizes = {
            **asdict(TORCHTITAN_FLAVORS[self.model][old_flavor]),
            "rope_scaling_factor": self.rope_scaling_factor,
            **self._sizes,  # the sizes in a resolved config override the flavor
        }
        new_sizes = asdict(FLAVORS[new_flavor])
        for key, new_size in new_sizes.items():
            old_size = old_sizes[key]
            if key not in SIZES_FROM_OTHER_KEYS and old_size != new_size:
                reason = f"the torchtitan flavor {old_flavor}"
                self._set_if_missing(f"model.{key}", old_size, reason)

    def _convert_json_model(self) -> None:
        """Add model settings that are missing in a resolved torchtitan 0.3 config (a JSON file).

        Enable the document mask, which torchtitan 0.3 always uses. Report that the layers that use
        FP8 are unknown.
        """
        self._set("dataset.document_mask", True, "torchtitan 0.3 always masks documents")
        self._report_lost(
            "converters of the model",
            "The file does not show which layers a converter has changed. If your config has a "
            "converter to FP8 or MXFP8, set float8.enable and float8.recipe_name.",
        )

    def _convert_data(self) -> None:
        """Set the training data of the new job file, and the validation data if it is enabled."""
        self._convert_source("dataset", old_section="training", default="c4_test")
        if self._old.get("validation.enable") is True:
            self._set_if_missing("validation.freq", 10, DEFAULT)
            self._convert_source("validation", old_section="validation", default="c4_validation")
            return

        self._new.pop("validation.freq", None)
        reason = "validation.enable is not true. In titanlite, validation.freq above 0 enables it."
        for key in ("validation.freq", "validation.dataset", "validation.dataset_path"):
            if key in self._old:
                self._report_lost(key, reason)

    def _convert_source(self, section: str, old_section: str, default: str) -> None:
        """Convert the dataset of a section of the old job file.

        For example, training.dataset = "c4" becomes dataset.source = "c4".

        Args:
            section: Section of the new job file, "dataset" or "validation".
            old_section: Section of the old job file, "training" or "validation".
            default: Dataset that torchtitan uses if the old section does not name one.

        Raises:
            UserError: If titanlite does not know the dataset, and the job file sets no path.
        """
        name_key = f"{old_section}.dataset"
        path_key = f"{old_section}.dataset_path"
        dataset = self._old.get(name_key, default)
        if path_key in self._old:
            self._convert_dataset_with_path(section, name_key, path_key, dataset)
        else:
            self._convert_dataset_without_path(section, name_key, dataset)

        if dataset == "c4_validation":
            self._set_if_missing(f"{section}.split", "validation")

    def _convert_dataset_with_path(
        self, section: str, name_key: str, path_key: str, dataset: Any
    ) -> None:
        """Set the data source to the Hugging Face dataset at the path in the old job file.

        Args:
            section: Section of the new job file, "dataset" or "validation".
            name_key: Key of the old job file that names the dataset.
            path_key: Key of the old job file with the path, a folder or a name on the Hub.
            dataset: Name of the dataset.
        """
        self._set_converted(f"{section}.source", "huggingface", old_key=name_key)
        self._set_converted(f"{section}.path", self._old[path_key], old_key=path_key)
        if dataset in C4_DATASETS:  # torchtitan streams the English part of C4 from any path
            self._set_if_missing(f"{section}.config", "en")
            self._set_if_missing(f"{section}.streaming", True)

    def _convert_dataset_without_path(self, section: str, name_key: str, dataset: Any) -> None:
        """Set the data source for a torchtitan dataset without a path, such as "c4".

        Replace "c4_test", a file of the torchtitan repository, with "python_stdlib".

        Args:
            section: Section of the new job file, "dataset" or "validation".
            name_key: Key of the old job file that names the dataset.
            dataset: Name of the dataset.

        Raises:
            UserError: If torchtitan needs a path for this dataset.
        """
        if dataset in C4_DATASETS:
            self._set_converted(f"{section}.source", "c4", old_key=name_key)
        elif dataset == "c4_test":
            self._set_if_missing(f"{section}.source", "python_stdlib")
            self._report_lost(name_key, C4_TEST_REASON)
        else:
            raise UserError(
                f"{name_key} = {format_value(dataset)}: torchtitan has c4, c4_test and "
                "c4_validation. Add dataset_path, a folder or a name on the Hub."
            )

    def _shorten_warmup(self) -> None:
        """Shorten a warmup that is longer than the schedule, as torchtitan does."""
        training_steps = self._get_integer("training.steps", 10000)
        steps = self._get_integer("lr_scheduler.total_steps", training_steps)
        if self._get_integer("lr_scheduler.warmup_steps", 200) > steps:
            reason = "as torchtitan does if the schedule has fewer steps"
            self._set("lr_scheduler.warmup_steps", steps, reason)

    def _convert_microbatches(self) -> None:
        """Convert the batch sizes of a job with pipeline parallelism.

        In the old job file, `training.local_batch_size` is the number of sequences that a rank
        trains on per step. In the new job file, it is the number of sequences per microbatch, and
        `training.global_batch_size` determines the number of microbatches.
        """
        # The second arguments of `_get_integer` are the defaults of torchtitan.
        num_pipeline_ranks = self._get_integer("parallelism.pipeline_parallel_degree", 1)
        if num_pipeline_ranks == 1:
            return

        local_key = "training.local_batch_size"
        sequences_per_step = self._get_integer(local_key, 8)
        microbatch_size = self._get_microbatch_size(sequences_per_step, num_pipeline_ranks)
        self._set(local_key, microbatch_size, "the size of a microbatch")

        if self._get_integer("training.global_batch_size", -1) == -1:  # not set
            self._set_global_batch_size(sequences_per_step, microbatch_size)

    def _set_global_batch_size(self, sequences_per_step: int, microbatch_size: int) -> None:
        """Set the global batch size to `sequences_per_step` times the data-parallel degree.

        If the job file sets no positive shard degree, report how to compute the size instead.

        Args:
            sequences_per_step: Number of sequences that a data-parallel rank trains on per step.
            microbatch_size: Number of sequences per microbatch, for the report.
        """
        global_key = "training.global_batch_size"
        local_key = "training.local_batch_size"
        num_shards = self._get_integer("parallelism.data_parallel_shard_degree", -1)
        if num_shards > 0:
            num_replicas = self._get_integer("parallelism.data_parallel_replicate_degree", 1)
            self._set(global_key, sequences_per_step * num_shards * num_replicas, reason=local_key)
        else:
            self._report_lost(
                local_key,
                f"Each data-parallel rank trains on {sequences_per_step} sequences per step, in "
                f"microbatches of {microbatch_size}. Set {global_key} to {sequences_per_step} "
                "times the number of data-parallel ranks.",
            )

    def _get_microbatch_size(self, local_size: int, num_pipeline_ranks: int) -> int:
        """Return the number of sequences per pipeline microbatch in the old job file.

        Job files of early torchtitan versions set the number of microbatches instead. In this case,
        divide `local_size` by this number.

        Args:
            local_size: Number of sequences that a data-parallel rank trains on per step.
            num_pipeline_ranks: Number of pipeline ranks, the default number of microbatches.
        """
        size = self._get_integer("parallelism.pipeline_parallel_microbatch_size", 1)
        is_early_version = "experimental.pipeline_parallel_degree" in self._old
        if not is_early_version:
            return size
        key = "experimental.pipeline_parallel_microbatches"
        num_microbatches = max(1, self._get_integer(key, num_pipeline_ranks))
        return max(1, local_size // num_microbatches)

    def _report_converters(self) -> None:
        """Report all model converters of the job except FP8 and MXFP8, which titanlite supports."""
        converters = _parse_names(self._old.get("model.converters", []))
        others = [name for name in converters if not _has_float8([name])]
        if others:
            reason = "titanlite has no such converter, only float8.enable."
            self._report_lost(f"model.converters {format_value(others)}", reason)

    def _convert_float8(self) -> None:
        """Set the FP8 recipe and the layers to convert, if the torchtitan job uses FP8."""
        if self._new.get("float8.enable") is not True:
            return

        is_mxfp8 = _has_mxfp8(self._old.get("model.converters", []))
        names_to_skip = self._get_layers_to_skip("mx" if is_mxfp8 else "float8")
        if is_mxfp8:
            self._set("float8.recipe_name", "mxfp8", "model.converters")
            self._set("float8.filter_fqns", names_to_skip, "the filter of MXFP8")
        min_features = 1024 if SMALL_LAYERS in names_to_skip else 0
        reason = f"torchtitan keeps small layers in high precision only with {SMALL_LAYERS}"
        self._set_if_missing("float8.min_features", min_features, reason)

        self._report_output_layer(names_to_skip)

    def _report_output_layer(self, names_to_skip: list[Any]) -> None:
        """Report if the old job converts the output layer to FP8, which titanlite does not.

        Args:
            names_to_skip: Names of layers that stay in high precision, from the option filter_fqns.
        """
        # A part of a name is enough: "out" also skips the layer "output".
        skips_output = any(str(name) in "output" for name in names_to_skip)
        is_older_than_01 = "float8.enable_float8_linear" in self._old
        if not skips_output and not is_older_than_01:
            self._report_lost(
                "the output projection in FP8",
                "torchtitan converts it unless filter_fqns names it. titanlite always keeps it in "
                "high precision, because its logits are computed in chunks.",
            )

    def _get_layers_to_skip(self, section: str) -> list[Any]:
        """Return the names of layers that stay in high precision, from the option filter_fqns.

        Args:
            section: Section of the old job file with this option, "float8" or "mx". torchtitan 0.2
                adds the prefix "quantize.linear.".
        """
        names = self._old.get(f"{section}.filter_fqns", [])
        return _parse_names(self._old.get(f"quantize.linear.{section}.filter_fqns", names))

    def _add_defaults(self) -> None:
        """Set keys that the old job file omits, if the torchtitan and titanlite defaults differ."""
        # titanlite rejects these keys if the job does not also set `enable` in their section.
        if "compile.components" in self._new:
            self._set_if_missing("compile.enable", False, DEFAULT)
        if self._new.get("compile.components") == []:
            self._set("compile.enable", False, "compile.components is empty")
        if "float8.recipe_name" in self._new:
            self._set_if_missing("float8.enable", False, DEFAULT)
        if self._sizes:
            return  # a resolved config has all keys
        for key, value in tables.DEFAULTS.items():
            self._set_if_missing(key, value, DEFAULT)
        if self.version == "0.2" and self._new["checkpoint.enable"] is True:
            self._set_if_missing("checkpoint.last_save_model_only", True, DEFAULT)

    def _convert_initial_weights(self) -> None:
        """Set checkpoint.initial_load_path for initial weights in the Hugging Face format.

        If it names a torchtitan checkpoint instead, remove it from the new job file, and report how
        to convert the checkpoint.
        """
        key = "checkpoint.initial_load_path"
        if self._old.get("checkpoint.initial_load_in_hf") is True:
            # Without a path, torchtitan loads the weights in the folder of the tokenizer.
            folder = self._old.get("model.hf_assets_path", "./tests/assets/tokenizer")
            reason = f"{DEFAULT}: model.hf_assets_path"
            self._set_if_missing(key, folder, reason)
        elif key in self._new:
            command = self._get_import_command(self._new.pop(key))
            reason = f"It is a torchtitan checkpoint. To convert its weights, run {command}."
            self._report_lost(key, reason)

    def _remove_weight_options(self) -> None:
        """Remove the options for loading and saving weights from a job without checkpoints."""
        for name in ("initial_load_path", "initial_load_in_hf", "last_save_in_hf"):
            key = f"checkpoint.{name}"
            if self._new.get(key):
                del self._new[key]
                self._report_lost(key, "It has no effect, because checkpoint.enable is false.")

    def _get_import_command(self, path: Any) -> str:
        """Return the command that imports a torchtitan checkpoint of the model."""
        can_import_directly = self.model == "llama3" and not self._sizes
        if can_import_directly:
            return (
                f"`titanlite import --torchtitan {format_value(path)} --out FOLDER "
                "--job.config_file NEW.toml`"
            )
        return (
            "the torchtitan script convert_to_hf.py and then `titanlite import --hf FOLDER "
            "--out FOLDER`"
        )

    def _format_job_file(self) -> str:
        """Validate the new job file and return it as text, with keys in the order of the schema.

        Raises:
            UserError: If a value is invalid. The message names the key in the torchtitan job file.
        """
        job: dict[str, dict[str, Any]] = {}
        for key in list_keys():
            if key in self._new:
                section, _, name = key.partition(".")
                job.setdefault(section, {})[name] = self._new[key]
        try:
            JobConfig.model_validate(job)
        except ConfigError as error:
            raise ConfigError(error.mistakes, "added", self._origin) from None
        return tomlkit.dumps(job)


# Parsing and checking of the torchtitan job file.


def _flatten(table: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of a TOML table by dotted key, such as "training.steps", in file order.

    An empty section has no values. An empty table inside of a section is kept as a value.
    """
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{path}{name}"
        is_section = not path
        if isinstance(value, dict) and (value or is_section):
            values |= _flatten(value, f"{key}.")
        else:
            values[key] = value
    return values


def _check_model(name: Any) -> None:
    """Raise a UserError if titanlite does not support the torchtitan model."""
    if not isinstance(name, str) or name not in TORCHTITAN_FLAVORS:
        known = " and ".join(TORCHTITAN_FLAVORS)
        raise UserError(
            f"model.name = {format_value(name)}: the supported torchtitan models are {known}."
        )


def _check_is_job_file(keys: Collection[str]) -> None:
    """Check that a file with these keys is a torchtitan job file.

    Unknown keys in known sections are allowed, as long as the file has a known key. A file without
    keys is also allowed.

    Raises:
        UserError: If a key is not in a known section, or the file has only unknown keys.
    """
    for key in keys:
        section, dot, _ = key.partition(".")
        is_in_section = dot != "" and section in tables.SECTIONS
        if not is_in_section:
            known = ", ".join(sorted(tables.SECTIONS))
            raise UserError(
                f"{key} is not in a section of a torchtitan job file. The sections are {known}."
            )

    has_known_key = not tables.KEYS.isdisjoint(keys)
    if keys and not has_known_key:
        raise UserError(
            f"None of its keys is a torchtitan key: {', '.join(keys)}.{_suggest_keys(keys)}"
        )


def _suggest_keys(keys: Iterable[str]) -> str:
    """Return hints, such as " Did you mean ...?", for unknown keys that resemble titanlite keys."""
    unknown = [key for key in keys if key not in list_keys()]
    problems = [describe_unknown_name(JobConfig, key).problem for key in unknown]
    hints = [problem.removeprefix("is unknown.") for problem in problems]
    return "".join(hint for hint in hints if "Did you mean" in hint)


# Conversion of the values of single keys.


def _parse_names(value: Any) -> list[Any]:
    """Convert the value of a torchtitan option to a list of names. Split text at commas.

    Raises:
        UserError: If the value is neither text nor a list.
    """
    if isinstance(value, str):
        return value.split(",")
    if not isinstance(value, list):
        raise UserError(f"{format_value(value)}: must be a list of strings.")
    return value


def _has_float8(value: Any) -> bool:
    """Return whether a torchtitan setting enables FP8.

    Args:
        value: Value of enable_float8_linear (a boolean) or of model.converters (a list).
    """
    if isinstance(value, bool):
        return value
    return _has_mxfp8(value) or any("float8" in str(name) for name in _parse_names(value))


def _has_mxfp8(value: Any) -> bool:
    """Return whether a list of torchtitan model converters contains the converter to MXFP8."""
    names = ("mx", "quantize.linear.mx")  # in torchtitan 0.1 and 0.2
    return any(name in names for name in _parse_names(value))


def _remove_small_layers(value: Any) -> list[Any]:
    """Parse a list of layer names, and omit the keyword "auto_filter_small_kn"."""
    return [name for name in _parse_names(value) if name != SMALL_LAYERS]


def _find_tokenizer_file(path: Any) -> Any:
    """Return the path of a tokenizer file: `path` or, if it is a folder, tokenizer.json in it."""
    is_folder = isinstance(path, str) and not path.endswith((".model", ".json"))
    return f"{path.rstrip('/')}/tokenizer.json" if is_folder else path


def _find_split_points(value: Any) -> list[Any]:
    """Return the name of the first block of each pipeline stage after the first stage.

    Args:
        value: Either these names, as a list or as text such as "layers.4,layers.8", or one list
            per stage with the names of all its modules.
    """
    stages = _parse_names(value)
    if not all(isinstance(stage, list) for stage in stages):
        return stages

    split_points = []
    for module_names in stages[1:]:
        blocks = [name for name in module_names if str(name).startswith("layers.")]
        split_points.append(blocks[0] if blocks else None)
    return split_points


def _find_schedule(value: Any) -> Any:
    """Return the titanlite spelling of a pipeline schedule, such as "1F1B" for "1f1b".

    torchtitan ignores case and, before 0.1.0, used underscores. Unknown names are returned
    unchanged.
    """
    names = get_args(list_keys()["parallelism.pipeline_parallel_schedule"].annotation)
    name_by_lowercase = {name.lower(): name for name in names}
    return name_by_lowercase.get(str(value).replace("_", "").lower(), value)


def _integer_to_text(value: Any) -> Any:
    """Return an integer as text, and any other value unchanged."""
    return str(value) if isinstance(value, int) else value


VALUE_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "float8.enable": _has_float8,
    "float8.filter_fqns": _remove_small_layers,
    "tokenizer.path": _find_tokenizer_file,
    "parallelism.pipeline_parallel_split_points": _find_split_points,
    "parallelism.pipeline_parallel_schedule": _find_schedule,
    "activation_checkpoint.selective_ac_option": _integer_to_text,
}
"""Functions that convert the value of a torchtitan key, by the equivalent titanlite key."""
