"""Reads a job file and the command line into one validated `JobConfig`.

Invariant: all mistakes are collected and reported together, and only files are read. A value on the command line wins
over the file, and a value in the file wins over the default of the schema.
"""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import tomli
import tomlkit
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from titanlite.config.errors import UserError
from titanlite.config.files import read_file
from titanlite.config.mistakes import COMMAND_LINE, Mistake, WrongJob, shown, table_within, types_in, unknown, wrapped
from titanlite.config.registry import Registry, load_plugins, require_plugins
from titanlite.config.schema import KEYS, SECTIONS, JobConfig
from titanlite.config.storage import local_copy

PACKAGE = Path(__file__).resolve().parents[1]
JOB_FILES = (PACKAGE / "train_configs").resolve()  # in the repository a link to the folder beside the package
DEFAULT_JOB_FILE = "debug_model.toml"
MOST_BYTES = 1 << 22  # of a job file; one with a mix of 10,000 sources has 1 MB
CONFIG_FILE = "job.config_file"
PLUGINS = "job.plugins"
HELP = "--help"


class Draft(NamedTuple):
    """What was read, together with the mistakes in it.

    Attributes:
        job: A valid job: each wrong value is replaced by its default.
        mistakes: What is wrong.
        origins: "section.key" -> where its value was set: the file, the command line, or "default".
        file: The job file.
    """

    job: JobConfig
    mistakes: Sequence[Mistake]
    origins: dict[str, str]
    file: str


def load_job(argv: Sequence[str], trusted: bool = True) -> JobConfig:
    """The job of a command line such as `["--job.config_file", "llama_8b.toml", "--training.steps", "100"]`.

    Args:
        trusted: the job file is its owner's, so the plugins that it names are imported. Those on the command line are
            in any case.

    Raises:
        UserError: anything wrong, all mistakes in one message; or a plugin that is missing.
    """
    draft = read_job([str(word) for word in argv], trusted)  # a program may give numbers
    if draft.mistakes:
        raise WrongJob(draft.mistakes, draft.file, draft.origins)
    return draft.job


def read_job(
    argv: Sequence[str], trusted: bool = True, below: Callable[[], dict[str, dict[str, Any]]] | None = None
) -> Draft:
    """Reads everything and collects the mistakes. If `argv` asks for the help, it is printed and the process exits with
    0.

    Args:
        trusted: see `load_job`.
        below: gives the tables over which the file wins, once all plugins are there. Then no file is needed.

    Raises:
        UserError: the job file cannot be read, or a plugin that it names cannot be imported.
    """
    values, _ = _command_line(argv)
    needs_file = below is None or CONFIG_FILE in values
    path, raw = _read_file(str(values.get(CONFIG_FILE, DEFAULT_JOB_FILE))) if needs_file else (Path("--from"), {})
    table = raw.get("job", {})
    named = values.get(PLUGINS, table.get("plugins", ()) if isinstance(table, dict) else ())
    if isinstance(named, list) and all(isinstance(name, str) for name in named):  # otherwise it is a mistake
        load_plugins(named) if trusted or PLUGINS in values else require_plugins(named, path)
    values, mistakes = _command_line(argv)  # once more, because plugins have keys
    origins = dict.fromkeys(KEYS, "default")
    origins |= {f"{name}.{key}": str(path) for name, table in raw.items() if isinstance(table, dict) for key in table}
    if isinstance(raw.setdefault("job", {}), dict) and needs_file:  # a saved config.toml names its original
        raw["job"].setdefault("config_file", str(path))
    for section, table in below().items() if below else ():
        if isinstance(raw.setdefault(section, {}), dict) and not (section == "job" and needs_file):
            raw[section] = table | raw[section]
    if HELP in values:
        _print_help(JobConfig.read(raw if CONFIG_FILE in values else {})[0], values[HELP])
    values.pop(CONFIG_FILE, None)
    for key, value in values.items():
        section, name = key.split(".")
        if isinstance(table := raw.setdefault(section, {}), dict):  # otherwise it is a mistake, which is found below
            table[name] = value
    job, wrong = JobConfig.read(raw)
    origins |= dict.fromkeys([*values, *(each.key for each in mistakes)], COMMAND_LINE)
    return Draft(job, [*mistakes, *wrong], origins, str(path))


def _read_file(name: str) -> tuple[Path, dict[str, Any]]:
    """The file `name` as given, in ./train_configs, or in titanlite's own train_configs, and its content. The suffix
    .toml may be missing. Raises UserError: there is none, or it is no TOML."""
    home = os.path.expanduser(name)
    places = [folder / file for folder in (Path(), Path("train_configs"), JOB_FILES) for file in (home, f"{home}.toml")]
    path = next(filter(os.path.isfile, places), None)
    if path is None:
        known = ", ".join(sorted(file.stem for file in JOB_FILES.glob("*.toml")))
        text = f"no such file here, in ./train_configs/ or in {JOB_FILES}/. Known there: {known}."
        raise UserError(f"{CONFIG_FILE} = {shown(name)}: {text}")
    try:
        return path, tomli.loads(read_file(path, MOST_BYTES).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, a number of 5,000 digits, or lists 400 deep
        raise UserError(f"{path} is not valid TOML in UTF-8, as a job file must be: {error}.") from None


def _command_line(argv: Sequence[str]) -> tuple[dict[str, Any], list[Mistake]]:
    """The values of the options by key, as a job file would have them, and what is wrong."""
    values: dict[str, Any] = {}
    mistakes: list[Mistake] = []
    options: list[list[str]] = []  # each with the words after it
    for word in argv:
        word = word.encode(errors="replace").decode()  # what is no UTF-8 could not be written down
        if word.startswith("--") or word == "-h":
            options.append([HELP] if word == "-h" else word.split("=", 1))
        elif options:
            options[-1].append(word)
        else:
            mistakes.append(Mistake(word, word, f"belongs to no option; a job file comes after --{CONFIG_FILE}."))
    for flag, *given in options:
        name = flag[2:].replace("-", "_")
        name = "config_file" if name == "config" else name  # or dataset.config would be proposed
        name = name[3:].replace(".", ".no_", 1) if name.startswith("no_") else name  # --no-compile.enable
        key = name if name in KEYS else name.replace(".no_", ".", 1)
        field = KEYS.get(key)
        kinds = types_in(field.annotation) if field else set()
        if flag == HELP:
            values[HELP] = given
        elif key in SECTIONS:
            keys = ", ".join(f"{flag}.{key}" for key in SECTIONS[key].model_fields)
            mistakes.append(Mistake(flag, flag, f"is a section, whose keys are {keys}."))
        elif field is None or (key != name and bool not in kinds):
            mistakes.append(unknown(JobConfig, name if field else key)._replace(key=flag, found=flag))
        elif bool in kinds and not given:
            values[key] = key == name
        elif typing.get_origin(field.annotation) is tuple:
            values[key] = [_value(word, kinds) for word in given]
        elif bool not in kinds and len(given) == 1:
            values[key] = _value(given[0], kinds)
        else:
            wanted = f"no value: alone true, false is --{key.replace('.', '.no-')}" if bool in kinds else "one value"
            mistakes.append(Mistake(flag, " ".join([flag, *given]), f"takes {wanted}. {field.description}"))
    return values, mistakes


def _value(word: str, kinds: set[type]) -> Any:
    """The value that a job file would have for a word, or the word itself, which the schema then refuses."""
    if word == "None" and type(None) in kinds:  # as the help writes it
        return None
    for kind in kinds & {int, float}:
        with suppress(ValueError):
            return kind(word)
    return word


_TEXT = """usage: titanlite train [--from FOLDER_OR_NAME] [--SECTION.KEY VALUE ...]

Train the model that a job file describes: `--job.config_file FILE`. Without one, debug_model.toml is trained. `launch`
does so on each GPU, or in NGPU=N processes. `--from` goes on from a model, a folder or OWNER/NAME on the Hugging Face
hub, and needs no job file: [model], the tokenizer, the length of rows and the learning rate follow from the model,
unless the file or the command line has them. Each key below can be given on the command line, too, and wins over the
file. `--help SECTION` explains the keys of a section, `--help KEY` one key, and `--help all` all."""


def _print_help(job: JobConfig, topics: Sequence[str]) -> None:
    """Print what is asked for, then exit 0.

    Args:
        job: Its values are shown.
        topics: sections ("training") and keys ("training.steps", "steps") to explain, or "all". Empty: the keys are
            listed.

    Raises:
        UserError: there is no such section or key.
    """
    asked = {topic.removeprefix("--").replace("-", "_") for topic in topics}
    for name in asked - {"all"}:
        if not any(name in (key, *key.split(".")) for key in KEYS):
            raise UserError(f"{name}: {unknown(JobConfig, name).remedy}")
    if not asked:
        print(wrapped(_TEXT), end="\n\n")
    for section, model in SECTIONS.items():
        if not asked or asked & {section, "all"}:
            print(wrapped(f"[{section}] {model.__doc__}"), end="\n\n" if asked else "\n")
        if not asked:
            print(wrapped(", ".join(model.model_fields), 6), end="\n\n")
        for name, field in model.model_fields.items():
            if asked & {section, "all", name, f"{section}.{name}"}:
                _print_key(f"{section}.{name}", field, getattr(getattr(job, section), name))
    sys.exit(0)


def _print_key(key: str, field: FieldInfo, value: Any, flag: str = "--") -> None:
    """A key with its type, its text and its value. The keys of a table that stands in the file only have no flag."""
    table = table_within(field.annotation)
    names = [_words(each) for each in field.metadata if isinstance(each, Registry)]
    words = " ".join(dict.fromkeys(names[0] if names else _words(field.annotation)))
    words = f"{flag}{key} {words}{' ...' * (typing.get_origin(field.annotation) is tuple)}"
    words = f"--{key}, --{key.replace('.', '.no-')}" if words == f"--{key} BOOL" else words
    default = "required" if value is PydanticUndefined else f"default: {shown(value) if value is not None else value}"
    print(f"[[{key}]]" if table else words)
    print(wrapped(f"{field.description}{'' if table else f' ({default})'}", 6), end="\n\n")
    for name, inner in table.model_fields.items() if table else ():
        _print_key(f"{key}.{name}", inner, inner.default, "")


def _words(annotation: Any) -> list[str]:
    """What a value of a key may be: choices, or types."""
    if isinstance(annotation, Registry):
        return ["|".join(annotation)] if [*annotation] else []
    if typing.get_origin(annotation) is typing.Literal:
        return ["|".join(map(str, typing.get_args(annotation)))]
    if parts := typing.get_args(annotation):
        parts = [part for part in parts if isinstance(part, Registry)] or parts
        return [word for part in parts for word in _words(part)]
    return [annotation.__name__.upper()] if isinstance(annotation, type) and annotation is not type(None) else []


def dump_config(job: JobConfig, without: Collection[str] = ()) -> str:
    """The job as TOML, but for some sections. A file with this text gives an equal `JobConfig` when it is loaded."""
    return tomlkit.dumps(job.model_dump(exclude_none=True, exclude={*without}))


def resolve_path(path: str) -> Path:
    """The path itself if it is absolute or exists in the current folder, otherwise the path within titanlite's own
    folder. Of a tokenizer at a URL that of a copy. Raises UserError: there is none."""
    here = local_copy(os.path.expanduser(path), beside="tokenizer_config.json")
    return here if here.exists() or not (PACKAGE / here).exists() else PACKAGE / here
