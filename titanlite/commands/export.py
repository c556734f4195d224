"""`titanlite export`: a checkpoint in Hugging Face's format.

Invariant: the exported model computes the same as the trained one. If it would not, the export is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import make_folder
from titanlite.config.options import AsJson, CheckpointOptions, OptionPath, parse
from titanlite.config.run import Run
from titanlite.runtime.logging import note


class Export(CheckpointOptions):
    """Write a checkpoint as a Hugging Face model, which transformers loads without titanlite."""

    checkpoint: OptionPath
    """The folder of one step, the folder of all steps, or the output folder of a run. Of several steps, the newest good
    one is used."""
    out: OptionPath
    """Folder to create for the model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the exported weights."""
    tokenizer: OptionPath | None = None
    """Tokenizer file. Left out: that of the training job."""
    ema: bool = False
    """Take the average of the weights: see `titanlite help ema`."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises as `export`."""
    options = parse(Export, argv, "export")
    path = export(options.checkpoint, options.out, options.dtype, options.tokenizer, options.ema)
    size = sum(file.stat().st_size for file in options.out.iterdir())
    report = {"checkpoint": str(path), "out": str(options.out), "dtype": options.dtype, "bytes": size}
    text = f"""Wrote {path} to {options.out} ({options.dtype}, {size / 1e9:.2f} GB). Load it with
  transformers.AutoModelForCausalLM.from_pretrained("{options.out}")"""
    print(json.dumps(report) if options.as_json else text)


def export(
    checkpoint: Path, out: Path, dtype: str = "bfloat16", tokenizer: Path | None = None, ema: bool = False
) -> Path:
    """Make a folder that transformers loads without titanlite. The arguments are those of `Export`.

    Returns:
        The step folder that the weights are from.

    Raises:
        UserError: the folder exists or cannot be made, or no tokenizer is known.
        CheckpointError: there is no good checkpoint.
    """
    from titanlite.checkpoint.find import checkpoints_at, job_of, use_newest

    checkpoints_at(checkpoint)  # of which a mistake does not wait for torch
    from titanlite.checkpoint.published import checkpoint_weights, export_hf
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.data.tokenizer_files import write_tokenizer

    def use(step_folder: Path) -> Path:
        try:
            run = Run(job_of(step_folder)) if tokenizer is None else None
        except CheckpointError as unknown:
            raise UserError(f"{unknown} Or name the tokenizer: --tokenizer FILE.") from None
        words = load_tokenizer(run.tokenizer_path, run.job) if run else load_tokenizer(cast(Path, tokenizer))
        source = checkpoint_weights(step_folder, ema)
        make_folder(out.parent)
        export_hf(source, out, dtype, lambda folder: write_tokenizer(words, folder, source.arch.max_seq_len))
        return step_folder

    return use_newest(checkpoint, use, log=note)
