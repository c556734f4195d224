"""Reductions of peak GPU memory that plain FSDP2 and torch do not make.

`parallelism.memory_savers` selects them:

- "none": plain FSDP2.
- "safe", the default: savers without races that cannot make a step longer by construction.
- "all": also savers that make the GPU wait, for a time that has not been measured on a real GPU.

No saver changes a value. The gains below are reserved GiB of the 8B model on 8 H100 with 2
sequences of 8,192 tokens per GPU, eager or compiled, measured on the simulated GPU.
docs/internals/memory_savers.md compares the savers. Their tests are in
tests/parallel/test_memory_savers.py.
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
from titanlite.model.llama import Llama
from titanlite.optim.adamw import AdamW, new_state

RANKS_PER_NODE = 8


def apply_memory_savers(model: Llama, mesh: DeviceMesh, run: Run) -> None:
    """Apply the selected optimizations that reduce the memory of FSDP, in place.

    Args:
        model: Model after `fully_shard`.
        mesh: Mesh of `fully_shard`.
        run: The validated job.
    """
    level = run.job.parallelism.memory_savers
    if level == "none":
        return
    skip_unshard_in_backward(model, run)
    if are_reductions_final(run):
        reduce_in_main_stream(model, mesh)
    if level == "all":
        gather_in_main_stream(model)


def frees_output_before_backward(run: Run) -> bool:
    """Return whether the output matrix is freed after the forward pass and not gathered again.

    Its backward pass does not need the matrix if the forward pass of the loss computes all
    gradients, as the fused cross entropy does.
    """
    backward_reads_weight = LOSSES[run.job.training.loss].backward_reads_weight
    return run.job.parallelism.memory_savers != "none" and not backward_reads_weight


def skip_unshard_in_backward(model: Llama, run: Run) -> None:
    """Do not gather the embedding and the output matrix for the backward pass (safe).

    The gradient of the embedding needs only the token ids. Saves one all-gather of each matrix.

    Gain: 2.3 GiB.
    Hazard: A loss whose backward pass reads the matrix would read freed memory.
    Test: test_safe_gathers_embedding_and_output_only_for_the_forward_pass
    """
    if isinstance(model.tok_embeddings, FSDPModule):
        model.tok_embeddings.set_unshard_in_backward(False)
    if isinstance(model.output, FSDPModule) and frees_output_before_backward(run):
        model.output.set_unshard_in_backward(False)


def regroup_norm(
    blocks: list[list[nn.Module]], output: list[list[nn.Module]], mesh: DeviceMesh, run: Run
) -> tuple[list[list[nn.Module]], list[list[nn.Module]]]:
    """Separate the final norm from the output projection, so that FSDP2 can free the latter early.

    The backward pass of the norm needs its weight, so the norm joins the last group of blocks. See
    `skip_unshard_in_backward` for gain, hazard and test.

    Args:
        blocks: Modules of each FSDP group of blocks, in forward order.
        output: The FSDP group of the final norm and the output projection, if there is one.
        mesh: Mesh of `fully_shard`.
        run: The validated job.

    Returns:
        New values of `blocks` and `output`.
    """
    if not output or not frees_output_before_backward(run):
        return blocks, output

    ((norm, projection),) = output
    if not blocks or reduces_output_first(projection, mesh, run):
        return blocks, [[norm], [projection]]
    *other_blocks, last_blocks = blocks
    return [*other_blocks, [*last_blocks, norm]], [[projection]]


def reduces_output_first(output: nn.Module, mesh: DeviceMesh, run: Run) -> bool:
    """Return whether to make the final norm an FSDP group by itself as well ("all" only).

    FSDP2 waits for a reduce-scatter before it starts the next one, and keeps the input buffer until
    then. The buffer of the output layer takes 2 GiB for the 8B model. If the norm is the next group
    to reduce, this buffer is freed before the last block needs memory.

    Gain: 1.3 GiB compiled, 0.1 GiB eager.
    Hazard: The GPU waits for the reduce-scatter of the output layer. Across nodes the wait would be
        long, and a small output layer does not justify another group, so the norm then joins the
        last group of blocks.
    Test: test_each_saver_lowers_reserved_memory
    """
    parallelism = run.job.parallelism
    num_params = sum(parameter.numel() for parameter in output.parameters())
    is_large = num_params >= 16 * parallelism.fsdp_min_num_params
    is_within_node = mesh.size(-1) <= RANKS_PER_NODE  # the last dimension is the shard dimension
    return parallelism.memory_savers == "all" and is_large and is_within_node


def are_reductions_final(run: Run) -> bool:
    """Return whether FSDP2 uses the result of each reduce-scatter directly as the gradient.

    If it casts, accumulates or offloads the result, it frees the memory before the main stream has
    waited for the collective. The memory must then not come from the main stream.
    """
    training = run.job.training
    is_cast = training.dtype != training.mixed_precision_reduce
    return not is_cast and run.fsdp_reduce == "step" and not training.enable_cpu_offload


def reduce_in_main_stream(model: Llama, mesh: DeviceMesh) -> None:
    """Allocate results of reduce-scatters in the main stream (safe).

    Memory that the caching allocator reserves for another stream is not available to the main
    stream. FSDP2 makes its stream wait for the main stream before it allocates a result, so no
    further wait is needed.

    Gain: 3.8 GiB compiled, 3.9 GiB eager.
    Hazard: A result that is freed early would be overwritten while the collective still writes to
        it; see `are_reductions_final`.
    Test: test_only_results_that_stay_are_allocated_in_the_main_stream
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            reduce_scatter: Any = _MainStreamReduceScatter(mesh.device_type)
            module.set_custom_reduce_scatter(reduce_scatter)


class _MainStreamReduceScatter:
    """The default reduce-scatter of FSDP2, but with its result allocated in the main stream."""

    def __init__(self, device_type: str) -> None:
        self._streams: Any = torch.get_device_module(device_type)
        self._main_stream = self._streams.current_stream()

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the result of a reduce-scatter in the main stream."""
        with self._streams.stream(self._main_stream):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any
    ) -> dist.Work | None:
        # The second name is the one before torch 2.13.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return reduce_scatter(output_tensor, input_tensor, *args, **kwargs)


def gather_in_main_stream(model: Llama) -> None:
    """Allocate the results of all-gathers in the main stream ("all" only).

    Gain: 2.9 GiB compiled, 2.5 GiB eager.
    Hazard: Casts and copies of weights before an all-gather run in the main stream, between the
        computation of two blocks, instead of overlapping with it.
    Test: test_each_saver_lowers_reserved_memory
    """
    cast(Any, model)._set_unshard_async_op(True)


def allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the moments of the fused AdamW of torch before the first step (safe).

    torch allocates them during the first step, between large activations, and small moments then
    leave holes in GPU memory. The optimizers of titanlite always allocate their state first.

    Gain: 0.3 GiB compiled, 0.2 GiB eager.
    Hazard: None. torch reads state that exists, as it does after loading a checkpoint.
    Test: test_moments_exist_before_the_first_step
    """
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:
                optimizer.state[parameter] = new_state(parameter, AdamW.moments)


def find_unneeded_matmul(block: nn.Module) -> int:
    """Return which matmul of a block, counted from 1, selective recomputation need not save (safe).

    The output of the last matmul is only added to the residual stream, so the backward pass does
    not need it, and recomputation stops before it. The result is 0 for a block with FP8 layers,
    because an FP8 layer in eager mode recomputes its matmul anyway.

    Gain: 5.3 GiB eager.
    Hazard: None. A block that needs the output after all recomputes it.
    Test: test_each_saver_lowers_reserved_memory
    """
    linear_types = [type(module) for module in block.modules() if isinstance(module, nn.Linear)]
    has_float8_layers = set(linear_types) != {nn.Linear}
    return 0 if has_float8_layers else len(linear_types)
