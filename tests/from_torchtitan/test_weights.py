"""Imported torchtitan checkpoints compute the same logits, and damaged ones are rejected."""

import math
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

from titanlite.checkpoint.huggingface import checkpoint_weights
from titanlite.cli import main
from titanlite.config.flavors import Architecture
from titanlite.config.schema import Model
from titanlite.model.formats import parameter_shapes
from titanlite.model.llama import Llama
from titanlite.torchtitan.weights import torchtitan_weights

SIZES: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
ARCH = Architecture(
    **SIZES, vocab_size=64, max_seq_len=8192, rope_theta=10000.0, rope_scaling_factor=8.0
)
GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, 64, (2, 300), generator=GENERATOR)
# Logits are about 4, and the channels of a head are added in another order.
TOLERANCE = 1e-5


def make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in parameter_shapes(ARCH).items():
        scale = math.sqrt(shape[-1]) if len(shape) > 1 else 1
        tensors[name] = torch.randn(shape, generator=generator) / scale
    return tensors


def save(folder: str, kind: str) -> None:
    """Save like CheckpointManager of torchtitan, on all ranks or on one process without a group."""
    state: dict[str, Any] = dict(make_weights())
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, weight in state.items():
            state[name] = distribute_tensor(weight, mesh, [Shard(0)])
    beside = {
        "optimizer": {
            "state.output.weight.exp_avg": torch.zeros(3),
            "param_groups.output.weight.lr": 0.1,
        },
        "train_state": {"step": torch.tensor(5, dtype=torch.int32)},
        "lr_scheduler": {"last_epoch": 5},
        "dataloader": {"dp_rank_0": pickle.dumps({"sample_idx": 3})},
    }
    if kind == "0.1":
        frequencies = torch.polar(torch.ones(16, 4), torch.ones(16, 4))
        state = {"model": state | {"freqs_cis": frequencies}} | beside
    elif kind == "0.2":
        state |= beside
    dcp_save(state, checkpoint_id=folder)


def rotate(x: Tensor, factor: float) -> Tensor:
    """Apply rotary embeddings to pairs of adjacent channels of (B, T, H, D), as in torchtitan."""
    head_dim = x.shape[-1]
    exponents = torch.arange(0, head_dim, 2) / head_dim
    frequencies = 10000.0**-exponents
    turns = 8192 * frequencies / (2 * math.pi)  # within the original context
    share = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    frequencies = frequencies * share + frequencies / factor * (1 - share)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    return torch.view_as_real(turned).flatten(-2)


def compute_logits(factor: float) -> Tensor:
    """Compute the logits of the torchtitan Llama with plain operations."""
    w = make_weights()

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), w[f"{name}.weight"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T

    x = w["tok_embeddings.weight"][TOKENS]
    for layer in range(ARCH.n_layers):
        at = f"layers.{layer}.attention"
        h = norm(x, f"{at}_norm")
        channels = [linear(h, f"{at}.w{name}") for name in "qkv"]
        q, k, v = [x.unflatten(-1, (-1, 8)) for x in channels]
        q = rotate(q, factor).transpose(1, 2)
        k = rotate(k, factor).transpose(1, 2)
        v = v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + linear(mixed.transpose(1, 2).flatten(-2), f"{at}.wo")
        h = norm(x, f"layers.{layer}.ffn_norm")
        at = f"layers.{layer}.feed_forward"
        gate = F.silu(linear(h, f"{at}.w1"))
        x = x + linear(gate * linear(h, f"{at}.w3"), f"{at}.w2")
    return linear(norm(x, "norm"), "output")


def model_options(factor: float = 8.0, **keys: int) -> str:
    """Return options of the saved model, whose vocabulary size follows from the checkpoint."""
    job = SIZES | {"rope_scaling_factor": factor} | keys
    return " ".join(f"--model.{key} {value}" for key, value in job.items())


def run_import(options: str, code: int = 0) -> None:
    assert main(f"import {options}".split()) == code


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    for kind in ("0.1", "0.2", "weights"):
        save(str(folder / kind), kind)
    return folder


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("0.2", 8.0),
        ("0.1", 1.0),
        ("weights", 8.0),
        ("weights", 1.0),
        pytest.param("two_ranks", 8.0, marks=pytest.mark.slow),
    ],
)
def test_imported_checkpoints_have_the_same_logits_as_in_torchtitan(kind, factor, steps, tmp_path):
    if kind == "two_ranks":
        run_ranks(2, save, str(steps / kind), "0.2")
        assert len(list((steps / kind).glob("*.distcp"))) == 2
    (tmp_path / "job.toml").write_text("[model]\nrope_theta = 10000.0")
    job = f"--job.config_file {tmp_path}/job.toml {model_options(factor)}"

    imported = tmp_path / "imported"
    run_import(f"--torchtitan {steps / kind} --out {imported} {job}")

    model = Llama(checkpoint_weights(imported / "step-00000000").arch)
    assert (model.arch.rope_scaling_factor, model.arch.vocab_size) == (factor, 64)

    load_model_weights(imported, model)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), compute_logits(factor), rtol=0, atol=TOLERANCE)

    assert not torch.allclose(compute_logits(8.0), compute_logits(1.0), atol=100 * TOLERANCE)


def test_weights_that_were_gathered_in_fp8_are_read_and_weights_keep_their_dtype(tmp_path):
    from torchao.float8.config import e4m3_dtype
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Wrapped

    config = LinearMMConfig()
    weights = {name: weight.bfloat16() for name, weight in make_weights().items()}
    wrapped = {name: Wrapped(weight, config, e4m3_dtype) for name, weight in weights.items()}
    dcp_save(wrapped, checkpoint_id=str(tmp_path))

    name = "layers.1.feed_forward.w2.weight"
    weight = torchtitan_weights(tmp_path, Model(**SIZES)).read(name)

    assert type(weight) is Tensor
    assert torch.equal(weight, weights[name])


def import_and_fail(
    capsys: pytest.CaptureFixture[str], folder: Path, options: str = model_options()
) -> str:
    """Check that an import fails, and return its error in one line."""
    out = folder.parent / "rejected"
    run_import(f"--torchtitan {folder} --out {out} {options}", code=2)
    assert not list(out.glob("step-*"))
    error = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in error
    return error


OTHER_FFN = "layers.1.feed_forward.w3.weight: shape (48, 32), expected (80, 32)"
OTHER_VOCABULARY = "tok_embeddings.weight: shape (64, 32), expected (65, 32)"
UNEXPECTED = "layers.1.attention.wk.weight: unexpected"


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        ("0.2", "", "--job.config_file"),
        ("0.2", "--flavor 8B", "--flavor"),
        ("0.2", model_options(n_kv_heads=4, ffn_dim=80), OTHER_FFN),
        ("0.2", model_options(n_layers=1), UNEXPECTED),
        ("0.2", model_options(vocab_size=65), OTHER_VOCABULARY),
        ("0.2", model_options(n_heads=32, n_kv_heads=16), "32 heads"),
        # The rotary frequencies in the checkpoint belong to heads of another width.
        ("0.1", model_options(1.0, n_heads=2, n_kv_heads=1), "n_heads"),
        ("0.1", model_options(8.0), "torchtitan 0.1"),
        ("0.2", model_options(1.0), "torchtitan 0.2"),
    ],
)
def test_options_that_contradict_the_checkpoint_are_rejected(kind, options, error, steps, capsys):
    assert error in import_and_fail(capsys, steps / kind, options)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("run-by-the-index"),))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (".metadata", lambda raw: pickle.dumps(Hostile(), protocol=4)),
        (".metadata", lambda raw: raw.replace(b"__0_0.distcp", b"../_0.distcp")),
        ("__0_0.distcp", lambda raw: raw[:-4000]),
        ("__0_0.distcp", lambda raw: raw[:-200] + bytes(200)),  # the archive of the last tensor
    ],
)
def test_a_damaged_checkpoint_is_rejected_without_running_its_code(
    name, change, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    save("theirs", "weights")
    file = Path("theirs") / name
    file.write_bytes(change(file.read_bytes()))

    assert "theirs" in import_and_fail(capsys, Path("theirs"))
    assert not Path("run-by-the-index").exists()


def test_folders_without_a_torchtitan_checkpoint_are_rejected(steps, tmp_path, capsys):
    assert ".metadata" in import_and_fail(capsys, tmp_path)

    run_import(f"--torchtitan {steps}/0.2 --out {tmp_path} {model_options()}")
    assert "titanlite checkpoint" in import_and_fail(capsys, tmp_path / "step-00000000")

    run_import(f"--hf {tmp_path} --out {tmp_path}/p --model.flavor 8b", code=2)
    assert "--torchtitan" in capsys.readouterr().err


BIAS = "layers.0.attention.wq.bias"


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (make_weights() | {BIAS: torch.zeros(32)}, BIAS),
        (make_weights() | {"norm.weight": torch.zeros(32).int()}, "norm.weight: torch.int32"),
        ({"encoder.weight": torch.zeros(1)}, "norm.weight: missing"),
    ],
    ids=["additional", "integer", "missing"],
)
def test_other_tensors_than_those_of_the_model_are_rejected(tensors, problem, tmp_path, capsys):
    dcp_save(tensors, checkpoint_id=str(tmp_path / "theirs"))
    assert problem in import_and_fail(capsys, tmp_path / "theirs")
