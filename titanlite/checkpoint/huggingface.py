"""Hugging Face model folders: write one tensor by tensor, read one slice by slice.

Invariant: at any time about one tensor is held in memory, a folder appears under its name only when it is whole, and
nothing outside of a folder is opened that a file in it names.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated, Any, Self

import torch
from pydantic import Field, RootModel
from torch import Tensor

from titanlite.checkpoint import step_folders
from titanlite.config.errors import UserError
from titanlite.config.files import FileModel, exists, file_inside, parse_json, read_file, short
from titanlite.config.flavors import Architecture
from titanlite.model.formats import (
    HF_EMBEDDING,
    HF_OUTPUT,
    architecture_from_hf,
    hf_config,
    hf_name,
    parameter_shapes,
    tensor_differences,
)

_DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}
_DTYPE_OF = dict(_DTYPES.values())
_SINGLE, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
_MOST_JSON = 1 << 24  # bytes; the index of Llama 405B has a tenth of a megabyte
_COMPARED_NUMBERS = 1 << 24  # of a matrix at a time
SHARD_BYTES = 5_000_000_000  # what Hugging Face's own tools write


class HuggingFaceWriter:
    """Writes a LlamaForCausalLM in safetensors, tensor by tensor, in the order of `names`.

    The format is a JSON header with every tensor's place, then the bytes (https://github.com/huggingface/safetensors);
    shapes are known before the values are, so nothing has to be collected.

    Args:
        out: the folder to create. Raises UserError if it exists.
        dtype: "float32", "bfloat16" or "float16".
    """

    def __init__(self, out: Path, arch: Architecture, dtype: str, shard_bytes: int = SHARD_BYTES) -> None:
        if out.exists():
            raise UserError(f"{out} exists already. Choose another folder, or remove it.")
        self.arch = arch
        self.names = list(parameter_shapes(arch))
        self._out = out
        self._dtype = dtype
        self._shards = _split(parameter_shapes(arch), _DTYPES[dtype][1].itemsize, shard_bytes)
        self._next = 0
        self._file: IO[bytes] | None = None
        self.folder = out.parent / f"{step_folders.UNFINISHED}{out.name}-{secrets.token_hex(4)}"
        self.folder.mkdir(parents=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next of `names`."""
        assert name == self.names[self._next], f"{name} out of order"
        assert tuple(tensor.shape) == parameter_shapes(self.arch)[name], name
        shard = next(i for i, names in enumerate(self._shards) if name in names)
        if name == self._shards[shard][0]:
            self._file = (self.folder / self._shard_name(shard)).open("wb")
            self._file.write(self._header(shard))
        assert self._file is not None
        data = tensor.detach().to("cpu", _DTYPES[self._dtype][1]).contiguous()
        self._file.write(data.flatten().view(torch.uint8).numpy().data)
        if name == self._shards[shard][-1]:
            self._flush(self._file)
        self._next += 1

    def publish(self, token_ids: dict[str, int | None] | None = None) -> None:
        """Write the JSON files and give the folder its name.

        Args:
            token_ids: bos_token_id and eos_token_id, where the tokenizer is known.
        """
        assert self._next == len(self.names)
        self._write_json("config.json", {**hf_config(self.arch, self._dtype), **(token_ids or {})})
        self._write_json("generation_config.json", {"do_sample": True, **(token_ids or {})})
        if len(self._shards) > 1:
            shapes = {hf_name(name): shape for name, shape in parameter_shapes(self.arch).items()}
            total = sum(torch.Size(shape).numel() for shape in shapes.values()) * _DTYPES[self._dtype][1].itemsize
            weight_map = {hf_name(n): self._shard_name(i) for i, names in enumerate(self._shards) for n in names}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            self._write_json(_INDEX, index)
        step_folders.flush_folder(self.folder)
        self.folder.rename(self._out)
        step_folders.flush_folder(self._out.parent)

    def _shard_name(self, shard: int) -> str:
        if len(self._shards) == 1:
            return _SINGLE
        return f"model-{shard + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _header(self, shard: int) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        code, dtype = _DTYPES[self._dtype]
        for name in self._shards[shard]:
            shape = parameter_shapes(self.arch)[name]
            end = offset + torch.Size(shape).numel() * dtype.itemsize
            header[hf_name(name)] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight
        return len(text).to_bytes(8, "little") + text

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        with (self.folder / name).open("wb") as file:
            file.write((json.dumps(value, indent=2) + "\n").encode())
            self._flush(file)

    @staticmethod
    def _flush(file: IO[bytes]) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()


class HuggingFaceReader:
    """A Llama in a Hugging Face folder; the context manager keeps its files mapped.

    Raises:
        UserError: there is no such model, or it would not be computed exactly; with all that is missing or superfluous.
    """

    def __init__(self, folder: Path) -> None:
        if exists(folder / _ADAPTER):
            raise UserError(
                f"{folder} holds {_ADAPTER}: an adapter, which is not applied. Merge it into the model first."
            )
        if not exists(folder / "config.json"):
            raise UserError(f"{folder} has no config.json. Expected a Hugging Face model folder.")
        path = file_inside(folder, "config.json")
        config = parse_json(path, read_file(path, _MOST_JSON), RootModel[dict[str, Any]]).root
        try:
            self.arch = architecture_from_hf(config)
        except ValueError as error:
            raise UserError(f"{path}: this Llama cannot be imported: {error}.") from None
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # Hugging Face tensor name -> open file

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # closes what is open already if anything is refused
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: ExitStack) -> None:
        from safetensors import SafetensorError, safe_open

        for path in self._paths():
            with path.open("rb") as file:
                header = int.from_bytes(file.read(8), "little")
            if header > _MOST_JSON:
                raise UserError(f"{path} cannot be read: a header of {header:,} bytes, which no such file has.")
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError, ValueError) as error:
                raise UserError(f"{path} cannot be read: {short(str(error))}") from None
            if twice := self._files.keys() & file.keys():
                raise UserError(f"{path}: {short(min(twice))} is in another file of the folder, too.")
            self._files |= dict.fromkeys(file.keys(), file)
        parts = {name: file.get_slice(name) for name, file in self._files.items()}
        if differences := tensor_differences(self.arch, {name: tuple(p.get_shape()) for name, p in parts.items()}):
            listed = "\n  ".join(differences[:20])
            more = f"\n  ... and {len(differences) - 20} more" if len(differences) > 20 else ""
            raise UserError(f"{self._folder}: its tensors are not those of its config.json:\n  {listed}{more}")
        for name in parameter_shapes(self.arch):
            if (code := parts[hf_name(name)].get_dtype()) not in _DTYPE_OF:
                raise UserError(f"{self._folder}: {hf_name(name)} is {code}; only F32, BF16 and F16 can be imported.")
        if self.arch.tied_embeddings and HF_OUTPUT in parts and not self._tied(parts[HF_EMBEDDING], parts[HF_OUTPUT]):
            raise UserError(
                f"{self._folder}: config.json ties the embeddings (tie_word_embeddings), but {HF_OUTPUT} differs from "
                f"{HF_EMBEDDING}. Set tie_word_embeddings to false to keep both, or remove {HF_OUTPUT}."
            )

    def _tied(self, embedding: Any, output: Any) -> bool:
        rows, width = self.arch.vocab_size, self.arch.dim
        if output.get_shape() != [rows, width] or output.get_dtype() != embedding.get_dtype():
            return False
        step = max(1, _COMPARED_NUMBERS // width)
        return all(torch.equal(embedding[i : i + step], output[i : i + step]) for i in range(0, rows, step))

    def __exit__(self, *args: object) -> None:
        self._stack.close()

    def read(self, name: str, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> Tensor:
        """A tensor by our name, or the part of it at `offsets`; only these bytes are read."""
        part = self._files[hf_name(name)].get_slice(hf_name(name))
        if offsets is None or sizes is None:
            return part[:]
        return part[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor by our name."""
        return _DTYPE_OF[self._files[hf_name(name)].get_slice(hf_name(name)).get_dtype()]

    def _paths(self) -> list[Path]:
        """The files that transformers would read: one, or those of the index."""
        if exists(self._folder / _SINGLE):
            return [file_inside(self._folder, _SINGLE)]
        if not exists(self._folder / _INDEX):
            raise UserError(f"{self._folder} has no {_SINGLE} and no {_INDEX}. Pickled .bin weights are not read.")
        index = file_inside(self._folder, _INDEX)
        names = parse_json(index, read_file(index, _MOST_JSON), _Index).weight_map.values()
        return [file_inside(self._folder, name) for name in sorted(set(names))]


class _Index(FileModel):
    """model.safetensors.index.json."""

    metadata: Any = None
    weight_map: Annotated[dict[str, str], Field(min_length=1)]


def _split(shapes: dict[str, tuple[int, ...]], itemsize: int, shard_bytes: int) -> list[list[str]]:
    """Names in order, in groups of at most `shard_bytes` where a single tensor is not larger than that."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
