"""The options of a command, declared as a class. A field is an option, its docstring is the help, its type is the rule.

Invariant: a wrong option ends with exit code 2, and with a UserError or tyro's own message. Only a command that runs
imports this module, because importing tyro and pydantic takes a tenth of a second.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

import tyro
from pydantic import AfterValidator, Field
from pydantic.types import NonNegativeFloat, NonNegativeInt, PositiveInt

from titanlite.config.errors import UserError
from titanlite.config.mistakes import COMMAND_LINE, types_in, wrapped
from titanlite.config.registry import load_plugins
from titanlite.config.run import MOST_RANKS
from titanlite.config.schema import Whole, usable_path

JOB_KEYS = "Every key of a job is an option, too: `titanlite train --help` explains them."

# A file or a folder. A leading ~ is expanded, and a name that the system does not accept is refused.
OptionPath = Annotated[Path, Field(strict=False), AfterValidator(lambda path: Path(usable_path(str(path))))]

# The same where it stands without the name of an option.
PositionalPath = Annotated[OptionPath, tyro.conf.Positional]

# The option --json.
AsJson = Annotated[bool, tyro.conf.arg(name="json")]

# A number of ranks.
OptionRanks = Annotated[PositiveInt, Field(le=MOST_RANKS)]

_STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)  # --json alone; PATH, and not {None}|PATH


class Options(Whole):
    """Base of the options of a command."""

    place: ClassVar[str] = COMMAND_LINE


class CheckpointOptions(Options):
    """Base of the options of a command that reads a checkpoint or a model folder, which never cause an import."""

    plugins: Annotated[tuple[str, ...], Field(strict=False), tyro.conf.arg(name="job.plugins")] = ()
    """Plugins that the checkpoint was trained with, to import before it is read."""


AnyOptions = TypeVar("AnyOptions", bound=Options)


def parse(options: type[AnyOptions], argv: Sequence[str], command: str) -> AnyOptions:
    """The options of `titanlite COMMAND`. If `argv` asks for the help, it is printed and the process exits.

    Raises:
        UserError: an option that is unknown or missing, or a value that is not allowed.
        SystemExit: 2 after a message about a malformed option.
    """
    own, words = parse_beside_job(options, argv, command, "")
    if words:
        raise UserError(f"{words[0]}: unknown; `titanlite {command} --help` lists all options.")
    return own


def parse_beside_job(
    options: type[AnyOptions], argv: Sequence[str], command: str, keys: str = JOB_KEYS
) -> tuple[AnyOptions, list[str]]:
    """As `parse`, for a command that also takes keys of a job, as `keys` explains. Returns its own options, and all
    other words."""
    prog = f"titanlite {command}"
    if {"-h", "--help"} & {*argv}:  # tyro would print this as one long line
        print(wrapped(f"{options.__doc__}\n\n{keys}".strip()), end="\n\n")
    _check_flags(options, argv, prog)
    own, words = tyro.cli(options, args=[*argv], prog=prog, description="", config=_STYLE, return_unknown_args=True)
    load_plugins(getattr(own, "plugins", ()))
    flags = [f"--{name.replace('_', '-')}" for name in options.model_fields]
    for word in words:  # a key of a job has a dot
        near = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
        if word.startswith("--") and "." not in word and near:
            raise UserError(f"{word}: unknown option of `{prog}`; did you mean {near[0]}?")
    return own, words


def _check_flags(options: type[Options], argv: Sequence[str], prog: str) -> None:
    """Raises UserError: an option of an earlier version, with what to use instead, one that stands there twice or is
    missing, or a value that is no number: of the last two tyro would speak in terms of the other words and of types."""
    flags = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    fields = {f"--{name.replace('_', '-')}": field for name, field in options.model_fields.items()}
    for flag in flags:
        if gone := options.dropped.get(flag[2:].replace("-", "_")):
            raise UserError(f"{flag}: {gone[1]}")
        if flags.count(flag) > 1 and flag in fields:
            raise UserError(f"{flag}: stands there twice. Give it once, with all of its values.")
    for flag, field in fields.items() if not {"-h", "--help"} & {*argv} else ():
        if field.is_required() and flag not in flags and tyro.conf.Positional not in field.metadata:
            raise UserError(f"{flag}: `{prog}` needs it. {field.description}")
    for word, after in zip(argv, [*argv, "--"][1:], strict=True):
        flag, has_value, value = word.partition("=")
        value, field = value if has_value else after, fields.get(flag.replace("_", "-"))
        if field and (kinds := types_in(field.annotation) & {int, float}) and not value.startswith("--"):
            try:
                min(kinds, key=lambda kind: kind is int)(value)
            except ValueError:
                kind = "whole number" if kinds == {int} else "number"
                raise UserError(f"{flag} {value}: must be a {kind}. {field.description}") from None


class Generation(Options):
    """How texts are completed."""

    dropped: ClassVar = {
        "stop": (None, "is gone: cut the text at what you look for."),
        "top_p": (None, "is gone: --top-k and --temperature narrow the sampling."),
    }

    max_new_tokens: PositiveInt = 100
    """Longest completion, in tokens. It ends earlier if the model ends the document or reaches its max_seq_len."""
    temperature: NonNegativeFloat = 0.8
    """0: take the most likely token each time. 1: sample from the model's probabilities. Higher: more random."""
    top_k: NonNegativeInt = 50
    """Sample from the k most likely tokens only. 0: from all."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Seed of the sampling. It is that of each prompt, so a completion does not depend on the other prompts."""
    batch_size: PositiveInt = 8
    """Prompts that are completed at once."""


class Scoring(Options):
    """How a text is scored."""

    window: Annotated[int, Field(ge=2)] | None = None
    """Tokens that the model sees at once. Left out: training.seq_len of its job."""
    stride: PositiveInt | None = None
    """Tokens from the beginning of one window to that of the next, less than a window. A token has at least window -
    stride tokens before it. Left out: half a window."""
    batch_size: PositiveInt = 8
    """Windows per forward pass of a rank."""
    text_column: str = "text"
    """Name of the field that holds the text, in .jsonl and .parquet."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of weights and computation. Left out: float32 on a CPU, and that of the training on a GPU."""
    ema: bool = False
    """Take the average of the weights: see `titanlite help ema`."""
