"""`titanlite import`: makes a checkpoint from published weights, to start a run from.

Invariant: the imported model computes the same as the original. If it would not, the import is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, cast

import tomlkit
import tyro

from titanlite.config.errors import UserError
from titanlite.config.files import make_folder
from titanlite.config.load import load_job
from titanlite.config.options import CheckpointOptions, OptionPath, parse_beside_job
from titanlite.config.storage import local_copy
from titanlite.pretrained import model_tables

_ORIGIN = tyro.conf.create_mutex_group(required=True)
_GONE = "flavor torchtitan_version n_heads rope_theta rope_scaling_factor norm_eps max_seq_len".split()  # noqa: SIM905
_KEYS = "With --torchtitan, a job says which model it is: --job.config_file FILE, or keys such as --model.flavor 8b."


class Import(CheckpointOptions):
    """Make a checkpoint from published weights."""

    dropped: ClassVar = {name: (None, _KEYS) for name in _GONE}

    out: OptionPath
    """Folder of checkpoints in which step-00000000 is made."""
    hf: Annotated[OptionPath | None, _ORIGIN] = None
    """Hugging Face folder: config.json and .safetensors files."""
    meta: Annotated[OptionPath | None, _ORIGIN] = None
    """Meta's folder: params.json and consolidated.*.pth files."""
    torchtitan: Annotated[OptionPath | None, _ORIGIN] = None
    """Folder of one step of torchtitan's: .metadata and *.distcp files."""


def main(argv: Sequence[str]) -> None:
    """`titanlite import --hf DIR | --meta DIR | --torchtitan DIR --out CKPT`: makes a checkpoint of other weights.

    Raises:
        UserError: the folder has no model that is computed here exactly.
    """
    options, words = parse_beside_job(Import, argv, "import", _KEYS)
    if bool(words) != (options.torchtitan is not None):
        raise UserError(" ".join([*words[:1], _KEYS, "The other formats say it themselves."]))
    origin = local_copy(cast(Path, options.hf or options.meta or options.torchtitan))
    if not origin.is_dir():
        raise UserError(f"{origin}: there is no such folder.")
    from titanlite.checkpoint.published import hf_weights, import_weights, meta_weights
    from titanlite.torchtitan.weights import torchtitan_weights

    read = meta_weights if options.meta else hf_weights
    source = torchtitan_weights(origin, load_job(words).model) if options.torchtitan else read(origin)
    path = import_weights(make_folder(options.out), source, str(origin))
    print(f"Wrote {path}: {len(source.dtypes)} tensors. A job that starts from it needs\n")
    tables = model_tables(source.arch) | ({"job": {"plugins": [*options.plugins]}} if options.plugins else {})
    tokenizers = [name for name in ("tokenizer.json", "tokenizer.model") if (origin / name).is_file()]
    tables |= {"tokenizer": {"path": str(origin / tokenizers[0])}} if tokenizers else {}
    print(tomlkit.dumps(tables | {"checkpoint": {"initial_load_path": str(path)}}).rstrip())
