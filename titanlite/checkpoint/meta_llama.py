"""Meta's original Llama files: params.json and consolidated.*.pth, split for tensor parallelism.

Invariant: nothing in the files is executed, and about one tensor is held in memory.
"""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from titanlite.checkpoint.dcp import reason
from titanlite.config.errors import UserError
from titanlite.config.files import exists, file_inside, parse_json, read_file, short
from titanlite.model.formats import MetaParams, architecture_from_meta, from_meta_rotary, parameter_shapes

_MOST_PARAMS = 1 << 20  # bytes; that of Llama 405B has 300
_EMBEDDING = "tok_embeddings.weight"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MetaReader:
    """The weights of a folder with params.json and consolidated.00.pth, consolidated.01.pth ...

    Raises:
        UserError: files are missing, or their tensors are not a Llama's; with the list.
    """

    def __init__(self, folder: Path) -> None:
        names = sorted(path.name for path in folder.glob("consolidated.*.pth"))
        if not exists(folder / "params.json") or not names:
            raise UserError(f"{folder} has no params.json or no consolidated.*.pth. Expected Meta's files of a Llama.")
        path = file_inside(folder, "params.json")
        params = parse_json(path, read_file(path, _MOST_PARAMS), MetaParams)
        self._shards = [_load(file_inside(folder, name)) for name in names]
        first = self._shards[0]
        embedding, w1 = first.get(_EMBEDDING), first.get("layers.0.feed_forward.w1.weight")
        if embedding is None or w1 is None or embedding.ndim != 2 or w1.ndim != 2:
            raise UserError(f"{folder / names[0]} holds no Llama: no tok_embeddings.weight, or no feed-forward network")
        by_rows = embedding.shape[1] == params.dim  # Llama 3 splits the vocabulary, Llama 2 the width
        vocab_size = embedding.shape[0] * (len(names) if by_rows else 1)
        if params.vocab_size not in (-1, vocab_size):
            raise UserError(f"{path}: vocab_size is {params.vocab_size}; tok_embeddings.weight has {vocab_size} rows")
        tied = all("output.weight" in s and torch.equal(s["output.weight"], s[_EMBEDDING]) for s in self._shards)
        arch = architecture_from_meta(params, vocab_size, w1.shape[0] * len(names))
        self.arch = dataclasses.replace(arch, tied_embeddings=tied)
        shapes = parameter_shapes(self.arch)
        for name, shard in zip(names, self._shards, strict=True):
            if odd := sorted(shard.keys() ^ (shapes.keys() | ({"output.weight"} if tied else set()))):
                problem = "tensors that are missing or not part of this architecture"
                raise UserError(f"{folder / name}: {problem}: {short(', '.join(odd))}")
        self.dtypes = {name: first[name].dtype for name in shapes}
        self._cuts = {name: self._cut(name, shape) for name, shape in shapes.items()}

    def _cut(self, name: str, whole: tuple[int, ...]) -> int | None:
        """The dimension along which a tensor is split; None if each file holds all of it.

        Raises:
            UserError: the parts do not make the tensor.
        """
        parts = {tuple(shard[name].shape) for shard in self._shards}
        for dim in (None, *range(len(whole))):
            share = list(whole)
            if dim is not None:
                share[dim] //= len(self._shards)
            if parts == {tuple(share)} and (dim is None or share[dim] * len(self._shards) == whole[dim]):
                return dim
        raise UserError(f"{name}: parts of shapes {sorted(parts)[:8]} do not make {whole}")

    def read(self, name: str) -> Tensor:
        """A whole tensor in this model's layout."""
        dim = self._cuts[name]
        whole = self._shards[0][name] if dim is None else torch.cat([shard[name] for shard in self._shards], dim)
        if name.endswith(("attention.wq.weight", "attention.wk.weight")):
            whole = from_meta_rotary(whole, self.arch.head_dim)
        return whole


def _load(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, mapped into memory.

    Raises:
        UserError: it is damaged or holds anything else than plain tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("its parts are compressed, so that they cannot be mapped")
        loaded = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # torch's reader raises any kind of error for damaged bytes
        raise UserError(f"{path} is damaged, or more than tensors: {short(reason(error))}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds no table of tensors")
    loaded.pop("rope.freqs", None)  # computed, not learned
    for name, tensor in loaded.items():
        # A strided view could claim to be larger than the file is, and would fill the memory when it is copied.
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES or not tensor.is_contiguous():
            raise UserError(f"{path}: {short(repr(name))} is no tensor of float32, bfloat16 or float16 numbers")
    return loaded
