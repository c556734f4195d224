"""Train a tiny Llama once for each of many jobs, on the ranks that call this, and say what happened.

Many variants share the ranks, because each of them takes a few steps only. Each step uses the same global batch for
any number of ranks, so results are comparable across world sizes.
"""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.model.llama import Llama
from titanlite.optim.clip import clip_grad_norm_
from titanlite.optim.loss import IGNORE_INDEX, linear_cross_entropy_sum
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel import context
from titanlite.parallel.float8 import precompute_scales
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.parallel.step import build_step
from titanlite.parallel.tensor import vocab_parallel

TINY: dict[str, Any] = {
    "model": {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": 96},
    "training": {
        "seq_len": 32,
        "local_batch_size": 2,
        "global_batch_size": 8,
        "steps": 8,
        "mixed_precision_param": "float32",
    },
    "optimizer": {"lr": 2e-3},
    "activation_checkpoint": {"mode": "none"},
    "float8": {"min_features": 0},
    "parallelism": {"fsdp_min_num_params": 0},  # as large blocks have it
}
GLOBAL_BATCH = TINY["training"]["global_batch_size"]


@dataclass
class Rows:
    """Some rows of the global batch, as the loader delivers them."""

    input_ids: Tensor
    labels: Tensor
    document_ids: Tensor | None = None
    positions: Tensor | None = None

    def __getitem__(self, rows: slice) -> "Rows":
        extra = [None if value is None else value[rows] for value in (self.document_ids, self.positions)]
        return Rows(self.input_ids[rows], self.labels[rows], *extra)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, without the wrappers of FSDP and of torchao's FP8 all-gather."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, "_tensor", tensor).cpu().float()


def all_weights(model: Llama) -> dict[str, torch.Tensor]:
    """Every weight of the whole model in fp32, in order of its name, on every rank."""
    own = {name: full(p.detach()) for name, p in model.named_parameters()}
    of_ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, own)
    weights: dict[str, torch.Tensor] = {}
    for of_rank in of_ranks:
        for name, weight in of_rank.items():
            assert torch.equal(weights.setdefault(name, weight), weight), f"{name} differs between ranks"
    return dict(sorted(weights.items()))


def weights_hash(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(name.encode())
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


def merge(*tables: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for table in tables:
        for section, keys in table.items():
            merged[section] = {**merged.get(section, {}), **keys}
    return merged


def global_batch(job: JobConfig, vocab_size: int, documents: bool) -> Rows:
    """Rows (GLOBAL_BATCH, T) with ragged masks, so that ranks and microbatches hold different numbers of labels.

    `documents`: each row is packed with documents of 7, 8, 9, ... tokens, none of which sees another.
    """
    length = job.training.seq_len
    rows = torch.randint(0, vocab_size, (GLOBAL_BATCH, length + 1), generator=torch.Generator().manual_seed(7))
    labels = rows[:, 1:].clone()
    for k in range(GLOBAL_BATCH):
        labels[k, : 3 * k] = IGNORE_INDEX
    if not documents:
        return Rows(rows[:, :-1], labels)
    places = torch.arange(length).expand(GLOBAL_BATCH, -1)
    size = torch.arange(7, 7 + GLOBAL_BATCH)[:, None]
    return Rows(rows[:, :-1], labels, document_ids=places // size, positions=places % size)


def dtypes_seen(model: Llama) -> dict[str, str]:
    """Record the dtype of the weight that a matmul of the first block really uses in a forward pass."""
    seen: dict[str, str] = {}
    for name, module in model.named_modules():
        if name == "layers.0.feed_forward.w1":
            module.register_forward_pre_hook(lambda linear, _: seen.update(computed=str(linear.weight.dtype)))
    return seen


def train(job: JobConfig, mesh: Mesh, documents: bool) -> dict[str, Any]:
    notes: list[str] = []
    run = Run(job, dist.get_world_size())
    sharded = build_model(run, mesh, torch.device("cpu"), notes.append)
    model = sharded.whole
    result: dict[str, Any] = {"initial": weights_hash(all_weights(model)), "notes": notes}
    seen = dtypes_seen(model) if not job.compile.enable else {}
    optimizer = build_optimizer(model, job.optimizer)
    batch = global_batch(job, model.arch.vocab_size, documents)
    valid = (batch.labels != IGNORE_INDEX).sum()
    mine, local = batch[mesh.data_rank :: mesh.data_degree], job.training.local_batch_size
    microbatches = [mine[i : i + local] for i in range(0, len(mine.labels), local)]
    loss_fn = linear_cross_entropy_sum
    if mesh.tensor is not None:
        loss_fn = vocab_parallel(loss_fn, mesh.tensor)
    forward_backward = build_step(sharded, mesh, loss_fn, run, torch.device("cpu"))
    if job.float8.precompute_float8_dynamic_scale_for_fsdp:
        precompute_scales(model)
    losses, norms = [], []
    for _ in range(job.training.steps):
        total = forward_backward(microbatches, valid)
        dist.all_reduce(total, group=mesh.loss_group)
        norm = clip_grad_norm_(model.parameters(), job.training.max_norm)
        gradient = next(p.grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if job.float8.precompute_float8_dynamic_scale_for_fsdp:
            precompute_scales(model)
        losses.append(total.item())
        norms.append(norm.item())
    evaluated = forward_backward.evaluate(microbatches)
    dist.all_reduce(evaluated, group=mesh.loss_group)
    weights = all_weights(model)
    parameter = next(model.parameters())
    assert gradient is not None
    result["dtypes"] = {
        "parameter": str(parameter.dtype),
        "gradient": str(gradient.dtype),
        "optimizer": str(optimizer.state[parameter]["exp_avg"].dtype),
        **seen,
    }
    return {
        **result,
        "losses": losses,
        "norms": norms,
        "evaluated": (evaluated / valid).item(),
        "final": weights_hash(weights),
        "weights": weights,
    }


@contextmanager
def planted(mistake: str | None) -> Iterator[None]:
    """A layout that computes something else, each in a way that is easy to commit: to see that it is caught."""

    def gather_without_gradient(x: Tensor, dim: int, group: Any) -> Tensor:
        """Each rank keeps the gradient of its own keys only: the reduce-scatter is missing."""
        parts = list(collectives.all_gather_tensor(x.detach(), dim, group).chunk(dist.get_world_size(group), dim))
        parts[dist.get_rank(group)] = x
        return torch.cat(parts, dim)

    def first_shard(parameter: Tensor, whole: Tensor) -> None:
        """Every rank of the mesh keeps the same shard, as DTensor's own random initialisation does on a CPU."""
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        local.copy_(whole[tuple(slice(size) for size in local.shape)])

    def averaged(module: FSDPModule, _factor: float) -> None:
        set_factor(module, 2.0)

    def own_only(x: Tensor, _operation: str, _group: Any) -> Tensor:
        return x

    set_factor = FSDPModule.set_gradient_divide_factor
    with ExitStack() as stack:
        if mistake == "missing_reduction":
            stack.enter_context(
                patch.object(context.collectives, "all_gather_tensor_autograd", gather_without_gradient)
            )
        elif mistake == "doubled_shard":
            stack.enter_context(patch("titanlite.parallel.init_weights.keep_shard", first_shard))
        elif mistake == "averaged_gradients":
            stack.enter_context(patch.object(FSDPModule, "set_gradient_divide_factor", averaged))
        elif mistake == "local_softmax":
            stack.enter_context(patch("titanlite.optim.loss._reduced", own_only))
        else:
            assert mistake in (None, "doubled_data")
        yield


def train_variants(variants: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results by the name of the variant, on the first rank. A variant overrides TINY; "plant" and "documents" are not
    keys of a job."""
    results = {}
    for name, variant in variants.items():
        overrides = dict(variant)
        mistake, documents = overrides.pop("plant", None), overrides.pop("documents", False)
        job = JobConfig.model_validate(merge(TINY, overrides))
        torch.compiler.reset()
        # One job a process outside of this test; nothing resets it there.
        functorch_config.activation_memory_budget = 1.0
        mesh = build_mesh(Run(job, dist.get_world_size()).degrees, "cpu")
        if mistake == "doubled_data":
            mesh = replace(mesh, data_rank=0)
        print(f"rank {dist.get_rank()}: {name}", flush=True)
        with planted(mistake):
            results[name] = train(job, mesh, documents)
    return results if dist.get_rank() == 0 else {}
