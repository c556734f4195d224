"""torchtitan's checkpoints, which DCP writes: the weights of a Llama, whatever else is beside them.

Invariant: nothing in the files is executed, none outside of the folder is opened, and about one tensor is held in
memory. A checkpoint does not say which model it holds, so a job says it, and what contradicts the job is refused.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from titanlite.checkpoint.dcp import SafeReader
from titanlite.checkpoint.published import Weights, check_tensors, dcp_weights
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import MANIFEST, exists
from titanlite.config.flavors import FITTED_TO_TOKENIZER
from titanlite.config.run import architecture
from titanlite.config.schema import Model
from titanlite.model.formats import from_meta_rotary
from titanlite.torchtitan.tables import ROPE_SCALING_FACTOR

# torchtitan 0.1 puts "model." before the names, unless it saves the model only.
_WEIGHT = re.compile(r"(model\.)?(tok_embeddings\.weight|norm\.weight|output\.weight|freqs_cis|layers\.\d{1,5}\..+)")
_SAID_BY = "[model] of the job: dim, n_layers, n_heads, n_kv_heads, ffn_dim, vocab_size, tied_embeddings"


def torchtitan_weights(path: Path, model: Model) -> Weights:
    """Those of the folder of one step, with .metadata and *.distcp files.

    Args:
        model: the section of the job that says which Llama it is. If it leaves out the vocabulary of a flavor that is
            fitted to the tokenizer, that of the checkpoint is taken.

    Raises:
        UserError: it is no such folder, it is damaged, or it contradicts the job; with all differences.
    """
    arch = architecture(model)
    if arch.switches or arch.architecture != "llama":
        raise UserError(f"model.flavor and its keys have {arch.switches}: of torchtitan's models only Llamas are read.")
    names: list[str] = []

    def wanted(name: str) -> bool:
        names.append(name)
        return _WEIGHT.fullmatch(name) is not None

    if exists(path / MANIFEST):
        raise UserError(f"{path} is a checkpoint of titanlite's, which checkpoint.initial_load_path takes as it is.")
    try:
        reader = SafeReader(path, wanted)
    except CheckpointError as error:
        text = "The folder of one step of torchtitan's is needed, with .metadata and *.distcp files"
        raise UserError(f"{path}: {error}. {text}.") from None
    import torchao.float8  # noqa: F401 - it tells torch that its wrapper of weights holds data only

    prefix = "model." if any(name.startswith("model.") for name in reader.index) else ""
    found = {key.removeprefix(prefix): (entry.size, entry.properties.dtype) for key, entry in reader.index.items()}
    angles = found.pop("freqs_cis", None)
    rows = found["tok_embeddings.weight"][0][:1] if "tok_embeddings.weight" in found else ()
    if model.vocab_size is None and model.flavor in FITTED_TO_TOKENIZER and rows:
        arch = dataclasses.replace(arch, vocab_size=rows[0])
    check_tensors(path, arch, found, _SAID_BY)
    if angles and tuple(angles[0][-1:]) != (arch.head_dim // 2,):
        raise UserError(f"{path}: its heads are not {arch.head_dim} wide, as in this job. Set model.n_heads.")
    has_optimizer = any(name.startswith("optimizer.") for name in names)
    version = "0.1" if prefix or angles else "0.2" if has_optimizer else None  # weights alone do not tell 0.2
    if version and arch.rope_scaling_factor != ROPE_SCALING_FACTOR[version]:
        text = f"torchtitan {version} wrote it, whose models have the factor {ROPE_SCALING_FACTOR[version]}"
        raise UserError(f"{path}: model.rope_scaling_factor is {arch.rope_scaling_factor} in this job; {text}. Set it.")
    weights = dcp_weights(reader, arch, prefix)
    return dataclasses.replace(weights, read=lambda name: from_meta_rotary(name, weights.read(name), arch.head_dim))
