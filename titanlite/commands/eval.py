"""`titanlite eval`: how well a checkpoint predicts a text."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict

from titanlite.config.errors import UserError
from titanlite.config.load import load_job
from titanlite.config.options import parse_beside_job
from titanlite.config.schema import Parallelism
from titanlite.runtime.logging import note
from titanlite.score import Eval, evaluate_text

LAYOUT_KEYS = (
    "`--parallelism.*` lays out the ranks, as in a job: `titanlite help parallelism` explains the keys. Without them "
    "the weights are sharded over all ranks."
)


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UserError: a wrong option, no such folder or file, or a record that cannot be read.
        CheckpointError: no usable checkpoint, or its output is not finite.
    """
    options, words = parse_beside_job(Eval, argv, "eval", LAYOUT_KEYS)
    parallelism = _layout(words)
    if os.environ.get("NGPU", "1") != "1" and "WORLD_SIZE" not in os.environ:
        from titanlite.launch.launcher import launch_command

        return launch_command(["eval", *argv])
    given = options.model_dump(exclude={"checkpoint", "data", "as_json"})
    score = evaluate_text(options.checkpoint, options.data, **given, parallelism=parallelism, log=_note)
    if os.environ.get("RANK", "0") != "0":
        return 0
    values = asdict(score)
    if options.as_json:  # JSON has no infinity
        print(json.dumps({k: str(v) if v == math.inf else v for k, v in values.items()}, allow_nan=False))
    else:
        print(f"{score.documents:,} documents, {score.tokens:,} tokens, {score.bytes:,} bytes")
        print(f"loss {score.loss:.4f}  perplexity {score.perplexity:,.2f}  bits/byte {score.bits_per_byte:.4f}")
    return 0


def _note(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        note(line)


def _layout(words: Sequence[str]) -> Parallelism:
    """[parallelism] of a command line. Raises UserError for any other word."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    strange = [flag for flag in flags if not flag.startswith("--parallelism.")]
    if not flags and words:
        strange = list(words)
    if strange:
        raise UserError(f"{strange[0]}: unknown option of `titanlite eval`; `titanlite eval --help` lists them.")
    return load_job(words).parallelism
