"""`titanlite import`: convert published weights to a checkpoint.

Invariant: The imported model computes the same as the original, or the import fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import tomlkit
import tyro

from titanlite.config.errors import UserError
from titanlite.config.files import check_new_folder, make_folder
from titanlite.config.load import load_job
from titanlite.config.options import CheckpointOptions, OptionPath, parse_options_and_job
from titanlite.config.run import Run, model_tables
from titanlite.config.schema import JobConfig
from titanlite.config.storage import get_local_copy
from titanlite.runtime.logging import note

if TYPE_CHECKING:
    from titanlite.data.tokenizer import Tokenizer

_ORIGIN = tyro.conf.create_mutex_group(required=True)
_KEYS = (
    "With --torchtitan, describe the model with options of a job: --job.config_file FILE, or keys "
    "such as --model.flavor 8b."
)


class Import(CheckpointOptions):
    """Convert published weights to a checkpoint, which all other commands accept."""

    out: OptionPath
    """New or empty folder, in which the checkpoint step-00000000 is created."""
    hf: Annotated[OptionPath | None, _ORIGIN] = None
    """Hugging Face folder: config.json and .safetensors files."""
    meta: Annotated[OptionPath | None, _ORIGIN] = None
    """Meta folder: params.json and consolidated.*.pth files."""
    torchtitan: Annotated[OptionPath | None, _ORIGIN] = None
    """Step folder of a torchtitan checkpoint: .metadata and *.distcp files."""
    tokenizer: OptionPath | None = None
    """Tokenizer file to copy into the checkpoint. Default: tokenizer.json or tokenizer.model in the
    model folder, unless a job that describes a torchtitan model sets tokenizer.path."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite import`: convert published weights to a checkpoint at step 0.

    Then print the lines of a job file that start training from this checkpoint.

    Args:
        argv: Arguments after the name of the command. With --torchtitan, they include the options
            of a job that describe the model.

    Raises:
        UserError: If the folder does not contain a model that titanlite can reproduce exactly,
            --tokenizer cannot be used, or --out is not empty.
    """
    options, words = parse_options_and_job(Import, argv, "import", _KEYS)
    has_description = bool(words)
    needs_description = options.torchtitan is not None
    if has_description != needs_description:
        prefix = f"{words[0]}: " if words else ""
        raise UserError(f"{prefix}{_KEYS} Models in other formats need no description.")
    # Require a new folder. In the output folder of a run, commands such as `titanlite eval`
    # would read the imported checkpoint instead of the checkpoints of the run.
    check_new_folder(options.out)
    origin = get_local_copy(cast(Path, options.hf or options.meta or options.torchtitan))
    if not origin.is_dir():
        raise UserError(f"{origin}: is not a folder.")

    from titanlite.checkpoint.huggingface import (
        describing_job,
        hf_weights,
        import_weights,
        meta_weights,
    )
    from titanlite.torchtitan.weights import torchtitan_weights

    if options.torchtitan:
        job = load_job(words)
        source = torchtitan_weights(origin, job.model)
        # Store the exact sizes of the model in the job of the checkpoint.
        sizes = model_tables(source.arch)["model"]
        job = job.with_section("model", **sizes)
    else:
        source = meta_weights(origin) if options.meta else hf_weights(origin)
        job = describing_job(source, options.plugins)
    tokenizer = _load_tokenizer(options.tokenizer, origin, job, source.arch.vocab_size)

    out = make_folder(options.out)
    step_folder = import_weights(out, source, str(origin), job=job, tokenizer=tokenizer)

    # Print the lines of a job file that start training from the new checkpoint.
    tables = model_tables(source.arch)
    if options.plugins:
        tables["job"] = {"plugins": [*options.plugins]}
    if tokenizer is not None:
        tables["tokenizer"] = {"path": str(step_folder / f"tokenizer{tokenizer.path.suffix}")}
    tables["checkpoint"] = {"initial_load_path": str(step_folder)}
    count = len(source.dtypes)
    print(f"Wrote {step_folder}: {count} tensors. To start from it, add to a job file:\n")
    print(tomlkit.dumps(tables).rstrip())


def _load_tokenizer(
    file: Path | None, origin: Path, job: JobConfig, vocab_size: int
) -> Tokenizer | None:
    """Load the tokenizer that `titanlite import` copies into the new checkpoint.

    Args:
        file: Tokenizer file, or None for the default: the tokenizer of the job, or else the one in
            `origin`.
        origin: Folder of the weights.
        job: Job that describes the model.
        vocab_size: Number of rows of the embedding.

    Returns:
        The tokenizer. If there is no usable default tokenizer, log the reason and return None.

    Raises:
        UserError: If `file` cannot be used.
    """
    try:
        path = file or _find_default_tokenizer(origin, job)
        return _load_fitting_tokenizer(path, job, vocab_size)
    except UserError as error:
        if file is not None:  # the user has chosen a tokenizer, so it must work
            raise UserError(f"--tokenizer: {error}") from None
        note(f"The checkpoint has no tokenizer: {error}")
        note("To generate or evaluate with it, pass --tokenizer.path FILE.")
        return None


def _find_default_tokenizer(origin: Path, job: JobConfig) -> Path:
    """Find the tokenizer file that the job sets, or else the one in the folder of the weights.

    Args:
        origin: Folder of the weights.
        job: Job that describes the model.

    Raises:
        UserError: If there is no tokenizer file.
    """
    if job.tokenizer.model_fields_set:
        return Run(job).tokenizer_path
    for path in (origin / "tokenizer.json", origin / "tokenizer.model"):
        if path.is_file():
            return path
    raise UserError("the folder of the weights has no tokenizer.json or tokenizer.model.")


def _load_fitting_tokenizer(path: Path, job: JobConfig, vocab_size: int) -> Tokenizer:
    """Load a tokenizer, and check that the embedding of the model has enough rows for its tokens.

    Args:
        path: Tokenizer file.
        job: Job that describes the model.
        vocab_size: Number of rows of the embedding.

    Raises:
        UserError: If the tokenizer cannot be loaded, or has more than `vocab_size` tokens.
    """
    from titanlite.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path, job)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{path} has {tokenizer.vocab_size} tokens, but the embedding has {vocab_size} rows."
        )
    return tokenizer
