"""THE ORDER in which a Llama on the meta device is converted, sharded, checkpointed and compiled.

Invariant: each step comes before the steps that depend on its result. docs/parallelism.md gives the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from titanlite.config.registry import resolved
from titanlite.config.run import Run
from titanlite.model.llama import Llama
from titanlite.parallel.context import apply_context_parallel
from titanlite.parallel.float8 import convert_to_float8
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.init_weights import materialize
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.pipeline import join_stages, own_stages
from titanlite.parallel.recompute import apply_activation_checkpointing
from titanlite.parallel.tensor import apply_tensor_parallel, enable_async_tensor_parallel


@dataclass(frozen=True)
class ShardedModel:
    """The part of the model on one rank.

    Attributes:
        whole: All that this rank has, under the names of the whole model: for optimizer, checkpoints and gradient norm.
        stages: Stage number -> its part. Without a pipeline there is one stage, and it is the module `whole`.
    """

    whole: Llama
    stages: dict[int, Llama]


def build_model(run: Run, mesh: Mesh, device: torch.device, log: Callable[[str], None]) -> ShardedModel:
    """Build, parallelize and initialise the model of a run. Its shards are on `device`."""
    training, stages = run.job.training, {}
    for number, blocks in own_stages(run, mesh).items():
        with torch.device("meta"):
            model: Llama = resolved(run.arch.model)(run.arch, blocks)
        model.to(getattr(torch, training.init_dtype))
        parallelize(model, mesh, run, log)
        materialize(model, device, training.seed, training.enable_cpu_offload)
        # Cast after sharding, so that no full-precision copy of the whole model exists. The optimizer's state follows.
        stages[number] = model.to(getattr(torch, training.dtype))
    return ShardedModel(join_stages(list(stages.values())), stages)


def parallelize(model: Llama, mesh: Mesh, run: Run, log: Callable[[str], None]) -> None:
    """Apply every transformation that the job asks for to a model or a pipeline stage, in place."""
    job, compiled, recompute = run.job, run.compiles("model"), run.job.activation_checkpoint
    if job.float8.enable:
        convert_to_float8(model, job.float8, log, compiled)
    if mesh.tensor is not None:
        apply_tensor_parallel(model, mesh.tensor, job.float8.enable and job.float8.recipe_name == "tensorwise")
        if job.parallelism.enable_async_tensor_parallel:
            enable_async_tensor_parallel(mesh.tensor)
    if mesh.context is not None:
        apply_context_parallel(model, mesh.context)
    # With DTensors, a graph fails that contains its own recomputation, because torch 2.13 saves their DeviceMesh as if
    # it were a tensor. So the checkpoint is put around the graph. It then also recomputes the last matmul, which the
    # compiler would leave out.
    around = mesh.tensor is not None and (recompute.mode, recompute.selective_ac_option) != ("selective", "op")
    options = None
    if job.float8.enable and mesh.fsdp.device_type == "cuda":
        # One kernel for the scales of all weights of a block, one for their casts. The one for the casts of a backward
        # pass holds all of them at a time, which is the peak where all is recomputed. Kernels that fuse casts gave NaN
        # with rowwise scales (https://github.com/pytorch/pytorch/issues/150859). Casts that are kept are operations,
        # of which more than 30 would make the compiler write three values of SwiGLU to memory, in fp32.
        options = {
            "combo_kernels": recompute.mode != "full",
            "emulate_precision_casts": job.float8.recipe_name != "tensorwise",
            "realize_opcount_threshold": 100,
        }
    how = {"fullgraph": True, "options": options}
    if compiled and around:
        for block in model.layers.values():
            block.forward = torch.compile(block.forward, **how)
    if recompute.mode != "none":
        apply_activation_checkpointing(model, recompute, compiled and not around)
    if compiled and not around:
        for block in model.layers.values():
            block.compile(**how)  # one graph serves all blocks, because code and shapes are the same
    apply_fsdp(model, mesh.fsdp, job)
