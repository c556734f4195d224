"""Turns a job file of torchtitan into one of ours: text to text, with the comments.

Invariant: a key of the old file is carried over, or named in the report with the reason, and so is a name of something
that titanlite does not have. The new file is valid by the schema, or the old one is refused with all values that are
wrong. No file is read or written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import tomli
import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Comment, InlineTable, Table

from titanlite.config.errors import UserError, printable
from titanlite.config.flavors import FLAVORS
from titanlite.config.mistakes import WrongJob, block, shown
from titanlite.config.schema import KEYS, SECTIONS, JobConfig
from titanlite.torchtitan import tables
from titanlite.torchtitan.tables import CONVERTED, EQUIVALENT, TORCHTITAN_FLAVORS, WITHOUT, Version


@dataclass
class _Entry:
    """A key of a file: its value, the value as it is written, the comment behind it, and the lines of comment above."""

    key: str
    value: Any
    text: str = ""
    comment: str = ""
    above: list[str] = field(default_factory=list)

    def lines(self, name: str) -> list[str]:
        """The entry in a file, where its key is `name`."""
        text = self.text or tomlkit.item(self.value).as_string()
        return [*self.above, f"{name} = {text}" + (f"  {self.comment}" if self.comment else "")]


@dataclass
class Migration:
    """What became of a job file.

    Attributes:
        text: The new file.
        version: torchtitan's version that the file is read as.
        carried: Number of keys that kept their name.
        renamed: Old key -> new key, or new keys.
        added: Keys that the old file leaves out, because the defaults differ: key = value -> why.
        lost: Reason -> old keys without an equivalent.
    """

    version: Version
    text: str = ""
    carried: int = 0
    renamed: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)


def migrate(raw: str, name: str, version: Version | None = None) -> Migration:
    """The migration of the text of a job file.

    Args:
        name: of the file, for messages.
        version: torchtitan's, whose models differ in their rotary frequencies. None: found out from the keys.

    Raises:
        UserError: it is no TOML, or no job of torchtitan's for a Llama, or it has wrong values.
    """
    raw = raw.replace("\r\n", "\n")
    header = re.match(r"(?:#.*\n)*(?=\n|\Z)", raw)  # lines of comment before an empty line are about the whole file
    heading, rest = (raw[: header.end()], raw[header.end() :]) if header else ("", raw)
    try:
        tomli.loads(raw)
        document = tomlkit.parse(rest)
    except (ValueError, RecursionError, TOMLKitError) as error:  # bad TOML, a number of 5,000 digits, deep lists
        raise UserError(f"{name}: not valid TOML: {error}.") from None
    try:
        job = _Job(list(_entries(document.body, "", [])), version)
        job.complete()
        blocks = job.blocks()
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    job.result.text = "\n\n".join(filter(None, [heading.rstrip(), *blocks])) + "\n"
    if printable(job.result.text) != job.result.text:
        raise UserError(f"{name} has control characters or invisible ones. Remove them.")
    return job.result


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
            yield _Entry(name, item.unwrap(), item.as_string(), item.trivia.comment, [*above])
            above.clear()


class _Job:
    """The old file by keys, and the new one while it is made.

    Raises:
        UserError: it is no job of torchtitan's for a Llama.
    """

    def __init__(self, entries: list[_Entry], version: Version | None) -> None:
        self.old = {entry.key: entry for entry in entries}
        self.new: dict[str, _Entry] = {}  # our key -> the old entry that it comes from, with its new value
        if (model := self.value("model.name", "llama3")) != "llama3":
            raise UserError(
                f"model.name = {shown(model)}: titanlite trains Llamas only, which torchtitan calls llama3."
            )
        for key in self.old:
            if "." not in key or key.partition(".")[0] not in tables.SECTIONS:
                known = ", ".join(sorted(tables.SECTIONS))
                text = "Is this a job file of titanlite's already?" if key in KEYS else f"Its sections are {known}."
                raise UserError(f"{key} is not torchtitan's for a Llama. {text}")
        self.result = Migration(version or tables.version_of(self.old))
        for entry in entries:
            if entry.key in EQUIVALENT:
                self.put(
                    EQUIVALENT[entry.key], VALUES.get(EQUIVALENT[entry.key], lambda value: value)(entry.value), entry
                )
            elif entry.key not in CONVERTED:
                self.lose(entry.key, WITHOUT.get(entry.key, "It is no key of torchtitan 0.1 or 0.2."))

    def value(self, key: str, default: Any) -> Any:
        """The value of a key of the old file."""
        return self.old[key].value if key in self.old else default

    def number(self, key: str, default: int) -> int:
        """The value of a key of the new file, or of the old. Raises UserError: it is no whole number."""
        entry = self.new.get(key) or self.old.get(key)
        if entry and not (isinstance(entry.value, int) and not isinstance(entry.value, bool)):
            raise UserError(f"{entry.key} = {shown(entry.value)}: a whole number is expected.")
        return int(entry.value) if entry else default

    def put(self, key: str, value: Any, entry: _Entry) -> None:
        """Write a key of the new file, with the comments of an old one. Raises UserError: two old keys become this."""
        if key in self.new and self.new[key].value != value:
            both = f"{self.new[key].key} and {entry.key}"
            raise UserError(f"{both} both become {key}, with different values. Remove one of them.")
        text = entry.text if value == entry.value else ""
        self.new[key] = _Entry(entry.key, value, text, entry.comment, entry.above)

    def add(self, key: str, value: Any, why: str = "", replace: bool = False) -> None:
        """Write a key that the old file leaves out, or has with another value. With `why`, the report says it."""
        if replace or key not in self.new:
            old = self.new.get(key, _Entry("", None))
            self.new[key] = _Entry(old.key, value, "", old.comment, old.above)
            if why:
                self.result.added[f"{key} = {shown(value)}"] = why

    def lose(self, key: str, reason: str) -> None:
        """Note a key without an equivalent."""
        self.result.lost.setdefault(reason, []).append(key)

    def blocks(self) -> list[str]:
        """The tables of the new file. Raises UserError: values that the schema refuses."""
        job: dict[str, dict[str, Any]] = {}
        for key, entry in self.new.items():
            job.setdefault(key.partition(".")[0], {})[key.partition(".")[2]] = entry.value
        try:
            JobConfig.model_validate(job)
        except WrongJob as wrong:
            errors = []
            for mistake in wrong.mistakes:
                entry = self.new[mistake.key]
                if mistake.kind == "literal_error" and isinstance(entry.value, str):  # a name, such as "Adam"
                    del self.new[mistake.key]
                    text = f"Here it {mistake.remedy} Left out, it is {shown(KEYS[mistake.key].default)}."
                    self.lose(f"{entry.key} = {shown(entry.value)}", f"{tables.INSTEAD.get(entry.value, '')} {text}")
                else:
                    errors.append(block(entry.key, mistake.found, mistake.remedy))
            if errors:
                text = "these values are wrong. Change them and migrate again:"
                raise UserError("\n".join([text, *errors])) from None
        for key, entry in self.new.items():
            self.result.carried += entry.key == key
            if entry.key not in ("", key):
                self.result.renamed[entry.key] = ", ".join(filter(None, [self.result.renamed.get(entry.key), key]))
        sections = {name: [key for key in self.new if key.startswith(f"{name}.")] for name in SECTIONS}
        return [
            "\n".join([f"[{name}]", *(line for key in keys for line in self.new[key].lines(key.partition(".")[2]))])
            for name, keys in sections.items()
            if keys
        ]

    # ------------------------------------------------------------------------------------- what several keys decide

    def complete(self) -> None:
        """Write what several keys decide together, and torchtitan's defaults where they differ from ours."""
        self.model()
        self.source("dataset", "training", "c4_test")
        self.validation()
        self.schedule()
        self.microbatches()
        self.float8()
        selective = self.value("activation_checkpoint.mode", "selective") == "selective"
        for key, value in tables.DEFAULTS.items():
            if selective or not key.startswith("activation_checkpoint."):
                self.add(key, value, "torchtitan's default")
        if self.result.version == "0.2" and self.new["checkpoint.enable"].value is True:
            self.add("checkpoint.last_save_model_only", True, "torchtitan's default")
        if self.value("checkpoint.initial_load_in_hf", False) is True:
            folder = self.value("model.hf_assets_path", "./tests/assets/tokenizer")
            self.add("checkpoint.initial_load_path", folder, "torchtitan's default: model.hf_assets_path")
        elif "checkpoint.initial_load_path" in self.new:
            entry = self.new.pop("checkpoint.initial_load_path")
            command = f"`titanlite import --torchtitan {shown(entry.value)} --out FOLDER`"
            self.lose(entry.key, f"It is a checkpoint of torchtitan's. {command} makes one of ours of its weights.")

    def model(self) -> None:
        """The sizes and the rotary frequencies in which a flavor of torchtitan's differs from ours."""
        flavor = str(self.value("model.flavor", "debugmodel"))
        base = _flavor(flavor)
        self.add("model.flavor", base, "torchtitan's default")
        theirs = asdict(TORCHTITAN_FLAVORS[flavor])
        theirs["rope_scaling_factor"] = tables.rope_scaling_factor(self.result.version)
        for key, ours in asdict(FLAVORS[base]).items():
            if key not in ("vocab_size", "max_seq_len") and theirs[key] != ours:
                self.add(f"model.{key}", theirs[key], f"torchtitan's {flavor}")
        if (length := self.number("training.seq_len", 2048)) > FLAVORS[base].max_seq_len:
            self.add("model.max_seq_len", length, "training.seq_len")
        if flavor in tables.MASKED:
            self.add("dataset.document_mask", True, f"torchtitan's {flavor}")

    def source(self, section: str, prefix: str, default: str) -> None:
        """Describe one of torchtitan's datasets in [section]. Its keys are prefix.dataset and prefix.dataset_path.

        Raises:
            UserError: it is unknown, and there is no path.
        """
        entry, place = self.old.get(f"{prefix}.dataset", _Entry("", default)), self.old.get(f"{prefix}.dataset_path")
        of_hub = entry.value in ("c4", "c4_validation")
        if place:
            self.put(f"{section}.source", "huggingface", entry)
            self.put(f"{section}.path", place.value, place)
            if of_hub:
                self.add(f"{section}.config", "en")
                self.add(f"{section}.streaming", True)
        elif of_hub:
            self.put(f"{section}.source", "c4", entry)
        elif entry.value == "c4_test":
            text = (
                "c4_test is a file of torchtitan's repository; python_stdlib is titanlite's text for trials. For the "
            )
            text += 'other: source = "jsonl", path = ".../tests/assets/c4_test/data.json".'
            self.lose(f"{prefix}.dataset", text)
            self.add(f"{section}.source", "python_stdlib")
        else:
            text = "torchtitan has c4, c4_test and c4_validation. Add dataset_path, a folder or a name on the hub."
            raise UserError(f"{entry.key} = {shown(entry.value)}: {text}")
        if entry.value == "c4_validation":
            self.add(f"{section}.split", "validation")

    def validation(self) -> None:
        """Rows and frequency of validation, which validation.enable turns on."""
        if self.value("validation.enable", False) is not True:
            self.new.pop("validation.freq", None)
            for key in (key for key in self.old if key.startswith("validation.") and key not in WITHOUT):
                self.lose(key, "Without validation.enable there is none. Here validation.freq above 0 turns it on.")
            return
        self.lose("validation.enable", "validation.freq above 0 turns it on.")
        self.add("validation.freq", 10, "torchtitan's default")
        self.source("validation", "validation", "c4_validation")
        rows, steps = self.number("validation.local_batch_size", 8), self.number("validation.steps", -1)
        length = self.number("training.seq_len", 2048)
        if self.number("validation.seq_len", 2048) != length:
            self.lose("validation.seq_len", f"Rows for validation have training.seq_len = {length} tokens.")
        if rows > 0 and steps > 0:
            self.put("validation.sequences", rows * steps, self.old["validation.steps"])
            text = f"validation.sequences counts the rows of all ranks: {rows * steps} are those of one data-parallel "
            self.lose("validation.local_batch_size", f"{text}rank of torchtitan's. Multiply it by their number.")
        else:
            text = "validation.sequences says how many rows to read; it is 64 where it is left out."
            self.lose("validation.steps", text)

    def schedule(self) -> None:
        """torchtitan shortens a warmup that is longer than the schedule."""
        steps = self.number("lr_scheduler.total_steps", self.number("training.steps", 10000))
        if self.number("lr_scheduler.warmup_steps", 200) > steps:
            why = "as torchtitan does where the schedule has fewer steps"
            self.add("lr_scheduler.warmup_steps", steps, why, replace=True)
        self.add("lr_scheduler.warmup_steps", 200, "torchtitan's default")

    def microbatches(self) -> None:
        """torchtitan cuts its local batch into microbatches; here a local batch is one, and a global batch has more."""
        ranks, rows = (
            self.number("parallelism.pipeline_parallel_degree", 1),
            self.number("training.local_batch_size", 8),
        )
        size = self.number("parallelism.pipeline_parallel_microbatch_size", 1)
        if "experimental.pipeline_parallel_degree" in self.old:  # then the file has the number of microbatches
            size = max(1, rows // max(1, self.number("experimental.pipeline_parallel_microbatches", ranks)))
        for key in ("parallelism.pipeline_parallel_microbatch_size", "experimental.pipeline_parallel_microbatches"):
            if key in self.old:
                text = (
                    "A microbatch is training.local_batch_size. A larger training.global_batch_size has more of them."
                )
                self.lose(key, text)
        if ranks == 1:
            return
        self.add("training.local_batch_size", size, "the rows of a microbatch", replace=True)
        if self.number("training.global_batch_size", -1) != -1:
            return
        shard = self.number("parallelism.data_parallel_shard_degree", -1)
        if shard > 0:
            data = shard * self.number("parallelism.data_parallel_replicate_degree", 1)
            self.add("training.global_batch_size", rows * data, "training.local_batch_size", replace=True)
        else:
            text = f"A step has {rows} rows for each data-parallel rank, in microbatches of {size}: set "
            self.lose("training.local_batch_size", f"{text}training.global_batch_size to {rows} times their number.")

    def float8(self) -> None:
        """Which layers are converted, and other conversions than that to FP8."""
        others = [name for name in _names(self.value("model.converters", [])) if "float8" not in str(name)]
        if others:
            text = "There is no such conversion of a model. float8.enable is for FP8."
            self.lose(f"model.converters {shown(others)}", text)
        if "float8.enable" not in self.new or self.new["float8.enable"].value is not True:
            return
        filters = self.value("quantize.linear.float8.filter_fqns", self.value("float8.filter_fqns", []))
        small = SMALL_LAYERS in _names(filters)
        why = (
            f"{SMALL_LAYERS} leaves small layers in high precision" if small else "torchtitan converts small ones, too"
        )
        self.add("float8.min_features", 1024 if small else 0, why)
        if "float8.enable_float8_linear" not in self.old and not any(str(name) in "output" for name in _names(filters)):
            text = "torchtitan converts it, too, where filter_fqns does not name it. Here it always stays in high "
            self.lose("the output projection in FP8", f"{text}precision, because its logits are computed in chunks.")


# ------------------------------------------------------------------------------------------------- values translated

SMALL_LAYERS = "auto_filter_small_kn"


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
    return (
        f"{path.rstrip('/')}/tokenizer.json"
        if isinstance(path, str) and not path.endswith((".model", ".json"))
        else path
    )


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


def _filters(value: Any) -> Any:
    names = _names(value)
    kept = [name for name in names if name != SMALL_LAYERS]
    return kept if isinstance(value, str) or len(kept) < len(names) else value


VALUES: dict[str, Callable[[Any], Any]] = {
    "model.flavor": _flavor,
    "float8.enable": lambda value: value if isinstance(value, bool) else any("float8" in str(n) for n in _names(value)),
    "tokenizer.path": _tokenizer,
    "parallelism.pipeline_parallel_split_points": _stages,
    "parallelism.pipeline_parallel_schedule": _pipeline_schedule,
    "activation_checkpoint.selective_ac_option": lambda value: str(value) if isinstance(value, int) else value,
    "float8.filter_fqns": _filters,
}
