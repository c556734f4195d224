"""THE ORDER: how a meta-device Llama becomes its sharded, checkpointed, compiled self.

Invariant: each step comes before those that must see its result; docs/parallelism.md gives the reasons.
May import torch, model, config and the other modules of this room.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from titanlite.config.schema import JobConfig
from titanlite.model.flavors import architecture
from titanlite.model.llama import Llama
from titanlite.parallel.activation_checkpoint import apply_activation_checkpointing
from titanlite.parallel.float8 import convert_to_float8
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.init import materialize
from titanlite.parallel.mesh import Mesh


def build_model(job: JobConfig, mesh: Mesh, device: torch.device, log: Callable[[str], None]) -> Llama:
    """Build, parallelize and initialise the model that `job` describes; its shards end on `device`."""
    with torch.device("meta"):
        model = Llama(architecture(job.model))
    model.to(getattr(torch, job.training.init_dtype))
    parallelize(model, mesh, job, log)
    materialize(model, torch.device("cpu") if job.training.enable_cpu_offload else device, job.training.seed)
    # Cast once sharded: a full-precision copy of the whole model never exists, and the optimizer's state follows.
    return model.to(getattr(torch, job.training.dtype))


def parallelize(model: Llama, mesh: Mesh, job: JobConfig, log: Callable[[str], None]) -> None:
    """Apply every transformation that `job` asks for, in place."""
    if job.float8.enable:
        convert_to_float8(model, job.float8, log)
    if job.activation_checkpoint.mode != "none":
        apply_activation_checkpointing(model, job.activation_checkpoint)
    if job.compile.enable and "model" in job.compile.components:
        for block in model.layers:
            block.compile(fullgraph=True)  # one graph serves all blocks: they share their code and shapes
    apply_fsdp(model, mesh.fsdp, job)
