"""Leaves out the copies that FSDP2 makes on a single rank.

Invariant: weights and gradients are bitwise the same as with FSDP2 alone. This is the only module that uses internals
of FSDP2. It tries them on a small layer first. If they have changed, FSDP2 is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def spare_copies(modules: Iterable[FSDPModule], dtype: torch.dtype | None) -> None:
    """Let blocks compute on the shards themselves, or on one conversion of them to `dtype`.

    The shards of a single rank are whole parameters, but FSDP2 copies them to gather them, and copies gradients to
    reduce them. Here the gathered parameters are the shards and are never freed, and gradients become the gradients of
    the shards without a copy. Weights of the FP8 all-gather are still copied.
    """
    for module in modules:
        group: Any = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group else ():
            parameter.accumulate_unsharded_grad_if_needed = partial(_take_gradient, group, parameter)
            if hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
                continue
            if dtype is None:
                parameter.init_all_gather_outputs = partial(_alias, parameter)
                parameter.free_unsharded_param = lambda: None
            else:
                parameter.init_all_gather_outputs = partial(_convert, parameter, dtype)


@cache
def why_not(mesh: DeviceMesh, stored: torch.dtype, policy: MixedPrecisionPolicy) -> str:
    """Why this does not work with the installed torch; empty if it works. It trains a layer of four weights both ways.
    The answer is kept, because a process may build many models: each stage of a pipeline is one.

    Args:
        mesh: A mesh of one rank.
        stored: Dtype of the shards.
    """
    plain = _train(mesh, stored, policy, spare=False)
    try:
        spared = _train(mesh, stored, policy, spare=True)
    except (AttributeError, TypeError, AssertionError, RuntimeError) as error:  # FSDP2 has renamed or changed something
        return f"{type(error).__name__}: {error}"
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(spared, plain, strict=True))
    return "" if same else "the weights and gradients of a trial layer differ"


def _train(mesh: DeviceMesh, stored: torch.dtype, policy: MixedPrecisionPolicy, spare: bool) -> list[Tensor]:
    """Outputs, gradients and weights of two steps, each of two microbatches. The first microbatch is not reduced."""
    layer = nn.RMSNorm(4, eps=1e-5, device=mesh.device_type, dtype=stored)  # its initial weights are not random
    fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    assert isinstance(layer, FSDPModule)
    if spare:
        spare_copies([layer], None if policy.param_dtype == stored else policy.param_dtype)
    optimizer, seen = torch.optim.SGD(layer.parameters(), lr=0.5), []
    for _ in range(2):
        for row in range(2):
            layer.set_requires_gradient_sync(row == 1)
            x = torch.arange(4.0, device=mesh.device_type).add(row)[None].to(policy.param_dtype)
            y = layer(x.requires_grad_())
            y.square().sum().backward()
            seen.append(y.detach())
        weight = layer.weight
        assert isinstance(weight, DTensor)
        assert isinstance(weight.grad, DTensor)
        seen.append(weight.grad.to_local().clone())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(weight.to_local().detach().clone())
    return seen


def _alias(parameter: Any, *_: object, **__: object) -> None:
    parameter.all_gather_outputs = [parameter._sharded_param_data]


def _convert(parameter: Any, dtype: torch.dtype, *_: object, **__: object) -> None:
    if not parameter.all_gather_outputs:
        data = parameter._sharded_param_data
        parameter.all_gather_outputs = [torch.empty(data.numel(), dtype=dtype, device=data.device)]
    parameter.param_dtype = None  # so that the copy into the output converts


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
