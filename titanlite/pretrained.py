"""Create jobs that start from a pretrained model, for the option `--from FOLDER_OR_NAME`.

Invariant: the job file and the command line take precedence over values derived from the model. A
model on the Hugging Face Hub is downloaded once, so that later runs need no network.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.checkpoint.find import NoTokenizerError, find_checkpoints, read_newest_job
from titanlite.config.errors import UserError
from titanlite.config.files import read_json_object
from titanlite.config.flavors import Architecture
from titanlite.config.run import LONGEST_DEFAULT_SEQUENCE, Run, model_tables
from titanlite.config.schema import JobConfig
from titanlite.data.hub import HubFiles
from titanlite.model.formats import architecture_from_hf
from titanlite.observe.flops import num_params

FROM_OPTION = "--from"
CONFIG = "config.json"
MAX_CONFIG_BYTES = 1 << 24
MAX_PEAK_LR = 1e-3


def split_from_option(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split a command line into the value of the option `--from` and all other words.

    For example, `--from=my_model --training.steps 5` is split into "my_model" and
    ["--training.steps", "5"].

    Returns:
        The value of `--from` (None if the option is not given) and the other words.

    Raises:
        UserError: If `--from` has no value or is given twice.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        FROM_OPTION,
        dest="values",
        action="append",  # so that an option that is given twice can be reported
        default=[],
        nargs="?",
        const="",  # the value if the option ends the command line or another option follows it
    )
    options, other_words = parser.parse_known_args(argv)
    if not options.values:
        return None, other_words

    value = options.values[0]
    # If the next option contains a space, such as "--job.description=my run", argparse mistakes it
    # for the value.
    is_missing = value == "" or value.startswith("--")
    is_repeated = len(options.values) > 1
    if is_missing or is_repeated:
        raise UserError(
            f"{FROM_OPTION}: takes one folder, or OWNER/NAME of a model on the Hugging Face Hub."
        )
    return value, other_words


def _find_folder(name: str) -> Path:
    """Return the local folder of a model, after downloading the model if necessary.

    Args:
        name: Local folder, or OWNER/NAME of a model on the Hugging Face Hub. Such a model is
            downloaded once, to models/OWNER/NAME.

    Raises:
        UserError: If the model is not available or not supported.
    """
    local_folder = Path(name).expanduser()
    if local_folder.exists():
        return local_folder

    download_folder = Path("models", name)
    is_downloaded = (download_folder / CONFIG).is_file()  # downloaded last
    if not is_downloaded:
        _download_model(name, download_folder)
    return download_folder


def _download_model(name: str, folder: Path) -> None:
    """Download a model from the Hugging Face Hub.

    The weights can be large, so first download config.json to the subfolder .config and check it.
    `folder` itself gets its config.json last, so this file marks a complete download.

    Args:
        name: OWNER/NAME of the model.
        folder: Folder to download to.

    Raises:
        UserError: If the model is not available or not supported.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        problem = "is not a folder, nor OWNER/NAME of a model on the Hugging Face Hub."
        raise UserError(f"{FROM_OPTION} {name} {problem}")
    files = HubFiles("model", name, origin=None, include=None)
    if CONFIG not in files.sizes:
        raise UserError(f"{FROM_OPTION} {name}: this repository has no {CONFIG} of a model.")

    config_folder = folder / ".config"
    files.fetch(config_folder, [CONFIG])
    _read_architecture(config_folder / CONFIG)  # raises UserError if it is not supported
    files.fetch(folder)


def _read_architecture(path: Path) -> Architecture:
    """Return the architecture that a Hugging Face config.json describes."""
    return architecture_from_hf(read_json_object(path, MAX_CONFIG_BYTES))


def build_job_tables(name: str) -> dict[str, dict[str, Any]]:
    """Return default values for a job that continues the pretraining of a model.

    They set the architecture, tokenizer, output folder, initial weights, sequence length and
    learning rate. The sequence length is the context length of the model, but at most 4,096 tokens.

    Args:
        name: Hugging Face folder, OWNER/NAME on the Hub (downloaded to models/OWNER/NAME), or a
            checkpoint or output folder of titanlite.

    Returns:
        Sections of a job, each a table of keys and default values.

    Raises:
        UserError: If the model does not exist or is not supported.
    """
    folder = _find_folder(name)
    is_hf_folder = (folder / CONFIG).is_file()
    if is_hf_folder:
        arch = _read_architecture(folder / CONFIG)
        tokenizer = {"path": str(_find_tokenizer(folder))}
    else:
        run = Run(_read_job(folder))
        arch = run.arch
        tokenizer = {"path": str(run.tokenizer_path), "name": run.job.tokenizer.name}

    return {
        **model_tables(arch),
        "tokenizer": tokenizer,
        "job": {"dump_folder": _choose_output_folder(folder, is_hf_folder)},
        "training": {"seq_len": min(arch.max_seq_len, LONGEST_DEFAULT_SEQUENCE)},
        "optimizer": {"lr": _choose_learning_rate(num_params(arch))},
        "checkpoint": {"initial_load_path": str(folder), "initial_load_in_hf": is_hf_folder},
    }


def _choose_output_folder(model_folder: Path, is_hf_folder: bool) -> str:
    """Return the default output folder of a run that starts from a pretrained model."""
    path = model_folder.resolve()
    if not is_hf_folder:
        return f"outputs/{path.name}-continued"
    # Many Hugging Face folders are called final_hf, so add the parent: "my_run-final_hf".
    return f"outputs/{'-'.join(path.parts[-2:])}"


def _choose_learning_rate(num_parameters: int) -> float:
    """Return the default learning rate for continuing the pretraining of a model.

    The peak learning rate for a new model of N parameters is 3e-4 * (8e9 / N)^(1/3), but at most
    1e-3. This formula fits Llama 3 (https://arxiv.org/abs/2407.21783): 3e-4 for 8B, 1.5e-4 for 70B
    and 8e-5 for 405B. The result is a tenth of this learning rate.
    """
    peak_lr = min(MAX_PEAK_LR, 3e-4 * (8e9 / num_parameters) ** (1 / 3))
    return float(f"{peak_lr / 10:.2g}")


def _find_tokenizer(folder: Path) -> Path:
    """Return the path of the tokenizer file in a Hugging Face folder.

    If there is no tokenizer file, return the path of tokenizer.json, so that a later error names
    this file.
    """
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    return folder / "tokenizer.json"


def _read_job(folder: Path) -> JobConfig:
    """Return the job of the newest checkpoint in a checkpoint or output folder.

    If the checkpoint has no tokenizer, use tokenizer.json in `folder`.

    Raises:
        UserError: If the folder contains neither a model nor a checkpoint.
    """
    if not _has_checkpoint(folder):
        problem = f"this folder has neither a {CONFIG} of a model nor a checkpoint."
        raise UserError(f"{FROM_OPTION} {folder}: {problem}")
    try:
        return read_newest_job(folder)
    except NoTokenizerError:
        # If this file does not exist, a later error names it, unless the job sets tokenizer.path.
        return read_newest_job(folder, folder / "tokenizer.json")


def _has_checkpoint(folder: Path) -> bool:
    """Return whether a checkpoint or output folder contains a checkpoint."""
    try:
        find_checkpoints(folder)
    except UserError:
        return False
    return True
