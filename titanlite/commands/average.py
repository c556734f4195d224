"""`titanlite average`: the mean of the weights of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import tyro
from pydantic import Field, PositiveFloat

from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import make_folder
from titanlite.config.options import OptionPath, Options, parse
from titanlite.runtime.logging import note


class Average(Options):
    """Average the weights of checkpoints of one model. The result holds weights only: eval, generate, export and
    checkpoint.initial_load_path take it. One tensor at a time is in memory."""

    checkpoints: Annotated[tuple[OptionPath, ...], Field(strict=False, min_length=2), tyro.conf.Positional]
    """Folders of steps, such as outputs/my_job/checkpoint/step-*. Of a folder with several steps, the newest good one
    is used."""
    out: OptionPath
    """Folder in which the checkpoint is made. It has the number and the job of the newest one that is averaged."""
    weights: Annotated[tuple[PositiveFloat, ...], Field(strict=False)] = ()
    """One number for each checkpoint, in their order: its share of the mean is this by the sum of all. Left out: all
    count the same."""


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        UserError: a wrong option, no such folder, or checkpoints of different models or tokenizers.
        CheckpointError: no usable checkpoint.
    """
    options = parse(Average, argv, "average")
    count, factors = len(options.checkpoints), options.weights or (1.0,) * len(options.checkpoints)
    if len(factors) != count:
        raise UserError(f"--weights: {len(factors)} numbers for {count} checkpoints. Give one for each.")
    if options.out.is_dir() and any(options.out.iterdir()):  # it can be a run, which would resume from the mean
        raise UserError(f"--out {options.out}: is not empty. Name a new folder.")
    from titanlite.checkpoint import step_folders
    from titanlite.checkpoint.find import job_of, use_newest

    paths = [use_newest(path, lambda step_folder: step_folder, log=note) for path in options.checkpoints]
    from titanlite.checkpoint.published import checkpoint_weights, import_weights, mean_of

    manifests = [step_folders.read_manifest(path) for path in paths]
    tokenizers = [(each["info"]["train_state"].get("data") or {}).get("tokenizer") for each in manifests]
    if odd := [path for path, tokenizer in zip(paths, tokenizers, strict=True) if tokenizer != tokenizers[0]]:
        raise UserError(f"{odd[0]} was trained with another tokenizer than {paths[0]}. Take others.")
    mean = mean_of(paths, [checkpoint_weights(path) for path in paths], factors)
    step, newest = max((manifest["step"], path) for manifest, path in zip(manifests, paths, strict=True))
    kept: dict[str, Any] = {"train_state": {"data": {"tokenizer": tokenizers[0]}}}
    with suppress(CheckpointError):  # imported weights have no job
        kept["job"] = job_of(newest).model_dump(mode="json")
    origin = f"the mean of {', '.join(map(str, paths))}, weights {', '.join(f'{each:g}' for each in factors)}"
    path = import_weights(make_folder(options.out), mean, origin, step, **kept)
    print(f"Wrote {path}: {origin}")
