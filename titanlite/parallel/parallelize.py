"""Apply all model transformations in the order in which they depend on each other.

The order is FP8, tensor parallelism, context parallelism, mixed precision without FSDP, activation
checkpointing and compilation, then FSDP. docs/internals/architecture.md gives the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from titanlite.config import schema
from titanlite.config.errors import UserError
from titanlite.config.registry import resolve
from titanlite.config.run import Run
from titanlite.model.llama import Llama
from titanlite.parallel.activation_checkpoint import apply_activation_checkpointing
from titanlite.parallel.context import apply_context_parallel
from titanlite.parallel.float8 import convert_to_float8
from titanlite.parallel.fsdp import apply_fsdp, needs_fsdp
from titanlite.parallel.init_weights import keep_shard
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.mixed_precision import cast_weights
from titanlite.parallel.pipeline import join_stages, local_stages
from titanlite.parallel.tensor import apply_tensor_parallel, enable_async_tensor_parallel


@dataclass(frozen=True)
class ShardedModel:
    """This rank's part of a sharded model.

    Attributes:
        whole: One module with all parameters of this rank, for the optimizer and checkpoints.
            Parameters have the names of the unsharded model, for example
            "layers.3.attention.wq.weight".
        stages: Modules of this rank's pipeline stages, by stage number. Without a pipeline, stage 0
            is `whole`.
    """

    whole: Llama
    stages: dict[int, Llama]


def build_model(
    run: Run,
    mesh: Mesh,
    device: torch.device,
    log: Callable[[str], None],
    has_float8: bool | None = None,
) -> ShardedModel:
    """Build, shard and initialize this rank's part of the model.

    Args:
        run: The validated job and the number of ranks.
        mesh: Layout of the ranks.
        device: Device of the shards. With the meta device, nothing is allocated.
        log: Function that logs a line.
        has_float8: Whether the GPUs support the FP8 matmuls of the job. By default, detect their
            support.

    Raises:
        UserError: If modules of a plugin share a parameter, but are in different FSDP groups.
    """
    stages = {
        number: _build_stage(blocks, run, mesh, device, log, has_float8)
        for number, blocks in local_stages(run, mesh).items()
    }
    return ShardedModel(whole=join_stages(list(stages.values())), stages=stages)


def _build_stage(
    blocks: range,
    run: Run,
    mesh: Mesh,
    device: torch.device,
    log: Callable[[str], None],
    has_float8: bool | None,
) -> Llama:
    """Build, shard and initialize the model or a pipeline stage with the given blocks.

    Parameters on the meta device take no memory, so only the shards of this rank are allocated.
    They are initialized in `training.init_dtype`, and then converted to `training.dtype`.
    """
    training = run.job.training
    model_class = resolve(run.arch.model)
    with torch.device("meta"):
        stage = model_class(run.arch, blocks)
    stage.to(getattr(torch, training.init_dtype))
    num_unsharded_parameters = len(list(stage.parameters()))
    parallelize(stage, mesh, run, log, has_float8)
    _materialize(stage, device, training)
    _check_no_shared_parameters(stage, num_unsharded_parameters, model_class.__name__)
    return stage.to(getattr(torch, training.dtype))


def _check_no_shared_parameters(model: Llama, num_parameters: int, class_name: str) -> None:
    """Check that no parameter is shared by different FSDP groups, as can happen in plugin models.

    Each group allocates a separate copy of a shared parameter, so sharding would increase the
    number of parameters.

    Args:
        model: Model or pipeline stage, after its parameters have been allocated.
        num_parameters: Number of its parameters before sharding.
        class_name: Name of the model class, for the error message.

    Raises:
        UserError: If several groups share a parameter.
    """
    if len(list(model.parameters())) > num_parameters:
        raise UserError(
            f"Blocks of {class_name} share a parameter, but belong to different FSDP "
            "groups, which cannot share parameters. Set parallelism.fsdp_min_num_params to a "
            "larger number than the model has parameters, so that there is only one group."
        )


def _materialize(model: Llama, device: torch.device, training: schema.Training) -> None:
    """Allocate the shards of a model that is on the meta device, and initialize its weights.

    Args:
        model: Model or pipeline stage after `parallelize`.
        device: Device on which the initial values are drawn. With the meta device, the model is
            left unchanged.
        training: Section [training] of the job. With CPU offload, the shards are allocated on the
            CPU instead of on `device`.
    """
    if device.type == "meta":
        return
    model.to_empty(device="cpu" if training.enable_cpu_offload else device)
    model.init_weights(training.seed, keep_shard, device)


def parallelize(
    model: Llama,
    mesh: Mesh,
    run: Run,
    log: Callable[[str], None],
    has_float8: bool | None,
) -> None:
    """Apply all parallelism and memory options of a job to a model or pipeline stage, in place.

    The order matters. FP8 replaces linear layers, so it comes first. Activation checkpointing
    follows `cast_weights`, because it repeats the casts in the backward pass. FSDP comes last,
    because it shards the DTensors of tensor parallelism again, and adds hooks around each block.

    Args:
        model: Model or pipeline stage on the meta device.
        mesh: Layout of the ranks.
        run: The validated job.
        log: Function that logs a line.
        has_float8: Whether the GPUs support the FP8 matmuls of the job. If None, detect it.
    """
    job = run.job
    compute_dtype = job.training.mixed_precision_param
    is_compiled = run.compiles("model")
    if job.float8.enable:
        convert_to_float8(
            model,
            job.float8,
            log,
            compiled=is_compiled,
            has_hardware=has_float8,
            compute_dtype=compute_dtype,
        )

    if mesh.tensor is not None:
        # Activations can be gathered in FP8 only with one scale per tensor.
        gather_float8 = job.float8.enable and job.float8.recipe_name == "tensorwise"
        apply_tensor_parallel(model, mesh.tensor, gather_float8)
        if job.parallelism.enable_async_tensor_parallel:
            enable_async_tensor_parallel(mesh.tensor)

    if mesh.context is not None:
        apply_context_parallel(model, mesh.context)

    uses_fsdp = needs_fsdp(model, mesh.fsdp.device_type, run)
    if not uses_fsdp and compute_dtype != job.training.dtype:
        # Cast the weights for mixed precision in each forward pass, as FSDP would.
        cast_weights(model, getattr(torch, compute_dtype), is_compiled)
    checkpoint_and_compile(model, mesh, run)
    if uses_fsdp:
        apply_fsdp(model, mesh.fsdp, run)


def checkpoint_and_compile(model: Llama, mesh: Mesh, run: Run) -> None:
    """Apply activation checkpointing and `torch.compile` to the blocks, if the job enables them.

    All blocks share one compiled graph, or two if only some of them have a sliding window.
    """
    config = run.job.activation_checkpoint
    uses_savers = run.job.parallelism.memory_savers != "none"
    add_checkpointing = partial(
        apply_activation_checkpointing, model, config, uses_savers=uses_savers
    )
    compile_options: dict[str, Any] = {"fullgraph": True, "options": inductor_options(mesh, run)}

    if not run.compiles("model"):
        add_checkpointing(is_compiled=False)
    elif _can_compile_recomputation(mesh, config):
        # Compile each block together with its recomputation, so that the compiler optimizes both.
        add_checkpointing(is_compiled=True)
        for block in model.layers.values():
            block.compile(**compile_options)
    else:
        # Compile only the forward pass. Then wrap the compiled forward pass in checkpointing.
        for block in model.layers.values():
            block.forward = torch.compile(block.forward, **compile_options)
        add_checkpointing(is_compiled=False)


def _can_compile_recomputation(mesh: Mesh, config: schema.ActivationCheckpoint) -> bool:
    """Return whether torch can compile a block together with its activation checkpointing.

    With tensor parallelism, torch 2.13 can do this only in the selective mode "op". In other modes,
    it would treat the DeviceMesh of a DTensor as a tensor to save, and fail.
    """
    is_selective_by_op = config.mode == "selective" and config.selective_ac_option == "op"
    return mesh.tensor is None or is_selective_by_op


def inductor_options(mesh: Mesh, run: Run) -> dict[str, Any] | None:
    """Return the Inductor options for compiled blocks. Only FP8 layers on GPUs need options.

    Returns:
        Options for `torch.compile`, or None for the defaults.
    """
    job = run.job
    if not job.float8.enable or mesh.fsdp.device_type != "cuda":
        return None
    return {
        # Launch fewer kernels: combine independent ones, such as the casts of all weights of a
        # block. A combined kernel keeps more tensors alive, which would raise the peak memory of
        # full activation checkpointing.
        "combo_kernels": job.activation_checkpoint.mode != "full",
        # Round to bf16 as often as in eager mode. Otherwise, rowwise scales can lead to NaN:
        # https://github.com/pytorch/pytorch/issues/150859
        "emulate_precision_casts": job.float8.recipe_name != "tensorwise",
        # Fuse up to 100 operations before a result is written to memory. The emulated casts count
        # as operations, so the default of 30 would write three results of SwiGLU in fp32.
        "realize_opcount_threshold": 100,
    }
