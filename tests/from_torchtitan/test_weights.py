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

from titanlite.checkpoint.published import CheckpointTensors
from titanlite.cli import main
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
    for kind in ("0.1", "0.2", "weights"):
        save(str(tmp_path / kind), kind)
    for kind, version in (("0.2", "0.2"), ("0.1", "0.1"), ("weights", "0.2"), ("weights", "0.1")):
        out, factor = tmp_path / f"{kind} {version}", 8.0 if version == "0.2" else 1.0
        told = ["--torchtitan-version", version] if kind == "weights" else []
        assert main(["import", "--torchtitan", str(tmp_path / kind), "--out", str(out), *SAID, *told]) == 0
        found, arch = imported_logits(out, tokens)
        assert arch.rope_scaling_factor == factor
        torch.testing.assert_close(found, logits(tokens, factor), rtol=0, atol=TOLERANCE)
    assert "[model]\ndim = 32\nn_layers = 2\nn_heads = 4\nn_kv_heads = 2\nffn_dim = 48\n" in capsys.readouterr().out
    assert not torch.allclose(logits(tokens, 8.0), logits(tokens, 1.0), atol=100 * TOLERANCE)


@pytest.mark.slow
def test_shards_of_two_ranks_are_put_together(tmp_path, capsys):
    run_ranks(2, save, str(tmp_path / "checkpoint" / "step-10"), "0.2")
    assert len(list((tmp_path / "checkpoint/step-10").glob("*.distcp"))) == 2
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
    ("0.2", [], "Say --flavor 8B, or --n-heads N --rope-theta X"),
    ("0.2", ["--n-heads", "4"], "the base of the rotary frequencies"),
    ("weights", SAID, "--torchtitan-version, of which 0.2"),
    ("0.2", ["--flavor", "8B"], "are (32, 2, 48), which are not those of torchtitan's 8B"),
    ("0.2", ["--flavor", "7B"], "torchtitan's Llamas are debugmodel"),
    ("0.2", ["--n-heads", "3", "--rope-theta", "10000"], "3 heads do not fit"),
    ("0.1", ["--n-heads", "2", "--rope-theta", "10000"], "2 heads do not fit"),
    ("0.2", [*SAID, "--torchtitan-version", "0.1"], "written as torchtitan 0.2 does"),
    ("0.2", ["--n-heads", "0", "--rope-theta", "10000"], "n_heads = 0"),
    ("0.2", ["--n-heads", "4", "--rope-theta", "nan"], "rope_theta = nan"),
    ("0.2", [*SAID, "--rope-scaling-factor", "0.5"], "rope_scaling_factor"),
]


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *said: str) -> str:
    """What is answered in place of an import."""
    out = folder.parent / "refused"
    assert main(["import", "--torchtitan", str(folder), "--out", str(out), *said]) == 2
    assert not list(out.glob("step-*"))
    answer = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in answer
    return answer


def test_what_is_missing_or_contradicts_is_answered(tmp_path, capsys):
    for kind in ("0.1", "0.2", "weights"):
        save(str(tmp_path / kind), kind)
    for kind, said, words in WRONG:
        assert words in refused(capsys, tmp_path / kind, *said)
    # The width of a head is read where torchtitan saved it.
    assert TorchtitanReader(tmp_path / "0.1", Said(rope_theta=10000.0)).arch.n_heads == 4


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
    assert "theirs" in refused(capsys, Path("theirs"), *SAID, "--torchtitan-version", "0.2")
    assert not Path("run-by-the-index").exists()


def test_other_folders_and_models_are_named(tmp_path, capsys):
    assert "no checkpoint of torchtitan's" in refused(capsys, tmp_path, "--flavor", "8B")
    save(str(tmp_path / "step-6"), "0.2")
    assert main(["import", "--torchtitan", str(tmp_path), "--out", str(tmp_path / "o"), *SAID]) == 0
    assert "a checkpoint of titanlite's" in refused(capsys, tmp_path / "o", *SAID)
    assert main(["import", "--hf", str(tmp_path), "--out", str(tmp_path / "p"), "--flavor", "8B"]) == 2
    assert "--flavor is for --torchtitan" in capsys.readouterr().err
    for name, state, words in (
        ("bias", weights() | {"layers.0.attention.wq.bias": torch.zeros(32)}, "attention.wq.bias: not part of this"),
        ("deep", weights() | {"layers.99999.x": torch.zeros(1)}, "100000 layers"),
        ("other", {"encoder.weight": torch.zeros(1)}, "there is no tok_embeddings.weight"),
    ):
        dcp_save(state, checkpoint_id=str(tmp_path / name))
        assert words in refused(capsys, tmp_path / name, *SAID, "--torchtitan-version", "0.2")
