"""Checkpoints from the weights of others, and folders for others from checkpoints; one tensor at a time.

Invariant: memory is a small multiple of the largest tensor.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from titanlite.checkpoint import live_tensors, step_folders
from titanlite.checkpoint.dcp import CommittingWriter, SafeReader, alone, load_tensors
from titanlite.checkpoint.huggingface import HuggingFaceReader, HuggingFaceWriter
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.flavors import Architecture
from titanlite.model.formats import parameter_shapes
from titanlite.model.llama import Llama


class CheckpointTensors:
    """The weights of a step folder that was checked, read whole and one by one, on one process.

    Raises:
        Damage: its index or its manifest is no good.
        CheckpointError: it does not say which model it holds, or holds another.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info: dict[str, Any] = step_folders.read_manifest(self.path)["info"]
        if self.info["architecture"] is None:
            raise CheckpointError(f"{self.path} does not say of which architecture its weights are")
        self.arch = Architecture(**self.info["architecture"])
        self._reader = SafeReader(self.path)
        self._reader.check_model(self.arch)

    def read(self, name: str) -> Tensor:
        """A whole parameter in its saved dtype. Raises Damage: its file holds another."""
        entry = self._reader.read_index()[f"model.{name}"]
        tensor = torch.empty(entry.size, dtype=getattr(torch, entry.dtype))
        load_tensors(self._reader, {f"model.{name}": tensor})
        return tensor


def export_hf(
    source: CheckpointTensors, out: Path, dtype: str, write_tokenizer: Callable[[Path], dict[str, int | None]]
) -> None:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        out: must not exist.
        dtype: "float32", "bfloat16" or "float16".
        write_tokenizer: puts the tokenizer's files into a folder and returns bos_token_id and eos_token_id.

    Raises:
        UserError: it exists, or cannot be written.
        Damage: a file of the checkpoint holds no such tensors, whatever its checksum says.
    """
    writer = None
    try:
        writer = HuggingFaceWriter(out, source.arch, dtype)
        token_ids = write_tokenizer(writer.folder)
        for name in writer.names:
            writer.add(name, source.read(name))
        writer.publish(token_ids)
    except BaseException as error:
        if writer is not None:
            shutil.rmtree(writer.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(
                f"{out} cannot be written: {error.strerror}. Choose another folder, or make room."
            ) from None
        raise


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
