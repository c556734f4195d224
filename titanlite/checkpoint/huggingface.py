"""Hugging Face model folders: write one tensor by tensor, read one slice by slice.

Invariant: at any time about one tensor is held in memory, and a folder appears under its name only when it is whole.
May import config, torch, safetensors, model.huggingface and commit.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self

import torch
from torch import Tensor

from titanlite.checkpoint import commit
from titanlite.config.errors import UserError
from titanlite.model.flavors import Architecture
from titanlite.model.huggingface import architecture_from_hf, hf_config, hf_name, parameter_shapes, tensor_differences

_DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}
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
        self.folder = out.parent / f"{commit.UNFINISHED}{out.name}-{secrets.token_hex(4)}"
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
            self._write_json("model.safetensors.index.json", index)
        commit.flush_folder(self.folder)
        self.folder.rename(self._out)
        commit.flush_folder(self._out.parent)

    def _shard_name(self, shard: int) -> str:
        if len(self._shards) == 1:
            return "model.safetensors"
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
        UserError: no such model there, or one that would not be computed exactly; with all that is missing or too much.
    """

    def __init__(self, folder: Path) -> None:
        config = folder / "config.json"
        try:
            self.arch = architecture_from_hf(json.loads(config.read_text()))
        except OSError as error:
            raise UserError(f"{config}: {error.strerror}. Expected a Hugging Face model folder.") from None
        except ValueError as error:
            raise UserError(f"{config}: this Llama cannot be imported: {error}") from None
        except (LookupError, TypeError, AttributeError) as error:  # a value of another kind than its key should have
            raise UserError(f"{config} does not describe a Llama: {error!r}") from None
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # Hugging Face tensor name -> open file

    def __enter__(self) -> Self:
        from safetensors import SafetensorError, safe_open

        paths = self._paths()
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} cannot be read: {error}") from None
            self._files |= dict.fromkeys(file.keys(), file)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}
        if differences := tensor_differences(self.arch, shapes):
            listed = "\n  ".join(differences[:20])
            more = f"\n  ... and {len(differences) - 20} more" if len(differences) > 20 else ""
            raise UserError(f"{self._folder}: its tensors are not those of its config.json:\n  {listed}{more}")
        return self

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
        code = self._files[hf_name(name)].get_slice(hf_name(name)).get_dtype()
        for known, dtype in _DTYPES.values():
            if code == known:
                return dtype
        raise UserError(f"{self._folder}: {hf_name(name)} is {code}; only F32, BF16 and F16 can be imported")

    def _paths(self) -> list[Path]:
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            return sorted({self._folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        paths = sorted(self._folder.glob("*.safetensors"))
        if not paths:
            raise UserError(f"{self._folder} holds no .safetensors file. Pickled .bin weights are not read.")
        return paths


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
