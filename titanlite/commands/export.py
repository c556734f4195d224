"""`titanlite export`: a checkpoint in Hugging Face's format.

Invariant: the exported model computes the same as the trained one. If it would not, the export is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from titanlite.config.errors import UserError, printable
from titanlite.config.files import make_folder
from titanlite.config.load import resolve_path
from titanlite.config.options import OptionPath, Options, parse


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
    """`titanlite export --checkpoint CKPT --out DIR`: makes a folder that transformers loads without titanlite.

    Raises:
        UserError: the folder exists, no tokenizer is known, or there is no good checkpoint (CheckpointError).
    """
    options = parse(Export, argv, "export")
    from titanlite.checkpoint.find import use_newest
    from titanlite.checkpoint.step_folders import folder_size

    def note(line: str) -> None:
        print(printable(line), file=sys.stderr)

    path = use_newest(options.checkpoint, lambda path: _export(path, options), log=note)
    size = folder_size(options.out)
    report = {"checkpoint": str(path), "out": str(options.out), "dtype": options.dtype, "bytes": size}
    if options.as_json:
        print(json.dumps(report))
    else:
        print(f"Wrote {path} to {options.out} ({options.dtype}, {size / 1e9:.2f} GB). Load it with")
        print(f'  transformers.AutoModelForCausalLM.from_pretrained("{options.out}")')


def _export(path: Path, options: Export) -> Path:
    from titanlite.checkpoint.export import CheckpointTensors, export_hf
    from titanlite.checkpoint.find import saved_job
    from titanlite.data.tokenizer_export import write_tokenizer

    source = CheckpointTensors(path)
    job = None if options.tokenizer else saved_job(path)
    tokenizer = options.tokenizer or (resolve_path(job.tokenizer.path) if job else None)
    if tokenizer is None:
        raise UserError(f"{path} does not say which tokenizer it was trained with. Name it: --tokenizer FILE.")
    length = source.arch.max_seq_len
    make_folder(options.out.parent)
    export_hf(source, options.out, options.dtype, lambda folder: write_tokenizer(tokenizer, folder, length))
    return path
