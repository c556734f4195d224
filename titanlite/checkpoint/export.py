"""A checkpoint as a Hugging Face model, one tensor at a time.

Invariant: memory is a small multiple of the largest tensor.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.dcp import SafeReader, load_tensors
from titanlite.checkpoint.huggingface import HuggingFaceWriter
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.flavors import Architecture


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
