"""Leaves out the copies that FSDP2 makes on a single rank.

Invariant: weights and gradients are bitwise the same as with FSDP2 alone. This is the only module that uses internals
of FSDP2. They are the same in torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def spare_copies(modules: Iterable[FSDPModule], dtype: torch.dtype | None) -> None:
    """Let blocks compute on the shards themselves, or on one conversion of them to `dtype`.

    The shards of a single rank are whole parameters, but FSDP2 copies them to gather them, and copies gradients to
    reduce them. Here the gathered parameters are the shards and are never freed, and gradients become the gradients of
    the shards without a copy. Weights of the FP8 all-gather are still copied.
    """
    for module in modules:
        group: Any = module._get_fsdp_state()._fsdp_param_group
        own = group.fsdp_params if group else ()
        gathered = [hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather") for parameter in own]
        if own and dtype is not None and not any(gathered):
            group.wait_for_unshard = partial(_convert_all, group, dtype)
        for parameter, in_fp8 in zip(own, gathered, strict=True):
            parameter.accumulate_unsharded_grad_if_needed = partial(_take_gradient, group, parameter)
            if in_fp8:
                continue
            if dtype is None:
                parameter.init_all_gather_outputs = partial(_alias, parameter)
                parameter.free_unsharded_param = lambda: None
            else:
                parameter.init_all_gather_outputs = partial(_convert, parameter, dtype)


def _alias(parameter: Any, *_: object, **__: object) -> None:
    parameter.all_gather_outputs = [parameter._sharded_param_data]


def _convert(parameter: Any, dtype: torch.dtype, *_: object, **__: object) -> None:
    if not parameter.all_gather_outputs:
        data = parameter._sharded_param_data
        parameter.all_gather_outputs = [torch.empty(data.numel(), dtype=dtype, device=data.device)]
    parameter.param_dtype = None  # so that the copy into the output converts


def _convert_all(group: Any, dtype: torch.dtype) -> None:
    """As `_convert` and FSDP2 would, in one call for all parameters of the group."""
    if group._all_gather_result is None:
        return
    shards, outputs = [parameter._sharded_param_data for parameter in group.fsdp_params], []
    for parameter, shard in zip(group.fsdp_params, shards, strict=True):
        parameter.init_all_gather_outputs([shard.numel()], [dtype], 1, shard.device)
        parameter.alloc_all_gather_outputs()
        outputs += parameter.all_gather_outputs
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(outputs)):  # pyright: ignore
        torch._foreach_copy_(outputs, shards)  # pyright: ignore
    for parameter in group.fsdp_params:
        parameter.init_unsharded_param()
    group._to_unsharded()
    group._all_gather_result = None


def _take_gradient(group: Any, parameter: Any) -> None:
    """Called when the gradient of a microbatch exists, sometimes twice. It leaves nothing to reduce."""
    type(parameter).accumulate_unsharded_grad_if_needed(parameter)
    if not group.reduce_grads or not hasattr(parameter, "_unsharded_param"):
        return
    if parameter.unsharded_accumulated_grad is not None:
        gradient = parameter.unsharded_accumulated_grad_data
    elif parameter.unsharded_param.grad is not None:
        gradient = parameter.unsharded_grad_data
    else:
        return
    parameter.unsharded_accumulated_grad = parameter.unsharded_param.grad = None
    gradient = parameter.to_sharded_dtensor(gradient.to(parameter.orig_dtype).contiguous())
    shard = parameter.sharded_param
    shard.grad = gradient if shard.grad is None else shard.grad.add_(gradient)
