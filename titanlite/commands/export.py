"""`titanlite export`: a checkpoint in Hugging Face's format.

Invariant: the exported model computes the same as the trained one. If it would not, the export is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from titanlite.config.errors import UserError
from titanlite.config.files import make_folder
from titanlite.config.options import OptionPath, Options, parse
from titanlite.config.run import Run
from titanlite.runtime.logging import note


class Export(Options):
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
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises as `export`."""
    options = parse(Export, argv, "export")
    from titanlite.checkpoint.step_folders import folder_size

    path = export(options.checkpoint, options.out, options.dtype, options.tokenizer)
    size = folder_size(options.out)
    report = {"checkpoint": str(path), "out": str(options.out), "dtype": options.dtype, "bytes": size}
    if options.as_json:
        print(json.dumps(report))
    else:
        print(f"Wrote {path} to {options.out} ({options.dtype}, {size / 1e9:.2f} GB). Load it with")
        print(f'  transformers.AutoModelForCausalLM.from_pretrained("{options.out}")')


def export(checkpoint: Path, out: Path, dtype: str = "bfloat16", tokenizer: Path | None = None) -> Path:
    """Make a folder that transformers loads without titanlite. The arguments are those of `Export`.

    Returns:
        The step folder that the weights are from.

    Raises:
        UserError: the folder exists or cannot be made, or no tokenizer is known.
        CheckpointError: there is no good checkpoint.
    """
    from titanlite.checkpoint.find import use_newest

    return use_newest(checkpoint, lambda step_folder: _export(step_folder, out, dtype, tokenizer), log=note)


def _export(step_folder: Path, out: Path, dtype: str, tokenizer: Path | None) -> Path:
    from titanlite.checkpoint.find import saved_job
    from titanlite.checkpoint.huggingface import CheckpointTensors, export_hf
    from titanlite.data.tokenizer_export import write_tokenizer

    source = CheckpointTensors(step_folder)
    if tokenizer is None:
        job = saved_job(step_folder)
        if job is None:
            raise UserError(
                f"{step_folder} does not say which tokenizer it was trained with. Name it: --tokenizer FILE."
            )
        tokenizer = Run(job).tokenizer_path
    make_folder(out.parent)
    export_hf(source, out, dtype, lambda folder: write_tokenizer(tokenizer, folder, source.arch.max_seq_len))
    return step_folder
