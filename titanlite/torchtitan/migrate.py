"""Turns a job file of torchtitan into one of ours: text to text, values only.

Invariant: a key of the old file is carried over, or named in the report with the reason. The new file is valid by the
schema, or the old one is refused with all values that are wrong. No file is read or written here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, get_args

import tomli
import tomlkit

from titanlite.config.errors import UserError
from titanlite.config.flavors import FLAVORS
from titanlite.config.mistakes import WrongJob, shown
from titanlite.config.schema import KEYS, SECTIONS, JobConfig
from titanlite.torchtitan import tables
from titanlite.torchtitan.tables import TORCHTITAN_FLAVORS, Version

SMALL_LAYERS = "auto_filter_small_kn"


def _flat(table: dict[str, Any], path: str = "") -> dict[str, Any]:
    """All values by their key in the order of the file, with those of tables in tables."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        is_table = isinstance(value, dict) and (value or not path)
        values |= _flat(value, f"{path}{name}.") if is_table else {f"{path}{name}": value}
    return values


class Migration:
    """What became of a job file.

    Args:
        raw: its content.
        version: torchtitan's, whose models differ in their rotary frequencies. None: found out from the keys.

    Attributes:
        text: The new file.
        version: torchtitan's version that the file is read as.
        carried: Number of keys that kept their name.
        renamed: Old key -> new key.
        added: Keys that the old file leaves out, because the defaults differ: key = value -> why.
        lost: Reason -> old keys without an equivalent.

    Raises:
        UserError: it is no TOML, or no job of torchtitan's for a Llama, or it has wrong values.
    """

    def __init__(self, raw: bytes, version: Version | None = None) -> None:
        try:
            self._old = old = _flat(tomli.loads(raw.decode("utf-8-sig")))
        except (ValueError, RecursionError) as error:  # bad TOML, a number of 5,000 digits, deep lists
            raise UserError(f"not valid TOML in UTF-8: {error}.") from None
        self._new: dict[str, Any] = {}
        self._origin: dict[str, str] = {}  # our key -> the old one that its value comes from
        self.added: dict[str, str] = {}
        self.lost: dict[str, list[str]] = {}
        if (model := old.get("model.name", "llama3")) != "llama3":
            raise UserError(f"model.name = {shown(model)}: titanlite trains Llamas only, torchtitan's llama3.")
        for key in old:
            if "." not in key or key.partition(".")[0] not in tables.SECTIONS:
                known = ", ".join(sorted(tables.SECTIONS))
                raise UserError(f"{key} is no key in a section of torchtitan's for a Llama; these are {known}.")
        self.version: Version = version or tables.version_of(old)
        for key, value in old.items():
            if ours := tables.EQUIVALENT.get(key):
                self._put(ours, VALUES[ours](value) if ours in VALUES else value, key)
            elif key not in tables.CONVERTED:
                self._lose(key, tables.WITHOUT.get(key, "It is no key of torchtitan 0.1 or 0.2."))
        for complete in (self._model, self._data, self._schedule, self._microbatches, self._float8, self._defaults):
            complete()
        job: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for name in KEYS:
            if name in self._new:
                section, _, key = name.partition(".")
                job[section][key] = self._new[name]
        try:
            JobConfig.model_validate(job)
        except WrongJob as wrong:
            raise WrongJob(wrong.mistakes, "added", self._origin) from None  # with the keys of the old file
        self.renamed = {key: new for new, key in self._origin.items() if key != new and key in old and new in self._new}
        self.carried = sum(self._origin.get(key) == key for key in self._new)
        self.text = tomlkit.dumps({section: values for section, values in job.items() if values})

    def _number(self, key: str, default: int) -> int:
        """The value of a key of the new file, or of the old. Raises UserError: it is no whole number."""
        value = self._new.get(key, self._old.get(key, default))
        if type(value) is not int:
            raise UserError(f"{self._origin.get(key, key)} = {shown(value)}: a whole number is expected.")
        return value

    def _put(self, key: str, value: Any, origin: str) -> None:
        """Write a key of the new file, whose value comes from an old one. Raises UserError: another one says more."""
        if key in self._new and self._new[key] != value:
            both = f"{self._origin[key]} and {origin}"
            raise UserError(f"{both} both become {key}, with different values. Remove one of them.")
        self._new[key], self._origin[key] = value, origin

    def _add(self, key: str, value: Any, why: str = "", replace: bool = False) -> None:
        """Write a key that the old file leaves out, or has with another value. With `why`, the report says it."""
        if replace or key not in self._new:
            self._new[key] = value
            if why:
                self.added[f"{key} = {shown(value)}"] = why

    def _lose(self, key: str, reason: str) -> None:
        """Note a key without an equivalent."""
        self.lost.setdefault(reason, []).append(key)

    # ------------------------------------------------------------------------------------- what several keys decide

    def _model(self) -> None:
        """The sizes and the rotary frequencies in which a flavor of torchtitan's differs from ours."""
        flavor = self._old.get("model.flavor", "debugmodel")
        base = _flavor(flavor)
        self._add("model.flavor", base, "torchtitan's default")
        theirs = asdict(TORCHTITAN_FLAVORS[flavor])
        theirs["rope_scaling_factor"] = tables.ROPE_SCALING_FACTOR[self.version]
        for key, ours in asdict(FLAVORS[base]).items():
            if key not in ("vocab_size", "max_seq_len", "head_dim") and theirs[key] != ours:
                self._add(f"model.{key}", theirs[key], f"torchtitan's {flavor}")
        if (length := self._number("training.seq_len", 2048)) > FLAVORS[base].max_seq_len:
            self._add("model.max_seq_len", length, "training.seq_len")
        if flavor in tables.MASKED:
            self._add("dataset.document_mask", True, f"torchtitan's {flavor}")

    def _data(self) -> None:
        """Text to train on, and to validate on if validation.enable is true."""
        self._source("dataset", "training", "c4_test")
        if self._old.get("validation.enable") is True:
            self._add("validation.freq", 10, "torchtitan's default")
            self._source("validation", "validation", "c4_validation")
            return
        self._new.pop("validation.freq", None)
        for key in ("validation.freq", "validation.dataset", "validation.dataset_path"):
            if key in self._old:
                self._lose(key, "Without validation.enable there is none. Here validation.freq above 0 turns it on.")

    def _source(self, section: str, prefix: str, default: str) -> None:
        """Describe one of torchtitan's datasets in [section]. Its keys are prefix.dataset and prefix.dataset_path.

        Raises:
            UserError: it is unknown, and there is no path.
        """
        key, place = f"{prefix}.dataset", f"{prefix}.dataset_path"
        name = self._old.get(key, default)
        of_hub = name in ("c4", "c4_validation")
        if place in self._old:
            self._put(f"{section}.source", "huggingface", key)
            self._put(f"{section}.path", self._old[place], place)
            for ours, value in (("config", "en"), ("streaming", True)) if of_hub else ():
                self._add(f"{section}.{ours}", value)
        elif of_hub:
            self._put(f"{section}.source", "c4", key)
        elif name == "c4_test":
            text = "c4_test is a file of torchtitan's repository; python_stdlib is titanlite's text for trials. For the"
            self._lose(key, f'{text} other: source = "jsonl", path = ".../tests/assets/c4_test/data.json".')
            self._add(f"{section}.source", "python_stdlib")
        else:
            text = "torchtitan has c4, c4_test and c4_validation. Add dataset_path, a folder or a name on the hub."
            raise UserError(f"{key} = {shown(name)}: {text}")
        if name == "c4_validation":
            self._add(f"{section}.split", "validation")

    def _schedule(self) -> None:
        """torchtitan shortens a warmup that is longer than the schedule."""
        steps = self._number("lr_scheduler.total_steps", self._number("training.steps", 10000))
        if self._number("lr_scheduler.warmup_steps", 200) > steps:
            why = "as torchtitan does where the schedule has fewer steps"
            self._add("lr_scheduler.warmup_steps", steps, why, replace=True)

    def _microbatches(self) -> None:
        """torchtitan cuts its local batch into microbatches; here a local batch is one, and a global batch has more."""
        if (stages := self._number("parallelism.pipeline_parallel_degree", 1)) == 1:
            return
        rows = self._number("training.local_batch_size", 8)
        size = self._number("parallelism.pipeline_parallel_microbatch_size", 1)
        if "experimental.pipeline_parallel_degree" in self._old:  # then the file has the number of microbatches
            size = max(1, rows // max(1, self._number("experimental.pipeline_parallel_microbatches", stages)))
        self._add("training.local_batch_size", size, "the rows of a microbatch", replace=True)
        shard = self._number("parallelism.data_parallel_shard_degree", -1)
        if self._number("training.global_batch_size", -1) != -1:
            return
        if shard > 0:
            total = rows * shard * self._number("parallelism.data_parallel_replicate_degree", 1)
            self._add("training.global_batch_size", total, "training.local_batch_size", replace=True)
        else:
            text = f"A step has {rows} rows for each data-parallel rank, in microbatches of {size}: set"
            self._lose("training.local_batch_size", f"{text} training.global_batch_size to {rows} times their number.")

    def _float8(self) -> None:
        """Which layers are converted, and other conversions than that to FP8."""
        converters = _names(self._old.get("model.converters", []))
        if others := [name for name in converters if "float8" not in str(name)]:
            self._lose(f"model.converters {shown(others)}", "There is no such conversion of a model but float8.enable.")
        if self._new.get("float8.enable") is not True:
            return
        names = _names(self._old.get("quantize.linear.float8.filter_fqns", self._old.get("float8.filter_fqns", [])))
        why = f"torchtitan leaves small layers in high precision with {SMALL_LAYERS} only"
        self._add("float8.min_features", 1024 if SMALL_LAYERS in names else 0, why)
        if "float8.enable_float8_linear" not in self._old and not any(str(name) in "output" for name in names):
            text = "torchtitan converts it, too, where filter_fqns does not name it. Here it always stays in high"
            self._lose("the output projection in FP8", f"{text} precision, because its logits are computed in chunks.")

    def _defaults(self) -> None:
        """torchtitan's defaults where they differ from ours."""
        for key, value in tables.DEFAULTS.items():
            self._add(key, value, "torchtitan's default")
        if self.version == "0.2" and self._new["checkpoint.enable"] is True:
            self._add("checkpoint.last_save_model_only", True, "torchtitan's default")
        if self._old.get("checkpoint.initial_load_in_hf", False) is True:
            folder = self._old.get("model.hf_assets_path", "./tests/assets/tokenizer")
            self._add("checkpoint.initial_load_path", folder, "torchtitan's default: model.hf_assets_path")
        elif (path := self._new.pop("checkpoint.initial_load_path", None)) is not None:
            command = f"`titanlite import --torchtitan {shown(path)} --out FOLDER --job.config_file` with the new file"
            text = f"It is a checkpoint of torchtitan's. {command} makes one of ours of its weights."
            self._lose("checkpoint.initial_load_path", text)


# ------------------------------------------------------------------------------------------------- values translated


def _names(value: Any) -> list[Any]:
    """A list of names, which may be written as one text."""
    if not isinstance(value, str | list):
        raise UserError(f"{shown(value)}: a list of texts is expected.")
    return value.split(",") if isinstance(value, str) else value


def _flavor(flavor: Any) -> str:
    if not isinstance(flavor, str) or flavor not in TORCHTITAN_FLAVORS:
        text = f"model.flavor = {shown(flavor)}: torchtitan's Llamas are {', '.join(TORCHTITAN_FLAVORS)}."
        raise UserError(f"{text} For a model of your own set one of them, and its sizes afterwards.")
    return flavor.partition("_")[0].lower()


def _tokenizer(path: Any) -> Any:
    """A folder with tokenizer.json, or a tokenizer file."""
    is_folder = isinstance(path, str) and not path.endswith((".model", ".json"))
    return f"{path.rstrip('/')}/tokenizer.json" if is_folder else path


def _stages(points: Any) -> Any:
    """The first block of each stage but the first: a text, a list, or the names of the modules of each stage."""
    points = _names(points)
    if not all(isinstance(part, list) for part in points):
        return points
    return [next((name for name in part if str(name).startswith("layers.")), None) for part in points[1:]]


def _pipeline_schedule(value: Any) -> Any:
    """torchtitan takes them in any case, and before 0.1.0 with underscores: "interleaved_1f1b"."""
    names = get_args(KEYS["parallelism.pipeline_parallel_schedule"].annotation)
    return next((name for name in names if name.lower() == str(value).replace("_", "").lower()), value)


VALUES: dict[str, Callable[[Any], Any]] = {
    "model.flavor": _flavor,
    "float8.enable": lambda value: value if isinstance(value, bool) else any("float8" in str(n) for n in _names(value)),
    "tokenizer.path": _tokenizer,
    "parallelism.pipeline_parallel_split_points": _stages,
    "parallelism.pipeline_parallel_schedule": _pipeline_schedule,
    "activation_checkpoint.selective_ac_option": lambda value: str(value) if isinstance(value, int) else value,
    "float8.filter_fqns": lambda value: [name for name in _names(value) if name != SMALL_LAYERS],
}
