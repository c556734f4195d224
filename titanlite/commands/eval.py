"""`titanlite eval`: evaluate a checkpoint on texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from pydantic import Field

from titanlite.checkpoint.find import find_checkpoints
from titanlite.commands.common import is_first_rank, print_result, run_on_ngpu_ranks
from titanlite.config.errors import UserError, format_count
from titanlite.config.load import load_job
from titanlite.config.options import (
    AsJson,
    OptionPath,
    Scoring,
    TextModelOptions,
    parse_options_and_job,
)
from titanlite.config.schema import Parallelism
from titanlite.runtime.logging import note

_LAYOUT_HELP = (
    "To choose the layout of the ranks, pass `--parallelism.*` as in a job; `titanlite help "
    "parallelism` lists the options. By default, the weights are sharded over all ranks."
)


class Eval(Scoring, TextModelOptions):
    """Compute the perplexity and bits per byte of texts.

    To start several ranks, use NGPU=N or torchrun.
    """

    checkpoint: OptionPath
    """A step folder (.../step-00000100), the folder of all steps, the output folder of a run, or
    .../best. If there are several steps, the newest undamaged one is used."""
    data: Annotated[tuple[OptionPath, ...], Field(strict=False, min_length=1)]
    """Files: .jsonl (also .gz and .zst) or .parquet. All other files are read as text."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite eval`: print the perplexity and bits per byte of a checkpoint on texts.

    Raises:
        UserError: If an option is invalid, or a file does not exist or cannot be read.
        CheckpointError: If no checkpoint can be used, or its output is not finite.
    """
    # Report invalid options before any ranks start.
    options, layout_words = parse_options_and_job(Eval, argv, "eval", _LAYOUT_HELP)
    parallelism = _load_layout(layout_words)
    find_checkpoints(options.checkpoint)  # raises an error if no checkpoint exists
    # With NGPU=N, run this command in N processes instead, and exit.
    run_on_ngpu_ranks("eval", argv)

    from titanlite.score import evaluate_text  # slow, because it imports torch

    # window, stride, batch_size, text_column, dtype and ema
    scoring_settings = options.model_dump(include=set(Scoring.model_fields))
    score = evaluate_text(
        options.checkpoint,
        options.data,
        parallelism=parallelism,
        tokenizer=options.tokenizer_path,
        log=_log_progress,
        **scoring_settings,
    )
    documents = format_count(score.documents, "document")
    amount = f"{documents}, {score.tokens:,} tokens, {score.bytes:,} bytes"
    print_result(asdict(score), f"{amount}\n{score}", options.as_json)


def _log_progress(message: str) -> None:
    """Log a progress message on rank 0. The other ranks log nothing."""
    if is_first_rank():
        note(message)


def _load_layout(words: Sequence[str]) -> Parallelism:
    """Parse the `--parallelism.*` options, which select the parallel layout of the ranks.

    Args:
        words: Words of the command line, such as ["--parallelism.tensor_parallel_degree", "2"].

    Raises:
        UserError: If there is any other option, or a value is invalid.
    """
    for index, word in enumerate(words):
        is_value = index > 0 and not word.startswith("--")
        if not is_value and not word.startswith("--parallelism."):
            flag = word.partition("=")[0]
            raise UserError(f"{flag}: unknown option; `titanlite eval --help` lists all options.")
    return load_job(words).parallelism
