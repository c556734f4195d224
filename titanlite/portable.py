"""`titanlite export` and `titanlite import`: from and to the formats that others read, with the tokenizer.

Invariant: what is exported computes what was trained, and what is imported computes what its origin does; anything
else is refused. May import checkpoint, data and config.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from titanlite.config.errors import UserError
from titanlite.config.load import path_name, resolve_path, shown
from titanlite.model.flavors import Architecture


def make_folder(path: Path) -> Path:
    """Raises UserError: `path` is a file or under one, or may not be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be made: {error.strerror}. Choose another folder.") from None
    return path


def export(argv: Sequence[str]) -> None:
    """`titanlite export --checkpoint CKPT --out DIR`: a folder that transformers loads with nothing else.

    Raises:
        UserError: the folder exists, no tokenizer is known, or there is no good checkpoint (CheckpointError).
    """
    from titanlite.checkpoint.commit import folder_size
    from titanlite.checkpoint.export import CheckpointTensors, export_hf

    parser = argparse.ArgumentParser(prog="titanlite export", description="Write a checkpoint as a Hugging Face model.")
    parser.add_argument("--checkpoint", type=path_name, required=True, help="one step folder, or the folder of all")
    parser.add_argument("--out", type=path_name, required=True, help="the folder to create")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="of the weights"
    )
    parser.add_argument("--tokenizer", type=path_name, help="tokenizer file; by default that of the training job")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(argv)
    source = CheckpointTensors(options.checkpoint)
    path = source.path
    job = source.info["job"]
    tokenizer = options.tokenizer or (resolve_path(job["tokenizer"]["path"]) if job else None)
    if tokenizer is None:
        raise UserError(f"{path} does not say which tokenizer it was trained with. Name it: --tokenizer FILE.")
    length = source.arch.max_seq_len
    make_folder(options.out.parent)
    export_hf(source, options.out, options.dtype, lambda folder: write_tokenizer(tokenizer, folder, length))
    size = folder_size(options.out)
    report = {"checkpoint": str(path), "out": str(options.out), "dtype": options.dtype, "bytes": size}
    if options.json:
        print(json.dumps(report))
    else:
        print(f"Wrote {path} to {options.out} ({options.dtype}, {size / 1e9:.2f} GB). Load it with")
        print(f'  transformers.AutoModelForCausalLM.from_pretrained("{options.out}")')


def import_(argv: Sequence[str]) -> None:
    """`titanlite import --hf DIR | --meta DIR --out CKPT`: weights of others as a checkpoint to start from.

    Raises:
        UserError: there is no Llama that this model computes exactly.
    """
    from titanlite.checkpoint.export import import_weights
    from titanlite.checkpoint.huggingface import HuggingFaceReader
    from titanlite.checkpoint.meta import MetaReader
    from titanlite.model.huggingface import parameter_shapes

    parser = argparse.ArgumentParser(prog="titanlite import", description="Make a checkpoint from published weights.")
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument("--hf", type=path_name, help="Hugging Face folder: config.json and .safetensors files")
    origin.add_argument("--meta", type=path_name, help="Meta's folder: params.json and consolidated.*.pth files")
    parser.add_argument(
        "--out", type=path_name, required=True, help="folder of checkpoints; step-00000000 appears in it"
    )
    options = parser.parse_args(argv)
    if options.meta:
        meta = MetaReader(options.meta)
        arch, path = meta.arch, import_weights(make_folder(options.out), meta, str(options.meta))
    else:
        with HuggingFaceReader(options.hf) as reader:
            arch, path = reader.arch, import_weights(make_folder(options.out), reader, str(options.hf))
    print(f"Wrote {path}: {len(parameter_shapes(arch))} tensors. A job that starts from it needs\n")
    print(job_tables(arch, path, options.hf or options.meta))


def job_tables(arch: Architecture, path: Path, origin: Path) -> str:
    """The part of a job file that fits imported weights."""
    keys = {key: json.dumps(value) for key, value in dataclasses.asdict(arch).items()}  # as TOML writes them, too
    lines = ["[model]", *(f"{key} = {value}" for key, value in keys.items())]
    tokenizers = [name for name in ("tokenizer.json", "tokenizer.model") if (origin / name).is_file()]
    if tokenizers:
        lines += ["", "[tokenizer]", f"path = {shown(str(origin / tokenizers[0]))}"]
    return "\n".join([*lines, "", "[checkpoint]", f"initial_load_path = {shown(str(path))}"])


def write_tokenizer(path: Path, out: Path, max_seq_len: int) -> dict[str, int | None]:
    """Put a tokenizer into a Hugging Face folder; tiktoken's format is converted.

    Returns:
        bos_token_id and eos_token_id.
    """
    from titanlite.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    if path.suffix == ".json":
        shutil.copyfile(path, out / "tokenizer.json")
    else:
        tiktoken_to_json(path, out / "tokenizer.json")
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    names = {key.removesuffix("_id"): tokenizer.decode([token]) for key, token in ids.items() if token is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "model_max_length": max_seq_len}
    original = path.with_name("tokenizer_config.json")
    if path.suffix == ".json" and original.is_file():  # it may hold a chat template, and names that are no standard
        config = json.loads(original.read_text())
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return ids


def tiktoken_to_json(path: Path, out: Path) -> None:
    """Convert Llama 3's tokenizer.model into a tokenizer.json that gives the same ids, and puts bos before a text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    from titanlite.data.tokenizer import LLAMA3_PATTERN, TiktokenTokenizer, byte_level_symbols, llama3_special_tokens

    source = TiktokenTokenizer(path)
    specials = llama3_special_tokens()
    symbols = {byte: symbol for symbol, byte in byte_level_symbols().items()}
    tokens = [
        "".join(symbols[byte] for byte in source.token_bytes(token))
        for token in range(source.vocab_size - len(specials))
    ]
    known = set(tokens)
    # tiktoken joins any neighbours whose bytes together are a token; tokenizers joins listed pairs only: list them all.
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    result = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore[assignment]
    result.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    result.add_special_tokens([AddedToken(name, special=True) for name in specials])
    bos = specials[0]
    begin = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, len(tokens))])
    result.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])  # type: ignore[assignment]
    result.save(str(out), pretty=False)
