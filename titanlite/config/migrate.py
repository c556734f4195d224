"""Turns a job file of torchtitan into one of ours: text to text, with the comments.

Invariant: a key of the old file is carried over, or named in the report with the reason, and so is a name of something
that titanlite does not have. The new file is valid by the schema, or the old one is refused with all values that are
wrong. No file is read or written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import tomli
import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Comment, InlineTable, Table, Whitespace

from titanlite.config import torchtitan
from titanlite.config.errors import UserError, printable
from titanlite.config.flavors import FLAVORS
from titanlite.config.keys import SECTIONS
from titanlite.config.mistakes import WrongJob, block, json_schema, shown
from titanlite.config.schema import JobConfig
from titanlite.config.torchtitan import CONVERTED, EQUIVALENT, TORCHTITAN_FLAVORS, WITHOUT, Version

_UNKNOWN = "It is no key of torchtitan 0.1 or 0.2."


@dataclass(frozen=True)
class _Entry:
    """A key of the old file. `text` is its value as written there; `above` are the lines of comment above it.

    The key "." stands for comments that belong to no key, but to the table above.
    """

    key: str
    value: Any
    text: str
    comment: str
    above: tuple[str, ...]


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
    if printable(raw) != raw:
        line = next(n for n, text in enumerate(raw.split("\n"), 1) if printable(text) != text)
        raise UserError(f"{name}: line {line} has control characters or invisible ones. Remove them.")
    try:
        tomli.loads(raw)
        document = tomlkit.parse(raw)
    except (ValueError, RecursionError, TOMLKitError) as error:  # bad TOML, a number of 5,000 digits, deep lists
        raise UserError(f"{name}: not valid TOML: {error}.") from None
    return _Job(name, list(_entries(document.body, ())), version).migration()


def _entries(body: list[Any], path: tuple[str, ...], pending: list[str] | None = None) -> Iterator[_Entry]:
    """All keys in the order of the file, with those of tables in tables."""
    pending = [] if pending is None else pending  # lines of comment since the last key, and "" for an empty line
    for key, item in body:
        here = path if key is None else (*path, *(part.key for part in key))
        if isinstance(item, Whitespace):
            pending.extend([""] if "\n" in item.as_string() else [])
        elif isinstance(item, Comment):
            pending.append(item.trivia.comment)
        elif isinstance(item, Table | InlineTable) and (item or not path):
            if not path:  # what stands before an empty line belongs to the table above, the rest to this one
                cut = len(pending) - pending[::-1].index("") if "" in pending else 0
                yield _Entry(".", None, "", "", tuple(filter(None, pending[:cut])))
                pending[:] = pending[cut:]
            pending.extend(filter(None, [item.trivia.comment]))
            yield from _entries(item.value.body, here, pending)
        elif item is not None and key is not None:
            name = ".".join(part if "." not in part else json.dumps(part) for part in here)
            text = "" if isinstance(item, AoT) else item.as_string()
            comment = "" if isinstance(item, AoT) else item.trivia.comment
            yield _Entry(name, item.unwrap(), text, comment, tuple(filter(None, pending)))
            pending.clear()
    if not path:
        yield _Entry(".", None, "", "", tuple(filter(None, pending)))


class _Job:
    """The old file by keys, and the new one by sections while it is made."""

    def __init__(self, name: str, entries: list[_Entry], version: Version | None) -> None:
        self.name = name
        self.entries = entries
        self.by_key = {entry.key: entry for entry in entries if entry.key != "."}
        self.old: dict[str, Any] = {key: entry.value for key, entry in self.by_key.items()}
        self._refuse_others()
        self.result = Migration(version or torchtitan.version_of(self.old))
        self.values: dict[str, str] = {}  # new key -> its value as TOML
        self.origins: dict[str, str] = {}  # new key -> old key
        self.lines: dict[str, list[str]] = {}  # section -> its lines

    def migration(self) -> Migration:
        """The result. Raises UserError: wrong values."""
        section = ""
        header: list[str] = []
        for entry in self.entries:
            if entry.key != ".":
                section = entry.key.partition(".")[0]
                self._carry(entry)
            elif section in self.lines:
                self.lines[section].extend(self._comments(entry, section))
            elif not section and entry.above:
                header += [*entry.above, ""]
        self._complete()
        blocks = ["\n".join([f"[{section}]", *lines]) for section, lines in self.lines.items()]
        self.result.text = "\n".join([*header, "\n\n".join(blocks), ""])
        self._validate()
        return self.result

    # ------------------------------------------------------------------------------------------------- what it is

    def _refuse_others(self) -> None:
        model = self.old.get("model.name", "llama3")
        if model != "llama3":
            text = f"model.name = {shown(model)}: titanlite trains Llamas only, which torchtitan calls llama3."
            raise UserError(f"{self.name}: {text}")
        ours = SECTIONS.keys() - torchtitan.SECTIONS
        for key in self.old:
            section = key.partition(".")[0]
            if section in ours:
                raise UserError(f"{self.name}: [{section}] is a section of titanlite's. Is this its job file already?")
            if section in torchtitan.SECTIONS_OF_EXTENSIONS:
                whose = torchtitan.SECTIONS_OF_EXTENSIONS[section]
                raise UserError(f"{self.name}: [{section}] is for {whose}; titanlite trains Llamas only.")
            if section not in torchtitan.SECTIONS or "." not in key:
                found = f"[{section}]" if "." in key else f"{key} = {shown(self.old[key])}"
                known = ", ".join(sorted(torchtitan.SECTIONS))
                raise UserError(f"{self.name}: {found} is not torchtitan's, whose sections are {known}. Remove it.")

    # ------------------------------------------------------------------------------------------------ key by key

    def _carry(self, entry: _Entry) -> None:
        if not entry.text and entry.key in EQUIVALENT.keys() | CONVERTED:
            raise UserError(f"{self.name}: [[{entry.key}]]: a value is expected, not tables.")
        if convert := _CONVERT.get(entry.key):
            convert(self, entry)
        elif entry.key in EQUIVALENT:
            if reason := _lacking(EQUIVALENT[entry.key], entry.value):
                self.lose(f"{entry.key} = {shown(entry.value)}", reason)
            else:
                self.put(EQUIVALENT[entry.key], entry.text, entry)
        else:
            self.lose(entry.key, WITHOUT.get(entry.key, _UNKNOWN))

    def put(self, key: str, text: str, entry: _Entry | None = None) -> None:
        """Write a key of the new file, with the comments of an old one.

        Raises:
            UserError: two keys of the old file become this one.
        """
        section, _, name = key.partition(".")
        if key in self.values:
            if entry is None or self.values[key] == text:
                return
            both = f"{self.origins[key]} and {entry.key}"
            raise UserError(f"{self.name}: {both} both become {key}, with different values. Remove one of them.")
        self.values[key] = text
        lines = self.lines.setdefault(section, [])
        if entry is None:
            lines.append(f"{name} = {text}")
            return
        self.origins[key] = entry.key
        lines.extend(self._comments(entry, entry.key.partition(".")[0]))
        lines.append(f"{name} = {text}" + (f"  {entry.comment}" if entry.comment else ""))
        if key == entry.key:
            self.result.carried += 1
        else:
            self.result.renamed[entry.key] = ", ".join(filter(None, [self.result.renamed.get(entry.key), key]))

    def add(self, key: str, text: str, why: str) -> None:
        """Write a key that the old file leaves out."""
        if key not in self.values:
            self.put(key, text)
            self.result.added[f"{key} = {text}"] = why

    def lose(self, key: str, reason: str) -> None:
        """Note a key without an equivalent."""
        self.result.lost.setdefault(reason, []).append(key)

    def _comments(self, entry: _Entry, section: str) -> Iterator[str]:
        """The comments above a key, without keys that are commented out and that titanlite does not have."""
        for line in entry.above:
            match = re.match(r"#+\s*([\w.-]+)\s*=", line)
            key = f"{section}.{match[1]}" if match else ""
            if key in torchtitan.ALL and EQUIVALENT.get(key) != key:
                self.lose(f"# {key}", "It was commented out.")
            else:
                yield line

    def text_of(self, entry: _Entry) -> str:
        """The value, which must be a text. Raises UserError."""
        if not isinstance(entry.value, str):
            raise UserError(f"{self.name}: {entry.key} = {shown(entry.value)}: a text is expected.")
        return entry.value

    # ----------------------------------------------------------------------------------- what several keys decide

    def _complete(self) -> None:
        self._model()
        self.source("dataset", "training", "c4_test")
        self._validation()
        for key, text in torchtitan.DEFAULTS.items():
            if (
                not key.startswith("activation_checkpoint.")
                or self._value("activation_checkpoint.mode", "selective") == "selective"
            ):
                self.add(key, text, "torchtitan's default")
        if self.result.version == "0.2" and self._value("checkpoint.enable", False) is True:
            self.add("checkpoint.last_save_model_only", "true", "torchtitan's default")
        self._schedule()
        self._microbatches()
        if "float8.enable" in self.values:
            self.add("float8.min_features", "0", "torchtitan converts small layers, too")
        if self.old.get("checkpoint.initial_load_in_hf") is True and "checkpoint.initial_load_path" not in self.values:
            folder = self.old.get("model.hf_assets_path", "./tests/assets/tokenizer")
            self.add("checkpoint.initial_load_path", _toml(folder), "torchtitan's default: model.hf_assets_path")

    def _value(self, key: str, default: Any) -> Any:
        """The value of a key of the new file."""
        return tomli.loads(f"value = {self.values[key]}")["value"] if key in self.values else default

    def _model(self) -> None:
        flavor = self.old.get("model.flavor", "debugmodel")
        if not isinstance(flavor, str) or flavor not in TORCHTITAN_FLAVORS:
            known = ", ".join(TORCHTITAN_FLAVORS)
            text = f"model.flavor = {shown(flavor)}: torchtitan's Llamas are {known}."
            raise UserError(f"{self.name}: {text} For a model of your own set one of them, and its sizes afterwards.")
        base = flavor.partition("_")[0].lower()
        if "model.flavor" not in self.values:
            self.add("model.flavor", _toml(base), "torchtitan's default")
        theirs = asdict(TORCHTITAN_FLAVORS[flavor]) | torchtitan.rotary_scaling(self.result.version)
        for key, ours in asdict(FLAVORS[base]).items():
            if key not in ("vocab_size", "max_seq_len") and theirs[key] != ours:
                self.add(f"model.{key}", _toml(theirs[key]), f"torchtitan's {flavor}")
        length = self.old.get("training.seq_len", 2048)
        if _whole(length) and length > FLAVORS[base].max_seq_len:
            self.add("model.max_seq_len", _toml(length), "training.seq_len")
        if flavor in torchtitan.MASKED:
            self.add("dataset.document_mask", "true", f"torchtitan's {flavor}")

    def source(self, section: str, prefix: str, default: str) -> None:
        """Describe one of torchtitan's datasets in [section]. Its keys are prefix.dataset and prefix.dataset_path.

        Raises:
            UserError: it is unknown, and there is no path.
        """
        if f"{section}.source" in self.values:
            return
        entry, place = self.by_key.get(f"{prefix}.dataset"), self.by_key.get(f"{prefix}.dataset_path")
        name = entry.value if entry else default
        if place:
            self.put(f"{section}.source", '"huggingface"', entry)
            self.put(f"{section}.path", place.text, place)
            if name in ("c4", "c4_validation"):
                self.put(f"{section}.config", '"en"')
                self.put(f"{section}.streaming", "true")
        elif name in ("c4", "c4_validation"):
            self.put(f"{section}.source", '"c4"', entry)
        elif name == "c4_test":
            text = (
                "c4_test is a file of torchtitan's repository; python_stdlib is titanlite's text for trials. For the "
            )
            self.lose(
                f"{prefix}.dataset", text + 'other: source = "jsonl", path = ".../tests/assets/c4_test/data.json".'
            )
            self.put(f"{section}.source", '"python_stdlib"')
        else:
            text = "torchtitan has c4, c4_test and c4_validation. Add dataset_path, a folder or a name on the hub."
            raise UserError(f"{self.name}: {prefix}.dataset = {shown(name)}: {text}")
        if name == "c4_validation":
            self.put(f"{section}.split", '"validation"')

    def _validation(self) -> None:
        keys = [key for key in self.old if key in CONVERTED and key.startswith("validation.")]
        if self.old.get("validation.enable") is not True:
            for key in keys:
                self.lose(key, "Without validation.enable there is none. Here validation.freq above 0 turns it on.")
            return
        self.lose("validation.enable", "validation.freq above 0 turns it on.")
        freq = self.by_key.get("validation.freq")
        self.put("validation.freq", freq.text if freq else "10", freq)
        self.source("validation", "validation", "c4_validation")
        rows, steps = self.old.get("validation.local_batch_size", 8), self.old.get("validation.steps", -1)
        length = self.old.get("training.seq_len", 2048)
        if self.old.get("validation.seq_len", 2048) != length:
            self.lose("validation.seq_len", f"Rows for validation have training.seq_len = {length} tokens.")
        if _whole(rows, steps) and rows > 0 and steps > 0:
            self.put("validation.sequences", str(rows * steps), self.by_key["validation.steps"])
            self.lose(
                "validation.steps, validation.local_batch_size",
                f"validation.sequences counts the rows of all ranks: {rows * steps} are those of one data-parallel "
                "rank of torchtitan's. Multiply it by their number.",
            )
        else:
            self.lose(
                "validation.steps", "validation.sequences says how many rows to read; it is 64 where it is left out."
            )

    def _schedule(self) -> None:
        steps, warmup = self.old.get("training.steps", 10000), self.old.get("lr_scheduler.warmup_steps", 200)
        if _whole(steps, warmup) and "lr_scheduler.warmup_steps" not in self.values:
            why = "torchtitan's default" if warmup <= steps else "as torchtitan does where training.steps is less"
            self.add("lr_scheduler.warmup_steps", str(min(warmup, steps)), why)

    def _microbatches(self) -> None:
        """torchtitan cuts its local batch into microbatches; here a local batch is one, and a global batch has more."""
        ranks, rows = (
            self.old.get("parallelism.pipeline_parallel_degree", 1),
            self.old.get("training.local_batch_size", 8),
        )
        size = self.old.get("parallelism.pipeline_parallel_microbatch_size", 1)
        if not _whole(ranks, rows, size):
            return
        if "parallelism.pipeline_parallel_microbatch_size" in self.old:
            text = "A microbatch is training.local_batch_size. A larger training.global_batch_size has more of them."
            self.lose("parallelism.pipeline_parallel_microbatch_size", text)
        if ranks == 1:
            return
        self.add("training.local_batch_size", str(size), "parallelism.pipeline_parallel_microbatch_size")
        shard = self.old.get("parallelism.data_parallel_shard_degree", -1)
        replicate = self.old.get("parallelism.data_parallel_replicate_degree", 1)
        if self.old.get("training.global_batch_size", -1) != -1:
            return
        if _whole(shard, replicate) and shard > 0:
            self.add("training.global_batch_size", str(rows * shard * replicate), "training.local_batch_size")
        else:
            text = f"A step has {rows} rows for each data-parallel rank, in microbatches of {size}: set "
            self.lose("training.local_batch_size", f"{text}training.global_batch_size to {rows} times their number.")

    def _validate(self) -> None:
        """Raises UserError: the new file has values that the schema refuses."""
        raw = tomli.loads(self.result.text)
        assert {f"{s}.{key}" for s, table in raw.items() for key in table} == self.values.keys(), "text and keys differ"
        try:
            JobConfig.model_validate(raw)
        except WrongJob as wrong:
            blocks = [
                block(f"{self.name}: {self.origins.get(mistake.key, mistake.key)}", mistake.found, mistake.remedy)
                for mistake in wrong.mistakes
            ]
            text = "values that are wrong. Change them in this file and migrate again:"
            raise UserError("\n".join([f"{self.name} has {text}", *blocks])) from None


# ------------------------------------------------------------------------------------------------- values translated


def _toml(value: Any) -> str:
    """The value in TOML, without characters that act on a terminal."""
    text = shown(value)
    return "".join(
        c if printable(c) == c else f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in text
    )


def _lacking(key: str, value: Any) -> str | None:
    """Why a key of ours cannot have a value that is a name, such as "Adam"; None if it can, or if it is no name."""
    section, _, name = key.partition(".")
    model = SECTIONS[section]
    field = json_schema(model)["properties"][name]
    names = field.get("enum") or [field["const"]] if "enum" in field or "const" in field else []
    if not isinstance(value, str) or not names or value in names:
        return None
    here = (
        "titanlite has " + " or ".join(map(shown, names)) if len(names) > 1 else f"titanlite has {shown(names[0])} only"
    )
    left_out = f"{here}. Left out, it is {shown(model.model_fields[name].default)}."
    return " ".join(filter(None, [left_out, torchtitan.INSTEAD.get(value)]))


def _whole(*values: Any) -> bool:
    """Whether all are whole numbers. If one is not, the schema refuses it later."""
    return all(type(value) is int for value in values)


def _flavor(job: _Job, entry: _Entry) -> None:
    job.put("model.flavor", _toml(job.text_of(entry).partition("_")[0].lower()), entry)


def _converters(job: _Job, entry: _Entry) -> None:
    """`model.converters` switches float8 on."""
    names = [entry.value] if isinstance(entry.value, str) else entry.value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{job.name}: {entry.key} = {shown(entry.value)}: a list of texts is expected.")
    rest = [name for name in names if name not in ("float8", "quantize.linear.float8")]
    if len(rest) < len(names):
        job.put("float8.enable", "true", entry)
    if rest:
        job.lose(f"{entry.key} {shown(rest)}", "There is no such conversion of a model. float8.enable is for FP8.")


def _tokenizer(job: _Job, entry: _Entry) -> None:
    """A folder with tokenizer.json, or a tokenizer file. torchtitan prefers tokenizer_path."""
    if entry.key == "model.hf_assets_path" and "model.tokenizer_path" in job.old:
        job.lose(entry.key, "model.tokenizer_path comes before it.")
        return
    path = job.text_of(entry)
    if not path.endswith((".model", ".json")):
        path = f"{path.rstrip('/')}/tokenizer.json"
    job.put("tokenizer.path", _toml(path), entry)


def _dataset(job: _Job, entry: _Entry) -> None:
    job.source("dataset", "training", "c4_test")


def _local_batch(job: _Job, entry: _Entry) -> None:
    if job.old.get("parallelism.pipeline_parallel_degree", 1) == 1:
        job.put("training.local_batch_size", entry.text, entry)


def _warmup(job: _Job, entry: _Entry) -> None:
    steps = job.old.get("training.steps", 10000)
    if not (_whole(steps, entry.value) and entry.value > steps):
        job.put("lr_scheduler.warmup_steps", entry.text, entry)


def _stages(job: _Job, entry: _Entry) -> None:
    """The first block of each part but the first is a split point."""
    try:
        points = [next(name for name in part if name.startswith("layers.")) for part in entry.value[1:]]
    except (TypeError, AttributeError, StopIteration):
        text = "lists of names of modules are expected, each with a block."
        raise UserError(f"{job.name}: {entry.key} = {shown(entry.value)}: {text}") from None
    job.put("parallelism.pipeline_parallel_split_points", _toml(points), entry)


def _initial_load(job: _Job, entry: _Entry) -> None:
    if job.old.get("checkpoint.initial_load_in_hf") is True:
        job.put("checkpoint.initial_load_path", entry.text, entry)
    else:
        folder = shown(entry.value)
        text = (
            f"It is a checkpoint of torchtitan's. `titanlite import --torchtitan {folder} --out FOLDER` makes one of "
        )
        job.lose(entry.key, text + "ours of its weights.")


def _load_step(job: _Job, entry: _Entry) -> None:
    job.lose(
        entry.key, "It names a checkpoint of torchtitan's run. A run of titanlite goes on from its own newest one."
    )


def _exclude(job: _Job, entry: _Entry) -> None:
    job.lose(entry.key, "It is about checkpoints of torchtitan's run. `titanlite import` takes the weights alone.")


def _ac_option(job: _Job, entry: _Entry) -> None:
    job.put(entry.key, _toml(str(entry.value)) if type(entry.value) is int else entry.text, entry)


def _filter(job: _Job, entry: _Entry) -> None:
    names = entry.value.split(",") if isinstance(entry.value, str) else entry.value
    if isinstance(names, list) and "auto_filter_small_kn" in names:
        names = [name for name in names if name != "auto_filter_small_kn"]
        job.lose(f"{entry.key} auto_filter_small_kn", "float8.min_features leaves small layers in high precision.")
        job.put("float8.min_features", "1024")
    job.put("float8.filter_fqns", entry.text if names == entry.value else _toml(names), entry)


def _elsewhere(job: _Job, entry: _Entry) -> None:
    """The key is read together with others."""


_CONVERT: dict[str, Callable[[_Job, _Entry], None]] = {
    **dict.fromkeys(CONVERTED, _elsewhere),
    "model.name": lambda job, entry: job.lose(entry.key, "titanlite trains Llamas only."),
    "model.flavor": _flavor,
    "model.converters": _converters,
    "model.hf_assets_path": _tokenizer,
    "model.tokenizer_path": _tokenizer,
    "training.dataset": _dataset,
    "training.dataset_path": _dataset,
    "training.local_batch_size": _local_batch,
    "lr_scheduler.warmup_steps": _warmup,
    "parallelism.module_fqns_per_model_part": _stages,
    "checkpoint.initial_load_path": _initial_load,
    "checkpoint.load_step": _load_step,
    "checkpoint.exclude_from_loading": _exclude,
    "activation_checkpoint.selective_ac_option": _ac_option,
    "float8.filter_fqns": _filter,
    "quantize.linear.float8.filter_fqns": _filter,
}
