"""Published weights: Hugging Face folders are written and read, Meta's are read, and any weights become a checkpoint.

Invariant: about one tensor is held in memory at a time, or one file that is written. A folder appears under its name
only when it is whole. Nothing in the files is executed, and nothing outside of a folder is opened that a file in it
names.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from titanlite.checkpoint import live_tensors, step_folders
from titanlite.checkpoint.dcp import CommittingWriter, SafeReader, abridged, load_tensors, reason, weights_of
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import FileModel, exists, file_inside, parse_json, read_file, read_object
from titanlite.config.flavors import Architecture
from titanlite.config.mistakes import short
from titanlite.config.registry import ARCHITECTURES
from titanlite.model import formats
from titanlite.model.formats import HF_EMBEDDING, HF_OUTPUT, hf_name, parameter_shapes
from titanlite.model.llama import Llama

_SINGLE, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
_DTYPES = torch.float32, torch.bfloat16, torch.float16
_MOST_JSON = 1 << 24  # bytes; the index of Llama 405B has a tenth of a megabyte


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of a Llama by our names; `read` gives a whole parameter in this model's layout."""

    arch: Architecture
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]


def check_tensors(
    folder: Path,
    arch: Architecture,
    found: Mapping[str, tuple[Sequence[int], torch.dtype]],
    said_by: str,
    named: Callable[[str], str] = str,
) -> dict[str, torch.dtype]:
    """The dtype of each parameter by our name.

    Args:
        found: name in the folder -> shape and dtype, of all tensors that are there.
        said_by: what describes the model, for the message.
        named: our name -> that in the folder.

    Raises:
        UserError: heads that do not divide the width; or tensors that are missing, superfluous, of another shape, or
            other numbers than these; all in one message.
    """
    if arch.head_dim % 2 or arch.n_heads % arch.n_kv_heads:
        heads = f"{arch.n_heads} heads of an even width, shared by {arch.n_kv_heads} key heads (num_key_value_heads)"
        raise UserError(f"{folder}: a width of {arch.dim} cannot be divided into {heads}.")
    names = {named(name): name for name in parameter_shapes(arch)}
    expected = {there: parameter_shapes(arch)[name] for there, name in names.items()}
    lines = formats.differences(expected, {name: tuple(shape) for name, (shape, _) in found.items()})
    lines += [f"{short(name)}: {dtype}" for name, (_, dtype) in found.items() if dtype not in _DTYPES]
    if lines:
        text = f"its tensors are not what {said_by} says, or none of {_DTYPES}"
        raise UserError(f"{folder}: {text}:\n  {abridged(lines, 20)}")
    return {name: found[there][1] for there, name in names.items()}


def checkpoint_weights(path: Path, averaged: bool = False) -> Weights:
    """Those of a step folder that was checked, or their averages, on one process.

    Raises:
        UserError: it has no averages.
        CheckpointError: it does not say which model it holds.
    """
    arch = step_folders.read_manifest(path)["info"]["architecture"]
    if arch is None:
        raise CheckpointError(f"{path} does not say of which architecture its weights are")
    kind = arch.get("architecture", "llama")
    if kind not in [*ARCHITECTURES]:
        raise UserError(f"{path} holds a model of the architecture {kind}, which a plugin has to bring.")
    reader = SafeReader(path)
    return dcp_weights(reader, ARCHITECTURES[kind](**arch), weights_of(reader, averaged))


def dcp_weights(reader: SafeReader, arch: Architecture, prefix: str) -> Weights:
    """Those that DCP has written, each under its name with the prefix. To read one raises a CheckpointError if it is
    damaged."""
    shapes = parameter_shapes(arch)
    dtypes = {name: reader.index[f"{prefix}{name}"].properties.dtype for name in shapes}

    def read(name: str) -> Tensor:
        tensor = torch.empty(shapes[name], dtype=dtypes[name])
        load_tensors(reader, {f"{prefix}{name}": tensor})
        return tensor

    return Weights(arch, dtypes, read)


def export_hf(
    source: Weights,
    out: Path,
    dtype: str,
    write_tokenizer: Callable[[Path], dict[str, int | None]] = lambda folder: {},
    shard_bytes: int = 1_000_000_000,
) -> None:
    """Write a model that transformers loads, of the first family that computes the same.

    Args:
        out: must not exist.
        dtype: "float32", "bfloat16" or "float16".
        write_tokenizer: puts the tokenizer's files into a folder and returns bos_token_id and eos_token_id.
        shard_bytes: of a file, which is in memory twice while it is written.

    Raises:
        UserError: it exists, or cannot be written, or no family computes this model.
    """
    from huggingface_hub import split_torch_state_dict_into_shards  # no other command needs it

    if out.exists():
        raise UserError(f"{out} exists already. Choose another folder, or remove it.")
    folder = out.parent / f"{step_folders.UNFINISHED}{out.name}-{secrets.token_hex(4)}"
    target, shapes = getattr(torch, dtype), parameter_shapes(source.arch)
    config, ours = formats.hf_config(source.arch, dtype), {hf_name(source.arch, name): name for name in shapes}
    empty = {name: torch.empty(shapes[own], dtype=target, device="meta") for name, own in ours.items()}
    shards = split_torch_state_dict_into_shards(empty, max_shard_size=shard_bytes)
    try:
        folder.mkdir(parents=True)
        token_ids = write_tokenizer(folder)
        for file_name, names in shards.filename_to_tensors.items():
            tensors = {name: source.read(ours[name]).detach().to("cpu", target).contiguous() for name in names}
            save_file(tensors, folder / file_name, {"format": "pt"})
        tables = {"config.json": config | token_ids}
        tables["generation_config.json"] = {"do_sample": True, **token_ids}
        if shards.is_sharded:
            tables[_INDEX] = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        for name, table in tables.items():
            (folder / name).write_text(json.dumps(table, indent=2) + "\n")
        for path in folder.iterdir():
            step_folders.flush(path)
        step_folders.appear(folder, out)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise UserError(f"{out} cannot be written: {error}. Choose another folder, or make room.") from None
        raise


def hf_weights(folder: Path) -> Weights:
    """Those of a model in a Hugging Face folder. Its files are mapped, so a part of a tensor can be read alone.

    Raises:
        UserError: there is no such model, or it would not be computed exactly; with all that is missing or superfluous.
    """
    if exists(folder / _ADAPTER):
        raise UserError(f"{folder} holds {_ADAPTER}: an adapter, which is not applied. Merge it first.")
    arch = formats.architecture_from_hf(read_object(file_inside(folder, "config.json"), _MOST_JSON))
    tensors: dict[str, Tensor] = {}
    for path in _safetensors(folder):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        except (OSError, SafetensorError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {short(str(error))}") from None
    output = tensors.pop(HF_OUTPUT, None) if arch.tied_embeddings else None
    found = {n: (t.shape, t.dtype) for n, t in tensors.items() if not formats.HF_DERIVED.fullmatch(n)}
    dtypes = check_tensors(folder, arch, found, "config.json", partial(hf_name, arch))
    if output is not None and not _same(output, tensors[HF_EMBEDDING]):
        problem = f"config.json ties the embeddings, but {HF_OUTPUT} differs from {HF_EMBEDDING}"
        raise UserError(f"{folder}: {problem}. Set tie_word_embeddings to false, or remove {HF_OUTPUT}.")
    return Weights(arch, dtypes, lambda name: tensors[hf_name(arch, name)])


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


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
def load_hf_weights(folder: Path, model: Llama) -> None:
    """Load a Hugging Face model into a sharded model in place; each rank reads the slices that it owns.

    Raises:
        UserError: it is no model that is computed here, or not this one; with the differences.
    """
    source = hf_weights(folder)
    there, here = (dataclasses.asdict(arch) for arch in (source.arch, model.arch))
    if differ := [key for key in here if key != "max_seq_len" and there[key] != here[key]]:
        lines = "\n  ".join(f"{key}: {there[key]} there, {here[key]} in this job" for key in differ)
        raise UserError(f"{folder} is another model. Set these keys of [model] as there:\n  {lines}")
    for name, tensor in live_tensors.model_tensors(model).items():
        whole = source.read(name)
        if not isinstance(tensor, DTensor):
            tensor.copy_(whole)
            continue
        for chunk in tensor.__create_chunk_list__():  # DCP's protocol is exact for uneven and strided shards, too
            part = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            tensor.__get_tensor_shard__(MetadataIndex(name, chunk.offsets)).copy_(whole[part])


def meta_weights(folder: Path) -> Weights:
    """Those of a folder with params.json and consolidated.00.pth, consolidated.01.pth ...

    Raises:
        UserError: files are missing, or their tensors are not a Llama's; with the list.
    """
    path = file_inside(folder, "params.json")
    params = parse_json(path, read_file(path, _MOST_JSON), formats.MetaParams)
    files = [_load(file_inside(folder, name)) for name in sorted(p.name for p in folder.glob("consolidated.*.pth"))]
    embedding, feed_forward, output = "tok_embeddings.weight", "layers.0.feed_forward.w1.weight", "output.weight"
    shapes = [{name: tensor.shape for name, tensor in file.items()} for file in files]
    try:
        (rows, width), (ffn_dim, _) = shapes[0][embedding], shapes[0][feed_forward]
    except (IndexError, KeyError, ValueError):
        raise UserError(f"{folder} has no consolidated.*.pth, or they lack {embedding} or {feed_forward}.") from None
    if any(others != shapes[0] for others in shapes):
        raise UserError(f"{folder}: the consolidated.*.pth do not hold tensors of the same names and shapes.")
    if tied := output in shapes[0] and all(_same(file[output], file[embedding]) for file in files):
        shapes[0].pop(output)
    by_rows = width == params.dim  # Llama 3 splits the vocabulary, Llama 2 the width
    vocab_size = rows * (len(files) if by_rows else 1)
    arch = formats.architecture_from_meta(params, vocab_size, ffn_dim * len(files), tied)
    row_parallel = ("attention.wo.weight", "feed_forward.w2.weight", *(() if by_rows else (embedding,)))

    def joined(name: str, device: str = "cpu") -> Tensor:
        parts = [file[name].to(device) for file in files]
        return torch.cat(parts, int(name.endswith(row_parallel))) if parts[0].ndim == 2 else parts[0]

    wholes = {name: joined(name, "meta") for name in shapes[0]}
    found = {name: (whole.shape, whole.dtype) for name, whole in wholes.items()}
    dtypes = check_tensors(folder, arch, found, "params.json")
    return Weights(arch, dtypes, lambda name: formats.from_meta_rotary(name, joined(name), arch.head_dim))


def _load(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, mapped into memory.

    Raises:
        UserError: it is damaged or holds anything else than plain tensors.
    """
    try:
        loaded = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
        loaded.pop("rope.freqs", None)  # computed, not learned
        # A strided view could claim to be larger than the file is, and would fill the memory when it is copied.
        if not all(isinstance(name, str) and tensor.is_contiguous() for name, tensor in loaded.items()):
            raise ValueError("no table of tensors")
    except Exception as error:  # torch's reader raises any kind of error for damaged bytes
        raise UserError(f"{path} is damaged, or more than tensors: {short(reason(error))}") from None
    return loaded


def mean_of(paths: Sequence[Path], sources: Sequence[Weights], factors: Sequence[float]) -> Weights:
    """The mean of weights, in which each has one of the factors, by their sum. It is computed in float64 when it is
    read, and is fp32.

    Args:
        paths: where the weights are.

    Raises:
        UserError: they are of different models.
    """
    one, shares = sources[0], [factor / sum(factors) for factor in factors]
    for path, other in zip(paths, sources, strict=True):
        if lines := formats.differences(parameter_shapes(one.arch), parameter_shapes(other.arch)):
            raise UserError(f"{path} does not hold the model of {paths[0]}:\n  {abridged(lines)}")

    def read(name: str) -> Tensor:
        total = torch.zeros(parameter_shapes(one.arch)[name], dtype=torch.float64)
        for source, share in zip(sources, shares, strict=True):
            total.add_(source.read(name), alpha=share)
        return total.float()

    return Weights(one.arch, dict.fromkeys(one.dtypes, torch.float32), read)


def import_weights(out: Path, source: Weights, origin: str, step: int = 0, **more: Any) -> Path:
    """Write weights that no run has saved as a checkpoint without training state, for `checkpoint.initial_load_path`.

    Args:
        out: the folder of checkpoints; that of the step appears in it.
        origin: where they come from, kept in the manifest.
        more: what else is known of them, as the manifest has it.

    Raises:
        UserError: it exists already, or cannot be written, or a weight is not finite.
    """
    target = out / step_folders.step_name(step)
    if target.exists():
        raise UserError(f"{target} exists already. Choose another folder, or remove it.")
    shapes = parameter_shapes(source.arch)
    tensors = {f"model.{n}": torch.empty(s, dtype=source.dtypes[n], device="meta") for n, s in shapes.items()}
    info = live_tensors.manifest_info(source.arch, {}) | {"weights_only": True, "origin": origin} | more
    writer = CommittingWriter(out, step, secrets.token_hex(8), info)
    writer.single_file_per_rank = False  # because DCP keeps all tensors of a file in memory until it is written
    try:
        dcp_save(tensors, storage_writer=writer, planner=_ReadingPlanner(source), no_dist=True)
    except CheckpointException as error:
        shutil.rmtree(writer.unfinished, ignore_errors=True)
        raise UserError(f"{out} cannot be made of {origin}: {reason(error)}") from None
    return target


class _ReadingPlanner(DefaultSavePlanner):
    """Plans with tensors that have shapes only, and reads each value when it is about to be written."""

    def __init__(self, source: Weights) -> None:
        super().__init__(flatten_state_dict=False)
        self._source = source

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn.removeprefix("model.")
        tensor = self._source.read(name).contiguous()
        if not live_tensors.is_finite(tensor):
            raise CheckpointError(f"{name} holds values that are not finite (NaN or infinite)")
        return tensor
