"""Read and write published weights: Hugging Face models, Meta models, imports and averages.

Invariant: About one tensor or one output file is in memory at a time. A folder gets its final name
only when it is complete. Nothing in the files is executed, and no file outside the folder is
opened.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from titanlite.checkpoint.dcp import (
    CheckpointWriter,
    SafeReader,
    describe_error,
    get_weight_prefix,
    join_lines,
    load_tensors,
    manifest_info,
)
from titanlite.checkpoint.find import set_tokenizer_path
from titanlite.checkpoint.live_state import is_finite, model_tensors
from titanlite.checkpoint.manifest import (
    TMP_PREFIX,
    publish_folder,
    read_manifest,
    step_folder_name,
    sync,
)
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.files import (
    exists,
    find_file_inside,
    parse_json,
    read_file,
    read_json_object,
)
from titanlite.config.flavors import Architecture
from titanlite.config.mistakes import shorten
from titanlite.config.models import FileModel
from titanlite.config.registry import ARCHITECTURES
from titanlite.config.run import LONGEST_DEFAULT_SEQUENCE, model_tables
from titanlite.config.schema import JobConfig
from titanlite.model import formats
from titanlite.model.formats import HF_EMBEDDING, HF_OUTPUT, hf_name, parameter_shapes
from titanlite.model.llama import Llama
from titanlite.parallel.init_weights import keep_shard

if TYPE_CHECKING:
    from titanlite.data.tokenizer import Tokenizer

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_ADAPTER_CONFIG = "adapter_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MAX_JSON_BYTES = 1 << 24  # the index of Llama 405B takes about 100 kB
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

TokenizerWriter = Callable[[Path], dict[str, int | None]]
"""Writes the tokenizer files into a folder and returns the special token IDs, such as
`eos_token_id`."""


@dataclass(frozen=True)
class Weights:
    """Weights of a model, stored in files of any format and read one parameter at a time.

    Attributes:
        arch: Architecture of the model.
        dtypes: Stored dtype of each parameter, by titanlite name, for example
            "layers.3.attention.wq.weight".
        read: Reads a whole (unsharded) parameter from the files, given its titanlite name.
    """

    arch: Architecture
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor in a file."""

    shape: Sequence[int]
    dtype: torch.dtype


def check_tensors(
    folder: Path,
    arch: Architecture,
    tensors: Mapping[str, Tensor | TensorInfo],
    described_by: str,
    to_stored_name: Callable[[str], str] = lambda name: name,
) -> dict[str, torch.dtype]:
    """Check that a folder contains exactly the parameters of a model and return their dtypes.

    Args:
        folder: The folder, for error messages.
        arch: Architecture of the model.
        tensors: The tensors in the folder, by stored name.
        described_by: File or section that describes the architecture, such as "config.json", for
            error messages.
        to_stored_name: Converts the titanlite name of a parameter to its stored name.

    Returns:
        Stored dtype of each parameter, by titanlite name.

    Raises:
        UserError: If the width cannot be divided into heads, or if any tensor is missing or
            unexpected or has the wrong shape or an unsupported dtype. The message lists these
            tensors.
    """
    _check_heads(folder, arch)
    shapes = parameter_shapes(arch)
    stored_names = {name: to_stored_name(name) for name in shapes}  # by titanlite name

    # Compare the names and shapes.
    expected_shapes = {stored_names[name]: shape for name, shape in shapes.items()}
    stored_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = formats.compare_shapes(expected_shapes, stored_shapes)

    # Check the dtypes.
    for stored_name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            problems.append(f"{shorten(stored_name)}: {tensor.dtype} is not supported")

    if problems:
        listed = join_lines(problems, limit=20)
        raise UserError(f"{folder}: the tensors do not match {described_by}:\n  {listed}")
    return {name: tensors[stored_names[name]].dtype for name in shapes}


def _check_heads(folder: Path, arch: Architecture) -> None:
    """Check that the head width is even, as RoPE requires, and that query heads form equal groups.

    Raises:
        UserError: If the head width is odd, or if the number of heads is not a multiple of the
            number of key/value heads. The message names `folder`.
    """
    if arch.head_dim % 2 or arch.n_heads % arch.n_kv_heads:
        heads = f"{arch.n_heads} heads of even width and {arch.n_kv_heads} key/value heads"
        raise UserError(f"{folder}: a width of {arch.dim} cannot be divided into {heads}.")


def checkpoint_weights(path: Path, averaged: bool = False) -> Weights:
    """Open the weights of a checkpoint for reading whole parameters one at a time in one process.

    Args:
        path: A step folder that has passed `check_checkpoint`.
        averaged: Return the averaged weights (EMA) instead.

    Raises:
        UserError: If `averaged` is true but the checkpoint has no averages, or if its architecture
            needs a plugin that is not loaded.
        CheckpointError: If the checkpoint does not describe its architecture, or if this version of
            titanlite cannot read the description.
    """
    manifest = read_manifest(path)
    arch = _build_architecture(path, manifest["info"]["architecture"])
    reader = SafeReader(path, manifest["files"])
    return dcp_weights(reader, arch, get_weight_prefix(reader, averaged))


def _build_architecture(path: Path, fields: dict[str, Any] | None) -> Architecture:
    """Create the architecture described in the manifest of a checkpoint.

    Args:
        path: The step folder, for error messages.
        fields: Fields of the architecture in the manifest, or None if it has none.

    Raises:
        CheckpointError: If `fields` is None, or if the fields do not match the architecture class
            in this version of titanlite.
        UserError: If the architecture belongs to a plugin that is not loaded.
    """
    if fields is None:
        raise CheckpointError(f"{path} does not describe the architecture of its weights")
    name = fields.get("architecture", "llama")  # titanlite 0.2 and earlier had only Llama
    if name not in ARCHITECTURES:
        raise UserError(
            f"{path} contains a model with the architecture {name}. "
            "Load the plugin that registers it."
        )
    architecture_class = ARCHITECTURES[name]
    try:
        return architecture_class(**fields)
    except TypeError as error:  # unknown or missing fields
        problem = f"this version cannot read the architecture of its weights: {error}"
        raise CheckpointError(f"{path}: {problem}") from None


def dcp_weights(reader: SafeReader, arch: Architecture, prefix: str) -> Weights:
    """Open weights that were saved with torch.distributed.checkpoint (DCP).

    The `read` function of the result raises `Damage` if the requested weight is damaged.

    Args:
        reader: Reader of the checkpoint.
        arch: Architecture of the model.
        prefix: Prefix of the parameter names in the checkpoint, for example "model.".

    Raises:
        CheckpointError: If the checkpoint lacks a weight of the model.
    """
    shapes = parameter_shapes(arch)
    saved_names = {name: f"{prefix}{name}" for name in shapes}

    missing = [name for name in shapes if saved_names[name] not in reader.index]
    if missing:
        raise CheckpointError(f"{reader.path} lacks weights of its model:\n  {join_lines(missing)}")

    dtypes = {name: reader.index[saved_names[name]].properties.dtype for name in shapes}

    def read(name: str) -> Tensor:
        tensor = torch.empty(shapes[name], dtype=dtypes[name])
        load_tensors(reader, {saved_names[name]: tensor})  # fills the tensor in place
        return tensor

    return Weights(arch, dtypes, read)


# Hugging Face


def export_hf(
    source: Weights,
    out: Path,
    dtype: str,
    write_tokenizer: TokenizerWriter = lambda folder: {},
    shard_bytes: int = 1_000_000_000,
    tmp_suffix: str | None = None,
) -> None:
    """Write a model in Hugging Face format, so that `transformers` can load it.

    The exported model uses a `transformers` model family, such as Llama, that computes the same
    function as the titanlite model.

    Args:
        source: The weights.
        out: The folder to create.
        dtype: "float32", "bfloat16" or "float16".
        write_tokenizer: Writes the tokenizer files into a folder and returns bos_token_id and
            eos_token_id.
        shard_bytes: Maximum size of a weight file in bytes. Writing a file takes twice its size in
            memory.
        tmp_suffix: Suffix for the name of the temporary folder. Defaults to a random string.

    Raises:
        UserError: If `out` exists or cannot be written, or if no `transformers` model family
            computes the same function.
    """
    if out.exists():
        raise UserError(f"{out} exists already. Choose another folder, or remove it.")
    config = formats.hf_config(source.arch, dtype)

    tmp_folder = out.parent / f"{TMP_PREFIX}{out.name}-{tmp_suffix or secrets.token_hex(4)}"
    try:
        tmp_folder.mkdir(parents=True)
        token_ids = write_tokenizer(tmp_folder)
        _write_json(tmp_folder / "config.json", config | token_ids)
        _write_json(tmp_folder / "generation_config.json", {"do_sample": True, **token_ids})
        _write_safetensors(source, tmp_folder, getattr(torch, dtype), shard_bytes)
        for path in tmp_folder.iterdir():
            sync(path)
        publish_folder(tmp_folder, out)
    except BaseException as error:  # also Ctrl-C
        shutil.rmtree(tmp_folder, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise UserError(
                f"cannot write {out}: {error}. Choose another folder, or free some space."
            ) from None
        raise


def _write_safetensors(source: Weights, folder: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """Write weights to safetensors files in a folder, with an index if there are several files.

    Args:
        source: The weights.
        folder: An existing folder.
        dtype: Data type of the written weights.
        shard_bytes: Maximum size of a file in bytes.
    """
    from huggingface_hub import split_torch_state_dict_into_shards  # slow to import

    # Assign the weights to files. This needs only their sizes, so use meta tensors.
    titanlite_names: dict[str, str] = {}  # by Hugging Face name
    meta_tensors: dict[str, Tensor] = {}  # by Hugging Face name
    for name, shape in parameter_shapes(source.arch).items():
        exported_name = hf_name(source.arch, name)
        titanlite_names[exported_name] = name
        meta_tensors[exported_name] = torch.empty(shape, dtype=dtype, device="meta")
    shards = split_torch_state_dict_into_shards(meta_tensors, max_shard_size=shard_bytes)

    # Read and write the weights of one file at a time.
    for file_name, exported_names in shards.filename_to_tensors.items():
        tensors = {}
        for exported_name in exported_names:
            tensor = source.read(titanlite_names[exported_name]).detach()
            tensors[exported_name] = tensor.to("cpu", dtype).contiguous()
        save_file(tensors, folder / file_name, {"format": "pt"})
        del tensors  # free this memory before reading the next file

    # Write the index, which lists the file of each weight.
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        _write_json(folder / _INDEX_FILE, index)


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n")


def hf_weights(folder: str | Path) -> Weights:
    """Open the weights of a Hugging Face model by memory-mapping its safetensors files.

    Raises:
        UserError: If the folder contains no valid model, or if titanlite would compute different
            results for this model than transformers. The message lists all reasons.
    """
    folder = Path(folder)
    _reject_adapter(folder)

    # Read the architecture.
    config_file = find_file_inside(folder, "config.json")
    config = read_json_object(config_file, _MAX_JSON_BYTES)
    arch = formats.architecture_from_hf(config)

    # Open the parameters by Hugging Face name.
    parameters = _open_safetensors(folder)
    output_copy = None
    if arch.tied_embeddings:
        # The output matrix is then not a parameter, but some models store a copy.
        output_copy = parameters.pop(HF_OUTPUT, None)

    # Check that the parameters match the architecture.
    to_hf_name = partial(hf_name, arch)
    dtypes = check_tensors(folder, arch, parameters, "config.json", to_hf_name)
    if output_copy is not None:
        _check_equals_embedding(folder, output_copy, parameters[HF_EMBEDDING])

    def read(name: str) -> Tensor:
        return parameters[to_hf_name(name)]

    return Weights(arch, dtypes, read)


def _reject_adapter(folder: Path) -> None:
    """Raise a UserError if a folder contains an adapter, such as LoRA weights."""
    if exists(folder / _ADAPTER_CONFIG):
        raise UserError(
            f"{folder} contains an adapter ({_ADAPTER_CONFIG}), which would be ignored. "
            "Merge it into the model first."
        )


def _check_equals_embedding(folder: Path, output: Tensor, embedding: Tensor) -> None:
    """Check that the output matrix of a model with tied embeddings equals the embedding matrix.

    Raises:
        UserError: If their dtypes or values differ. The message names `folder`.
    """
    if not _are_equal(output, embedding):
        raise UserError(
            f"{folder}: config.json ties the embeddings, but {HF_OUTPUT} differs from "
            f"{HF_EMBEDDING}. Set tie_word_embeddings to false, or remove {HF_OUTPUT}."
        )


def _open_safetensors(folder: Path) -> dict[str, Tensor]:
    """Memory-map the tensors of a Hugging Face model and return them by name.

    Omit tensors that can be derived from config.json, such as rotary angles.

    Raises:
        UserError: If a file is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    for path in _list_safetensors(folder):
        try:
            tensors |= load_file(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {shorten(str(error))}.") from None
        except (SafetensorError, ValueError) as error:
            raise UserError(
                f"cannot read {path}: {shorten(str(error))}. Download it again, with `git lfs "
                "pull` if it is a Git LFS pointer."
            ) from None
    is_derived = formats.HF_DERIVED.fullmatch
    return {name: tensor for name, tensor in tensors.items() if not is_derived(name)}


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype and values."""
    return one.dtype == other.dtype and torch.equal(one, other)


class _SafetensorsIndex(FileModel):
    """Content of model.safetensors.index.json."""

    metadata: Any = None
    weight_map: Annotated[dict[str, str], Field(min_length=1)]


def _list_safetensors(folder: Path) -> list[Path]:
    """Return the weight files of a Hugging Face model, selected in the same way as in transformers.

    Return model.safetensors or, if it does not exist, all files listed in
    model.safetensors.index.json.

    Raises:
        UserError: If the folder has neither file.
    """
    if exists(folder / _SINGLE_FILE):
        return [find_file_inside(folder, _SINGLE_FILE)]
    if not exists(folder / _INDEX_FILE):
        raise UserError(
            f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}. Convert other formats, such "
            "as pytorch_model.bin, to safetensors with `save_pretrained` of transformers."
        )
    path = find_file_inside(folder, _INDEX_FILE)
    index = parse_json(path, read_file(path, _MAX_JSON_BYTES), _SafetensorsIndex)
    names = sorted(set(index.weight_map.values()))
    return [find_file_inside(folder, name) for name in names]


@torch.no_grad()
def load_hf_weights(folder: Path, model: Llama) -> None:
    """Load the weights of a Hugging Face model into a titanlite model in place.

    If the titanlite model is sharded, each rank copies only the shards that it holds.

    Args:
        folder: Folder of the Hugging Face model.
        model: The titanlite model, sharded or not.

    Raises:
        UserError: If titanlite does not support the Hugging Face model, or if its architecture
            differs from `model.arch`. The message lists the differences.
    """
    source = hf_weights(folder)
    _check_same_model(folder, source.arch, model.arch)
    for name, tensor in model_tensors(model).items():
        keep_shard(tensor, source.read(name))


def _check_same_model(folder: Path, saved_arch: Architecture, arch: Architecture) -> None:
    """Check that saved weights have the architecture of the job, apart from `max_seq_len`.

    Args:
        folder: Folder of the saved weights, for the error message.
        saved_arch: Architecture of the saved weights.
        arch: Architecture of the job.

    Raises:
        UserError: If the architectures differ. The message lists the differences.
    """
    saved = asdict(saved_arch)
    differences = []
    for key, value in asdict(arch).items():
        if key != "max_seq_len" and saved[key] != value:
            differences.append(f"{key}: {saved[key]} there, {value} in this job")
    if differences:
        listed = "\n  ".join(differences)
        raise UserError(f"{folder} is another model. Set these keys of [model]:\n  {listed}")


# Meta


def meta_weights(folder: str | Path) -> Weights:
    """Open the weights of a Llama model in the Meta format.

    Args:
        folder: Folder with params.json and consolidated.00.pth, consolidated.01.pth, ... Each .pth
            file contains one tensor-parallel shard of every weight. Reading a weight joins its
            shards.

    Raises:
        UserError: If a file is missing or damaged, or if the tensors do not form a Llama model. The
            message lists the differences.
    """
    folder = Path(folder)
    path = find_file_inside(folder, "params.json")
    params = parse_json(path, read_file(path, _MAX_JSON_BYTES), formats.MetaParams)
    file_names = sorted(path.name for path in folder.glob("consolidated.*.pth"))
    files = [_load_pth(find_file_inside(folder, name)) for name in file_names]

    embedding = "tok_embeddings.weight"
    feed_forward = "layers.0.feed_forward.w1.weight"
    output = "output.weight"
    shapes = [{name: tensor.shape for name, tensor in file.items()} for file in files]
    try:
        num_rows, width = shapes[0][embedding]
        ffn_dim, _ = shapes[0][feed_forward]
    except (IndexError, KeyError, ValueError):
        raise UserError(
            f"{folder} has no consolidated.*.pth, or they lack {embedding} or {feed_forward}."
        ) from None
    if any(other != shapes[0] for other in shapes):
        raise UserError(
            f"{folder}: the consolidated.*.pth files have tensors with different names or shapes."
        )

    names = list(shapes[0])
    is_tied = output in names and all(_are_equal(file[output], file[embedding]) for file in files)
    if is_tied:
        names.remove(output)

    # Derive the sizes of the whole model. Llama 3 splits the embedding by tokens, Llama 2 by width.
    is_split_by_tokens = width == params.dim
    vocab_size = num_rows * len(files) if is_split_by_tokens else num_rows
    arch = formats.architecture_from_meta(params, vocab_size, ffn_dim * len(files), is_tied)

    # Shards of these matrices contain columns. Those of all other matrices contain rows.
    split_by_columns: tuple[str, ...] = ("attention.wo.weight", "feed_forward.w2.weight")
    if not is_split_by_tokens:
        split_by_columns += (embedding,)

    def join(name: str, device: str = "cpu") -> Tensor:
        """Read a weight by concatenating its shards, one from each file."""
        parts = [file[name].to(device) for file in files]
        if parts[0].ndim != 2:
            return parts[0]  # norms are not split
        is_split_by_columns = name.endswith(split_by_columns)
        return torch.cat(parts, dim=1 if is_split_by_columns else 0)

    def read(name: str) -> Tensor:
        return formats.from_meta_rotary(name, join(name), arch.head_dim)

    whole_tensors = {name: join(name, "meta") for name in names}
    dtypes = check_tensors(folder, arch, whole_tensors, "params.json")
    return Weights(arch, dtypes, read)


def _load_pth(path: Path) -> dict[str, Tensor]:
    """Memory-map a .pth file and return its tensors by name.

    Raises:
        UserError: If the file is damaged or contains anything but contiguous tensors.
    """
    try:
        tensors = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
        tensors.pop("rope.freqs", None)  # follows from params.json
        for name, tensor in tensors.items():
            # A strided view could claim to be larger than the file, and fill memory when copied.
            if not isinstance(name, str) or not tensor.is_contiguous():
                raise ValueError("it is not a table of contiguous tensors")
    except Exception as error:  # damaged bytes raise any kind of exception
        problem = shorten(describe_error(error))
        raise UserError(f"{path} is damaged, or contains more than tensors: {problem}") from None
    return tensors


# Averages and imports


def average_weights(
    paths: Sequence[Path], sources: Sequence[Weights], factors: Sequence[float]
) -> Weights:
    """Return the weighted average of several checkpoints.

    The `read` function of the result computes the average of a parameter in float64 and returns it
    in float32.

    Args:
        paths: Path of each checkpoint, for error messages.
        sources: Weights of each checkpoint.
        factors: Weighting factor of each checkpoint. They need not add up to 1, because they are
            divided by their sum.

    Raises:
        UserError: If the checkpoints contain different models.
    """
    first = sources[0]
    shapes = parameter_shapes(first.arch)
    for path, source in zip(paths, sources, strict=True):
        differences = formats.compare_shapes(shapes, parameter_shapes(source.arch))
        if differences:
            listed = join_lines(differences)
            raise UserError(f"{path} contains a different model from {paths[0]}:\n  {listed}")
    total_factor = sum(factors)

    def read_mean(name: str) -> Tensor:
        total = torch.zeros(shapes[name], dtype=torch.float64)
        for source, factor in zip(sources, factors, strict=True):
            total.add_(source.read(name), alpha=factor / total_factor)
        return total.float()

    dtypes = dict.fromkeys(first.dtypes, torch.float32)
    return Weights(first.arch, dtypes, read=read_mean)


def import_weights(
    out: str | Path,
    source: Weights,
    origin: str,
    *,
    step: int = 0,
    job: JobConfig | None = None,
    tokenizer: Tokenizer | None = None,
    tokenizer_fingerprint: str | None = None,
) -> Path:
    """Write weights as a titanlite checkpoint, without optimizer state and data position.

    A run can start from the checkpoint with `checkpoint.initial_load_path`, but cannot resume from
    it.

    Args:
        out: Checkpoint folder in which to create the step folder.
        source: The weights and their architecture.
        origin: Where the weights come from, for example the path of a model. It is recorded in the
            manifest.
        step: Step of the checkpoint.
        job: Job that describes the model. Defaults to a job with the architecture of `source`.
        tokenizer: Tokenizer of the model. Its files are copied into the checkpoint.
        tokenizer_fingerprint: Tokenizer fingerprint to record if `tokenizer` is None. No tokenizer
            files are copied in this case.

    Returns:
        The step folder.

    Raises:
        UserError: If the step folder exists or cannot be written, or if a weight contains NaN or
            infinity.
    """
    out = Path(out)
    target = out / step_folder_name(step)
    if target.exists():
        raise UserError(f"{target} exists already. Choose another folder, or remove it.")

    if job is None:
        job = describing_job(source)
    files: dict[str, Path] = {}
    if tokenizer is not None:
        tokenizer_fingerprint = tokenizer.fingerprint
        files = _tokenizer_files(tokenizer)
        if files:
            main_file = next(iter(files))
            job = set_tokenizer_path(job, main_file)

    info = manifest_info(
        source.arch,
        {"data": {"tokenizer": tokenizer_fingerprint}},
        job=job.model_dump(mode="json"),
        weights_only=True,
        origin=origin,
    )
    writer = CheckpointWriter(out, step, secrets.token_hex(8), info)
    try:
        for name, file in files.items():
            writer.add_file(name, file.read_bytes())
        _write_weights(writer, source)
    except (CheckpointException, OSError) as error:
        shutil.rmtree(writer.tmp_folder, ignore_errors=True)
        raise UserError(f"cannot import {origin} to {out}: {describe_error(error)}") from None
    return target


def _write_weights(writer: CheckpointWriter, source: Weights) -> None:
    """Write weights to a checkpoint, one tensor at a time to limit memory."""
    # DCP keeps all tensors of a file in memory until the file is written, so write one file per
    # tensor.
    writer.single_file_per_rank = False
    tensors = {
        f"model.{name}": torch.empty(shape, dtype=source.dtypes[name], device="meta")
        for name, shape in parameter_shapes(source.arch).items()
    }
    dcp_save(tensors, storage_writer=writer, planner=_ReadingPlanner(source), no_dist=True)


def describing_job(source: Weights, plugins: Sequence[str] = ()) -> JobConfig:
    """Create the job configuration that is stored with imported weights.

    It describes the model, so that other commands can build it from the checkpoint.

    Args:
        source: The weights and their architecture.
        plugins: Plugins that the architecture needs.
    """
    is_full_precision = set(source.dtypes.values()) == {torch.float32}
    training = {
        "seq_len": min(source.arch.max_seq_len, LONGEST_DEFAULT_SEQUENCE),
        "mixed_precision_param": "float32" if is_full_precision else "bfloat16",
    }
    tables = {"job": {"plugins": [*plugins]}, "training": training}
    return JobConfig.model_validate(model_tables(source.arch) | tables)


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, Path]:
    """List the tokenizer files to copy into a checkpoint.

    Returns:
        Mapping from names in the checkpoint to file paths, with the main file first. It is empty if
        the tokenizer has no file, as is possible for plugins.
    """
    if not tokenizer.path.is_file():
        return {}
    files = {f"tokenizer{tokenizer.path.suffix}": tokenizer.path}
    config = tokenizer.path.with_name(_TOKENIZER_CONFIG)
    if config.is_file():
        files[_TOKENIZER_CONFIG] = config
    return files


class _ReadingPlanner(DefaultSavePlanner):
    """DCP save planner that reads each weight from `source` just before DCP writes it.

    DCP plans the save with meta tensors, so that only one weight is in memory at a time.

    Args:
        source: The weights to read.
    """

    def __init__(self, source: Weights) -> None:
        super().__init__(flatten_state_dict=False)
        self._source = source

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn.removeprefix("model.")
        tensor = self._source.read(name).contiguous()
        if not is_finite(tensor):
            raise CheckpointError(f"{name} contains NaN or infinity")
        return tensor
