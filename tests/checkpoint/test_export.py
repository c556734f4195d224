"""Exported and imported models compute the same in transformers and titanlite."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from tiny_run import PROOF, Malicious, TinyRun, assert_equal, load_model_weights

from titanlite.checkpoint import huggingface
from titanlite.checkpoint.manifest import encode_manifest, read_manifest
from titanlite.cli import main
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.flavors import Architecture
from titanlite.model.llama import Llama

TIKTOKEN = Path(__file__).parents[2] / "assets" / "tokenizer" / "tokenizer.model"
PLAIN = Architecture(48, 3, 6, 2, 80, vocab_size=131, max_seq_len=256, rope_theta=10000.0)
SCALED = dataclasses.replace(
    PLAIN,
    n_kv_heads=3,
    norm_eps=1e-6,
    rope_theta=5e5,
    rope_scaling_factor=8.0,
    rope_original_max_seq_len=64,
)
TIED = dataclasses.replace(SCALED, tied_embeddings=True, n_kv_heads=6)
ONE_FILE = 10**9


def build(arch: Architecture) -> Llama:
    model = Llama(arch)
    model.init_weights(1)
    # If all norm weights were 1, the test would not notice swapped norms.
    with torch.no_grad():
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def write_hf(
    out: Path,
    model: Llama,
    dtype: str = "float32",
    shard_bytes: int = ONE_FILE,
) -> None:
    weights = huggingface.Weights(model.arch, {}, model.get_parameter)
    huggingface.export_hf(weights, out, dtype, shard_bytes=shard_bytes)


def assert_same_logits(model: Llama, other: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(model.arch.vocab_size, (2, 60), generator=generator)
    with torch.no_grad():
        expected = model(tokens)
        difference = other(tokens).logits - expected
    assert difference.abs().max() <= 1e-5 * expected.abs().max()  # fp32 sums in another order


def run_import(
    kind: str,
    source: Path,
    out: Path,
    code: int = 0,
) -> None:
    assert main(["import", f"--{kind}", str(source), "--out", str(out)]) == code


@pytest.mark.parametrize(
    ("arch", "dtype", "shard_bytes", "num_files"),
    [
        (PLAIN, torch.bfloat16, ONE_FILE, 1),
        (SCALED, torch.float32, 60_000, 5),
        (TIED, torch.float32, 60_000, 5),
    ],
    ids=["plain", "scaled", "tied"],
)
def test_exported_model_has_the_same_logits_in_transformers_and_imports_unchanged(
    tmp_path, arch, dtype, shard_bytes, num_files, capsys
):
    from transformers import LlamaForCausalLM

    model = build(arch)
    origin = tmp_path / 'q"x\\é'
    out = tmp_path / 'a"b'
    write_hf(origin, model, str(dtype).removeprefix("torch."), shard_bytes)

    assert len(list(origin.glob("*.safetensors"))) == num_files

    stored = {name: value.to(dtype) for name, value in model.state_dict().items()}
    model.load_state_dict(stored)  # rounded

    assert_same_logits(model, LlamaForCausalLM.from_pretrained(origin, dtype=torch.float32))

    run_import("hf", origin, out)

    imported = huggingface.checkpoint_weights(out / "step-00000000")
    assert_equal({name: imported.read(name) for name in stored}, stored)

    # The printed options are valid TOML, whatever the name of the folder.
    job = tomli.loads(capsys.readouterr().out.split("\n\n", 1)[1])
    assert Architecture(**job["model"]) == imported.arch == arch
    assert job["checkpoint"]["initial_load_path"] == str(out / "step-00000000")


@pytest.mark.usefixtures("one_rank")
def test_export_includes_the_tokenizer_and_never_overwrites_a_folder(tmp_path, capsys):
    from transformers import AutoTokenizer, GenerationConfig

    run = TinyRun()
    run.checkpoints(tmp_path / "checkpoint").save(2)
    out = tmp_path / "hf"
    command = f"export --checkpoint {tmp_path}/checkpoint --out {out} --json".split()
    with_tokenizer = [*command, "--tokenizer", str(TIKTOKEN)]

    assert main(command) == 2
    assert "--tokenizer FILE" in capsys.readouterr().err
    assert main(with_tokenizer) == 0

    written = sum(file.stat().st_size for file in out.iterdir())
    assert json.loads(capsys.readouterr().out)["bytes"] == written
    assert main(with_tokenizer) == 2
    assert "exists already" in capsys.readouterr().err
    assert not list(tmp_path.glob(".tmp-*"))

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.bos_token == "<|begin_of_text|>"
    eos_token_id = GenerationConfig.from_pretrained(out).eos_token_id
    assert eos_token_id == tokenizer.eos_token_id == 3841


def interleave(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Order the rotary channels of a query or key matrix as Meta does."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(weight.shape)


def write_meta(folder: Path, model: Llama, parts: int) -> None:
    """Write a model in Meta's format, cut into tensor-parallel shards."""
    arch = model.arch
    folder.mkdir()
    shards = [{"rope.freqs": torch.ones(4)} for _ in range(parts)]
    for name, value in model.state_dict().items():
        if name.endswith(("wq.weight", "wk.weight")):
            value = interleave(value, arch.head_dim)
        dim = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
        pieces = value.chunk(parts, dim) if value.ndim == 2 else [value] * parts
        for shard, piece in zip(shards, pieces, strict=True):
            shard[name] = piece.clone()
    for index, shard in enumerate(shards):
        if arch.tied_embeddings:
            shard["output.weight"] = shard["tok_embeddings.weight"].clone()
        torch.save(shard, folder / f"consolidated.{index:02d}.pth")
    same_names = "dim n_layers n_heads n_kv_heads norm_eps rope_theta".split()
    params = {name: getattr(arch, name) for name in same_names}
    params |= {"use_scaled_rope": arch.rope_scaling_factor != 1, "vocab_size": -1}
    params |= {"multiple_of": 256}
    (folder / "params.json").write_text(json.dumps(params))


@pytest.mark.parametrize(
    ("parts", "tied"),
    [(1, True), (2, True), (2, False)],
)
def test_import_of_meta_files_is_exact(tmp_path, parts, tied):
    arch = dataclasses.replace(
        PLAIN,
        vocab_size=132,
        max_seq_len=131072,
        rope_scaling_factor=8.0,
        tied_embeddings=tied,
    )
    model = build(arch)
    write_meta(tmp_path / "meta", model, parts)

    run_import("meta", tmp_path / "meta", tmp_path / "out")

    imported = Llama(model.arch)
    info = load_model_weights(tmp_path / "out", imported)

    assert Architecture(**info["architecture"]) == arch
    assert_equal(dict(imported.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("norm.weight", None, "norm.weight: missing"),
        ("norm.weight", torch.ones(48, dtype=torch.int32), "norm.weight: torch.int32"),
        ("layers.0.attention.wo.weight", torch.ones(48, 47), "layers.0.attention.wo.weight: shape"),
        ("layers.0.bias", torch.ones(1), "layers.0.bias: unexpected"),
        ("tok_embeddings.weight", None, "tok_embeddings.weight"),
        ("planted", Malicious(), "more than tensors"),
    ],
)
def test_import_rejects_invalid_meta_files(tmp_path, name, value, message, capsys):
    write_meta(tmp_path / "meta", build(PLAIN), 1)
    path = tmp_path / "meta" / "consolidated.00.pth"
    content = torch.load(path) | {name: value}
    if value is None:
        del content[name]
    torch.save(content, path)

    run_import("meta", tmp_path / "meta", tmp_path / "out", code=2)

    error = capsys.readouterr().err
    assert message in error
    # The error of torch suggests an option that would run the code in the file.
    assert "weights_only" not in error
    assert not PROOF.exists()


def test_run_starts_from_hugging_face_or_imported_weights_but_resumes_from_neither(
    tmp_path, one_rank
):
    run = TinyRun()
    model = build(run.model.arch)
    write_hf(tmp_path / "hf", model, "bfloat16")
    huggingface.import_weights(tmp_path / "ckpt", huggingface.hf_weights(tmp_path / "hf"), "test")

    with pytest.raises(CheckpointError, match="initial_load_path"):
        run.checkpoints(tmp_path / "ckpt").load()

    huggingface.load_hf_weights(tmp_path / "hf", run.model)
    # Rounded by the export.
    model.bfloat16().float()

    assert_equal(run.copy_weights(), dict(model.state_dict()))

    other = Llama(dataclasses.replace(run.model.arch, rope_theta=1.0))
    with pytest.raises(UserError, match=r"rope_theta: 10000\.0 there, 1\.0 in this job"):
        huggingface.load_hf_weights(tmp_path / "hf", other)


def test_import_reports_the_folder_file_or_tensor_that_cannot_be_used(tmp_path, capsys):
    hf = tmp_path / "hf"
    out = tmp_path / "out"

    def rejected(source: Path, out: Path) -> str:
        run_import("hf", source, out, code=2)
        return capsys.readouterr().err

    model = build(PLAIN)
    write_hf(hf, model, shard_bytes=20_000)
    for unusable in (Path("/proc"), hf / "config.json" / "out"):
        assert str(unusable) in rejected(hf, unusable)

    shard = sorted(hf.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])

    assert shard.name in rejected(hf, out)

    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")

    assert "git lfs pull" in rejected(hf, out)

    (hf / "model.safetensors.index.json").unlink()

    assert "pytorch_model.bin" in rejected(hf, out)

    model.get_parameter("layers.1.feed_forward.w2.weight").data[3, 5] = float("nan")
    write_hf(tmp_path / "nan", model)

    assert "layers.1.feed_forward.w2.weight" in rejected(tmp_path / "nan", out)
    assert not out.exists() or not os.listdir(out)


def test_import_writes_only_to_an_empty_folder(tmp_path):
    write_hf(tmp_path / "hf", build(PLAIN))

    run_import("hf", tmp_path / "hf", tmp_path, code=2)

    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize(
    ("field", "message"),
    [("from_the_future", "from_the_future"), ("vocab_size", "embeddings.weight: shape")],
)
def test_an_architecture_that_does_not_fit_is_rejected(tmp_path, field, message):
    write_hf(tmp_path / "hf", build(PLAIN))
    run_import("hf", tmp_path / "hf", tmp_path / "out")
    step_folder = tmp_path / "out/step-00000000"
    manifest = read_manifest(step_folder)
    manifest["info"]["architecture"][field] = 1
    (step_folder / "manifest.json").write_bytes(encode_manifest(manifest))

    with pytest.raises(CheckpointError, match=message):
        huggingface.checkpoint_weights(step_folder).read("tok_embeddings.weight")


@pytest.mark.slow
def test_export_and_import_memory_is_a_small_multiple_of_the_largest_tensor(tmp_path):
    script = """
import resource, sys
from pathlib import Path
from titanlite.checkpoint.huggingface import *
arch = Architecture(512, 16, 8, 8, 2048, vocab_size=4096)  # 285 MB in fp32, largest tensor 8 MB
shapes, out = parameter_shapes(arch), Path(sys.argv[1])
zeros = Weights(arch, dict.fromkeys(shapes, torch.float32), lambda name: torch.zeros(shapes[name]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step = import_weights(out / "ckpt", zeros, "test")
export_hf(checkpoint_weights(step), out / "hf", "float32", shard_bytes=20_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    output = subprocess.check_output([sys.executable, "-c", script, str(tmp_path)])

    assert float(output) < 100 * 1024  # KB
    assert sum(file.stat().st_size for file in (tmp_path / "hf").iterdir()) > 280e6
