"""`titanlite import`: makes a checkpoint from published weights, to start a run from.

Invariant: the imported model computes the same as the original. If it would not, the import is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from titanlite.config.files import make_folder
from titanlite.config.flavors import Architecture
from titanlite.config.mistakes import shown
from titanlite.config.options import OptionPath, Options, parse

_ORIGIN = tyro.conf.create_mutex_group(required=True)


class Import(Options):
    """Make a checkpoint from published weights."""

    out: OptionPath
    """Folder of checkpoints in which step-00000000 is made."""
    hf: Annotated[OptionPath | None, _ORIGIN] = None
    """Hugging Face folder: config.json and .safetensors files."""
    meta: Annotated[OptionPath | None, _ORIGIN] = None
    """Meta's folder: params.json and consolidated.*.pth files."""


def main(argv: Sequence[str]) -> None:
    """`titanlite import --hf DIR | --meta DIR --out CKPT`: makes a checkpoint from published weights.

    Raises:
        UserError: the folder has no Llama that this model computes exactly.
    """
    options = parse(Import, argv, "import")
    from titanlite.checkpoint.huggingface import HuggingFaceReader
    from titanlite.checkpoint.import_weights import import_weights
    from titanlite.checkpoint.meta_llama import MetaReader
    from titanlite.model.formats import parameter_shapes

    origin = options.meta or options.hf
    assert origin is not None
    with contextlib.ExitStack() as files:
        reader = MetaReader(origin) if options.meta else files.enter_context(HuggingFaceReader(origin))
        arch, path = reader.arch, import_weights(make_folder(options.out), reader, str(origin))
    print(f"Wrote {path}: {len(parameter_shapes(arch))} tensors. A job that starts from it needs\n")
    print(job_tables(arch, path, origin))


def job_tables(arch: Architecture, path: Path, origin: Path) -> str:
    """The part of a job file that a run with the imported weights needs."""
    keys = {
        key: json.dumps(value) for key, value in dataclasses.asdict(arch).items()
    }  # TOML writes these values as JSON does
    lines = ["[model]", *(f"{key} = {value}" for key, value in keys.items())]
    tokenizers = [name for name in ("tokenizer.json", "tokenizer.model") if (origin / name).is_file()]
    if tokenizers:
        lines += ["", "[tokenizer]", f"path = {shown(str(origin / tokenizers[0]))}"]
    return "\n".join([*lines, "", "[checkpoint]", f"initial_load_path = {shown(str(path))}"])
