"""Optimizers train alike in all implementations, on any layout, after a resume, and in torch."""

import copy
import re
import zlib
from pathlib import Path

import pytest
import torch
from ranks import run_ranks, train_small
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_variants import all_weights, weights_hash

from titanlite.config import schema
from titanlite.config.flavors import Architecture
from titanlite.hooks.hook import Hook
from titanlite.load_run import load_run
from titanlite.model.llama import Llama
from titanlite.optim.build import build_optimizer
from titanlite.parallel.init_weights import keep_shard
from titanlite.train.trainer import Trainer

MODEL = (
    "--model.n_heads 4 --model.n_kv_heads 2 --training.local_batch_size 1 --training.max_norm 0 "
    "--parallelism.fsdp_min_num_params 0 --lr_scheduler.decay_ratio 0 --checkpoint.interval 3 "
    "--optimizer.name "
)
FP8 = (
    "--float8.enable --float8.emulate --float8.min-features 0 "
    "--float8.enable-fsdp-float8-all-gather"
)
HSDP = "--parallelism.data_parallel_replicate_degree 2"
TP = "--parallelism.tensor_parallel_degree 2"
PP = "--parallelism.pipeline_parallel_degree 2"
LAYOUTS = {2: ["", TP, "--training.enable_cpu_offload", FP8], 4: ["", HSDP, f"{PP} {TP}"]}
ADAPTER = "--job.plugins mutants.plugins --model.architecture adapter"
TINY = (
    "--model.n_layers 2 --model.dim 64 --training.seq_len 16 --lr_scheduler.warmup_steps 0 "
    "--optimizer.name"
)


def copy_full_tensor(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


class RandomGradients(Hook):
    """Replaces gradients by random numbers, because layouts round gradients differently."""

    def built(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.named = dict(trainer.model.named_parameters())

    def gradients(self, step: int) -> None:
        for name, parameter in self.named.items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{step} {name}".encode()))
            assert parameter.grad is not None
            keep_shard(parameter.grad, torch.randn(parameter.shape, generator=generator))


def weights_after(folder: Path, jobs: list[str]) -> list[str]:
    """Run jobs, and return a hash of all weights at the end of each."""
    hashes = []
    for number, options in enumerate(jobs):
        trainer = train_small(folder / str(number), RandomGradients(), MODEL, options)
        hashes.append(weights_hash(all_weights(trainer.model)))
    return hashes


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layouts"),
    [("", LAYOUTS), (ADAPTER, {2: [TP], 4: [f"{HSDP} {TP}"]})],
    ids=["Llama", "adapter"],
)
def test_muon_is_bitwise_equal_on_any_layout(tmp_path, model, layouts):
    """Tensor parallelism replicates the matrices of the adapter, and shards all other matrices."""
    muon = f"Muon {model} --model.ffn_dim 88 --training.steps 3 --checkpoint.no-enable "
    (alone,) = run_ranks(1, weights_after, tmp_path / "1", [muon])[0]
    for ranks, options in layouts.items():
        jobs = [muon + layout for layout in options]
        hashes = run_ranks(ranks, weights_after, tmp_path / str(ranks), jobs)
        assert hashes == [[alone] * len(jobs)] * ranks


@pytest.mark.long
def test_a_resume_on_another_number_of_ranks_is_bitwise_equal(tmp_path):
    # Rows consist of whole blocks of AdamW8bit.
    sizes = "--model.n_layers 1 --model.dim 256 --model.ffn_dim 256 --training.steps"
    jobs = [f"{name} {sizes}" for name in ("Muon", "AdamW8bit")]
    straight = [f"{options} 4" for options in jobs]
    expected = run_ranks(1, weights_after, tmp_path / "straight", straight)
    for ranks, steps in (2, 2), (1, 3), (2, 4):
        parts = [f"{options} {steps}" for options in jobs]
        resumed = run_ranks(ranks, weights_after, tmp_path / "resumed", parts)

    assert resumed == expected * 2


def test_adamw8bit_trains_and_resumes_with_empty_shards(tmp_path):
    # `wk` and `wv` have 4 rows. With 2 rows per rank, the last of 3 ranks has none.
    options = (
        "AdamW8bit --model.n_layers 1 --model.dim 1024 --model.head_dim 4 --model.ffn_dim 256 "
        "--model.n_kv_heads 1 --model.tied_embeddings --training.global_batch_size 3 "
        "--training.steps"
    )
    expected = run_ranks(1, weights_after, tmp_path / "straight", [f"{options} 3"])
    for ranks, steps in (3, 1), (1, 2), (3, 3):
        resumed = run_ranks(ranks, weights_after, tmp_path / "resumed", [f"{options} {steps}"])

    assert resumed == expected * 3


class TorchMuon(RandomGradients):
    """Applies `torch.optim.Muon` to copies of the weights, with the same gradients."""

    def started(self, step: int) -> None:
        names = [
            name for name in self.named if re.match(r"layers\..*(attention|feed_forward)\.", name)
        ]
        self.begin = {name: copy_full_tensor(self.named[name]) for name in names}
        self.theirs = {
            name: torch.nn.Parameter(copy_full_tensor(self.named[name])) for name in names
        }
        self.muon = torch.optim.Muon(
            self.theirs.values(), weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        )

    def before_update(self, *_: object) -> None:
        for name, parameter in self.theirs.items():
            parameter.grad = copy_full_tensor(self.named[name].grad)
        self.muon.param_groups[0]["lr"] = self.trainer.optimizer.param_groups[0]["lr"]
        self.muon.step()


def test_muon_on_one_process_is_close_to_torch(tmp_path):
    """titanlite rounds momentum twice and torch once, so elements can differ by 2^-8 in bf16."""
    hook = TorchMuon()
    run = load_run(f"--job.dump_folder {tmp_path} {TINY} Muon".split(), 1)
    with Trainer(run, None, [hook]) as trainer:
        for _ in range(4):
            trainer.step()

        for name, theirs in hook.theirs.items():
            difference = (copy_full_tensor(hook.named[name]) - theirs).norm()
            assert difference < 2**-6 * (theirs - hook.begin[name]).norm()


@pytest.mark.parametrize(
    ("name", "decayed"), [("AdamW", True), ("Muon", False), ("AdamW8bit", True)]
)
def test_parameter_groups_use_their_learning_rates_and_weight_decays(tmp_path, name, decayed):
    job = load_run(f"--job.dump_folder {tmp_path} {TINY} {name}".split(), 1).job
    still = schema.ParameterGroup(params=("tok_embeddings.*", "layers.0.*"), lr_factor=0.0)
    updated_names = ("layers.1.*", "norm.weight", "output.weight")
    updated = schema.ParameterGroup(params=updated_names, weight_decay=0.3)
    keys = {"groups": (still, updated), "decay_embeddings": decayed}
    optimizer = job.optimizer.model_copy(update=keys)

    with Trainer(job.model_copy(update={"optimizer": optimizer}), standard=False) as trainer:
        named = dict(trainer.model.named_parameters())
        before = {key: copy_full_tensor(parameter) for key, parameter in named.items()}
        trainer.step()

        for group in trainer.optimizer.param_groups:
            for key, parameter in named.items():
                if not any(parameter is member for member in group["params"]):
                    continue
                is_exempt = "norm" in key or not (decayed or "layers" in key)
                decay = 0.0 if is_exempt else 0.1
                assert group["weight_decay"] == (decay if still.claims(key) else 0.3), key
                assert torch.equal(copy_full_tensor(parameter), before[key]) == still.claims(key), (
                    key
                )
        assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(named)


ARCH = Architecture(32, 2, 2, 1, 64, vocab_size=48)


def train_two_steps(compiled: bool = False, **keys: object) -> torch.Tensor:
    """Train two steps, and return all weights in one vector."""
    model = Llama(ARCH)
    optimizer = build_optimizer(model, schema.Optimizer.model_validate(keys), compiled)
    tokens = torch.arange(8).view(1, 8)
    for _ in range(2):
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        # Kernels may round the square root and the division differently, by one ulp of updates of
        # 3e-4.
        ({"implementation": "fused"}, 1e-6),
        ({"implementation": "foreach"}, 1e-6),
        pytest.param({"compiled": True}, 1e-6, marks=pytest.mark.slow),
        # bfloat16 moments have 8 bits, so a step of 3e-4 is exact to 2^-8, or to twice as much
        # after the square root.
        ({"state_dtype": "bfloat16"}, 2 * 3e-4 * 2**-7),
    ],
)
def test_all_implementations_compute_the_same_updates(keys, tolerance):
    torch.testing.assert_close(
        train_two_steps(**keys), train_two_steps(implementation="for-loop"), rtol=0, atol=tolerance
    )


def test_stochastic_rounding_keeps_small_updates_that_rounding_to_nearest_loses():
    """bfloat16 rounds steps of 1e-4 at weights of 1 to zero, because they are below 2^-9."""

    def after_100_steps(stochastic: bool) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        settings = schema.Optimizer(lr=1e-4, weight_decay=0.0, stochastic_rounding=stochastic)
        optimizer = build_optimizer(nn.ParameterList([weight]), settings)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach().float()

    assert after_100_steps(stochastic=False).eq(1.0).all()

    moved = after_100_steps(stochastic=True)
    # Each of the 4,096 elements is a random walk of 100 steps with a standard deviation of at most
    # 2^-8 / 2, so the mean is exact to 3e-4.
    assert moved.mean().item() == pytest.approx(1.0 - 100 * 1e-4, abs=1e-3)
    assert len(moved.unique()) > 1


def compare_updates_of_shards() -> None:
    """Update parameters that are sharded in one or both dimensions, some unevenly."""
    shapes = [(8, 8), (28, 24), (12, 20), (4, 36)]
    for rows, columns in shapes:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        first = nn.Linear(columns, rows)
        second = nn.Linear(rows, columns)
        model = nn.Sequential(first, second).bfloat16()
        whole = copy.deepcopy(model)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter, full in zip(model.parameters(), whole.parameters(), strict=True):
                full.copy_(torch.randn(full.shape, generator=generator))
                full.grad = torch.randn(full.shape, generator=generator).bfloat16()
                parameter.grad = parameter.clone()
                keep_shard(parameter, full)
                keep_shard(parameter.grad, full.grad)
        for part in (model, whole):
            build_optimizer(part, schema.Optimizer(stochastic_rounding=True)).step()
        for parameter, full in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), full)


@pytest.mark.slow
def test_stochastic_updates_of_shards_equal_those_of_whole_parameters():
    run_ranks(4, compare_updates_of_shards)
