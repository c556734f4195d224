"""Memory savers, which reduce peak GPU memory further than plain FSDP2 and torch.

`parallelism.memory_savers` selects them:

- "none": plain FSDP2.
- "safe", the default: savers without races. Each of them either cannot lengthen a step by
  construction, or lengthens it by an estimated 0.3% at most.
- "all": also savers that make the GPU wait longer. The wait has not been measured on a real GPU.

No saver changes a computed value. The docstring of each saver states its gain, its hazard, and the
test in tests/parallel/test_memory_savers.py that guards it. Gains are GiB of GPU memory for the
compiled 8B model on 8 GPUs, simulated by the ghost GPU, with 2 sequences of 8,192 tokens per GPU;
docs/internals/memory_savers.md has the whole table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanlite.config.registry import LOSSES
from titanlite.config.run import Run
from titanlite.model.llama import Llama, TransformerBlock
from titanlite.optim.adamw import create_state

ModuleGroups = list[list[nn.Module]]
"""FSDP groups: lists of modules whose parameters are gathered and freed together."""
RANKS_PER_NODE = 8
SMALL_MODEL_GROUPS = 16
"""Modules are small if they have fewer parameters than this number times
`parallelism.fsdp_min_num_params`. Freeing small modules early saves little memory."""
MIN_WORK_PER_OUTPUT_PARAM = 200_000
"""Smallest ratio (tokens of a microbatch * block parameters) / output parameters at which the GPU
may wait for the reduction of the output gradient.

At this ratio or above, the wait takes at most 0.3% of a microbatch, assuming that H100 GPUs reach
45% MFU and 370 GB/s of NVLink bandwidth. For example, the 8B model may wait 5 ms in microbatches of
more than 15,100 tokens, which take 1.7 s.
"""


def apply_memory_savers(model: Llama, mesh: DeviceMesh, run: Run) -> None:
    """Apply the optimizations that `parallelism.memory_savers` selects to an FSDP model, in place.

    Args:
        model: Model after `fully_shard`.
        mesh: Mesh of `fully_shard`.
        run: The validated job.
    """
    level = run.job.parallelism.memory_savers
    if level == "none":
        return
    skip_unshard_in_backward(model, run)
    free_gather_buffer_before_loss(model)
    reduce_in_main_stream(model, mesh, run)
    if level == "all":
        gather_in_main_stream(model)


def frees_output_after_forward(run: Run) -> bool:
    """Return whether FSDP frees the unsharded output matrix after the forward pass.

    This saves memory, but requires a loss whose backward pass does not read the matrix. An example
    is the fused cross entropy, which computes its gradients in the forward pass.
    """
    backward_reads_weight = LOSSES[run.job.training.loss].backward_reads_weight
    return run.job.parallelism.memory_savers != "none" and not backward_reads_weight


def skip_unshard_in_backward(model: Llama, run: Run) -> None:
    """Stop FSDP from all-gathering the embedding and the output matrix for the backward pass.

    The gradient of the embedding depends only on the token ids. The output matrix is not gathered
    again if the backward pass of the loss does not read it.

    Gain: 0.48 GiB of allocated memory, one all-gather of each matrix, and 6 kernel launches.
    Hazard: A backward pass that reads the output matrix would fail, so the matrix is skipped only
    if `frees_output_after_forward` allows it.
    Test: test_safe_gathers_embedding_and_output_only_for_the_forward_pass
    """
    if isinstance(model.tok_embeddings, FSDPModule):
        model.tok_embeddings.set_unshard_in_backward(False)
    if isinstance(model.output, FSDPModule) and frees_output_after_forward(run):
        model.output.set_unshard_in_backward(False)


def free_gather_buffer_before_loss(model: Llama) -> None:
    """Free the all-gather buffer of the output matrix before the loss, to save memory.

    FSDP2 copies the weights of a module out of their all-gather buffer in the forward pass, and
    keeps the buffer until it gathers the next module. No module follows the output layer, so its
    buffer, 1.0 GiB for the 8B model, would stay allocated during the loss. A hook therefore makes
    the copy before the forward pass, after which FSDP2 frees the buffer at once.

    Gain: 0.97 GiB of allocated memory with "safe", 0.98 GiB in eager mode. With "all", another
    saver has the same effect. No additional kernel launches.
    Hazard: None, because only the streams of later all-gathers wait for the copy.
    Test: test_safe_savers_lower_the_peak_of_allocated_memory
    """
    if isinstance(model.output, FSDPModule):
        model.output.register_forward_pre_hook(_unshard_before_forward, prepend=True)


def _unshard_before_forward(module: nn.Module, _args: Any) -> None:
    """Gather the parameters of an FSDP module, or wait if they are already being gathered."""
    cast(FSDPModule, module).unshard()


def regroup_norm(
    block_groups: ModuleGroups, output_groups: ModuleGroups, mesh: DeviceMesh, run: Run
) -> tuple[ModuleGroups, ModuleGroups]:
    """Move the final norm out of the FSDP group of the output projection, if this saves memory.

    FSDP frees all weights of a group together. The backward pass reads the norm, but usually not
    the projection, so FSDP can free the projection early if it is a separate group. The norm then
    joins the group of the last block, or becomes a separate group to save more memory.

    Args:
        block_groups: FSDP groups of the blocks, in forward order. Some pipeline stages have none.
        output_groups: The group [norm, projection] in a list. Empty without an output layer.
        mesh: Mesh of `fully_shard`.
        run: The validated job.

    Returns:
        The new groups of the blocks, and the new groups of the output.
    """
    # Comments show the result for a model with two blocks.
    if not output_groups or not frees_output_after_forward(run):
        return block_groups, output_groups  # [block 0] [block 1] [norm, projection]

    norm, projection = output_groups[0]
    if not block_groups or separates_norm(block_groups, projection, mesh, run):
        return block_groups, [[norm], [projection]]  # [block 0] [block 1] [norm] [projection]

    # Otherwise, save a collective: [block 0] [block 1, norm] [projection]
    *first_groups, last_group = block_groups
    return [*first_groups, [*last_group, norm]], [[projection]]


def separates_norm(blocks: ModuleGroups, output: nn.Module, mesh: DeviceMesh, run: Run) -> bool:
    """Return whether the final norm becomes a separate FSDP group, to lower the peak memory.

    FSDP2 frees the gradient of the output projection only after the backward pass of the next
    group. That pass is much shorter if the group contains only the norm than if it contains the
    last block.

    Gain: 1.33 GiB of reserved and 1.89 GiB of allocated memory, for 4 more kernel launches.
    Hazard: The GPU waits until the gradient is reduced, an estimated 5 ms for the 8B model. The
    level "safe" allows only a short wait.
    Tests: test_safe_savers_lower_the_peak_of_allocated_memory,
    test_no_saver_waits_for_the_output_if_that_costs_time_or_saves_little
    """
    shards_across_nodes = mesh.size(-1) > RANKS_PER_NODE  # the wait would be long
    if shards_across_nodes or is_small([output], run):
        return False
    return run.job.parallelism.memory_savers == "all" or _is_wait_short(blocks, output, run)


def is_small(modules: Iterable[nn.Module], run: Run) -> bool:
    """Return whether modules are so small that freeing them early saves little memory."""
    return count_params(modules) < SMALL_MODEL_GROUPS * run.job.parallelism.fsdp_min_num_params


def _is_wait_short(blocks: ModuleGroups, output: nn.Module, run: Run) -> bool:
    """Estimate whether reducing the output gradient takes at most 0.3% of a microbatch's time.

    Assume that the time of a microbatch is proportional to the number of tokens times the number of
    block parameters. Assume that the time to reduce the gradient of the output projection is
    proportional to the number of its parameters.
    """
    num_block_params = sum(count_params(group) for group in blocks)
    microbatch_work = run.local_microbatch_tokens * num_block_params
    return microbatch_work >= MIN_WORK_PER_OUTPUT_PARAM * count_params([output])


def count_params(modules: Iterable[nn.Module]) -> int:
    """Count the parameters of modules, including the shards on other ranks."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return all modules of a model that FSDP shards, which usually includes the model itself."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def keeps_reduced_gradients(run: Run) -> bool:
    """Return whether FSDP2 uses the result tensor of each reduce-scatter directly as the gradient.

    Otherwise, FSDP2 casts, accumulates or offloads the result, and frees the tensor before the main
    CUDA stream has waited for the reduce-scatter that writes it.
    """
    training = run.job.training
    is_cast = training.dtype != training.mixed_precision_reduce
    return not is_cast and run.fsdp_reduce == "step" and not training.enable_cpu_offload


def reduce_in_main_stream(model: Llama, mesh: DeviceMesh, run: Run) -> None:
    """Let FSDP allocate reduced gradients in the main CUDA stream, which can reuse their memory.

    By default, FSDP2 allocates them in another stream, whose memory the main stream cannot reuse.

    Gain: 3.75 GiB of reserved memory. No additional kernel launches.
    Hazard: The main stream may reuse freed memory while a collective still writes to it. So this
    function does nothing if FSDP2 frees reduced gradients early.
    Tests: test_only_gradients_that_are_kept_are_allocated_in_the_main_stream,
    test_a_single_rank_does_not_copy_gradients_to_reduce_them
    """
    if keeps_reduced_gradients(run):
        for module in fsdp_modules(model):
            module.set_custom_reduce_scatter(_create_reduce_scatter(mesh))


def _create_reduce_scatter(mesh: DeviceMesh) -> Any:
    """Create the object that allocates and reduces the gradients of an FSDP module."""
    if mesh.size() == 1:
        return _SingleRankReduceScatter()
    return _MainStreamReduceScatter(mesh.device_type)


class _MainStreamReduceScatter:
    """Custom FSDP2 reduce-scatter that allocates its tensors in the main CUDA stream."""

    def __init__(self, device_type: str) -> None:
        self._streams: Any = torch.get_device_module(device_type)
        self._main_stream = self._streams.current_stream()

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the input or the result of a reduce-scatter in the main stream."""
        with self._streams.stream(self._main_stream):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any
    ) -> dist.Work | None:
        # torch 2.13 renamed `reduce_scatter_tensor`.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return reduce_scatter(output_tensor, input_tensor, *args, **kwargs)


class _SingleRankReduceScatter:
    """Avoids copying gradients on a single rank: a reduction has the same input and result tensor.

    FSDP2 calls `allocate` twice per reduction, first for the input and then for the result. On a
    single rank, it then copies the input to the result instead of calling this object. Copying a
    tensor to itself does nothing.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the input on every odd call, and return it as the result on every even call."""
        if self._input is None:
            self._input = torch.empty(*size, dtype=dtype, device=device)
            return self._input
        result = self._input
        self._input = None
        return result


def gather_in_main_stream(model: Llama) -> None:
    """Allocate the results of FSDP all-gathers in the main stream, to save memory.

    Gain: 1.06 GiB of reserved memory, 1.56 GiB in eager mode. No additional kernel launches.
    Hazard: Casts and copies of weights before each all-gather also run in the main stream, so they
    no longer overlap with computation. The effect on a real GPU has not been measured.
    Test: test_each_saver_lowers_reserved_memory
    """
    # FSDP2 then allocates, casts and copies in the current stream instead of its own streams. The
    # all-gather itself remains asynchronous: NCCL runs it in a stream of the process group.
    cast(Any, model)._set_unshard_async_op(True)


def allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the moments of the fused torch AdamW before the first step to avoid fragmentation.

    torch allocates them during the first step, between large activations, which leaves holes in GPU
    memory. Other optimizers are left unchanged.

    Gain: 0.02 GiB of reserved memory, 0.14 GiB in eager mode. No additional kernel launches.
    Hazard: None, because torch would otherwise allocate the same tensors in the first step.
    Test: test_moments_exist_before_the_first_step

    Args:
        optimizer: New optimizer. In its first step, torch then finds existing moments, as after
            loading a checkpoint, and does not allocate any.
    """
    # Compare the exact type, because a subclass in a plugin may have other state.
    if type(optimizer) is not torch.optim.AdamW or optimizer.state:
        return
    # AMSGrad has a third moment.
    if all(group["fused"] and not group["amsgrad"] for group in optimizer.param_groups):
        create_state(optimizer)


def find_unneeded_matmul(block: nn.Module) -> int | None:
    """Return the number of the last matmul of a block, if the backward pass never reads its output.

    Selective activation checkpointing then does not save this output. Matmuls are numbered from 1
    in the order of execution, and each linear layer computes one.

    Gain: 4.0 GiB of allocated and reserved memory in eager mode. The compiler does this anyway.
    Hazard: If the backward pass needs the output, the matmul is computed twice.
    Tests: test_each_saver_lowers_reserved_memory, test_safe_savers_compute_nothing_again
    """
    linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
    return None if _needs_last_output(block, linears) else len(linears)


def _needs_last_output(block: nn.Module, linears: list[nn.Linear]) -> bool:
    """Return whether the backward pass needs the output of the last linear layer of a block.

    Usually the block only adds it to the residual stream, and the backward pass of an addition
    reads no values. Exceptions are a norm after the layer, and FP8 layers.
    """
    if isinstance(block, TransformerBlock) and block.norm_after:
        return True  # the backward pass of the norm reads its input

    # An FP8 layer saves its input for the backward pass only after its matmul. To restore the
    # input, the recomputation would run the matmul again, unless its output is saved.
    return any(type(linear) is not nn.Linear for linear in linears)
