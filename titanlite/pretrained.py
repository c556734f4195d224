"""Continue pretraining: what a job needs to go on from a model, of `--from FOLDER_OR_NAME` on the command line.

Invariant: what the model's files say is the lowest layer of the job: the job file and the command line win over it. A
model of the hub is downloaded once, so a start again needs no network.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.checkpoint.find import checkpoints_at, known_job
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import read_object
from titanlite.config.flavors import Architecture
from titanlite.config.run import Run
from titanlite.data.hub import Files
from titanlite.model.formats import architecture_from_hf
from titanlite.observe.flops import num_params

FROM = "--from"
MOST_TOKENS = 4096
_CONFIG, _MOST_JSON = "config.json", 1 << 24


def parted(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """What `--from` names, if it stands in `argv`, and the other words. Raises UserError: it names nothing."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith(f"{FROM}=") else [word])]
    if FROM not in words:
        return None, words
    place = words.index(FROM)
    if words.count(FROM) > 1 or place + 1 == len(words) or words[place + 1].startswith("--"):
        raise UserError(f"{FROM}: takes one folder, or OWNER/NAME: a model of the Hugging Face hub.")
    return words[place + 1], words[:place] + words[place + 2 :]


def _downloaded(name: str) -> Path:
    """The folder of the model, where one of the hub is brought to. Raises UserError: it cannot be had."""
    here = Path(name).expanduser()
    folder = here if here.exists() else Path("models", name)
    if (folder / _CONFIG).is_file() or folder == here:
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{FROM} {name}: there is no such folder. OWNER/NAME is a model of the Hugging Face hub.")
    files = Files("model", name, None, None)
    if _CONFIG not in files.sizes:
        raise UserError(f"{FROM} {name}: there is no {_CONFIG} of a model.")
    files.fetch(folder / ".config", [_CONFIG])
    _read_architecture(folder / ".config" / _CONFIG)  # before gigabytes of weights that are not computed here
    files.fetch(folder)  # the config comes last
    return folder


def _read_architecture(path: Path) -> Architecture:
    return architecture_from_hf(read_object(path, _MOST_JSON))


def tables_of(name: str) -> dict[str, dict[str, Any]]:
    """The tables of a job that goes on from a model: a Hugging Face folder, OWNER/NAME of the hub, which is brought to
    the folder models/OWNER/NAME, or a checkpoint or a run of titanlite's.

    Rows have as many tokens as the model has positions, at most `MOST_TOKENS`. The learning rate is a tenth of the peak
    with which Llama 3 was trained (https://arxiv.org/abs/2407.21783): 3e-4 for 8B, and for N parameters (8e9 / N)^(1/3)
    times that, which gives 1.5e-4 for 70B and 8e-5 for 405B; at most 1e-3.

    Raises:
        UserError: it has no model, or one that is not computed here; the message names what prevents it.
    """
    folder = _downloaded(name)
    path = folder / _CONFIG
    if path.is_file():
        arch, files = _read_architecture(path), ("tokenizer.json", "tokenizer.model")
        file = next((name for name in files if (folder / name).is_file()), files[0])
        tables = model_tables(arch) | {"tokenizer": {"path": str(folder / file)}}
    else:
        try:
            checkpoints_at(folder)
        except (UserError, CheckpointError):
            raise UserError(f"{FROM} {folder}: there is no {_CONFIG} of a model, and no checkpoint.") from None
        run = Run(known_job(folder))
        tokenizer = {"path": str(run.tokenizer_path), "name": run.job.tokenizer.name}
        arch, tables = run.arch, model_tables(run.arch) | {"tokenizer": tokenizer}
    parts = folder.resolve().parts[-2 if path.is_file() else -1 :]  # many folders of models are called final_hf
    rate = min(1e-3, 3e-4 * (8e9 / num_params(arch)) ** (1 / 3)) / 10
    return tables | {
        "job": {"dump_folder": f"outputs/{'-'.join(parts)}{'' if path.is_file() else '-continued'}"},
        "training": {"seq_len": min(arch.max_seq_len, MOST_TOKENS)},
        "optimizer": {"lr": float(f"{rate:.2g}")},
        "checkpoint": {"initial_load_path": str(folder), "initial_load_in_hf": path.is_file()},
    }


def model_tables(arch: Architecture) -> dict[str, dict[str, Any]]:
    """[model], and the table of a plugin's architecture."""
    values, names = dataclasses.asdict(arch), {field.name for field in dataclasses.fields(Architecture)}
    own = {name: value for name, value in values.items() if name not in names}
    model = {name: value for name, value in values.items() if name in names}
    return {"model": model} | ({arch.architecture: own} if own else {})
