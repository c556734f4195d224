"""A checkpoint of torchtitan's Llama computes the same here, whatever wrote it: one rank or two, weights or all."""

import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from tiny_run import load_model_weights
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titanlite.checkpoint.huggingface import CheckpointTensors
from titanlite.cli import main
from titanlite.config.errors import UserError
from titanlite.config.flavors import Architecture
from titanlite.model.formats import parameter_shapes
from titanlite.model.llama import Llama
from titanlite.torchtitan.weights import Said, TorchtitanReader

ARCH = Architecture(32, 2, 4, 2, 48, vocab_size=64, rope_theta=10000.0, rope_scaling_factor=8.0)
SAID = ["--n-heads", "4", "--rope-theta", "10000"]
KNOWN = Said(n_heads=4, rope_theta=10000.0)
TOLERANCE = 1e-5  # of logits of about 4: the channels of a head are added in another order


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) / (math.sqrt(shape[-1]) if len(shape) > 1 else 1)
        for name, shape in parameter_shapes(ARCH).items()
    }


def save(folder: str, kind: str, dtype: torch.dtype = torch.float32) -> None:
    """What torchtitan's CheckpointManager gives to DCP, on each rank of a group, or on one process without a group."""
    state: dict[str, Any] = {name: tensor.to(dtype) for name, tensor in weights().items()}
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
    beside = {
        "optimizer": {"state.output.weight.exp_avg": torch.zeros(3), "param_groups.output.weight.lr": 0.1},
        "train_state": {"step": torch.tensor(5, dtype=torch.int32)},
        "lr_scheduler": {"last_epoch": 5},
        "dataloader": {"dp_rank_0": pickle.dumps({"sample_idx": 3})},
    }
    if kind == "0.1":
        state = {"model": state | {"freqs_cis": torch.polar(torch.ones(16, 4), torch.ones(16, 4))}} | beside
    elif kind == "0.2":
        state |= beside
    dcp_save(state, checkpoint_id=folder)


def rotated(x: Tensor, factor: float) -> Tensor:
    """Rotary embedding of neighbouring channels, (B, T, H, D), as torchtitan computes it."""
    frequencies = 10000.0 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    turns = 8192 * frequencies / (2 * math.pi)  # within the original context
    share = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    frequencies = frequencies * share + frequencies / factor * (1 - share)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]).flatten(-2)


def logits(tokens: Tensor, factor: float, heads: int = 4) -> Tensor:
    """The Llama of torchtitan, in plain operations."""
    w = weights()

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), w[f"{name}.weight"], 1e-5)

    x = w["tok_embeddings.weight"][tokens]
    for layer in range(ARCH.n_layers):
        at = f"layers.{layer}."
        h = norm(x, f"{at}attention_norm")
        q, k, v = (
            (h @ w[f"{at}attention.{name}.weight"].T).unflatten(-1, (-1, 32 // heads)) for name in ("wq", "wk", "wv")
        )
        q, k = rotated(q, factor), rotated(k, factor)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(1, 2).flatten(-2) @ w[f"{at}attention.wo.weight"].T
        h, ffn = norm(x, f"{at}ffn_norm"), f"{at}feed_forward."
        x = x + (F.silu(h @ w[f"{ffn}w1.weight"].T) * (h @ w[f"{ffn}w3.weight"].T)) @ w[f"{ffn}w2.weight"].T
    return norm(x, "norm") @ w["output.weight"].T


@torch.no_grad()
def imported_logits(folder: Path, tokens: Tensor) -> tuple[Tensor, Architecture]:
    model = Llama(CheckpointTensors(folder / "step-00000000").arch)
    load_model_weights(folder, model)
    return model(tokens), model.arch


def test_the_logits_are_torchtitans(tmp_path, capsys):
    tokens = torch.randint(0, 64, (2, 300), generator=torch.Generator().manual_seed(1))
    for kind, version, factor in (
        ("0.2", (), 8.0),
        ("0.1", (), 1.0),
        ("weights", ("0.2",), 8.0),
        ("weights", ("0.1",), 1.0),
    ):
        step, out = tmp_path / kind, tmp_path / f"{kind}{version}"
        if not step.exists():
            save(str(step), kind)
        told = ["--torchtitan-version", *version] if version else []
        assert main(["import", "--torchtitan", str(step), "--out", str(out), *SAID, *told]) == 0, capsys.readouterr()
        found, arch = imported_logits(out, tokens)
        assert arch.rope_scaling_factor == factor
        torch.testing.assert_close(found, logits(tokens, factor), rtol=0, atol=TOLERANCE)
    assert "[model]\ndim = 32\nn_layers = 2\nn_heads = 4\nn_kv_heads = 2\nffn_dim = 48\n" in capsys.readouterr().out
    assert not torch.allclose(logits(tokens, 8.0), logits(tokens, 1.0), atol=100 * TOLERANCE)


@pytest.mark.slow
def test_shards_of_two_ranks_are_put_together(tmp_path, capsys):
    run_ranks(2, save, str(tmp_path / "checkpoint" / "step-10"), "0.2")
    assert len(list((tmp_path / "checkpoint/step-10").glob("*.distcp"))) == 2
    for folder in (tmp_path / "checkpoint", tmp_path / "checkpoint/step-10"):
        assert torch.equal(TorchtitanReader(folder, KNOWN).read("output.weight"), weights()["output.weight"])
    assert main(["import", "--torchtitan", str(tmp_path), "--out", str(tmp_path / "out"), *SAID]) == 0
    tokens = torch.randint(0, 64, (2, 300), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        imported_logits(tmp_path / "out", tokens)[0], logits(tokens, 8.0), rtol=0, atol=TOLERANCE
    )


def test_weights_that_were_gathered_in_fp8_are_read_and_weights_keep_their_dtype(tmp_path):
    from torchao.float8.config import e4m3_dtype
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    wrapped = {
        name: WeightWithDynamicFloat8CastTensor(w.bfloat16(), LinearMMConfig(), e4m3_dtype)
        for name, w in weights().items()
    }
    dcp_save(wrapped, checkpoint_id=str(tmp_path))
    found = TorchtitanReader(tmp_path, KNOWN, "0.2").read("layers.1.feed_forward.w2.weight")
    assert type(found) is Tensor
    assert torch.equal(found, weights()["layers.1.feed_forward.w2.weight"].bfloat16())


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("steps")
    for kind in ("0.1", "0.2", "weights"):
        save(str(folder / kind), kind)
    return {kind: folder / kind for kind in ("0.1", "0.2", "weights")}


WRONG = [  # the checkpoint, what is said, and words of the answer
    ("0.2", [], "Say them: --flavor 8B, or --n-heads N --rope-theta X"),
    ("0.2", ["--n-heads", "4"], "the base of the rotary frequencies"),
    ("weights", SAID, "--torchtitan-version 0.2 or 0.1"),
    ("0.2", ["--flavor", "8B"], "are 32, 2 and 48, not 4096, 32 and 14336"),
    ("0.2", ["--flavor", "7B"], "torchtitan's Llamas are debugmodel"),
    ("0.2", ["--n-heads", "3", "--rope-theta", "10000"], "3 heads do not fit"),
    ("0.2", ["--n-heads", "32", "--rope-theta", "10000"], "32 heads do not fit"),
    ("0.1", ["--n-heads", "2", "--rope-theta", "10000"], "2 heads do not fit"),
    ("0.2", [*SAID, "--torchtitan-version", "0.1"], "written as torchtitan 0.2 does"),
    ("0.1", [*SAID, "--torchtitan-version", "0.2"], "written as torchtitan 0.1 does"),
    ("0.2", ["--n-heads", "0", "--rope-theta", "10000"], "--n-heads"),
    ("0.2", ["--n-heads", "4", "--rope-theta", "nan"], "--rope-theta nan"),
    ("0.2", [*SAID, "--rope-scaling-factor", "0.5"], "--rope-scaling-factor"),
]


@pytest.mark.parametrize(("kind", "said", "words"), WRONG, ids=[f"{kind} {' '.join(said)}" for kind, said, _ in WRONG])
def test_what_is_missing_or_contradicts_is_answered(steps, kind, said, words, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["import", "--torchtitan", str(steps[kind]), "--out", str(out), *said]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_the_width_of_a_head_is_read_where_torchtitan_saved_it(steps):
    assert TorchtitanReader(steps["0.1"], Said(rope_theta=10000.0)).arch.n_heads == 4


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("run-by-the-index"),))


def broken(folder: Path, how: str) -> None:
    index, shard = folder / ".metadata", next(folder.glob("*.distcp"))
    match how:
        case "no .metadata":
            index.unlink()
        case "cut index":
            index.write_bytes(index.read_bytes()[:-9])
        case "hostile index":
            index.write_bytes(pickle.dumps(Hostile(), protocol=4))
        case "no weights":
            shard.unlink()
        case "cut weights":
            shard.write_bytes(shard.read_bytes()[:-4000])
        case "hostile weights":  # the last tensor's bytes, in the place of its archive
            shard.write_bytes(shard.read_bytes()[:-200] + bytes(200))
        case "a name that leaves the folder":
            index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"../_0.distcp"))
        case "a pipe":
            shard.unlink()
            os.mkfifo(shard)


DAMAGE = ("no .metadata", "cut index", "hostile index", "no weights", "cut weights", "hostile weights")


@pytest.mark.parametrize("how", [*DAMAGE, "a name that leaves the folder", "a pipe"])
def test_damage_is_answered_in_words_and_nothing_is_made(how, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save("theirs", "weights")
    broken(Path("theirs"), how)
    assert main(["import", "--torchtitan", "theirs", "--out", "out", *SAID, "--torchtitan-version", "0.2"]) == 2
    said = capsys.readouterr().err
    assert "theirs" in said
    assert "Traceback" not in said
    assert not Path("run-by-the-index").exists()
    assert not list(Path().glob("out/step-*"))


def test_other_folders_are_named(tmp_path, capsys):
    assert main(["import", "--torchtitan", str(tmp_path), "--out", str(tmp_path / "o"), "--flavor", "8B"]) == 2
    assert "Expected a checkpoint of torchtitan's" in capsys.readouterr().err
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5/model.safetensors").touch()
    assert main(["import", "--torchtitan", str(tmp_path), "--out", str(tmp_path / "o"), "--flavor", "8B"]) == 2
    assert "Import it with --hf" in capsys.readouterr().err
    save(str(tmp_path / "step-6"), "0.2")
    assert main(["import", "--torchtitan", str(tmp_path), "--out", str(tmp_path / "o"), *SAID]) == 0
    assert main(["import", "--torchtitan", str(tmp_path / "o"), "--out", str(tmp_path / "p"), *SAID]) == 2
    assert "is a checkpoint of titanlite's" in capsys.readouterr().err
    assert main(["import", "--hf", str(tmp_path), "--out", str(tmp_path / "p"), "--flavor", "8B"]) == 2
    assert "--flavor is for --torchtitan" in capsys.readouterr().err


def test_a_model_that_is_none_of_torchtitans_llamas_is_refused(tmp_path):
    dcp_save(weights() | {"layers.0.attention.wq.bias": torch.zeros(32)}, checkpoint_id=str(tmp_path / "bias"))
    with pytest.raises(UserError, match=r"attention\.wq\.bias: not part of this architecture"):
        TorchtitanReader(tmp_path / "bias", KNOWN, "0.2")
    dcp_save({"layers.99999.x": torch.zeros(1)} | weights(), checkpoint_id=str(tmp_path / "deep"))
    with pytest.raises(UserError, match="100000 layers"):
        TorchtitanReader(tmp_path / "deep", KNOWN, "0.2")
    dcp_save({"encoder.weight": torch.zeros(1)}, checkpoint_id=str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"there is no tok_embeddings\.weight"):
        TorchtitanReader(tmp_path / "other", KNOWN, "0.2")
