"""Rules for an element: AdamW for moments and parameters in bfloat16 and for the compiler, Lion, and SGD.

Invariant: the new value of an element depends on its old value, its gradient, the step, the name of its parameter and
its place in the whole parameter, and so neither on the sharding nor on a random state.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.config import schema

CHUNK = 2**22  # elements that an eager update handles at a time, so that its temporaries stay below 200 MB
BITS = 0xFFFFFFFF


class AdamW(torch.optim.Optimizer):
    """As `torch.optim.AdamW`, with the same names of states. It computes in fp32 whatever the stored dtype is.

    With `stochastic_rounding` values are rounded to bfloat16 up or down at random, so that the mean is exact and small
    updates are not lost (https://arxiv.org/abs/2010.06192).

    Args:
        names: Names of all parameters, as in the whole model.
        state_dtype: Dtype of both moments.
        compiled: Compile the update of a tensor into one kernel.
    """

    rule: Literal["AdamW", "Lion", "SGD"] = "AdamW"
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        config: schema.Optimizer,
        state_dtype: torch.dtype,
        compiled: bool,
    ) -> None:
        beta1 = config.momentum if self.rule == "SGD" else config.beta1
        super().__init__(groups, {"lr": config.lr, "betas": (beta1, config.beta2), "eps": config.eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = new_state(parameter, self.moments, state_dtype)
        self._stochastic, self._compiled = config.stochastic_rounding, compiled
        self._keys = {parameter: torch.tensor(zlib.crc32(name.encode())) for parameter, name in names.items()}
        self._places = {parameter: _shard_place(parameter) for parameter in names}
        self._update: Callable[..., None] = _update
        if compiled:  # trials of several kernels would copy a large tensor from the host before each, as it is updated
            self._update = torch.compile(_update, dynamic=True, options={"triton.autotune_pointwise": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. Nothing is read from the device.

        What a step gives to all elements of a tensor is a tensor, so that a new value causes no new compilation. What
        depends on the count of steps is on the device, which alone knows the steps that were skipped.
        """
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], torch.as_tensor(group["lr"], dtype=torch.float32)
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            done = self.state[parameters[0]]["step"]  # all parameters have taken the same steps
            skip = getattr(self, "found_inf", torch.zeros_like(done))
            step = done + 1
            rate = lr / (1 - beta1**step) if self.rule == "AdamW" else lr
            factors = 1 - lr * group["weight_decay"], rate, (1 - beta2**step).rsqrt()
            seed, taken = _mix(step.to(torch.int64)), 1 - skip
            for parameter in parameters:
                state = self.state[parameter]
                state["step"].add_(taken)
                tensors = [local_shard(t) for t in (parameter, parameter.grad, *map(state.get, self.moments))]
                size = max(1, tensors[0].numel()) if self._compiled else CHUNK
                scalars = *factors, seed, self._keys[parameter], skip
                constants = self.rule, beta1, beta2, group["eps"], self._stochastic
                for start in range(0, tensors[0].numel(), size):
                    parts = [t.view(-1)[start : start + size] for t in tensors]
                    self._update(parts, scalars, constants, self._places[parameter], start)


class Lion(AdamW):
    """Lion (https://arxiv.org/abs/2302.06675): a step is the sign of a mean of gradients, the only moment."""

    rule, moments = "Lion", ("exp_avg",)


class SGD(AdamW):
    """As `torch.optim.SGD` with momentum, but with decoupled decay. torch's fused one does not take DTensors, and the
    others cannot skip a step on the device."""

    rule, moments = "SGD", ("momentum_buffer",)


def new_state(parameter: Tensor, moments: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The state of a parameter that has taken no step, with the names that torch's optimizers have. torch makes it in
    the first step, where small moments take the places of large activations, which then fit nowhere."""
    state = {"step": torch.zeros((), device=parameter.device)}
    return state | {name: torch.zeros_like(parameter, dtype=dtype) for name in moments}


def _update(
    parts: Sequence[Tensor],
    scalars: Sequence[Tensor],
    constants: tuple[str, float, float, float, bool],
    place: tuple[int, int, int],
    start: int,
) -> None:
    """Update a part of a flat shard in place, from the element `start` of the shard on.

    Args:
        parts: of the parameter, its gradient and its moments.
        scalars: factor of the old value; learning rate, with the correction of the first moment; factor of the square
            root of the second moment; seeds of the random bits, of the step and the parameter; 1 to skip, else 0.
        constants: the rule, both betas, eps, and whether values are rounded at random.
        place: that of the shard: see `_shard_place`.
    """
    parameter, gradient, *moments = parts
    decay, rate, correction, seed, key, skip = scalars
    rule, beta1, beta2, eps, stochastic = constants
    local_width, width, first = place
    gradient, mean = gradient.float(), moments[0].float()
    means = [mean.lerp(gradient, 1 - beta1)]
    if rule == "AdamW":
        means.append(moments[1].float().mul(beta2).addcmul(gradient, gradient, value=1 - beta2))
        change = rate * means[0] / (means[1].sqrt() * correction + eps)
    elif rule == "Lion":
        change, means = rate * means[0].sign(), [mean.lerp(gradient, 1 - beta2)]
    else:
        means = [mean * beta1 + gradient]
        change = rate * means[0]
    value = parameter.float() * decay - change
    bits = torch.zeros((), dtype=torch.int64)
    if stochastic:
        index = torch.arange(len(parameter), device=parameter.device) + start
        if local_width != width:  # if they are equal, the divisions are left out, because they take long
            index = index // local_width * width + index % local_width
        bits = _mix(_mix(index + first & BITS) ^ _mix(seed ^ key))
    chances = bits, bits >> 16, _mix(bits)
    for old, new, chance in zip((parameter, *moments), (value, *means), chances, strict=False):
        old.copy_(torch.where(skip > 0, old, _rounded(new, old.dtype, chance, stochastic)))


def _rounded(value: Tensor, dtype: torch.dtype, bits: Tensor, stochastic: bool) -> Tensor:
    """fp32 to `dtype`. To round at random, 16 random bits are added below the bits that bfloat16 keeps."""
    if not stochastic or dtype == torch.float32:
        return value.to(dtype)
    carried = value.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return torch.where(value.isnan(), value, (carried & -0x10000).view(torch.float32)).to(dtype)


def _mix(x: Tensor) -> Tensor:
    """A hash of 32 bits. It is computed in int64, so that nothing overflows (the multiplier:
    https://stackoverflow.com/a/12996028)."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & BITS
    return (x >> 16) ^ x


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard, without the wrapper of the FP8 all-gather."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, "_tensor", tensor)


def _shard_place(parameter: Tensor) -> tuple[int, int, int]:
    """Elements per row of this rank's shard, those per row of the whole parameter, and the number of the shard's first
    element in the whole parameter."""
    width = parameter.shape[-1]
    if not isinstance(parameter, DTensor):
        return width, width, 0
    (shard,) = parameter.__create_chunk_list__()
    first = shard.offsets[0] if parameter.ndim == 1 else shard.offsets[0] * width + shard.offsets[1]
    return max(1, shard.sizes[-1]), width, first
