"""Define the options of commands as classes, in which each field is an option.

The docstring of a field is its help text.

Invariant: an invalid option raises a UserError, whose message takes one line per mistake.
Commands import this module only when they run, because importing tyro and pydantic takes a tenth of
a second.
"""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro
from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    create_model,
)

from titanlite.config.errors import UserError
from titanlite.config.mistakes import COMMAND_LINE, find_types, wrap_text
from titanlite.config.registry import load_plugins
from titanlite.config.run import MOST_RANKS
from titanlite.config.schema import RootConfig, check_path

_MIN_SIMILARITY = 0.75
"""Minimum `difflib` ratio of a suggestion. The default, 0.6, suggests `--plot` for `--lr`."""
JOB_KEYS = "Every key of a job is also an option. Run `titanlite train --help` for a list."

# A path. A leading ~ is expanded, and names that no file system accepts are rejected.
OptionPath = Annotated[
    Path, Field(strict=False), AfterValidator(lambda path: Path(check_path(str(path))))
]

# A path as a positional argument.
PositionalPath = Annotated[OptionPath, tyro.conf.Positional]

# The option --json.
AsJson = Annotated[bool, tyro.conf.arg(name="json")]

# A number of ranks.
OptionRanks = Annotated[PositiveInt, Field(le=MOST_RANKS)]

HELP_TEXT_INDENT = " " * 9  # in the error messages of tyro

# Accept --json without a --no-json. In the help, write PATH instead of {None}|PATH, and name a
# positional argument after its field.
_STYLE = (
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.DisallowNone,
    tyro.conf.PositionalMetavarFromFieldName,
)


class Options(RootConfig):
    """Base class for the options of a command."""

    source: ClassVar[str] = COMMAND_LINE

    @classmethod
    def name_on_command_line(cls, field: str) -> str:
        """Return the name of a field in the help, such as "--step" or, if positional, "DIR"."""
        metadata = cls.model_fields[field].metadata
        if tyro.conf.Positional in metadata:
            return field.upper()
        names = [item.name for item in metadata if getattr(item, "name", None)]  # tyro.conf.arg
        return f"--{names[0] if names else field.replace('_', '-')}"


class CheckpointOptions(Options):
    """Base class for the options of a command that reads a checkpoint or a model folder.

    A checkpoint never causes an import of plugins, because imports run code. The user must name the
    plugins with --job.plugins.
    """

    plugins: Annotated[tuple[str, ...], Field(strict=False), tyro.conf.arg(name="job.plugins")] = ()
    """Plugins that the checkpoint was trained with. They are imported before it is read."""


class TextModelOptions(CheckpointOptions):
    """Base class for the options of a command that reads or writes text with a checkpoint."""

    tokenizer_path: Annotated[OptionPath | None, tyro.conf.arg(name="tokenizer.path")] = None
    """Tokenizer file. Required if the checkpoint was imported without one. Default: the tokenizer
    of the checkpoint."""


AnyOptions = TypeVar("AnyOptions", bound=Options)


def parse_options(options: type[AnyOptions], argv: Sequence[str], command: str) -> AnyOptions:
    """Parse the options of a command, or print its help and exit if they contain --help.

    Args:
        options: Class of the options.
        argv: Words of the command line after the command.
        command: Name of the command, such as "generate".

    Raises:
        UserError: If an option is unknown, missing or invalid.
        SystemExit: With code 0 after --help has printed the help.
    """
    parsed, words = parse_options_and_job(options, argv, command, "")
    if words:
        raise UserError(f"{words[0]} is unknown. Run `titanlite {command} --help` for all options.")
    return parsed


def parse_options_and_job(
    options: type[AnyOptions], argv: Sequence[str], command: str, help_on_job: str = JOB_KEYS
) -> tuple[AnyOptions, list[str]]:
    """Parse the options of a command that also accepts the keys of a job as options.

    tyro parses the options, and rejects invalid values. Repeated and misspelled options are
    rejected here. Plugins that the options name are loaded, because they can add keys to a job.

    Args:
        options: Class of the options.
        argv: Words of the command line after the command.
        command: Name of the command, such as "plan".
        help_on_job: Last paragraph of the description in the help, about the keys of a job.

    Returns:
        The options, and all words that are not options of the command, such as keys of a job.

    Raises:
        UserError: If an option is missing, invalid, repeated or misspelled.
        SystemExit: With code 0 after --help has printed the help.
    """
    prog = f"titanlite {command}"
    wants_help = "-h" in argv or "--help" in argv
    if wants_help:
        # Print the description here, because tyro would not wrap it.
        description = f"{options.__doc__}\n\n{help_on_job}".strip()
        print(wrap_text(description), end="\n\n")
        options = _hide_empty_defaults(options)
    _check_repeated(options, argv)

    # Parse the options or, with --help, print them below the description and exit.
    stderr = io.StringIO()
    try:
        with redirect_stderr(stderr):
            parsed, words = tyro.cli(
                options,
                args=[*argv],
                prog=prog,
                description="",
                config=_STYLE,
                return_unknown_args=True,
            )
    except SystemExit as exit_request:
        if exit_request.code == 0:  # tyro has printed the help
            raise
        message = _name_number_type(options, _extract_message(stderr.getvalue()))
        raise UserError(f"{message}. Run `{prog} --help` for all options.") from None

    load_plugins(getattr(parsed, "plugins", ()))
    _check_misspelled(options, words, prog)
    return parsed, words


def _extract_message(box: str) -> str:
    """Return the error message in a box that tyro has drawn, in one line without a final period.

    Omit the title of the box, the help texts of missing options, and the reference to the help. For
    example, this box becomes "Missing from titanlite export: --out PATH":

        ╭─ Required options ──────────────────╮
        │ Missing from titanlite export:      │
        │     --out PATH                      │
        │         Folder to create. (required)│
        │ ─────────────────────────────────── │
        │ For full helptext, run:             │
        │     titanlite export --help         │
        ╰─────────────────────────────────────╯
    """
    message = _list_message_lines(box)
    parts = [line.strip() for line in message if not line.startswith(HELP_TEXT_INDENT)]
    return " ".join(parts).rstrip(".!")


def _list_message_lines(box: str) -> list[str]:
    """Return the message lines of a tyro error box, without its title and reference to the help.

    Without UTF-8, tyro draws no frame, but adds a line of hyphens below the title. Skip this line.
    """
    lines: list[str] = []
    for framed_line in box.splitlines()[1:]:
        line = framed_line.strip("│")
        is_rule_or_blank = line.strip(" ─-") == ""
        if not is_rule_or_blank:
            lines.append(line)
        elif lines:  # the rule above the reference to the help
            break
    return lines


def _name_number_type(options: type[Options], message: str) -> str:
    """Name the expected type in a tyro message about an option that takes a number.

    For example, "Error parsing --steps: invalid literal for int() with base 10: '1e3'" becomes
    "--steps must be an integer, got '1e3'".
    """
    for flag, field in zip(_list_flags(options), options.model_fields.values(), strict=True):
        types = find_types(field.annotation)
        if not message.startswith(f"Error parsing {flag}:") or types.isdisjoint({int, float}):
            continue
        expected = "a number" if float in types else "an integer"
        values = ", ".join(re.findall(r"""'[^']*'|"[^"]*\"""", message))
        return f"{flag} must be {expected}, got {values}"
    return message


def _hide_empty_defaults(options: type[AnyOptions]) -> type[AnyOptions]:
    """Return a copy of an options class whose help shows "(optional)" instead of empty defaults.

    Otherwise, tyro appends "(default: None)" even if the help text explains the default, as in
    "Default: all sequences."
    """
    optional = tyro.conf.arg(help_behavior_hint="(optional)")
    fields: dict[str, Any] = {
        name: (Annotated[field.annotation, *field.metadata, optional], field)
        for name, field in options.model_fields.items()
        if field.default in (None, "", ())
    }
    return create_model(options.__name__, __base__=options, **fields)


def _list_flags(options: type[Options]) -> list[str]:
    """Return the flag of each option in a class, such as "--max-new-tokens"."""
    return [f"--{name.replace('_', '-')}" for name in options.model_fields]


def _check_repeated(options: type[Options], argv: Sequence[str]) -> None:
    """Reject options that are repeated.

    Raises:
        UserError: If an option is repeated.
    """
    words = [word.partition("=")[0] for word in argv if word.startswith("--")]
    flags = [word.replace("_", "-") for word in words]
    for flag in _list_flags(options):
        if flags.count(flag) > 1:
            raise UserError(f"{flag} is repeated. Write it once, with all of its values.")


def _check_misspelled(options: type[Options], words: Sequence[str], prog: str) -> None:
    """Reject unknown options that are probably misspelled. Keys of a job are not checked.

    Args:
        options: Class of the options.
        words: Words of the command line that tyro has not parsed.
        prog: Name of the command for the error message, such as "titanlite plan".

    Raises:
        UserError: If an unknown option is similar to one in `options`.
    """
    flags = _list_flags(options)
    for word in words:
        flag = word.partition("=")[0]
        is_job_key = "." in flag
        if is_job_key or not flag.startswith("--"):
            continue
        similar = difflib.get_close_matches(flag, flags, n=1, cutoff=_MIN_SIMILARITY)
        if similar:
            raise UserError(f"{word}: unknown option of `{prog}`. Did you mean {similar[0]}?")


class Generation(Options):
    """Options for sampling completions."""

    max_new_tokens: PositiveInt = 100
    """Maximum number of tokens in a completion. It ends earlier at the end of the document, or at
    the maximum sequence length of the model."""
    temperature: NonNegativeFloat = 0.8
    """Sampling temperature. 0 always selects the most likely token."""
    top_k: NonNegativeInt = 50
    """Number of most likely tokens to sample from. 0: sample from all tokens."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Random seed for sampling, used for each prompt."""
    batch_size: PositiveInt = 8
    """Number of prompts to complete at once."""


class Scoring(Options):
    """Options for evaluating text."""

    window: Annotated[int, Field(ge=2)] | None = None
    """Number of tokens per window. Default: training.seq_len of the checkpoint."""
    stride: PositiveInt | None = None
    """Number of tokens between the starts of consecutive windows. After the first window, each
    token is scored with at least window - stride tokens before it. Default: half a window."""
    batch_size: PositiveInt = 8
    """Number of windows per forward pass of a rank."""
    text_column: str = "text"
    """Name of the field that contains the text in .jsonl and .parquet files."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of weights and computation. Default: float32 on a CPU, and the training dtype on a
    GPU."""
    ema: bool = False
    """Use the exponential moving average of the weights: see `titanlite help ema`."""
