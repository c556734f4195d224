"""`titanlite export`: convert a checkpoint to a Hugging Face model.

Invariant: The exported model computes the same as the trained one, or the export fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from titanlite.commands.common import print_result
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import make_folder
from titanlite.config.options import AsJson, CheckpointOptions, OptionPath, parse_options
from titanlite.config.run import Run
from titanlite.runtime.logging import note

if TYPE_CHECKING:
    from titanlite.data.tokenizer import Tokenizer


DataType = Literal["float32", "bfloat16", "float16"]


class Export(CheckpointOptions):
    """Convert a checkpoint to a Hugging Face model, which transformers loads without titanlite."""

    checkpoint: OptionPath
    """A step folder, the folder of all steps, or the output folder of a run. If there are several
    steps, the newest undamaged one is used."""
    out: OptionPath
    """Folder to create for the model."""
    dtype: DataType = "bfloat16"
    """Data type of the exported weights."""
    tokenizer: OptionPath | None = None
    """Tokenizer file. Default: the tokenizer of the training job."""
    ema: bool = False
    """Export the moving average of the weights; see `titanlite help ema`."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite export`: convert a checkpoint to a Hugging Face model and print its size.

    Raises:
        UserError: If an option is invalid, the output folder exists or cannot be created, or no
            tokenizer is known.
        CheckpointError: If no checkpoint can be used.
    """
    options = parse_options(Export, argv, "export")
    out = options.out
    step_folder = export(options.checkpoint, out, options.dtype, options.tokenizer, options.ema)

    num_bytes = sum(file.stat().st_size for file in out.iterdir())
    result = {
        "checkpoint": str(step_folder),
        "out": str(out),
        "dtype": options.dtype,
        "bytes": num_bytes,
    }
    text = (
        f"Wrote {step_folder} to {out} ({options.dtype}, {num_bytes / 1e9:.2f} GB). To load it:\n"
        f'  transformers.AutoModelForCausalLM.from_pretrained("{out}")'
    )
    print_result(result, text, options.as_json)


def export(
    checkpoint: str | Path,
    out: str | Path,
    dtype: str = "bfloat16",
    tokenizer: str | Path | None = None,
    ema: bool = False,
) -> Path:
    """Convert a checkpoint to a Hugging Face model folder.

    Args:
        checkpoint: A step folder, the folder of all steps, or the output folder of a run. The
            newest undamaged step is used.
        out: Folder to create for the model.
        dtype: Data type of the exported weights: "float32", "bfloat16" or "float16".
        tokenizer: Tokenizer file. Default: the tokenizer of the training job.
        ema: Export the exponential moving average of the weights.

    Returns:
        The step folder from which the weights were read.

    Raises:
        UserError: If `out` exists or cannot be created, `dtype` is unknown, or no tokenizer is
            known.
        CheckpointError: If no checkpoint can be used.
    """
    if dtype not in get_args(DataType):
        names = ", ".join(get_args(DataType))
        raise UserError(f"dtype must be one of {names}, got {dtype!r}.")
    checkpoint = Path(checkpoint)
    out = Path(out)

    from titanlite.checkpoint.find import find_checkpoints, load_newest

    find_checkpoints(checkpoint)  # reports a wrong path before torch is imported
    from titanlite.checkpoint.huggingface import checkpoint_weights, export_hf
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.data.tokenizer_files import write_tokenizer

    # `load_newest` calls this for the newest step or, if it is damaged, for the step before it.
    def export_step(step_folder: Path) -> Path:
        if tokenizer is None:
            loaded = _load_saved_tokenizer(step_folder)
        else:
            loaded = load_tokenizer(tokenizer)
        weights = checkpoint_weights(step_folder, ema)
        max_seq_len = weights.arch.max_seq_len
        make_folder(out.parent)
        export_hf(weights, out, dtype, lambda folder: write_tokenizer(loaded, folder, max_seq_len))
        return step_folder

    # `export_step` verifies the checksums of tensors when it reads them.
    return load_newest(checkpoint, export_step, skip_tensor_checksums=True, log=note)


def _load_saved_tokenizer(step_folder: Path) -> Tokenizer:
    """Load the tokenizer with which a checkpoint was trained.

    Raises:
        UserError: If the checkpoint was imported without a tokenizer, or the tokenizer cannot be
            loaded.
    """
    from titanlite.checkpoint.find import NoTokenizerError, read_job
    from titanlite.data.tokenizer import load_tokenizer  # slow

    try:
        job = read_job(step_folder)
    except NoTokenizerError:
        raise UserError(
            f"{step_folder} has no tokenizer, because it was imported without one. "
            "Pass --tokenizer FILE."
        ) from None
    except CheckpointError as error:
        reason = str(error).rstrip(".")
        raise UserError(f"{reason}. Or pass --tokenizer FILE to export.") from None
    return load_tokenizer(Run(job).tokenizer_path, job)
