"""Train a tiny Llama once for each of many jobs, on the ranks that call this, and say what happened.

Many variants share the ranks, because each of them takes a few steps only. Each step uses the same global batch for
any number of ranks, so results are comparable across world sizes.
"""

import hashlib
from contextlib import AbstractContextManager, ExitStack, nullcontext
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
from titanlite.data.batch import GlobalBatch
from titanlite.model.llama import Llama
from titanlite.optim.loss import IGNORE_INDEX
from titanlite.parallel import context
from titanlite.parallel.forward_backward import Microbatch
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.train import loop

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
    "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.0},
    "checkpoint": {"enable": False},
    "metrics": {"log_freq": 1, "enable_tensorboard": False},
}
GLOBAL_BATCH = TINY["training"]["global_batch_size"]


@dataclass(frozen=True)
class Rows(Microbatch):
    """Some rows of the global batch, as the loader delivers them."""

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
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights.values())).hexdigest()


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


class FixedRows:
    """Stands for the loader: the same global batch in each step."""

    def __init__(self, job: JobConfig, mesh: Mesh, documents: bool) -> None:
        batch = global_batch(job, Run(job).arch.vocab_size, documents)
        self.num_labels = int((batch.labels != IGNORE_INDEX).sum())  # of all ranks
        mine, local = batch[mesh.data_rank :: mesh.data_degree], job.training.local_batch_size
        self.microbatches = [mine[i : i + local] for i in range(0, len(mine.labels), local)]
        self._share = GlobalBatch(self.microbatches, int((mine.labels != IGNORE_INDEX).sum()))  # pyright: ignore

    def next_global_batch(self) -> GlobalBatch:
        return self._share

    def describe(self) -> str:
        return "fixed rows"

    def table(self, _steps: int) -> str:
        return "the same rows in each step"

    def start(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, float]:
        return {}


def train(job: JobConfig, documents: bool, mistake: str | None) -> dict[str, Any]:
    """What the real trainer does with fixed rows."""
    notes: list[str] = []

    def lay_out(*args: Any) -> Mesh:
        mesh = build_mesh(*args)
        return replace(mesh, data_rank=0) if mistake == "doubled_data" else mesh

    def fixed_rows(run: Run, *_: Any) -> FixedRows:
        return FixedRows(job, lay_out(run.degrees, "cpu"), documents)

    with ExitStack() as stack:
        stack.enter_context(planted(mistake))
        stack.enter_context(patch.object(loop, "build_mesh", lay_out))
        stack.enter_context(patch.object(loop, "Loader", fixed_rows))
        stack.enter_context(patch.object(loop.Trainer, "log", lambda _, line: notes.append(str(line))))
        run = Run(job, dist.get_world_size())
        return follow(stack.enter_context(loop.Trainer(run, torch.device("cpu"), standard=False)), notes)


def follow(trainer: loop.Trainer, notes: list[str]) -> dict[str, Any]:
    """Step to the end; what there is to compare."""
    job, rows = trainer.job, trainer.loader
    model: Any = trainer.model
    assert isinstance(rows, FixedRows)
    initial = weights_hash(all_weights(model))
    seen: dict[str, str] = {}
    matmul = dict(model.named_modules()).get("layers.0.feed_forward.w1")  # a pipeline has it on one rank
    if matmul is not None and not job.compile.enable:
        matmul.register_forward_pre_hook(lambda linear, _: seen.update(computed=str(linear.weight.dtype)))

    def see_gradient(*_: Any) -> None:
        gradient = next(parameter.grad for parameter in model.parameters())
        assert gradient is not None
        seen["gradient"] = str(gradient.dtype)

    trainer.optimizer.register_step_pre_hook(see_gradient)
    logged = [trainer.step() for _ in range(job.training.steps)]
    evaluated = trainer.forward_backward.evaluate(rows.microbatches)
    dist.all_reduce(evaluated, group=trainer.mesh.loss_group)
    weights, parameter = all_weights(model), next(model.parameters())
    return {
        "initial": initial,
        "notes": notes,
        "losses": [step.loss for step in logged if step is not None],
        "norms": [step.grad_norm for step in logged if step is not None],
        "evaluated": (evaluated / rows.num_labels).item(),
        "dtypes": {
            "parameter": str(parameter.dtype),
            "optimizer": str(trainer.optimizer.state[parameter]["exp_avg"].dtype),
            **seen,
        },
        "final": weights_hash(weights),
        "weights": weights,
    }


def planted(mistake: str | None) -> AbstractContextManager[Any]:
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
    if mistake in (None, "doubled_data"):
        return nullcontext()
    return {
        "missing_reduction": patch.object(context.collectives, "all_gather_tensor_autograd", gather_without_gradient),
        "doubled_shard": patch("titanlite.parallel.init_weights.keep_shard", first_shard),
        "averaged_gradients": patch.object(FSDPModule, "set_gradient_divide_factor", averaged),
        "local_softmax": patch("titanlite.optim.loss._reduced", own_only),
    }[mistake]


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
        print(f"rank {dist.get_rank()}: {name}", flush=True)
        results[name] = train(job, documents, mistake)
    return results if dist.get_rank() == 0 else {}
