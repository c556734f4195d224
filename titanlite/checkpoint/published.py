"""Published weights: Hugging Face folders are written and read, Meta's are read, and any weights become a checkpoint.

Invariant: about one tensor is held in memory at a time, or one file that is written. A folder appears under its name
only when it is whole. Nothing in the files is executed, and nothing outside of a folder is opened that a file in it
names.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field, RootModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from titanlite.checkpoint import live_tensors, step_folders
from titanlite.checkpoint.dcp import CommittingWriter, SafeReader, abridged, load_tensors, reason
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import FileModel, exists, file_inside, parse_json, read_file, short
from titanlite.config.flavors import Architecture
from titanlite.model import formats
from titanlite.model.formats import HF_EMBEDDING, HF_OUTPUT, hf_name, parameter_shapes
from titanlite.model.llama import Llama

_DTYPE_OF = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SINGLE, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
_EMBEDDING = "tok_embeddings.weight"
_MOST_JSON = 1 << 24  # bytes; the index of Llama 405B has a tenth of a megabyte
SHARD_BYTES = 1_000_000_000  # of a file, which is in memory twice while it is written


class WeightSource(Protocol):
    """The weights of a Llama by our names."""

    arch: Architecture
    dtypes: dict[str, torch.dtype]

    def read(self, name: str) -> Tensor:
        """A whole parameter in this model's layout."""
        ...


class CheckpointTensors:
    """The weights of a step folder that was checked, on one process.

    Raises:
        CheckpointError: it does not say which model it holds.
    """

    def __init__(self, path: Path) -> None:
        self._reader, arch = SafeReader(path), step_folders.read_manifest(path)["info"]["architecture"]
        if arch is None:
            raise CheckpointError(f"{path} does not say of which architecture its weights are")
        self.arch, index = Architecture(**arch), self._reader.index
        self.dtypes = {name: index[f"model.{name}"].properties.dtype for name in parameter_shapes(self.arch)}

    def read(self, name: str) -> Tensor:
        """A whole parameter in its saved dtype."""
        tensor = torch.empty(parameter_shapes(self.arch)[name], dtype=self.dtypes[name])
        load_tensors(self._reader, {f"model.{name}": tensor})
        return tensor


def export_hf(
    source: WeightSource,
    out: Path,
    dtype: str,
    write_tokenizer: Callable[[Path], dict[str, int | None]] = lambda folder: {},
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a LlamaForCausalLM that transformers loads.

    Args:
        out: must not exist.
        dtype: "float32", "bfloat16" or "float16".
        write_tokenizer: puts the tokenizer's files into a folder and returns bos_token_id and eos_token_id.

    Raises:
        UserError: it exists, or cannot be written.
    """
    if out.exists():
        raise UserError(f"{out} exists already. Choose another folder, or remove it.")
    folder = out.parent / f"{step_folders.UNFINISHED}{out.name}-{secrets.token_hex(4)}"
    target = getattr(torch, dtype)
    sizes = {name: math.prod(shape) * target.itemsize for name, shape in parameter_shapes(source.arch).items()}
    shards: list[list[str]] = []
    places, room = {}, 0
    for name, size in sizes.items():
        if size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    try:
        folder.mkdir(parents=True)
        token_ids = write_tokenizer(folder)
        for number, names in enumerate(shards, 1):
            file_name = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            places |= {hf_name(name): file_name for name in names}
            tensors = {hf_name(name): source.read(name).detach().to("cpu", target).contiguous() for name in names}
            save_file(tensors, folder / file_name, {"format": "pt"})
        tables = {"config.json": formats.hf_config(source.arch, dtype) | token_ids}
        tables["generation_config.json"] = {"do_sample": True, **token_ids}
        if len(shards) > 1:
            tables[_INDEX] = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        for name, table in tables.items():
            (folder / name).write_text(json.dumps(table, indent=2) + "\n")
        for path in folder.iterdir():
            step_folders.flush(path)
        step_folders.flush(folder)
        folder.rename(out)
        step_folders.flush(out.parent)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise UserError(f"{out} cannot be written: {error}. Choose another folder, or make room.") from None
        raise


class HuggingFaceReader:
    """A Llama in a Hugging Face folder, whose files are mapped while this object lives.

    Raises:
        UserError: there is no such model, or it would not be computed exactly; with all that is missing or superfluous.
    """

    def __init__(self, folder: Path) -> None:
        if exists(folder / _ADAPTER):
            raise UserError(f"{folder} holds {_ADAPTER}: an adapter, which is not applied. Merge it first.")
        path = file_inside(folder, "config.json")
        try:
            config = parse_json(path, read_file(path, _MOST_JSON), RootModel[dict[str, Any]]).root
            self.arch = formats.architecture_from_hf(config)
        except ValueError as error:
            raise UserError(f"{path}: this Llama cannot be imported: {error}.") from None
        self._files: dict[str, Any] = {}  # Hugging Face tensor name -> open file
        for path in _safetensors(folder):
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError, ValueError) as error:
                raise UserError(f"{path} cannot be read: {short(str(error))}") from None
            self._files |= dict.fromkeys(file.keys(), file)
        parts = {name: file.get_slice(name) for name, file in self._files.items()}
        if lines := formats.tensor_differences(self.arch, {name: tuple(p.get_shape()) for name, p in parts.items()}):
            raise UserError(f"{folder}: its tensors are not those of its config.json:\n  {abridged(lines, 20)}")
        codes = {name: parts[hf_name(name)].get_dtype() for name in parameter_shapes(self.arch)}
        if odd := [f"{hf_name(name)} is {code}" for name, code in codes.items() if code not in _DTYPE_OF]:
            raise UserError(f"{folder}: {odd[0]}; only F32, BF16 and F16 can be imported.")
        self.dtypes = {name: _DTYPE_OF[code] for name, code in codes.items()}
        if self.arch.tied_embeddings and HF_OUTPUT in parts:
            both = [self._files[name].get_tensor(name) for name in (HF_EMBEDDING, HF_OUTPUT)]  # mapped, not copied
            if both[0].dtype != both[1].dtype or not torch.equal(*both):
                problem = f"config.json ties the embeddings, but {HF_OUTPUT} differs from {HF_EMBEDDING}"
                raise UserError(f"{folder}: {problem}. Set tie_word_embeddings to false, or remove {HF_OUTPUT}.")

    def read(self, name: str, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Tensor:
        """A tensor by our name, or the part of it at `offsets`; only these bytes are read."""
        part = self._files[hf_name(name)].get_slice(hf_name(name))
        return part[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)) or ...]


def _safetensors(folder: Path) -> list[Path]:
    """The files that transformers would read: one, or those of the index."""
    if exists(folder / _SINGLE):
        return [file_inside(folder, _SINGLE)]
    index = file_inside(folder, _INDEX)
    names = parse_json(index, read_file(index, _MOST_JSON), _Index).weight_map.values()
    return [file_inside(folder, name) for name in sorted(set(names))]


class _Index(FileModel):
    """model.safetensors.index.json."""

    metadata: Any = None
    weight_map: Annotated[dict[str, str], Field(min_length=1)]


@torch.no_grad()
def load_hf_weights(folder: Path, model: nn.Module) -> None:
    """Load a Hugging Face Llama into a sharded model in place; each rank reads the slices that it owns.

    Raises:
        UserError: it is no Llama, or not this one; with the differences.
    """
    assert isinstance(model, Llama)
    reader = HuggingFaceReader(folder)
    there, here = (dataclasses.asdict(arch) for arch in (reader.arch, model.arch))
    if differ := [key for key in here if key != "max_seq_len" and there[key] != here[key]]:
        lines = "\n  ".join(f"{key}: {there[key]} there, {here[key]} in this job" for key in differ)
        raise UserError(f"{folder} is another model. Set these keys of [model] as there:\n  {lines}")
    for name, tensor in live_tensors.model_tensors(model).items():
        if not isinstance(tensor, DTensor):
            tensor.copy_(reader.read(name))
            continue
        for chunk in tensor.__create_chunk_list__():  # DCP's protocol is exact for uneven and strided shards, too
            local = tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets))
            local.copy_(reader.read(name, tuple(chunk.offsets), tuple(chunk.sizes)))


class MetaReader:
    """The weights of a folder with params.json and consolidated.00.pth, consolidated.01.pth ...

    Raises:
        UserError: files are missing, or their tensors are not a Llama's; with the list.
    """

    def __init__(self, folder: Path) -> None:
        names = sorted(path.name for path in folder.glob("consolidated.*.pth"))
        if not names:
            raise UserError(f"{folder} has no consolidated.*.pth. Expected Meta's files of a Llama.")
        path = file_inside(folder, "params.json")
        params = parse_json(path, read_file(path, _MOST_JSON), formats.MetaParams)
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
        arch = formats.architecture_from_meta(params, vocab_size, w1.shape[0] * len(names))
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
        shapes, count = {tuple(shard[name].shape) for shard in self._shards}, len(self._shards)
        part = min(shapes)
        cut = [dim for dim, size in enumerate(whole) if part[dim : dim + 1] != (size,)]
        if len(shapes) > 1 or len(cut) > 1 or any(part[dim] * count != whole[dim] for dim in cut):
            raise UserError(f"{name}: parts of shapes {sorted(shapes)[:8]} do not make {whole}")
        return cut[0] if cut else None

    def read(self, name: str) -> Tensor:
        """A whole tensor in this model's layout."""
        dim = self._cuts[name]
        whole = self._shards[0][name] if dim is None else torch.cat([shard[name] for shard in self._shards], dim)
        if name.endswith(("attention.wq.weight", "attention.wk.weight")):
            whole = formats.from_meta_rotary(whole, self.arch.head_dim)
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
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPE_OF.values() or not tensor.is_contiguous():
            raise UserError(f"{path}: {short(repr(name))} is no tensor of float32, bfloat16 or float16 numbers")
    return loaded


def import_weights(out: Path, source: WeightSource, origin: str) -> Path:
    """Write foreign weights as a checkpoint of step 0 without training state, for `checkpoint.initial_load_path`.

    Args:
        out: the folder of checkpoints; step-00000000 appears in it.
        origin: where they come from, kept in the manifest.

    Raises:
        UserError: it exists already, or cannot be written, or a weight is not finite.
    """
    target = out / step_folders.step_name(0)
    if target.exists():
        raise UserError(f"{target} exists already. Choose another folder, or remove it.")
    shapes = parameter_shapes(source.arch)
    tensors = {f"model.{n}": torch.empty(s, dtype=source.dtypes[n], device="meta") for n, s in shapes.items()}
    info = live_tensors.manifest_info(source.arch, {}) | {"weights_only": True, "origin": origin}
    writer = CommittingWriter(out, 0, secrets.token_hex(8), info)
    writer.single_file_per_rank = False  # because DCP keeps all tensors of a file in memory until it is written
    try:
        dcp_save(tensors, storage_writer=writer, planner=_ReadingPlanner(source, origin), no_dist=True)
    except CheckpointException as error:
        shutil.rmtree(writer.unfinished, ignore_errors=True)
        cause = next(iter(error.failures.values()))[0]  # DCP hides it
        if isinstance(cause, UserError):  # from source.read
            raise cause from None
        raise UserError(f"{out} cannot be written: {reason(error)}. Choose another folder.") from None
    return target


class _ReadingPlanner(DefaultSavePlanner):
    """Plans with tensors that have shapes only, and reads each value when it is about to be written."""

    def __init__(self, source: WeightSource, origin: str) -> None:
        super().__init__(flatten_state_dict=False)
        self._source, self._origin = source, origin

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn.removeprefix("model.")
        tensor = self._source.read(name).contiguous()
        if not live_tensors.is_finite(tensor):
            raise UserError(f"{self._origin}: {name} holds values that are not finite (NaN or infinite)")
        return tensor
