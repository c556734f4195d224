"""`titanlite eval`: how well a checkpoint predicts a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from pydantic import Field

from titanlite.checkpoint.find import checkpoints_at
from titanlite.commands.common import is_first_rank, print_result, start_ranks
from titanlite.config.errors import UserError, counted
from titanlite.config.load import load_job
from titanlite.config.options import AsJson, CheckpointOptions, OptionPath, Scoring, parse_beside_job
from titanlite.runtime.logging import note

LAYOUT_KEYS = (
    "`--parallelism.*` lays out the ranks, as in a job: `titanlite help parallelism` explains the keys. Without them "
    "the weights are sharded over all ranks."
)


class Eval(Scoring, CheckpointOptions):
    """Score a checkpoint on texts: perplexity, and bits per byte. Start several ranks with NGPU=N or with torchrun."""

    checkpoint: OptionPath
    """The folder of one step (.../step-00000100), the folder of all steps, the output folder of a run, or .../best. Of
    several steps, the newest good one is used."""
    data: Annotated[tuple[OptionPath, ...], Field(strict=False, min_length=1)]
    """Files: .jsonl (also .gz and .zst), .parquet; any other is read as text."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        UserError: a wrong option, no such folder or file, or a record that cannot be read.
        CheckpointError: no usable checkpoint, or its output is not finite.
    """
    options, words = parse_beside_job(Eval, argv, "eval", LAYOUT_KEYS)
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    if strange := [flag for flag in flags or words if not flag.startswith("--parallelism.")]:
        raise UserError(f"{strange[0]}: unknown option of `titanlite eval`; `titanlite eval --help` lists them.")
    parallelism = load_job(words).parallelism
    checkpoints_at(options.checkpoint)
    start_ranks("eval", argv)
    from titanlite.score import evaluate_text  # torch, which a wrong option does not wait for

    settings = options.model_dump(include=set(Scoring.model_fields))
    log = note if is_first_rank() else lambda line: None
    score = evaluate_text(options.checkpoint, options.data, parallelism=parallelism, log=log, **settings)
    read = f"{counted(score.documents, 'document')}, {score.tokens:,} tokens, {score.bytes:,} bytes"
    print_result(asdict(score), f"{read}\n{score}", options.as_json)
