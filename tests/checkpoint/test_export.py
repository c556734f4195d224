"""Portable: transformers and titanlite compute the same from the same files, in both directions."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
import torch
from tiny_run import PROOF, Malicious, TinyRun, assert_equal, load_model_weights

from titanlite.checkpoint import huggingface
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
SHAPES = {
    "plain": PLAIN,
    "scaled": SCALED,
    "tied": dataclasses.replace(SCALED, tied_embeddings=True, n_kv_heads=6),
}


def build(arch: Architecture, seed: int = 1) -> Llama:
    model = Llama(arch)
    model.init_weights(seed)
    with torch.no_grad():  # norms that are all ones would hide a mix-up of theirs
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def write_hf(out: Path, model: Llama, dtype: str = "float32", shard_bytes: int = 10**9) -> None:
    huggingface.export_hf(
        huggingface.Weights(model.arch, {}, model.get_parameter),
        out,
        dtype,
        shard_bytes=shard_bytes,
    )


def assert_same_logits(ours: Llama, theirs) -> None:
    tokens = torch.randint(
        ours.arch.vocab_size, (2, 60), generator=torch.Generator().manual_seed(3)
    )
    with torch.no_grad():
        expected, found = ours(tokens), theirs(tokens).logits
    assert (
        found - expected
    ).abs().max() <= 1e-5 * expected.abs().max()  # fp32 sums in another order


@pytest.mark.parametrize(
    ("shape", "dtype", "files"),
    [("plain", "bfloat16", 1), ("scaled", "float32", 5), ("tied", "float32", 5)],
)
def test_exported_model_has_the_same_logits_in_transformers_and_imports_unchanged(
    tmp_path, shape, dtype, files, capsys
):
    from transformers import LlamaForCausalLM

    model, origin, out = build(SHAPES[shape]), tmp_path / 'q"x\\é', tmp_path / 'a"b'
    write_hf(origin, model, dtype, shard_bytes=10**9 if files == 1 else 60_000)
    assert len(list(origin.glob("*.safetensors"))) == files
    stored = {name: value.to(getattr(torch, dtype)) for name, value in model.state_dict().items()}
    model.load_state_dict(stored)  # rounded
    assert_same_logits(model, LlamaForCausalLM.from_pretrained(origin, dtype=torch.float32))
    assert main(["import", "--hf", str(origin), "--out", str(out)]) == 0
    found = huggingface.checkpoint_weights(out / "step-00000000")
    assert_equal({name: found.read(name) for name in stored}, stored)
    tables = tomli.loads(
        capsys.readouterr().out.split("\n\n", 1)[1]
    )  # what a job needs, whatever the folder's name
    assert Architecture(**tables["model"]) == found.arch == SHAPES[shape]
    assert tables["checkpoint"]["initial_load_path"] == str(out / "step-00000000")


@pytest.mark.usefixtures("one_rank")
def test_export_of_a_trained_checkpoint_includes_its_tokenizer(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = TinyRun(model={"tied_embeddings": True})
    run.train(2)
    run.checkpoints(tmp_path / "checkpoint").save(2, run.train_state())
    command = [
        "export",
        "--checkpoint",
        str(tmp_path / "checkpoint"),
        "--out",
        str(tmp_path / "hf"),
        "--json",
    ]
    assert main(command) == 2
    assert "--tokenizer FILE" in capsys.readouterr().err
    assert main([*command, "--dtype", "float32", "--tokenizer", str(TIKTOKEN)]) == 0
    written = sum(file.stat().st_size for file in (tmp_path / "hf").iterdir())
    assert json.loads(capsys.readouterr().out)["bytes"] == written
    assert main([*command, "--tokenizer", str(TIKTOKEN)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert not list(tmp_path.glob(".tmp-*"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert_same_logits(run.model, theirs)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.bos_token == "<|begin_of_text|>"
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id == 3841


def meta_files(folder: Path, model: Llama, parts: int) -> None:
    """Write a model in Meta's format: tensor parallel shards with interleaved rotary channels."""
    arch = model.arch
    folder.mkdir()
    shards: list[dict[str, torch.Tensor]] = [{"rope.freqs": torch.ones(4)} for _ in range(parts)]
    for name, value in model.state_dict().items():
        if name.endswith(("wq.weight", "wk.weight")):
            value = (
                value.unflatten(0, (-1, 2, arch.head_dim // 2)).transpose(1, 2).reshape(value.shape)
            )
        dim = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
        for shard, part in zip(
            shards, value.chunk(parts, dim) if value.ndim == 2 else [value] * parts, strict=True
        ):
            shard[name] = part.clone()
    for index, shard in enumerate(shards):
        if arch.tied_embeddings:
            shard["output.weight"] = shard["tok_embeddings.weight"].clone()
        torch.save(shard, folder / f"consolidated.{index:02d}.pth")
    params = {
        "dim": arch.dim,
        "n_layers": arch.n_layers,
        "n_heads": arch.n_heads,
        "n_kv_heads": arch.n_kv_heads,
    }
    extra = {
        "norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_theta,
        "use_scaled_rope": arch.rope_scaling_factor != 1,
    }
    (folder / "params.json").write_text(
        json.dumps(params | extra | {"vocab_size": -1, "multiple_of": 256})
    )


@pytest.mark.parametrize(("parts", "tied"), [(1, True), (2, True), (2, False)])
def test_import_of_meta_files_is_exact(tmp_path, parts, tied):
    sizes = {"vocab_size": 132, "max_seq_len": 131072, "rope_scaling_factor": 8.0}
    model = build(dataclasses.replace(PLAIN, tied_embeddings=tied, **sizes))
    meta_files(tmp_path / "meta", model, parts)
    assert main(["import", "--meta", str(tmp_path / "meta"), "--out", str(tmp_path / "ckpt")]) == 0
    imported = Llama(model.arch)
    assert (
        Architecture(**load_model_weights(tmp_path / "ckpt", imported)["architecture"])
        == model.arch
    )
    assert_equal(dict(imported.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("norm.weight", None, "norm.weight: missing"),
        ("norm.weight", torch.ones(48, dtype=torch.int32), "norm.weight: torch.int32"),
        ("layers.0.attention.wo.weight", torch.ones(48, 47), "layers.0.attention.wo.weight: shape"),
        ("layers.0.bias", torch.ones(1), "layers.0.bias: not part"),
        ("tok_embeddings.weight", None, "tok_embeddings.weight"),
        ("planted", Malicious(), "more than tensors"),
    ],
)
def test_import_rejects_invalid_meta_files(tmp_path, name, value, said, capsys):
    meta_files(tmp_path / "meta", build(PLAIN), 1)
    path = tmp_path / "meta" / "consolidated.00.pth"
    found = torch.load(path) | {name: value}
    torch.save({key: tensor for key, tensor in found.items() if tensor is not None}, path)
    assert main(["import", "--meta", str(tmp_path / "meta"), "--out", str(tmp_path / "out")]) == 2
    answer = capsys.readouterr().err
    assert said in answer
    assert "weights_only" not in answer  # torch's advice how to run the code in it
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
    huggingface.load_hf_weights(tmp_path / "hf", run.model)  # each rank its slices
    assert_equal(
        run.copy_weights(),
        {name: value.bfloat16().float() for name, value in model.state_dict().items()},
    )
    other = Llama(dataclasses.replace(run.model.arch, rope_theta=1.0))
    with pytest.raises(
        UserError, match=f"rope_theta: {run.model.arch.rope_theta} there, 1.0 in this job"
    ):
        huggingface.load_hf_weights(tmp_path / "hf", other)


def test_import_names_folders_that_cannot_be_used(tmp_path, capsys):
    def answer(model: Path, out: Path) -> str:
        assert main(["import", "--hf", str(model), "--out", str(out)]) == 2
        return capsys.readouterr().err

    model = build(PLAIN)
    write_hf(tmp_path / "hf", model, shard_bytes=20_000)
    for out in (Path("/proc"), tmp_path / "hf" / "config.json" / "out"):
        assert str(out) in answer(tmp_path / "hf", out)
    shard = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert shard.name in answer(tmp_path / "hf", tmp_path / "out")
    model.get_parameter("layers.1.feed_forward.w2.weight").data[3, 5] = float("nan")
    write_hf(tmp_path / "nan", model)
    assert "layers.1.feed_forward.w2.weight" in answer(tmp_path / "nan", tmp_path / "out")
    assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")


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
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 100 * 1024  # KB
    assert sum(file.stat().st_size for file in (tmp_path / "hf").iterdir()) > 280e6
