"""The weights of others, in Hugging Face's, Meta's or torchtitan's files, as a checkpoint or in a model.

Invariant: memory is a small multiple of the largest tensor.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from titanlite.checkpoint import live_tensors, step_folders
from titanlite.checkpoint.dcp import CommittingWriter, alone
from titanlite.checkpoint.huggingface import HuggingFaceReader
from titanlite.config.errors import UserError
from titanlite.config.flavors import Architecture
from titanlite.model.formats import parameter_shapes
from titanlite.model.llama import Llama


class WeightSource(Protocol):
    """Foreign weights by our names."""

    arch: Architecture

    def read(self, name: str) -> Tensor:
        """A whole parameter in this model's layout."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype, without reading it."""
        ...


def import_weights(out: Path, source: WeightSource, origin: str) -> Path:
    """Write foreign weights as a checkpoint of step 0 without training state, for `checkpoint.initial_load_path`.

    Args:
        out: the folder of checkpoints; step-00000000 appears in it.
        origin: where they come from, kept in the manifest.

    Raises:
        UserError: it exists already, or cannot be written.
    """
    if (out / step_folders.step_name(0)).exists():
        raise UserError(f"{out / step_folders.step_name(0)} exists already. Choose another folder, or remove it.")
    shapes = parameter_shapes(source.arch)
    tensors = {f"model.{n}": torch.empty(s, dtype=source.dtype(n), device="meta") for n, s in shapes.items()}
    info = {
        "train_state": {},
        "weights_only": True,
        "origin": origin,
        "job": None,
        "architecture": dataclasses.asdict(source.arch),
        "optimizer_groups": [],
        "layout": {"world_size": 1, "meshes": {}},
        "versions": live_tensors.library_versions(),
    }
    writer = CommittingWriter(out, 0, secrets.token_hex(8), info)
    writer.single_file_per_rank = False  # because DCP keeps all tensors of a file in memory until it is written
    try:
        with alone():
            dcp_save(tensors, storage_writer=writer, planner=_ReadingPlanner(source.read), no_dist=True)
    except CheckpointException as error:  # DCP hides the cause in it
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, UserError):  # from source.read
            raise cause from None
        if isinstance(cause, OSError):
            raise UserError(f"{out} cannot be written: {cause.strerror}. Choose another folder.") from None
        raise
    return out / step_folders.step_name(0)


@torch.no_grad()
def load_hf_weights(folder: Path, model: nn.Module) -> None:
    """Load a Hugging Face Llama into a sharded model in place; each rank reads the slices that it owns.

    Raises:
        UserError: it is no Llama, or not this one; with the differences.
    """
    with HuggingFaceReader(folder) as reader:
        check_same_model(folder, reader.arch, model)
        for name, tensor in live_tensors.model_tensors(model).items():
            if not isinstance(tensor, DTensor):
                tensor.copy_(reader.read(name))
                continue
            for chunk in tensor.__create_chunk_list__():  # DCP's protocol is exact for uneven and strided shards, too
                local = tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets))
                local.copy_(reader.read(name, tuple(chunk.offsets), tuple(chunk.sizes)))


def check_same_model(origin: Path, found: Architecture, model: nn.Module) -> None:
    """Raises UserError if weights of architecture `found` would compute something else in `model`."""
    assert isinstance(model, Llama)
    wanted = model.arch
    lines = [
        f"{field.name}: {getattr(found, field.name)} there, {getattr(wanted, field.name)} in this job"
        for field in dataclasses.fields(Architecture)
        if field.name != "max_seq_len" and getattr(found, field.name) != getattr(wanted, field.name)
    ]
    if lines:
        raise UserError(f"{origin} is another model. Set these keys of [model] as there:\n  " + "\n  ".join(lines))


class _ReadingPlanner(DefaultSavePlanner):
    """Plans with tensors that have shapes only, and reads each value when it is about to be written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._read(write_item.index.fqn.removeprefix("model.")).contiguous()
