"""Read Llama weights from a torchtitan checkpoint in DCP format (.metadata, *.distcp).

Invariant: Nothing in the files is executed, no file outside of the folder is opened, and only about
one tensor is in memory at a time. A checkpoint does not store its architecture, so the job defines
it, and a checkpoint that contradicts the job is rejected.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from torch import Tensor

from titanlite.checkpoint.dcp import SafeReader
from titanlite.checkpoint.huggingface import TensorInfo, Weights, check_tensors, dcp_weights
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import MANIFEST, exists
from titanlite.config.flavors import FITTED_TO_TOKENIZER, Architecture
from titanlite.config.run import build_architecture
from titanlite.config.schema import Model
from titanlite.model.formats import from_meta_rotary
from titanlite.torchtitan.tables import ROPE_SCALING_FACTOR, Version

# torchtitan 0.1 puts "model." in front of the names, unless it saves only the model.
_WEIGHT = re.compile(
    r"(model\.)?(tok_embeddings\.weight|norm\.weight|output\.weight|freqs_cis|layers\.\d{1,5}\..+)"
)
_DESCRIBED_BY = (
    "[model] of the job: dim, n_layers, n_heads, n_kv_heads, ffn_dim, vocab_size, tied_embeddings"
)


def torchtitan_weights(path: str | Path, model: Model) -> Weights:
    """Open the weights of a torchtitan checkpoint, and convert them to the titanlite layout.

    Each weight is read and converted only when it is used. Optimizer state is not loaded.

    Args:
        path: Checkpoint folder of one step, with .metadata and *.distcp files.
        model: Section [model] of the job, which defines the architecture. If the flavor adapts its
            vocabulary to the tokenizer and `vocab_size` is not set, the vocabulary size of the
            checkpoint is used.

    Raises:
        UserError: If `path` is not such a folder, is damaged, or contradicts the job. The message
            lists all differences.
    """
    path = Path(path)
    arch = build_architecture(model)
    if arch.switches or arch.architecture != "llama":
        raise UserError(
            f"The model of the job has {arch.switches}. Only Llama models can be imported from "
            "torchtitan checkpoints."
        )
    reader = _open_checkpoint(path)
    entries = {name: entry for name, entry in reader.index.items() if _WEIGHT.fullmatch(name)}
    prefix = "model." if any(name.startswith("model.") for name in entries) else ""
    tensors = {
        name.removeprefix(prefix): TensorInfo(entry.size, entry.properties.dtype)
        for name, entry in entries.items()
    }
    rotary_frequencies = tensors.pop("freqs_cis", None)  # (max_seq_len, head_dim / 2), only in 0.1

    embedding = tensors.get("tok_embeddings.weight")
    is_fitted = model.vocab_size is None and model.flavor in FITTED_TO_TOKENIZER
    if is_fitted and embedding is not None and len(embedding.shape) == 2:
        arch = dataclasses.replace(arch, vocab_size=embedding.shape[0])
    check_tensors(path, arch, tensors, _DESCRIBED_BY)
    if rotary_frequencies is not None:
        _check_head_dim(path, arch, rotary_frequencies)

    if prefix or rotary_frequencies is not None:
        _check_rope_scaling(path, arch, "0.1")
    elif any(name.startswith("optimizer.") for name in reader.index):
        _check_rope_scaling(path, arch, "0.2")
    # Otherwise the checkpoint has only weights, and either version may have saved it.

    # FP8 jobs of torchtitan save the weight wrapper of torchao. This import registers it as a type
    # that is safe to load.
    import torchao.float8  # noqa: F401

    weights = dcp_weights(reader, arch, prefix)

    def read(name: str) -> Tensor:
        return from_meta_rotary(name, weights.read(name), arch.head_dim)

    return dataclasses.replace(weights, read=read)


def _open_checkpoint(path: Path) -> SafeReader:
    """Open a torchtitan checkpoint, which has no manifest, to read its weights.

    Raises:
        UserError: If the folder is a titanlite checkpoint (it has a manifest), is not a checkpoint,
            or is damaged.
    """
    if exists(path / MANIFEST):
        raise UserError(
            f"{path} is a titanlite checkpoint. Pass it to checkpoint.initial_load_path."
        )
    try:
        return SafeReader(path, {})
    except CheckpointError as error:
        raise UserError(
            f"{path}: {error}. "
            "Pass the folder of one torchtitan step, which contains .metadata and *.distcp files."
        ) from None


def _check_head_dim(path: Path, arch: Architecture, rotary_frequencies: TensorInfo) -> None:
    """Raise a UserError if the checkpoint and the model have different head dimensions.

    Only the rotary frequencies reveal the head dimension: there is one for every two channels.
    """
    if tuple(rotary_frequencies.shape[-1:]) != (arch.head_dim // 2,):
        raise UserError(
            f"{path}: its attention heads are not {arch.head_dim} wide, as in this job. Set "
            "model.n_heads."
        )


def _check_rope_scaling(path: Path, arch: Architecture, version: Version) -> None:
    """Raise a UserError if the job and a torchtitan version scale RoPE differently.

    Args:
        path: Checkpoint folder, for the error message.
        arch: Architecture that the job defines.
        version: torchtitan version that saved the checkpoint.
    """
    expected = ROPE_SCALING_FACTOR[version]
    if arch.rope_scaling_factor != expected:
        raise UserError(
            f"{path}: torchtitan {version} trained it with RoPE scaling factor {expected}, but the "
            f"job has {arch.rope_scaling_factor}. Set model.rope_scaling_factor to {expected}."
        )
