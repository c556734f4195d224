"""Turns a job file of torchtitan into one of ours: text to text, with the comments.

Invariant: a key of the old file is carried over, or named in the report with the reason. The new file is valid by the
schema, or the old one is refused with all values that are wrong. No file is read or written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, get_args

import tomli
import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Comment, InlineTable, Table

from titanlite.config.errors import UserError, printable
from titanlite.config.flavors import FLAVORS
from titanlite.config.mistakes import WrongJob, shown
from titanlite.config.schema import KEYS, SECTIONS, JobConfig
from titanlite.torchtitan import tables
from titanlite.torchtitan.tables import TORCHTITAN_FLAVORS, Version

SMALL_LAYERS = "auto_filter_small_kn"


@dataclass
class _Entry:
    """A key of a file: its value, the value as it is written, the comment behind it, and the lines of comment above."""

    key: str
    value: Any
    text: str = ""
    comment: str = ""
    above: tuple[str, ...] = ()


def migrate(raw: bytes, version: Version | None = None) -> Migration:
    """The migration of a job file.

    Args:
        raw: its content.
        version: torchtitan's, whose models differ in their rotary frequencies. None: found out from the keys.

    Raises:
        UserError: it is no TOML, or no job of torchtitan's for a Llama, or it has wrong values.
    """
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
        tomli.loads(text)
        heading = re.match(r"(?:(?:#.*\n)*(?=\n|\Z))?", text)  # comment before an empty line is about the whole file
        assert heading
        document = tomlkit.parse(text[heading.end() :])
    except (ValueError, RecursionError, TOMLKitError) as error:  # bad TOML, a number of 5,000 digits, deep lists
        raise UserError(f"not valid TOML in UTF-8: {error}.") from None
    if printable(text) != text:
        raise UserError("it has control characters or invisible ones. Remove them.")
    return Migration(list(_entries(document.body, "", [])), version, heading[0].rstrip())


def _entries(body: list[Any], path: str, above: list[str]) -> Iterator[_Entry]:
    """All keys in the order of the file, with those of tables in tables. `above`: the lines of comment since the last
    key."""
    for key, item in body:
        name = path if key is None else ".".join(filter(None, [path, *(part.key for part in key)]))
        if isinstance(item, Comment):
            above.append(item.trivia.comment)
        elif isinstance(item, Table | InlineTable) and (item or not path):
            above.extend(filter(None, [item.trivia.comment]))
            yield from _entries(item.value.body, name, above)
        elif isinstance(item, AoT):
            raise UserError(f"[[{name}]]: a value is expected, not tables.")
        elif item is not None and key is not None:
            yield _Entry(name, item.unwrap(), item.as_string(), item.trivia.comment, tuple(above))
            above.clear()


class Migration:
    """What became of a job file.

    Attributes:
        text: The new file.
        version: torchtitan's version that the file is read as.
        carried: Number of keys that kept their name.
        renamed: Old key -> new key.
        added: Keys that the old file leaves out, because the defaults differ: key = value -> why.
        lost: Reason -> old keys without an equivalent.

    Raises:
        UserError: it is no job of torchtitan's for a Llama, or it has wrong values.
    """

    def __init__(self, entries: list[_Entry], version: Version | None, heading: str) -> None:
        self._old = {entry.key: entry for entry in entries}
        self._values = {entry.key: entry.value for entry in entries}
        self._new: dict[str, _Entry] = {}  # our key -> the old entry that it comes from, with its new value
        self.added: dict[str, str] = {}
        self.lost: dict[str, list[str]] = {}
        if (model := self._values.get("model.name", "llama3")) != "llama3":
            raise UserError(f"model.name = {shown(model)}: titanlite trains Llamas only, torchtitan's llama3.")
        for key in self._old:
            if "." not in key or key.partition(".")[0] not in tables.SECTIONS:
                known = f"Its sections are {', '.join(sorted(tables.SECTIONS))}."
                ours = "Is this a job file of titanlite's already?"
                raise UserError(f"{key} is not torchtitan's for a Llama. {ours if key in KEYS else known}")
        self.version: Version = version or tables.version_of(self._old)
        for key, entry in self._old.items():
            if ours := tables.EQUIVALENT.get(key):
                self._put(ours, VALUES[ours](entry.value) if ours in VALUES else entry.value, entry)
            elif key not in tables.CONVERTED:
                self._lose(key, tables.WITHOUT.get(key, "It is no key of torchtitan 0.1 or 0.2."))
        for complete in (self._model, self._data, self._schedule, self._microbatches, self._float8, self._defaults):
            complete()
        self._check()
        self.carried = sum(entry.key == key for key, entry in self._new.items())
        self.renamed = {entry.key: key for key, entry in self._new.items() if entry.key not in ("", key)}
        blocks = [heading]
        for name in SECTIONS:
            lines = [f"[{name}]"]
            for key, entry in self._new.items():
                if key.startswith(f"{name}."):
                    text = entry.text or tomlkit.item(entry.value).as_string()
                    lines += [*entry.above, f"{key.partition('.')[2]} = {text}  {entry.comment}".rstrip()]
            blocks.append("\n".join(lines) if len(lines) > 1 else "")
        self.text = "\n\n".join(filter(None, blocks)) + "\n"

    def _number(self, key: str, default: int) -> int:
        """The value of a key of the new file, or of the old. Raises UserError: it is no whole number."""
        entry = self._new.get(key) or self._old.get(key) or _Entry(key, default)
        if type(entry.value) is not int:
            raise UserError(f"{entry.key} = {shown(entry.value)}: a whole number is expected.")
        return entry.value

    def _put(self, key: str, value: Any, entry: _Entry) -> None:
        """Write a key of the new file, with the comments of an old one. Raises UserError: two old keys become this."""
        if key in self._new and self._new[key].value != value:
            both = f"{self._new[key].key} and {entry.key}"
            raise UserError(f"{both} both become {key}, with different values. Remove one of them.")
        text = entry.text if value == entry.value else ""
        self._new[key] = _Entry(entry.key, value, text, entry.comment, entry.above)

    def _add(self, key: str, value: Any, why: str = "", replace: bool = False) -> None:
        """Write a key that the old file leaves out, or has with another value. With `why`, the report says it."""
        if replace or key not in self._new:
            old = self._new.get(key, _Entry("", None))
            self._new[key] = _Entry(old.key, value, "", old.comment, old.above)
            if why:
                self.added[f"{key} = {shown(value)}"] = why

    def _lose(self, key: str, reason: str) -> None:
        """Note a key without an equivalent."""
        self.lost.setdefault(reason, []).append(key)

    def _check(self) -> None:
        """Raises UserError: values that the schema refuses, by their old names."""
        job: dict[str, dict[str, Any]] = {}
        for key, entry in self._new.items():
            job.setdefault(key.partition(".")[0], {})[key.partition(".")[2]] = entry.value
        try:
            JobConfig.model_validate(job)
        except WrongJob as wrong:
            errors = [f"  {self._new[found.key].key}: {found.found} {found.remedy}" for found in wrong.mistakes]
            text = "these values are wrong here. Change them, or leave them out, and migrate again:"
            raise UserError("\n".join([text, *errors])) from None

    # ------------------------------------------------------------------------------------- what several keys decide

    def _model(self) -> None:
        """The sizes and the rotary frequencies in which a flavor of torchtitan's differs from ours."""
        flavor = self._values.get("model.flavor", "debugmodel")
        base = _flavor(flavor)
        self._add("model.flavor", base, "torchtitan's default")
        theirs = asdict(TORCHTITAN_FLAVORS[flavor])
        theirs["rope_scaling_factor"] = tables.rope_scaling_factor(self.version)
        for key, ours in asdict(FLAVORS[base]).items():
            if key not in ("vocab_size", "max_seq_len") and theirs[key] != ours:
                self._add(f"model.{key}", theirs[key], f"torchtitan's {flavor}")
        if (length := self._number("training.seq_len", 2048)) > FLAVORS[base].max_seq_len:
            self._add("model.max_seq_len", length, "training.seq_len")
        if flavor in tables.MASKED:
            self._add("dataset.document_mask", True, f"torchtitan's {flavor}")

    def _data(self) -> None:
        """Text to train on, and to validate on if validation.enable is true."""
        self._source("dataset", "training", "c4_test")
        if self._values.get("validation.enable", False) is not True:
            self._new.pop("validation.freq", None)
            for key in (key for key in self._old if key.startswith("validation.") and key not in tables.WITHOUT):
                self._lose(key, "Without validation.enable there is none. Here validation.freq above 0 turns it on.")
            return
        self._add("validation.freq", 10, "torchtitan's default")
        self._source("validation", "validation", "c4_validation")
        rows, steps = self._number("validation.local_batch_size", 8), self._number("validation.steps", -1)
        if rows > 0 and steps > 0:
            self._put("validation.sequences", rows * steps, self._old["validation.steps"])
            text = (
                f"validation.sequences counts the rows of all ranks: {rows * steps} are those of one data-parallel rank"
            )
            self._lose("validation.local_batch_size", f"{text} of torchtitan's. Multiply it by their number.")
        else:
            text = "validation.sequences says how many rows to read; it is 64 where it is left out."
            self._lose("validation.steps", text)

    def _source(self, section: str, prefix: str, default: str) -> None:
        """Describe one of torchtitan's datasets in [section]. Its keys are prefix.dataset and prefix.dataset_path.

        Raises:
            UserError: it is unknown, and there is no path.
        """
        entry, place = self._old.get(f"{prefix}.dataset", _Entry("", default)), self._old.get(f"{prefix}.dataset_path")
        of_hub = entry.value in ("c4", "c4_validation")
        if place:
            self._put(f"{section}.source", "huggingface", entry)
            self._put(f"{section}.path", place.value, place)
            for key, value in (("config", "en"), ("streaming", True)) if of_hub else ():
                self._add(f"{section}.{key}", value)
        elif of_hub:
            self._put(f"{section}.source", "c4", entry)
        elif entry.value == "c4_test":
            text = "c4_test is a file of torchtitan's repository; python_stdlib is titanlite's text for trials. For the"
            self._lose(
                f"{prefix}.dataset", f'{text} other: source = "jsonl", path = ".../tests/assets/c4_test/data.json".'
            )
            self._add(f"{section}.source", "python_stdlib")
        else:
            text = "torchtitan has c4, c4_test and c4_validation. Add dataset_path, a folder or a name on the hub."
            raise UserError(f"{entry.key} = {shown(entry.value)}: {text}")
        if entry.value == "c4_validation":
            self._add(f"{section}.split", "validation")

    def _schedule(self) -> None:
        """torchtitan shortens a warmup that is longer than the schedule."""
        steps = self._number("lr_scheduler.total_steps", self._number("training.steps", 10000))
        if self._number("lr_scheduler.warmup_steps", 200) > steps:
            why = "as torchtitan does where the schedule has fewer steps"
            self._add("lr_scheduler.warmup_steps", steps, why, replace=True)
        self._add("lr_scheduler.warmup_steps", 200, "torchtitan's default")

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
        others = [name for name in _names(self._values.get("model.converters", [])) if "float8" not in str(name)]
        if others:
            text = "There is no such conversion of a model. float8.enable is for FP8."
            self._lose(f"model.converters {shown(others)}", text)
        if "float8.enable" not in self._new or self._new["float8.enable"].value is not True:
            return
        names = _names(
            self._values.get("quantize.linear.float8.filter_fqns", self._values.get("float8.filter_fqns", []))
        )
        small = SMALL_LAYERS in names
        why = (
            f"{SMALL_LAYERS} leaves small layers in high precision" if small else "torchtitan converts small ones, too"
        )
        self._add("float8.min_features", 1024 if small else 0, why)
        if "float8.enable_float8_linear" not in self._old and not any(str(name) in "output" for name in names):
            text = "torchtitan converts it, too, where filter_fqns does not name it. Here it always stays in high"
            self._lose("the output projection in FP8", f"{text} precision, because its logits are computed in chunks.")

    def _defaults(self) -> None:
        """torchtitan's defaults where they differ from ours."""
        selective = self._values.get("activation_checkpoint.mode", "selective") == "selective"
        for key, value in tables.DEFAULTS.items():
            if selective or not key.startswith("activation_checkpoint."):
                self._add(key, value, "torchtitan's default")
        if self.version == "0.2" and self._new["checkpoint.enable"].value is True:
            self._add("checkpoint.last_save_model_only", True, "torchtitan's default")
        if self._values.get("checkpoint.initial_load_in_hf", False) is True:
            folder = self._values.get("model.hf_assets_path", "./tests/assets/tokenizer")
            self._add("checkpoint.initial_load_path", folder, "torchtitan's default: model.hf_assets_path")
        elif "checkpoint.initial_load_path" in self._new:
            entry = self._new.pop("checkpoint.initial_load_path")
            command = f"`titanlite import --torchtitan {shown(entry.value)} --out FOLDER`"
            self._lose(entry.key, f"It is a checkpoint of torchtitan's. {command} makes one of ours of its weights.")


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
    if not any(isinstance(part, list) for part in points):
        return points
    try:
        return [next(name for name in part if name.startswith("layers.")) for part in points[1:]]
    except (TypeError, AttributeError, StopIteration):
        raise UserError(f"{shown(points)}: lists of names of modules are expected, each with a block.") from None


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
