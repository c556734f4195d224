"""`titanlite import`: makes a checkpoint from published weights, to start a run from.

Invariant: the imported model computes the same as the original. If it would not, the import is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import tyro
from pydantic import Field, PositiveFloat, PositiveInt

from titanlite.config.errors import UserError
from titanlite.config.files import make_folder
from titanlite.config.flavors import Architecture
from titanlite.config.mistakes import shown
from titanlite.config.options import OptionPath, Options, parse
from titanlite.torchtitan.tables import Version

_SAID = ("flavor", "n_heads", "rope_theta", "rope_scaling_factor", "norm_eps", "max_seq_len")
_ORIGIN = tyro.conf.create_mutex_group(required=True)


class Import(Options):
    """Make a checkpoint from published weights."""

    out: OptionPath
    """Folder of checkpoints in which step-00000000 is made."""
    hf: Annotated[OptionPath | None, _ORIGIN] = None
    """Hugging Face folder: config.json and .safetensors files."""
    meta: Annotated[OptionPath | None, _ORIGIN] = None
    """Meta's folder: params.json and consolidated.*.pth files."""
    torchtitan: Annotated[OptionPath | None, _ORIGIN] = None
    """torchtitan's folder: .metadata and *.distcp files, or step-N folders with such files. It does not say which Llama
    it holds; the next options do."""
    flavor: str | None = None
    """For --torchtitan: its model.flavor, such as 8B."""
    torchtitan_version: Version | None = None
    """For --torchtitan: 0.1 or 0.2. Models of 0.2 scale their rotary frequencies as Llama 3.1 does, those of 0.1 do
    not. A checkpoint with the optimizer's state tells it, one of the weights alone does not."""
    n_heads: PositiveInt | None = None
    """For --torchtitan without --flavor: number of query heads."""
    rope_theta: PositiveFloat | None = None
    """For --torchtitan without --flavor: base of the rotary frequencies."""
    rope_scaling_factor: Annotated[float, Field(ge=1.0)] | None = None
    """For --torchtitan: another scaling of the rotary frequencies than the version's."""
    norm_eps: PositiveFloat | None = None
    """For --torchtitan: epsilon of RMSNorm. Left out: 1e-5, as all of torchtitan's Llamas have it."""
    max_seq_len: PositiveInt | None = None
    """For --torchtitan: longest sequence. Left out: 131072, or 8192 where rotary frequencies are not scaled."""


def main(argv: Sequence[str]) -> None:
    """`titanlite import --hf DIR | --meta DIR | --torchtitan DIR --out CKPT`: makes a checkpoint of other weights.

    Raises:
        UserError: the folder has no Llama that this model computes exactly.
    """
    options = parse(Import, argv, "import")
    said = {key: getattr(options, key) for key in _SAID}
    given = [key for key in ("torchtitan_version", *_SAID) if getattr(options, key) is not None]
    if given and options.torchtitan is None:
        raise UserError(f"--{given[0].replace('_', '-')} is for --torchtitan; other formats say it themselves.")
    from titanlite.checkpoint.published import HuggingFaceReader, MetaReader, import_weights
    from titanlite.model.formats import parameter_shapes
    from titanlite.torchtitan.weights import Said, TorchtitanReader

    if options.torchtitan:
        reader = TorchtitanReader(options.torchtitan, Said(**said), options.torchtitan_version)
        origin = reader.path
    else:
        origin = cast(Path, options.meta or options.hf)
        reader = MetaReader(origin) if options.meta else HuggingFaceReader(origin)
    path = import_weights(make_folder(options.out), reader, str(origin))
    print(f"Wrote {path}: {len(parameter_shapes(reader.arch))} tensors. A job that starts from it needs\n")
    print(job_tables(reader.arch, path, origin))


def job_tables(arch: Architecture, path: Path, origin: Path) -> str:
    """The part of a job file that a run with the imported weights needs."""
    values = dataclasses.asdict(arch).items()  # which TOML writes as JSON does
    lines = ["[model]", *(f"{key} = {json.dumps(value)}" for key, value in values)]
    tokenizers = [name for name in ("tokenizer.json", "tokenizer.model") if (origin / name).is_file()]
    if tokenizers:
        lines += ["", "[tokenizer]", f"path = {shown(str(origin / tokenizers[0]))}"]
    return "\n".join([*lines, "", "[checkpoint]", f"initial_load_path = {shown(str(path))}"])
