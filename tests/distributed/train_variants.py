"""Run under torchrun: train a tiny Llama once for each job in a JSON file and write down what happened.

Many variants share one launch, because starting ranks takes longer than the few steps of a variant. Each step uses
the same global batch for any number of ranks, so results are comparable across world sizes.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.config.schema import JobConfig
from titanlite.model.llama import Llama
from titanlite.optim.clip import clip_grad_norm_
from titanlite.optim.loss import IGNORE_INDEX, cross_entropy_sum
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.float8 import precompute_scales
from titanlite.parallel.fsdp import set_gradient_sync
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.parallelize import build_model

TINY = {
    "model": {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": 96},
    "training": {"seq_len": 32, "local_batch_size": 2, "steps": 8, "mixed_precision_param": "float32"},
    "optimizer": {"lr": 2e-3},
    "activation_checkpoint": {"mode": "none"},
}
GLOBAL_BATCH = 8


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, without the wrappers of FSDP and of torchao's FP8 all-gather."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, "_tensor", tensor)


def weights_hash(model: Llama) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.replace("_checkpoint_wrapped_module.", "").encode())
        digest.update(full(parameter.detach()).cpu().float().numpy().tobytes())
    return digest.hexdigest()


def merge(*tables: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for table in tables:
        for section, keys in table.items():
            merged[section] = {**merged.get(section, {}), **keys}
    return merged


def global_batch(job: JobConfig, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (GLOBAL_BATCH, T) with ragged masks, so that ranks and microbatches hold different numbers of labels."""
    rows = torch.randint(
        0, vocab_size, (GLOBAL_BATCH, job.training.seq_len + 1), generator=torch.Generator().manual_seed(7)
    )
    labels = rows[:, 1:].clone()
    for k in range(GLOBAL_BATCH):
        labels[k, : 3 * k] = IGNORE_INDEX
    return rows[:, :-1], labels


def dtypes_seen(model: Llama) -> dict[str, str]:
    """Record the dtype of the weight that a matmul of the first block really uses in a forward pass."""
    seen: dict[str, str] = {}
    for name, module in model.named_modules():
        if name.replace("_checkpoint_wrapped_module.", "") == "layers.0.feed_forward.w1":
            module.register_forward_pre_hook(lambda linear, _: seen.update(computed=str(linear.weight.dtype)))
    return seen


def train(job: JobConfig, mesh: Mesh) -> dict[str, Any]:
    notes: list[str] = []
    model = build_model(job, mesh, torch.device("cpu"), notes.append)
    result: dict[str, Any] = {"initial": weights_hash(model), "notes": notes}
    seen = dtypes_seen(model) if not job.compile.enable else {}
    optimizer = build_optimizer(model, job.optimizer)
    tokens, labels = global_batch(job, model.arch.vocab_size)
    valid = (labels != IGNORE_INDEX).sum()
    mine = slice(mesh.data_rank, None, mesh.data_degree)
    micro_tokens = tokens[mine].split(job.training.local_batch_size)
    micro_labels = labels[mine].split(job.training.local_batch_size)
    losses, norms = [], []
    for _ in range(job.training.steps):
        total = torch.zeros(())
        for i, (x, y) in enumerate(zip(micro_tokens, micro_labels, strict=True)):
            set_gradient_sync(model, i == len(micro_tokens) - 1)
            loss = cross_entropy_sum(model(x), y) / valid
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total, group=mesh.data_group)
        norm = clip_grad_norm_(model.parameters(), job.training.max_norm)
        gradient = next(p.grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if job.float8.precompute_float8_dynamic_scale_for_fsdp:
            precompute_scales(model)
        losses.append(total.item())
        norms.append(norm.item())
    parameter = next(model.parameters())
    assert gradient is not None
    result["dtypes"] = {
        "parameter": str(parameter.dtype),
        "gradient": str(gradient.dtype),
        "optimizer": str(optimizer.state[parameter]["exp_avg"].dtype),
        **seen,
    }
    return {**result, "losses": losses, "norms": norms, "final": weights_hash(model)}


def main() -> None:
    variants, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dist.init_process_group("gloo")
    results = {}
    for name, overrides in variants.items():
        job = JobConfig.model_validate(merge(TINY, overrides))
        torch.compiler.reset()
        functorch_config.activation_memory_budget = (
            1.0  # one job a process outside of this test; nothing resets it there
        )
        results[name] = train(job, build_mesh(job.parallelism, "cpu"))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
