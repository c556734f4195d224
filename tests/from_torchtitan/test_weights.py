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

SIZES: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
}
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


def model_options(factor: float = 8.0, **keys: int) -> list[str]:
    """Return options of the saved model, whose vocabulary size follows from the checkpoint."""
    job = SIZES | {"rope_scaling_factor": factor} | keys
    options = []
    for key, value in job.items():
        options += [f"--model.{key}", str(value)]
    return options


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
        pytest.param("two ranks", 8.0, marks=pytest.mark.slow),
    ],
)
def test_imported_checkpoints_have_the_same_logits_as_in_torchtitan(kind, factor, steps, tmp_path):
    if kind == "two ranks":
        run_ranks(2, save, str(steps / kind), "0.2")
        assert len(list((steps / kind).glob("*.distcp"))) == 2
    (tmp_path / "job.toml").write_text("[model]\nrope_theta = 10000.0")
    job = ["--job.config_file", str(tmp_path / "job.toml"), *model_options(factor)]
    folders = ["--torchtitan", str(steps / kind), "--out", str(tmp_path)]

    assert main(["import", *folders, *job]) == 0

    model = Llama(checkpoint_weights(tmp_path / "step-00000000").arch)
    assert (model.arch.rope_scaling_factor, model.arch.vocab_size) == (factor, 64)

    load_model_weights(tmp_path, model)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), compute_logits(factor), rtol=0, atol=TOLERANCE)

    assert not torch.allclose(compute_logits(8.0), compute_logits(1.0), atol=100 * TOLERANCE)


def test_weights_that_were_gathered_in_fp8_are_read_and_weights_keep_their_dtype(tmp_path):
    from torchao.float8.config import e4m3_dtype
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Wrapped

    config = LinearMMConfig()
    wrapped = {
        name: Wrapped(w.bfloat16(), config, e4m3_dtype) for name, w in make_weights().items()
    }
    dcp_save(wrapped, checkpoint_id=str(tmp_path))

    name = "layers.1.feed_forward.w2.weight"
    weight = torchtitan_weights(tmp_path, Model(**SIZES)).read(name)

    assert type(weight) is Tensor
    assert torch.equal(weight, make_weights()[name].bfloat16())


def import_and_fail(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    """Check that an import fails, and return its error in one line."""
    out = folder.parent / "refused"
    assert main(["import", "--torchtitan", str(folder), "--out", str(out), *options]) == 2
    assert not list(out.glob("step-*"))
    error = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in error
    return error


# Checkpoint, options, and text in the error.
WRONG = [
    ("0.2", [], "--job.config_file"),
    ("0.2", ["--flavor", "8B"], "--flavor"),
    (
        "0.2",
        model_options(n_kv_heads=4, ffn_dim=80),
        "layers.1.feed_forward.w3.weight: shape (48, 32), expected (80, 32)",
    ),
    ("0.2", model_options(n_layers=1), "layers.1.attention.wk.weight: not part of this"),
    (
        "0.2",
        model_options(vocab_size=65),
        "tok_embeddings.weight: shape (64, 32), expected (65, 32)",
    ),
    ("0.2", model_options(n_heads=32, n_kv_heads=16), "32 heads"),
    (
        "0.1",
        model_options(1.0, n_heads=2, n_kv_heads=1),
        # The rotary frequencies in the checkpoint belong to heads of another width.
        "n_heads",
    ),
    ("0.1", model_options(8.0), "torchtitan 0.1"),
    ("0.2", model_options(1.0), "torchtitan 0.2"),
]


@pytest.mark.parametrize(("kind", "options", "error"), WRONG)
def test_options_that_contradict_the_checkpoint_are_rejected(kind, options, error, steps, capsys):
    assert error in import_and_fail(capsys, steps / kind, *options)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("run-by-the-index"),))


# Files and their damage.
BROKEN = [
    (".metadata", lambda raw: pickle.dumps(Hostile(), protocol=4)),
    (".metadata", lambda raw: raw.replace(b"__0_0.distcp", b"../_0.distcp")),
    ("__0_0.distcp", lambda raw: raw[:-4000]),
    (
        "__0_0.distcp",
        # This damages the archive of the last tensor.
        lambda raw: raw[:-200] + bytes(200),
    ),
]


@pytest.mark.parametrize(("name", "change"), BROKEN)
def test_a_damaged_checkpoint_is_rejected_without_running_its_code(
    name, change, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    save("theirs", "weights")
    file = Path("theirs") / name
    file.write_bytes(change(file.read_bytes()))

    assert "theirs" in import_and_fail(capsys, Path("theirs"), *model_options())
    assert not Path("run-by-the-index").exists()


def test_folders_without_a_torchtitan_checkpoint_are_rejected(steps, tmp_path, capsys):
    assert ".metadata" in import_and_fail(capsys, tmp_path, *model_options())

    options = ["--torchtitan", str(steps / "0.2"), "--out", str(tmp_path), *model_options()]
    assert main(["import", *options]) == 0
    assert "titanlite checkpoint" in import_and_fail(
        capsys, tmp_path / "step-00000000", *model_options()
    )

    hf = f"import --hf {tmp_path} --out {tmp_path}/p --model.flavor 8b"
    assert main(hf.split()) == 2
    assert "--torchtitan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("layers.0.attention.wq.bias", torch.zeros(32), ""),
        ("norm.weight", torch.zeros(32, dtype=torch.int32), ": torch.int32"),
    ],
)
def test_a_tensor_that_is_not_part_of_the_model_is_rejected(
    name, tensor, problem, tmp_path, capsys
):
    dcp_save(make_weights() | {name: tensor}, checkpoint_id=str(tmp_path / "theirs"))
    assert f"{name}{problem}" in import_and_fail(capsys, tmp_path / "theirs", *model_options())


def test_a_missing_tensor_is_rejected(tmp_path, capsys):
    dcp_save({"encoder.weight": torch.zeros(1)}, checkpoint_id=str(tmp_path / "theirs"))
    assert "norm.weight: missing" in import_and_fail(capsys, tmp_path / "theirs", *model_options())
