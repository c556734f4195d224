"""GPU behavior of small models: FP8, checkpoints, host syncs and attention kernels."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# cuBLAS reads this variable when it starts, and then adds in a fixed order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.config.load import load_job
from titanlite.model.attention import DocumentBounds, attention, backend_order, document_mask
from titanlite.parallel.context import flex_mask
from titanlite.train.trainer import Trainer

DEVICE = torch.device("cuda")
WORDS = (
    "--model.dim 256 --model.n_layers 2 --model.n_heads 4 --model.n_kv_heads 2 --model.ffn_dim 512 "
    "--training.seq_len 128 --training.local_batch_size 4 --training.steps 100 "
    "--metrics.no-enable_tensorboard --lr_scheduler.warmup_steps 2 --float8.min_features 0"
)
EACH_STEP = "--metrics.log_freq 1 --checkpoint.no-enable"
ALL_COMPILED = "--compile.enable --compile.components model loss optimizer clip"
ALL_GATHER = (
    "--float8.enable_fsdp_float8_all_gather --float8.precompute_float8_dynamic_scale_for_fsdp"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU; a CPU's are in tests/parallel"
    ),
]


@contextmanager
def make_trainer(folder: Path, options: str) -> Iterator[Trainer]:
    """Create a trainer like `titanlite train`."""
    arguments = f"{WORDS} --job.dump_folder {folder / 'run'} {options}"
    with Trainer(load_job(arguments.split())) as trainer:
        yield trainer
    torch._dynamo.reset()


def train(trainer: Trainer, steps: int) -> list[float]:
    """Train `steps` steps, and return the losses."""
    entries = [trainer.step() for _ in range(steps)]
    return [entry.loss for entry in entries if entry is not None]


def copy_weights(trainer: Trainer) -> list[Tensor]:
    return [
        p.to_local().clone() if isinstance(p, DTensor) else p.clone()
        for p in trainer.model.parameters()
    ]


@pytest.mark.parametrize("recipe", [f"tensorwise {ALL_GATHER}", "rowwise"])
def test_losses_in_float8_are_close_to_those_in_bf16(tmp_path, recipe):
    with make_trainer(tmp_path, EACH_STEP) as trainer:
        expected = train(trainer, 20)
    float8 = f"{EACH_STEP} --float8.enable --float8.recipe_name {recipe}"
    with make_trainer(tmp_path, float8) as trainer:
        losses = train(trainer, 20)

    assert losses != expected
    # FP8 keeps 3 bits of a mantissa, and errors of a sum of 256 products mostly cancel. Sums are
    # compared because a sequence of rare tokens differs more. Measured: 0.006.
    assert sum(losses) == pytest.approx(sum(expected), rel=0.01)
    assert "on FP8 hardware" in (tmp_path / "run/train.log").read_text()


@pytest.mark.parametrize("mode", ["disabled", "async_with_pinned_mem"])
def test_resume_is_bitwise_equal_to_an_uninterrupted_run(tmp_path, mode):
    """Equality requires deterministic kernels."""
    options = f"--metrics.log_freq 1 --training.deterministic --checkpoint.async_mode {mode}"
    with make_trainer(tmp_path, options) as trainer:
        train(trainer, 3)
        trainer.save()
        expected_losses = train(trainer, 3)
        expected_weights = copy_weights(trainer)
    with make_trainer(tmp_path, options) as trainer:
        assert trainer.steps_done == 3
        losses = train(trainer, 3)
        weights = copy_weights(trainer)

    assert losses == expected_losses
    for weight, expected in zip(weights, expected_weights, strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize(
    "options",
    [
        "--training.global_batch_size 8",
        "--float8.enable --float8.enable_fsdp_float8_all_gather --dataset.document_mask",
        f"{ALL_COMPILED} --dataset.document_mask",
        f"{ALL_COMPILED} --training.dtype bfloat16 --optimizer.stochastic_rounding",
    ],
)
def test_a_step_never_waits_for_the_gpu(tmp_path, options):
    """Two steps compile the kernels and log before the measurement."""
    unlogged = "--metrics.log_freq 50 --checkpoint.no-enable"
    with make_trainer(tmp_path, f"{unlogged} {options}") as trainer:
        trainer.step()
        trainer.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            # This mode must detect a host sync.
            with pytest.raises(RuntimeError, match="synchronizing"):
                torch.zeros(1, device="cuda").item()
            for _ in range(3):
                trainer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def random_heads(dtype: torch.dtype, width: int) -> list[Tensor]:
    """Return queries with four heads, and keys and values with two: (2, H, 512, width)."""
    generator = torch.Generator().manual_seed(0)
    heads = []
    for count in (4, 2, 2):
        x = torch.randn(2, count, 512, width, generator=generator)
        heads.append(x.to(DEVICE, dtype).requires_grad_())
    return heads


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=generator).to(out)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


# With float32 inputs, kernels use TF32, which has a mantissa of 10 bits.
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_of_documents_equals_sdpa_with_a_mask(dtype, tolerance, compiled):
    attend = torch.compile(attention, fullgraph=True) if compiled else attention
    inputs = random_heads(dtype, 64)
    for seed in range(2):  # other documents, the same kernel
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 5, (2, 512), generator=generator)
        ids = ids.sort(dim=1).values
        q, k, v = inputs
        dense_mask = document_mask(ids).to(DEVICE)
        block_mask = flex_mask(ids.to(DEVICE), ids.to(DEVICE), None)

        expected = with_gradients(attention(q, k, v, dense_mask), inputs)
        actual = with_gradients(attend(q, k, v, block_mask), inputs)

        assert_close(actual, expected, tolerance)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("compiled", [False, True])
def test_variable_length_attention_equals_sdpa_with_a_mask(window, compiled):
    attend = torch.compile(attention, fullgraph=True) if compiled else attention
    inputs = random_heads(torch.bfloat16, 64)
    for num_documents in (2, 5):
        ids = torch.arange(512).expand(2, -1) * num_documents // 512
        is_first = ids.diff(prepend=ids[:, :1] - 1) != 0
        first_tokens = is_first.flatten().nonzero().flatten()
        bounds = torch.tensor([*first_tokens.tolist(), ids.numel()], dtype=torch.int32)
        mask = document_mask(ids, window).to(DEVICE)
        expected = with_gradients(attention(*inputs, mask), inputs)  # pyright: ignore
        bounds_mask = DocumentBounds(bounds.to(DEVICE), window)
        actual = with_gradients(attend(*inputs, bounds_mask), inputs)  # pyright: ignore
        assert_close(actual, expected, 2e-2)


def test_the_selected_sdpa_kernel_is_close_to_exact_attention():
    inputs = random_heads(torch.bfloat16, 128)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        expected = with_gradients(attention(*exact), exact)
    with backend_order(DEVICE):
        assert_close(with_gradients(attention(*inputs), inputs), expected, 2e-2)
