"""Train a tiny Llama for each of several jobs on the calling ranks, and return results.

The variants share the ranks because each takes only a few steps. The global batch does not depend
on the number of ranks, so results are comparable across world sizes.
"""

import hashlib
from typing import Any
from unittest.mock import Mock, patch

import tomli
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from small_runs import job_tables
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.batch import RankBatch
from titanlite.model.microbatch import IGNORE_INDEX, Microbatch
from titanlite.parallel.mesh import build_mesh
from titanlite.train import trainer as trainer_module

Options = dict[str, Any]
"""Tables of a job file: options by section and name."""
Results = dict[str, Any]

TINY: Options = tomli.loads("""
[model]
dim = 64
n_layers = 3
n_heads = 4
n_kv_heads = 2
ffn_dim = 128
vocab_size = 96

[training]
seq_len = 32
local_batch_size = 2
global_batch_size = 8
steps = 8
mixed_precision_param = "float32"

[optimizer]
lr = 2e-3

[lr_scheduler]
warmup_steps = 0
decay_ratio = 0.0

[activation_checkpoint]
mode = "none"

[float8]
min_features = 0

[parallelism]
fsdp_min_num_params = 0  # shards each block, as in a large model

[checkpoint]
enable = false

[metrics]
log_freq = 1
enable_tensorboard = false
""")
GLOBAL_BATCH = TINY["training"]["global_batch_size"]


def all_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights of the model in fp32, by name, on every rank."""
    local_weights = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        plain = getattr(whole, "_tensor", whole)  # without torchao's wrapper
        local_weights[name] = plain.detach().float()

    of_ranks: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, local_weights)
    weights: dict[str, Tensor] = {}
    for of_rank in of_ranks:
        for name, weight in of_rank.items():
            first = weights.setdefault(name, weight)
            assert torch.equal(first, weight), f"{name} differs between ranks"
    return dict(sorted(weights.items()))


def weights_hash(weights: dict[str, Tensor]) -> str:
    content = b"".join(weight.numpy().tobytes() for weight in weights.values())
    return hashlib.sha256(content).hexdigest()


def merge(*tables: Options) -> Options:
    """Merge option tables. Later values override earlier ones."""
    merged: Options = {}
    for table in tables:
        for key, value in table.items():
            if isinstance(value, dict):
                value = merged.get(key, {}) | value
            merged[key] = value
    return merged


def tiny_run(options: str, world_size: int) -> Run:
    """Return a run of TINY with the given lines of a job file, separated by " ; "."""
    return Run(JobConfig.model_validate(merge(TINY, job_tables(options))), world_size)


def global_batch(job: JobConfig, vocab_size: int, documents: bool) -> dict[str, Tensor]:
    """Return sequences (GLOBAL_BATCH, T) with masks of different lengths.

    Args:
        documents: Pack each sequence with documents of 7, 8, 9, ... tokens, attending separately.
    """
    length = job.training.seq_len
    generator = torch.Generator().manual_seed(7)
    sequences = torch.randint(vocab_size, (GLOBAL_BATCH, length + 1), generator=generator)
    labels = sequences[:, 1:].clone()
    for k in range(GLOBAL_BATCH):
        labels[k, : 3 * k] = IGNORE_INDEX
    batch = {"input_ids": sequences[:, :-1], "labels": labels}
    if documents:
        index = torch.arange(length).expand(GLOBAL_BATCH, -1)
        size = torch.arange(7, 7 + GLOBAL_BATCH)[:, None]
        batch |= {"document_ids": index // size, "positions": index % size}
    return batch


def train(job: JobConfig, documents: bool) -> Results:
    """Train on the same sequences in each step, and return the results to compare."""
    run = Run(job, dist.get_world_size())
    mesh = build_mesh(run.degrees, "cpu")
    batch = global_batch(job, run.arch.vocab_size, documents)
    local = job.training.local_batch_size
    of_rank = slice(mesh.data_rank, None, mesh.degrees.data)
    mine = {name: values[of_rank] for name, values in batch.items()}

    microbatches = []
    for start in range(0, len(mine["labels"]), local):
        part = {name: values[start : start + local] for name, values in mine.items()}
        if documents and job.model.uses_document_bounds:
            first_tokens = (part["positions"].flatten() == 0).nonzero().flatten()
            bounds = [*first_tokens.tolist(), part["positions"].numel()]
            part["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
        microbatches.append(Microbatch(**part))
    share = RankBatch(microbatches, int((mine["labels"] != IGNORE_INDEX).sum()))
    loader = Mock(
        describe=str,
        sources=[Mock(num_tokens=10**12, describe=str)],
        stats=dict,
        next_global_batch=lambda: share,
    )

    with (
        patch.object(trainer_module, "build_mesh", lambda *_: mesh),
        patch.object(trainer_module, "Loader", lambda *_args, **_options: loader),
        patch.object(trainer_module.Trainer, "log") as log,
        trainer_module.Trainer(run, torch.device("cpu"), standard=False) as trainer,
    ):
        result = train_and_record(trainer)
        loss_sum = trainer.forward_backward.evaluate(microbatches)
        dist.all_reduce(loss_sum, group=trainer.mesh.loss_group)
        num_labels = (batch["labels"] != IGNORE_INDEX).sum()
        result["evaluated"] = [(loss_sum / num_labels).item()]
        return result | {"notes": [str(call.args[0]) for call in log.mock_calls]}


def train_and_record(trainer: trainer_module.Trainer) -> Results:
    """Train to the last step, and record losses, norms, dtypes and weights."""
    job = trainer.job
    model = trainer.model
    initial = weights_hash(all_weights(model))
    dtypes: dict[str, str] = {}
    # With a pipeline, only one rank has this layer.
    matmul = dict(model.named_modules()).get("layers.0.feed_forward.w1")
    if matmul is not None and not job.compile.enable:
        matmul.register_forward_pre_hook(
            lambda linear, _: dtypes.update(computed=str(linear.weight.dtype))
        )
    parameter = next(model.parameters())

    def record_gradient_dtype(*_: object) -> None:
        assert parameter.grad is not None
        dtypes["gradient"] = str(parameter.grad.dtype)

    trainer.optimizer.register_step_pre_hook(record_gradient_dtype)
    logged = [trainer.step() for _ in range(job.training.steps)]
    moment = next(
        tensor for key, tensor in trainer.optimizer.state[parameter].items() if key != "step"
    )
    dtypes |= {"parameter": str(parameter.dtype), "optimizer": str(moment.dtype)}
    weights = all_weights(model)
    return {
        "initial": initial,
        "losses": [step.loss for step in logged if step is not None],
        "norms": [step.grad_norm for step in logged if step is not None],
        "dtypes": dtypes,
        "final": weights_hash(weights),
        "weights": weights,
    }


def train_variants(variants: dict[str, Options]) -> dict[str, Results]:
    """Train all variants, and return the results of the first rank by name.

    A variant overrides TINY. "documents" is not a job key.
    """
    results = {}
    for name, variant in variants.items():
        overrides = dict(variant)
        documents = overrides.pop("documents", False)
        job = JobConfig.model_validate(merge(TINY, overrides))
        torch.compiler.reset()
        # Outside of this test, a process trains one job, so nothing else resets the budget.
        functorch_config.activation_memory_budget = 1.0
        print(f"rank {dist.get_rank()}: {name}", flush=True)
        results[name] = train(job, documents)
    return results if dist.get_rank() == 0 else {}
