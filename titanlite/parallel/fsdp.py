"""FSDP2: parameters, gradients and optimizer state are sharded block by block (https://arxiv.org/abs/2304.11277).

Invariant: gradients are summed over ranks and never averaged, because the loss is already divided by the number of
tokens of the global batch. One process is a world of size one and takes the same path.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from titanlite.config.schema import JobConfig
from titanlite.model.llama import Llama
from titanlite.optim.loss import tokens_per_chunk
from titanlite.parallel.spare_copies import spare_copies

RANKS_OF_A_MACHINE = 8


def apply_fsdp(model: Llama, mesh: DeviceMesh, job: JobConfig) -> None:
    """Shard `model` in place: the embedding, each block, the output, then the root. The norm is with the last block, or
    alone if that frees much memory earlier.

    A tied embedding stays in the root group, together with the norm. It stays gathered from the look-up to the output
    projection. Small blocks share a group, and a small model is one group, because each group costs about a
    millisecond per step on a CPU for collectives and hooks, whatever its size. That is a large part of a small step.
    """
    training = job.training
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,  # activations have the compute dtype already; the rotary table must stay fp32
    )
    pinned = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    offload = pinned if training.enable_cpu_offload else OffloadPolicy()
    reshard = job.parallelism.fsdp_reshard_after_forward
    if reshard == "default" and job.parallelism.pipeline_parallel_degree > 1:
        reshard = "never"  # otherwise every microbatch would gather the stage again

    def shard(module: nn.Module | list[nn.Module], reshard_after_forward: bool) -> None:
        how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
        fully_shard(module, reshard_after_forward=reshard_after_forward, **how)  # pyright: ignore

    groups: list[list[nn.Module]] = []
    if _size([model]) >= job.parallelism.fsdp_min_num_params:  # otherwise the root is the only group
        if model.tok_embeddings is not None and not model.arch.tied_embeddings:
            shard(model.tok_embeddings, reshard != "never")
            # Its gradient needs the token ids only.
            cast(FSDPModule, model.tok_embeddings).set_unshard_in_backward(False)
        if model.norm is not None and model.output is not None:
            shard(model.output, reshard == "always")
            cast(FSDPModule, model.output).set_unshard_in_backward(False)  # the loss has computed its gradient
            tokens = training.local_batch_size * training.seq_len // job.parallelism.context_parallel_degree
            gather = _AllGather(tokens_per_chunk(tokens) / model.arch.dim)
            cast(FSDPModule, model.output).set_custom_all_gather(cast(Any, gather))
        groups = _group(model.layers.values(), job.parallelism.fsdp_min_num_params)
        if model.norm is not None and model.output is not None:
            # FSDP2 waits for a reduction before it begins the next one. The output's holds 2 GiB (8b). Within a machine
            # it takes 5 ms, and the norm's is the next one, so that the memory is free for the last block. A small
            # output is not worth a group more.
            large = _size([model.output]) >= 16 * job.parallelism.fsdp_min_num_params
            if not groups or (large and mesh.size(-1) <= RANKS_OF_A_MACHINE):
                shard(model.norm, reshard == "always")
            else:
                groups[-1].append(model.norm)
    # A single group of blocks stays gathered, because the backward pass begins with it. The blocks also stay gathered
    # if they are small and there is a single rank: copying them again would cost a hundredth of a small step.
    little = mesh.size() == 1 and _size(model.layers.values()) < 16 * job.parallelism.fsdp_min_num_params
    for group in groups:
        shard(group, reshard == "always" or (reshard == "default" and len(groups) > 1 and not little))
    shard(model, reshard == "always")

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
        # Otherwise a factor of 1 means PREMUL_SUM, which gloo does not have.
        module.set_force_sum_reduction_for_comms(True)
    once = training.dtype == training.mixed_precision_reduce and job.parallelism.fsdp_reduce == "step"
    if once and not training.enable_cpu_offload:
        for module in sharded:
            module.set_custom_reduce_scatter(cast(Any, _ReduceScatter(mesh.device_type)))
    if mesh.size() == 1 and not training.enable_cpu_offload:
        spare_copies(sharded, None if training.mixed_precision_param == training.dtype else policy.param_dtype)
    leaders = cast(list[FSDPModule], [group[0] for group in groups])  # the modules of a group share their state
    ahead, behind = job.parallelism.fsdp_forward_prefetch, job.parallelism.fsdp_backward_prefetch
    targets = [*leaders, *([model.output] if isinstance(model.output, FSDPModule) else [])]
    for i, leader in enumerate(leaders):
        leader.set_modules_to_forward_prefetch(targets[i + 1 : i + 1 + max(1, ahead)])
        leader.set_modules_to_backward_prefetch(leaders[max(0, i - behind) : i][::-1])  # 0: as FSDP2 does by itself
    # All-gathers take the memory of the main stream, and none that only they can use. Their input is made in that
    # stream, before the block that is computed while they run.
    cast(Any, model)._set_unshard_async_op(True)


class _AllGather:
    """FSDP2's own all-gather of the output matrix, into memory that is large enough for the gradient in fp32 and for
    the logits.

    FSDP2 copies the weights from there and frees it just before the loss, whose tensors then take all of it. They would
    not fit into a place of the size of the weights, which would be lost until the backward pass.

    Args:
        logits: elements of the logits that exist at a time, for each element of the matrix.
    """

    def __init__(self, logits: float) -> None:
        self._logits = logits

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = size
        room = numel * 4 // dtype.itemsize + int(numel * self._logits)
        return torch.empty(room, dtype=dtype, device=device)[:numel]

    __call__ = staticmethod(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)  # torch < 2.13


class _ReduceScatter:
    """FSDP2's own reduce-scatter, but for the stream whose memory its result takes.

    A result is the gradient of a shard. FSDP2 allocates it in the stream of the collective, where its memory stays
    reserved in the forward pass, in which no gradient exists. Here it takes the memory of activations that the backward
    pass has freed. The collective waits for all work before it, and the main stream for all collectives before the
    gradients are used and freed. So no result may be freed earlier, as those are that FSDP2 converts, adds to a
    gradient or sends to the host.
    """

    def __init__(self, device_type: str) -> None:
        self._streams: Any = torch.get_device_module(device_type)
        self._main = self._streams.current_stream()

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with self._streams.stream(self._main):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **more: Any) -> dist.Work | None:
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.13
        return reduce_scatter(output_tensor, input_tensor, *rest, **more)


def _group(blocks: Iterable[nn.Module], least: int) -> list[list[nn.Module]]:
    """Groups of consecutive blocks, each with at least `least` parameters. The last group may have fewer."""
    groups: list[list[nn.Module]] = []
    for block in blocks:
        if groups and _size(groups[-1]) < least:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _size(modules: Iterable[nn.Module]) -> int:
    """Number of parameters, including those on other ranks."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def set_gradient_sync(model: Llama, reduce: bool, last_microbatch: bool) -> None:
    """Set whether the gradients of this microbatch are reduced, together with those of earlier microbatches.

    The output matrix is the largest of all, so it stays gathered from the first microbatch to the last.
    """
    cast(FSDPModule, model).set_requires_gradient_sync(reduce)
    for module in (model, model.output):  # a tied output is in the root's group
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(last_microbatch, recurse=False)
    if isinstance(model.output, FSDPModule):
        model.output.set_reshard_after_forward(last_microbatch, recurse=False)


def free_gathered(model: nn.Module) -> None:
    """Free the parameters that a forward pass without a backward pass has left gathered. Then `parameters()` are
    shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
