"""Meta's original Llama files: params.json and consolidated.*.pth, split for tensor parallelism.

Invariant: nothing in the files is executed, and about one tensor is held in memory. May import config, torch and
model.huggingface.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import torch
from torch import Tensor

from titanlite.config.errors import UserError
from titanlite.model.huggingface import architecture_from_meta, from_meta_rotary, parameter_shapes


class MetaReader:
    """The weights of a folder with params.json and consolidated.00.pth, consolidated.01.pth ...

    Raises:
        UserError: files are missing, or their tensors are not a Llama's; with the list.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("consolidated.*.pth"))
        try:
            params = json.loads((folder / "params.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / 'params.json'}: {error}") from None
        if not paths:
            raise UserError(f"{folder} holds no consolidated.*.pth file")
        self._shards = [_load(path) for path in paths]
        for shard in self._shards:
            shard.pop("rope.freqs", None)  # computed, not learned
        first = self._shards[0]
        embedding, w1 = first.get("tok_embeddings.weight"), first.get("layers.0.feed_forward.w1.weight")
        if embedding is None or w1 is None:
            raise UserError(f"{paths[0]} holds no Llama: no tok_embeddings.weight, or no feed-forward network")
        by_rows = embedding.shape[1] == params["dim"]  # Llama 3 splits the vocabulary, Llama 2 the width
        vocab_size = embedding.shape[0] * (len(paths) if by_rows else 1)
        self.arch = architecture_from_meta(params, vocab_size, w1.shape[0] * len(paths))
        if "output.weight" in first and all(_is_tied(shard) for shard in self._shards):
            self.arch = dataclasses.replace(self.arch, tied_embeddings=True)
        self._shapes = parameter_shapes(self.arch)
        found = first.keys() - ({"output.weight"} if self.arch.tied_embeddings else set())
        if odd := sorted(found ^ self._shapes.keys()):
            raise UserError(f"{folder}: tensors that are missing or not part of this architecture: {', '.join(odd)}")

    def read(self, name: str) -> Tensor:
        """A whole tensor in this model's layout."""
        parts = [shard[name] for shard in self._shards]
        expected = self._shapes[name]
        whole = parts[0]
        if tuple(whole.shape) != expected:
            dim = next(d for d in range(whole.ndim) if whole.shape[d] != expected[d])
            whole = torch.cat(parts, dim)
        if tuple(whole.shape) != expected:
            raise UserError(f"{name}: {len(parts)} parts make {tuple(whole.shape)}, expected {expected}")
        if name.endswith(("attention.wq.weight", "attention.wk.weight")):
            whole = from_meta_rotary(whole, self.arch.head_dim)
        return whole

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._shards[0][name].dtype


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, OSError) as error:
        raise UserError(f"{path} is damaged, or more than tensors: {str(error).splitlines()[0]}") from None


def _is_tied(shard: dict[str, Tensor]) -> bool:
    return torch.equal(shard["output.weight"], shard["tok_embeddings.weight"])
