"""Fully sharded data parallelism with FSDP2 (https://arxiv.org/abs/2304.11277).

Parameters, gradients and optimizer state are sharded over the data parallel ranks, block by block.
Gradients are summed over ranks and never averaged, because the loss is already divided by the
number of tokens in the global batch.

On a single rank, FSDP copies weights and gradients, so it is applied only if the job needs it; see
`needs_fsdp`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain, pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.config.schema import Training
from titanlite.model.llama import Llama
from titanlite.parallel import memory_savers
from titanlite.parallel.memory_savers import ModuleGroups, count_params, fsdp_modules

PLAIN_TENSOR_OPTIMIZERS = ("AdamW", "Lion", "SGD")
"""Optimizers that accept plain tensors. Muon, AdamW8bit and the optimizers of plugins always get
DTensors, which FSDP creates."""


def apply_fsdp(model: Llama, mesh: DeviceMesh, run: Run) -> None:
    """Shard a model or pipeline stage with FSDP2, in place.

    The embedding, the blocks, the final norm with the output projection, and the model itself
    become FSDP groups. The parameters of a group are gathered and freed together.

    Args:
        model: Model on the meta device, after all other transformations.
        mesh: Mesh of shape (shard,), or (replicate, shard) for HSDP.
        run: The validated job and the number of ranks. The job selects dtypes, resharding, CPU
            offload and memory savers.
    """
    shard: Any = partial(fully_shard, mesh=mesh, **_build_policies(mesh, run))
    embedding, blocks, output = _group_modules(model, run)
    blocks, output = memory_savers.regroup_norm(blocks, output, mesh, run)

    # Decide which groups free their parameters after the forward pass, and gather them again for
    # the backward pass:
    #
    #     option    | embedding | blocks                 | output
    #     "always"  | yes       | yes                    | yes
    #     "default" | yes       | unless few or small    | no, the backward pass starts with it
    #     "never"   | no        | no                     | no
    #
    # With a pipeline, "default" means "never". Without a pipeline, `configure_microbatch` overrides
    # the column "output" before each microbatch. Memory savers skip the second gather of the
    # embedding and, if the loss allows it, of the output (`skip_unshard_in_backward`).
    reshard = run.job.parallelism.fsdp_reshard_after_forward
    if reshard == "default" and run.degrees.pipeline > 1:
        reshard = "never"  # otherwise every microbatch would gather the parameters again
    always_reshards = reshard == "always"
    reshards_blocks = reshard == "default" and _should_reshard(blocks, mesh, run)

    # Shard the inner modules first: the model itself gets the parameters that no group contains.
    for group in embedding:
        shard(group, reshard_after_forward=reshard != "never")
    for group in blocks:
        shard(group, reshard_after_forward=always_reshards or reshards_blocks)
    for group in output:
        shard(group, reshard_after_forward=always_reshards)
    shard(model, reshard_after_forward=always_reshards)

    # The final norm may be a separate output group. It is small, so prefetch only the projection.
    _prefetch_groups([*embedding, *blocks, *output[-1:]])
    _sum_gradients(model, mesh)
    if run.job.parallelism.enable_fsdp_symmetric_memory:
        use_symmetric_memory(model, mesh.device_type)
    # By default, free some buffers earlier than FSDP does, and skip two all-gathers.
    memory_savers.apply_memory_savers(model, mesh, run)


def needs_fsdp(model: Llama, device_type: str, run: Run) -> bool:
    """Return whether a job needs FSDP for a model, or saves memory with it.

    All jobs on several ranks need FSDP. If this function returns False, training without FSDP gives
    bitwise identical results, except with rare plugin models; see
    titanlite/parallel/mixed_precision.py.

    Args:
        model: Model or pipeline stage on the meta device.
        device_type: "cuda" or "cpu".
        run: The validated job and the number of ranks.
    """
    job = run.job
    return (
        run.degrees.world > 1
        or _casts_with_fsdp(job.training, device_type)
        or _shares_parameters(model)  # FSDP preserves sharing when it allocates parameters
        or job.training.enable_cpu_offload  # FSDP copies parameters to the GPU
        or job.float8.enable  # FSDP all-gathers FP8 weights
        or job.optimizer.name not in PLAIN_TENSOR_OPTIMIZERS  # others need DTensors
    )


def _casts_with_fsdp(training: Training, device_type: str) -> bool:
    """Return whether a job on a single rank uses FSDP to cast its weights or gradients.

    If only weights are cast, from fp32 and on a CPU, `cast_weights` does it without the copies that
    FSDP makes. On a GPU, FSDP saves memory, because it frees the cast weights of most blocks after
    their forward pass.
    """
    casts_weights = training.mixed_precision_param != training.dtype
    casts_gradients = training.mixed_precision_reduce != training.dtype
    can_cast_without_fsdp = device_type == "cpu" and training.dtype == "float32"
    return casts_gradients or (casts_weights and not can_cast_without_fsdp)


def _shares_parameters(model: nn.Module) -> bool:
    """Return whether modules share any parameter, as in some plugin models.

    FSDP preserves sharing within an FSDP group. Without FSDP, `to_empty` would allocate a separate
    copy of the parameter for each module.
    """
    parameters_by_name = list(model.named_parameters(remove_duplicate=False))
    return len(parameters_by_name) > len(list(model.parameters()))


def _prefetch_groups(groups: ModuleGroups) -> None:
    """Let FSDP all-gather the parameters of a group while the previous group computes.

    Args:
        groups: FSDP groups in forward order.
    """
    for group, next_group in pairwise(groups):
        # One module is enough, because all modules of a group share its state.
        module = cast(FSDPModule, group[0])
        next_module = cast(FSDPModule, next_group[0])
        module.set_modules_to_forward_prefetch([next_module])


def _sum_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Configure FSDP to sum gradients over the ranks instead of averaging them."""
    for module in fsdp_modules(model):
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
        # Without this setting, torch applies the factor of 1 with PREMUL_SUM, which gloo lacks.
        module.set_force_sum_reduction_for_comms(True)


def use_symmetric_memory(model: nn.Module, device_type: str) -> None:
    """Allocate the buffers of FSDP collectives in symmetric memory, for all FSDP groups of a model.

    Raises:
        UserError: If the ranks do not run on GPUs, or torch is older than 2.13.
    """
    if device_type != "cuda" or not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        raise UserError(
            "parallelism.enable_fsdp_symmetric_memory = true requires GPUs and torch 2.13. "
            "Set it to false."
        )
    for module in fsdp_modules(model):
        module.set_symm_mem_for_comm()


def _build_policies(mesh: DeviceMesh, run: Run) -> dict[str, Any]:
    """Return the arguments of `fully_shard` for mixed precision and CPU offload."""
    training = run.job.training
    mp_policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        # Activations already have the compute dtype, and the RoPE table must stay in fp32.
        cast_forward_inputs=False,
    )
    offload_policy = OffloadPolicy()
    if training.enable_cpu_offload:
        offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return {"mp_policy": mp_policy, "offload_policy": offload_policy}


def _group_modules(model: Llama, run: Run) -> tuple[ModuleGroups, ModuleGroups, ModuleGroups]:
    """Divide the modules of a model into FSDP groups, which are gathered and freed together.

    Small blocks share a group, because each group costs about a millisecond per step on a CPU.
    Modules that are in no group, such as tied embeddings, become part of the root FSDP module.

    Returns:
        Lists of the embedding groups, block groups and output groups, each in forward order. All
        are empty for a small model.
    """
    min_size = run.job.parallelism.fsdp_min_num_params
    if count_params([model]) < min_size:
        return [], [], []

    embedding: ModuleGroups = []
    if model.tok_embeddings is not None and not model.arch.tied_embeddings:
        embedding = [[model.tok_embeddings]]
    blocks = _group_blocks(model.layers.values(), min_size)
    output: ModuleGroups = []
    if model.norm is not None and model.output is not None:
        output = [[model.norm, model.output]]
    return embedding, blocks, output


def _group_blocks(blocks: Iterable[nn.Module], min_size: int) -> ModuleGroups:
    """Group consecutive blocks so that all groups but the last have at least `min_size` parameters.

    For example, blocks of 40 parameters with a `min_size` of 100 form groups of three.
    """
    groups: ModuleGroups = []
    for block in blocks:
        if groups and count_params(groups[-1]) < min_size:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _should_reshard(blocks: ModuleGroups, mesh: DeviceMesh, run: Run) -> bool:
    """Return whether FSDP frees block parameters between the forward and the backward pass.

    This applies to jobs with `fsdp_reshard_after_forward` = "default". If there is only one group,
    it stays unsharded, because the backward pass starts with it. On a single rank, small blocks
    also stay unsharded: freeing them saves little memory, and copying them again takes 1% of a
    step.
    """
    is_single_rank = mesh.size() == 1
    are_blocks_small = memory_savers.is_small(chain(*blocks), run)
    return len(blocks) > 1 and not (is_single_rank and are_blocks_small)


def configure_microbatch(
    model: Llama,
    *,
    reduces_gradients: bool,
    frees_output_after_forward: bool,
    frees_output_after_backward: bool,
) -> None:
    """Configure when FSDP reduces gradients and frees the output matrix in the next microbatch.

    In a step with several microbatches, gradients need only be reduced in the last one, and keeping
    the output matrix unsharded until then saves all-gathers. Call this function before the forward
    pass of each microbatch. Without FSDP, it does nothing.

    Args:
        model: Model after `apply_fsdp`.
        reduces_gradients: Reduce the accumulated gradients over the ranks in the backward pass. If
            False, FSDP accumulates unsharded gradients.
        frees_output_after_forward: Free the output matrix after the forward pass. This has no
            effect if the matrix belongs to the root module.
        frees_output_after_backward: Free the output matrix after the backward pass.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(reduces_gradients)

    # With tied embeddings or in a small model, the output matrix belongs to the root module.
    # `apply_fsdp` has set whether the root module frees it after the forward pass.
    model.set_reshard_after_backward(frees_output_after_backward, recurse=False)

    if isinstance(model.output, FSDPModule):
        model.output.set_reshard_after_backward(frees_output_after_backward, recurse=False)
        model.output.set_reshard_after_forward(frees_output_after_forward, recurse=False)
