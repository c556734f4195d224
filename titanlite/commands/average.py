"""`titanlite average`: average the weights of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field, PositiveFloat

from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import check_new_folder, make_folder
from titanlite.config.options import OptionPath, Options, parse_options
from titanlite.runtime.logging import note

if TYPE_CHECKING:
    from titanlite.checkpoint.manifest import Manifest


class Average(Options):
    """Average the weights of checkpoints of the same model.

    The result contains weights only. You can pass it to eval, generate, export and
    checkpoint.initial_load_path. Only one tensor is in memory at a time.
    """

    checkpoints: Annotated[
        tuple[OptionPath, ...],
        Field(strict=False, min_length=2),
        tyro.conf.Positional,
        tyro.conf.arg(metavar="DIR...", help_behavior_hint="(required)"),
    ]
    """Step folders, such as outputs/my_job/checkpoint/step-*. For a folder with several steps, the
    newest undamaged checkpoint is used."""
    out: OptionPath
    """Folder for the new checkpoint, which gets the step and the job of the newest input."""
    weights: Annotated[
        tuple[Annotated[PositiveFloat, Field(le=1e15)], ...], Field(strict=False)
    ] = ()
    """One weight per checkpoint, in the same order. They need not add up to 1. Default: equal
    weights."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite average`: average the weights of several checkpoints into a new one.

    Raises:
        UserError: If an option is invalid, or the checkpoints have different models or tokenizers.
        CheckpointError: If a checkpoint is damaged or missing.
    """
    options = parse_options(Average, argv, "average")
    count = len(options.checkpoints)
    factors = options.weights or (1.0,) * count
    if len(factors) != count:
        raise UserError(
            f"--weights: {len(factors)} weights for {count} checkpoints. Pass one for each."
        )
    # A run whose checkpoints are in this folder would resume from the average.
    check_new_folder(options.out)

    # Importing torch is slow, so invalid options are reported first.
    from titanlite.checkpoint.find import load_newest, read_job
    from titanlite.checkpoint.huggingface import average_weights, checkpoint_weights, import_weights
    from titanlite.checkpoint.manifest import read_manifest
    from titanlite.data.tokenizer import load_tokenizer

    paths = [load_newest(path, lambda folder: folder, log=note) for path in options.checkpoints]
    manifests = [read_manifest(path) for path in paths]
    tokenizer_fingerprint = _check_same_tokenizer(paths, manifests)

    # The new checkpoint gets the step, the job and the tokenizer of the newest one.
    steps = [manifest["step"] for manifest in manifests]
    newest_step, newest = max(zip(steps, paths, strict=True))
    job = None
    tokenizer = None
    with suppress(CheckpointError):  # Imported weights without a tokenizer have no job.
        job = read_job(newest)
        if Path(job.tokenizer.path).parent == newest:
            tokenizer = load_tokenizer(job.tokenizer.path, job)

    mean = average_weights(paths, [checkpoint_weights(path) for path in paths], factors)
    weights = ", ".join(f"{factor:g}" for factor in factors)
    origin = f"average of {', '.join(map(str, paths))}, weights {weights}"
    path = import_weights(
        make_folder(options.out),
        mean,
        origin,
        step=newest_step,
        job=job,
        tokenizer=tokenizer,
        tokenizer_fingerprint=tokenizer_fingerprint,
    )
    print(f"Wrote {path}: {origin}")


def _check_same_tokenizer(paths: Sequence[Path], manifests: Sequence[Manifest]) -> str | None:
    """Check that checkpoints were trained with the same tokenizer, and return its fingerprint.

    Checkpoints that were imported without a tokenizer have no fingerprint. If none of the
    checkpoints has one, return None. If only some have one, the tokenizers count as different.

    Args:
        paths: Step folders of the checkpoints.
        manifests: Manifests of the checkpoints, in the same order.

    Raises:
        UserError: If the tokenizers differ.
    """
    from titanlite.checkpoint.find import get_data_state

    fingerprints = [get_data_state(manifest["info"]).get("tokenizer") for manifest in manifests]
    for path, fingerprint in zip(paths, fingerprints, strict=True):
        if fingerprint != fingerprints[0]:
            raise UserError(
                f"{path} was trained with another tokenizer than {paths[0]}. Choose checkpoints of "
                "one tokenizer."
            )
    return fingerprints[0]
