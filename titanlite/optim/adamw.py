"""Arguments of all optimizers, and the elementwise optimizers AdamW, Lion and SGD with momentum.

By default, jobs use the fused torch AdamW instead; see `titanlite.optim.build.adamw`. The
optimizers in this module support bfloat16 parameters and moments, stochastic rounding,
torch.compile, and skipping a step on the device.

Invariant: The new value of an element depends only on its old value, gradient and moments, the
step, the name of its parameter, and its index in the whole parameter. It depends neither on the
sharding nor on the state of a random number generator.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.config import schema
from titanlite.optim.clip import local_shard

EAGER_CHUNK = 2**22  # elements per eager update, which keeps its temporaries below 200 MB
UINT32_MASK = 0xFFFFFFFF

Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """Arguments of a function that builds an optimizer, in addition to the parameter groups.

    Both built-in and plugin optimizers are built from the groups and a recipe.

    Attributes:
        config: Section [optimizer] of the job.
        names: Name of each parameter in the whole model, such as "layers.3.attention.wq.weight".
        compiled: Whether the job enables compilation of the update; see `compiles_elementwise`.
        ranks: Ranks that hold shards of the same parameters. None means all ranks.
    """

    config: schema.Optimizer
    names: dict[nn.Parameter, str]
    compiled: bool
    ranks: dist.ProcessGroup | None

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Return the dtype in which parameters are stored."""
        return next(iter(self.names)).dtype

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of the moments: `config.state_dtype`, or the dtype of the parameters."""
        if self.config.state_dtype is None:
            return self.parameter_dtype
        return getattr(torch, self.config.state_dtype)

    @property
    def compiles_elementwise(self) -> bool:
        """Return whether to compile elementwise computations, such as the update of AdamW.

        On a GPU, they are always compiled, even if `compiled` is false, because an eager update of
        AdamW launches 72 kernels.
        """
        return self.compiled or next(iter(self.names)).is_cuda


class ShardSeed(NamedTuple):
    """Values from which stochastic rounding derives the random bits of a shard.

    The bits of an element depend only on the step, the name of the parameter, and the index of the
    element in the whole parameter, so the result does not depend on the sharding. All sizes are
    numbers of elements.
    """

    name_seed: Tensor
    """Hash of the name of the parameter."""
    local_width: int
    """Length of the last dimension of the shard."""
    full_width: int
    """Length of the last dimension of the whole parameter."""
    first: int
    """Flat index of the first element of the shard in the whole parameter."""


class StepScalars(NamedTuple):
    """Scalars that all parameters of a group share in one step, such as the step size.

    They are tensors, because `torch.compile` would recompile the update for each new Python number.
    """

    decay: Tensor
    """Factor that multiplies the old value, from decoupled weight decay."""
    step_size: Tensor
    """Learning rate. For AdamW, divided by the bias correction of the first moment."""
    root_correction: Tensor
    """Factor that corrects the bias of the square root of the second moment. Only AdamW uses it."""
    step_seed: Tensor
    """Seed of the random bits for stochastic rounding, derived from the step number."""
    skip: Tensor
    """1 to leave the parameter and its moments unchanged, else 0."""


class UpdateRule(NamedTuple):
    """Constants of an optimizer update. `torch.compile` specializes the update for them."""

    name: Literal["AdamW", "Lion", "SGD"]
    beta1: float
    """For SGD, the momentum coefficient."""
    beta2: float
    eps: float
    stochastic_rounding: bool


class AdamW(torch.optim.Optimizer):
    """AdamW (https://arxiv.org/abs/1711.05101), computed in fp32 for any dtype of the parameters.

    State names and results match `torch.optim.AdamW`. With `config.stochastic_rounding`, new values
    are randomly rounded up or down to bfloat16. The expected value is then exact, and small updates
    are not lost (https://arxiv.org/abs/2010.06192).

    Args:
        groups: Parameter groups with `params`, `lr_factor` and `weight_decay`.
        recipe: Options of the optimizer, the names of all parameters, and whether to compile the
            update of each parameter into one kernel.

    Attributes:
        rule: Name of the update rule, which subclasses override.
        moments: Names of the moments in the optimizer state, which subclasses override.
    """

    rule: Literal["AdamW", "Lion", "SGD"] = "AdamW"
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, groups: Groups, recipe: Recipe) -> None:
        config = recipe.config
        beta1 = config.momentum if self.rule == "SGD" else config.beta1
        defaults = {"lr": config.lr, "betas": (beta1, config.beta2), "eps": config.eps}
        super().__init__(groups, defaults)

        create_state(self, self.moments, recipe.state_dtype)
        self._stochastic_rounding = config.stochastic_rounding
        self._seeds = {
            parameter: _seed_shard(parameter, name) for parameter, name in recipe.names.items()
        }
        self._compiled = recipe.compiles_elementwise
        self._update: Callable[..., None] = _update_
        if self._compiled:
            # The update is in place, so autotuning several kernels would first copy each large
            # tensor to the CPU and back.
            self._update = torch.compile(
                _update_, dynamic=True, options={"triton.autotune_pointwise": False}
            )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient, without a host sync.

        To skip the step on the device, set the attribute `found_inf` to a scalar tensor of 1, as
        `torch.amp.GradScaler` does. Parameters and state then keep their values. The step count is
        a tensor on the device, because the CPU cannot read which steps were skipped without a host
        sync.
        """
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update_parameters(parameters, group)

    def _update_parameters(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Apply one optimizer step to parameters of a group. Each of them must have a gradient."""
        # Compute the values that all parameters share.
        steps_taken = self.state[parameters[0]]["step"]
        skip = getattr(self, "found_inf", torch.zeros_like(steps_taken))
        increment = 1 - skip  # a skipped step does not count
        scalars = self._step_scalars(group, steps_taken + 1, skip)
        beta1, beta2 = group["betas"]
        rule = UpdateRule(self.rule, beta1, beta2, group["eps"], self._stochastic_rounding)

        for parameter in parameters:
            self.state[parameter]["step"].add_(increment)
            self._update_parameter(parameter, scalars, rule)

    def _step_scalars(self, group: dict[str, Any], step: Tensor, skip: Tensor) -> StepScalars:
        """Compute the scalars that the parameters of a group share in one step.

        Args:
            group: Parameter group of this optimizer.
            step: Number of the step, counted from 1, as a tensor on the device.
            skip: 1 to skip the step, else 0.
        """
        lr = torch.as_tensor(group["lr"], dtype=torch.float32)
        decay = 1 - lr * group["weight_decay"]
        step_seed = _hash32(step.to(torch.int64))  # different random bits in each step
        if self.rule == "AdamW":
            step_size, root_correction = _correct_adamw_bias(lr, group["betas"], step)
        else:
            step_size = lr
            root_correction = torch.ones_like(lr)  # unused
        return StepScalars(decay, step_size, root_correction, step_seed, skip)

    def _update_parameter(
        self, parameter: nn.Parameter, scalars: StepScalars, rule: UpdateRule
    ) -> None:
        """Update this rank's shard of one parameter and its moments.

        In eager mode, update the shard in chunks to limit the memory of temporary tensors.
        """
        state = self.state[parameter]
        assert parameter.grad is not None
        tensors = [parameter, parameter.grad, *(state[name] for name in self.moments)]
        flat = [local_shard(tensor).view(-1) for tensor in tensors]

        numel = flat[0].numel()
        chunk = max(1, numel) if self._compiled else EAGER_CHUNK
        for start in range(0, numel, chunk):
            value, gradient, *moments = [tensor[start : start + chunk] for tensor in flat]
            self._update(value, gradient, moments, scalars, rule, self._seeds[parameter], start)


class Lion(AdamW):
    """Lion (https://arxiv.org/abs/2302.06675): the update is the sign of an averaged gradient."""

    rule = "Lion"
    moments = ("exp_avg",)


class SGD(AdamW):
    """SGD with momentum and decoupled weight decay.

    The fused `torch.optim.SGD` does not support DTensor, and its other implementations cannot skip
    a step on the device.
    """

    rule = "SGD"
    moments = ("momentum_buffer",)


def _correct_adamw_bias(lr: Tensor, betas: Sequence[float], step: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the AdamW bias corrections: `step_size` and `root_correction` of `StepScalars`.

    The moments start at zero, so their first values are too small, by the factors
    mean_bias = 1 - beta1**step and square_bias = 1 - beta2**step. AdamW divides each moment by its
    factor. With the two returned values, the update is

        lr * (mean / mean_bias) / (sqrt(square / square_bias) + eps)
        = step_size * mean / (root_correction * sqrt(square) + eps)
    """
    beta1, beta2 = betas
    mean_bias = 1 - beta1**step
    square_bias = 1 - beta2**step
    return lr / mean_bias, square_bias.rsqrt()


def create_state(
    optimizer: torch.optim.Optimizer,
    moments: Sequence[str] = AdamW.moments,
    dtype: torch.dtype | None = None,
) -> None:
    """Create the state of all parameters before the first step, with all values zero.

    By default, torch.optim creates the state during the first step. Small moments would then be
    allocated between large activations and fragment GPU memory.

    Args:
        optimizer: Optimizer whose parameters can be DTensors. Moments have the same layout.
        moments: Names of the moments, for example ("exp_avg", "exp_avg_sq").
        dtype: Dtype of the moments. Defaults to the dtype of the parameters.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = {"step": torch.zeros((), device=parameter.device)}
            for name in moments:
                state[name] = torch.zeros_like(parameter, dtype=dtype)
            optimizer.state[parameter] = state


def wrap_shard(shard: Tensor, like: DTensor) -> DTensor:
    """Create a DTensor with the shape and layout of `like` from this rank's shard."""
    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def shard_slices(tensor: DTensor, coordinates: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Return the part of the whole tensor that a rank holds, as one slice per dimension.

    For example, if the rows of a (10, 4) matrix are sharded over 2 ranks, rank 1 holds
    (slice(5, 10), slice(0, 4)).

    Args:
        tensor: DTensor whose device mesh and placements define the layout.
        coordinates: Position of the rank along each mesh dimension. Defaults to this rank.
    """
    mesh = tensor.device_mesh
    if coordinates is None:
        coordinates = mesh.get_coordinate()
    assert coordinates is not None  # this rank is in the mesh

    # Go from the last mesh dimension to the first, because FSDP divides the shards of tensor
    # parallelism, although its mesh dimension comes first. For example, on a (2, 2) mesh with the
    # dimensions (FSDP, tensor parallel), tensor parallelism divides 8 rows into rows 0-3 and 4-7,
    # and FSDP divides rows 4-7 into rows 4-5 and 6-7.
    slices = [slice(0, size) for size in tensor.shape]
    for mesh_dim in reversed(range(mesh.ndim)):
        placement: Any = tensor.placements[mesh_dim]
        if not placement.is_replicate():
            dim = placement.dim  # the tensor dimension that this mesh dimension shards
            slices[dim] = _divide_slice(slices[dim], mesh.shape[mesh_dim], coordinates[mesh_dim])
    return tuple(slices)


def _divide_slice(whole: slice, num_ranks: int, rank: int) -> slice:
    """Divide a slice among ranks in the same way as torch.chunk, and return the part of one rank.

    For example, slice(0, 5) is divided among 4 ranks into parts of 2, 2, 1 and 0 elements.
    """
    part_size = math.ceil((whole.stop - whole.start) / num_ranks)
    start = whole.start + part_size * rank
    return slice(min(start, whole.stop), min(start + part_size, whole.stop))


def _update_(
    parameter: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    scalars: StepScalars,
    rule: UpdateRule,
    seed: ShardSeed,
    start: int,
) -> None:
    """Apply one optimizer step to a slice of a flat shard and its moments, in place.

    Args:
        parameter: Slice of the parameter, shape (N,).
        gradient: Slice of its gradient, shape (N,).
        moments: Slices of its moments, each of shape (N,).
        scalars: Scalars of this step, such as the step size.
        rule: Update rule and its constants.
        seed: Seed of the shard, for stochastic rounding.
        start: Index of the first element of the slice in the shard.
    """
    # Compute the new values in fp32. The weight decay is decoupled from the update.
    update, new_moments = _compute_update(gradient.float(), moments, scalars, rule)
    new_parameter = parameter.float() * scalars.decay - update
    new_values = [new_parameter, *new_moments]
    old_values = [parameter, *moments]

    if rule.stochastic_rounding:
        random_bits = _random_bits(parameter, scalars.step_seed, seed, start)
        new_values = _round_like_old_values(new_values, old_values, random_bits)

    # Overwrite the old values, unless the step is skipped.
    for old, new in zip(old_values, new_values, strict=True):
        old.copy_(torch.where(scalars.skip > 0, old, new.to(old.dtype)))


def _compute_update(
    gradient: Tensor, moments: Sequence[Tensor], scalars: StepScalars, rule: UpdateRule
) -> tuple[Tensor, list[Tensor]]:
    """Compute the value to subtract from a parameter, and the new moments, all in fp32.

    Args:
        gradient: Gradient of a slice, fp32, shape (N,).
        moments: Moments of the slice before the step, each of shape (N,).
        scalars: Scalars of this step, such as the step size.
        rule: Update rule and its constants.
    """
    if rule.name == "AdamW":
        return _compute_adamw_update(gradient, moments, scalars, rule)

    momentum = moments[0].float()
    if rule.name == "Lion":
        # `a.lerp(b, weight)` is the moving average (1 - weight) * a + weight * b.
        direction = momentum.lerp(gradient, 1 - rule.beta1).sign()
        update = scalars.step_size * direction
        new_momentum = momentum.lerp(gradient, 1 - rule.beta2)
    else:  # SGD
        new_momentum = momentum * rule.beta1 + gradient
        update = scalars.step_size * new_momentum
    return update, [new_momentum]


def _compute_adamw_update(
    gradient: Tensor, moments: Sequence[Tensor], scalars: StepScalars, rule: UpdateRule
) -> tuple[Tensor, list[Tensor]]:
    """Compute the update of AdamW and its new moments.

    With the moments `mean` and `square`, the formulas are:

        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        update = step_size * mean / (root_correction * sqrt(square) + eps)

    See `_compute_update` for the arguments.
    """
    new_mean = moments[0].float().lerp(gradient, 1 - rule.beta1)
    square = moments[1].float()
    new_square = square.mul(rule.beta2).addcmul(gradient, gradient, value=1 - rule.beta2)
    denominator = new_square.sqrt() * scalars.root_correction + rule.eps
    return scalars.step_size * new_mean / denominator, [new_mean, new_square]


def _random_bits(parameter: Tensor, step_seed: Tensor, seed: ShardSeed, start: int) -> Tensor:
    """Return a random 32-bit integer for each element of a slice, the same for any sharding.

    No random number generator is needed: each integer is a hash of the step, the name of the
    parameter, and the index of the element in the whole parameter.

    Args:
        parameter: Slice of the flat shard, shape (N,).
        step_seed: Seed of the step.
        seed: Seed of the shard, for stochastic rounding.
        start: Index of the first element of the slice in the shard.
    """
    index_in_shard = torch.arange(len(parameter), device=parameter.device) + start
    index = _index_in_parameter(index_in_shard, seed)
    element_seed = _hash32(index & UINT32_MASK)  # the hash takes 32-bit integers
    parameter_seed = _hash32(step_seed ^ seed.name_seed)
    return _hash32(element_seed ^ parameter_seed)


def _index_in_parameter(index_in_shard: Tensor, shard: ShardSeed) -> Tensor:
    """Convert flat indices in a shard to flat indices in the whole parameter.

    For example, a shard with two of eight columns has the indices 0, 1, 8, 9, 16, 17, ..., relative
    to its first element.
    """
    index = index_in_shard
    if shard.local_width != shard.full_width:  # otherwise, avoid two slow divisions
        row = index // shard.local_width
        column = index % shard.local_width
        index = row * shard.full_width + column
    return index + shard.first


def _round_stochastically(value: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round fp32 values to bfloat16 stochastically, or return them unchanged for float32.

    bfloat16 keeps the upper 16 bits of an fp32 value. Adding 16 random bits to the lower half
    before truncation rounds up with a probability equal to the discarded fraction.

    Args:
        value: fp32 tensor.
        dtype: float32 or bfloat16.
        bits: Random integers. Only their low 16 bits are used.
    """
    if dtype == torch.float32:
        return value
    with_random_bits = value.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    truncated = (with_random_bits & ~0xFFFF).view(torch.float32)
    return torch.where(value.isnan(), value, truncated).to(dtype)


def _round_like_old_values(
    new_values: list[Tensor], old_values: list[Tensor], random_bits: Tensor
) -> list[Tensor]:
    """Round new values stochastically to the dtypes of the old values, each with different bits.

    Args:
        new_values: Parameter and up to two moments, fp32, each of shape (N,).
        old_values: The same tensors before the step, in the dtypes to round to.
        random_bits: Random 32-bit integers, shape (N,). Rounding needs 16 bits: the parameter gets
            the low half of each integer, the first moment the high half, and the second moment the
            low half of a hash.
    """
    all_bits = [random_bits, random_bits >> 16, _hash32(random_bits)]
    bits_of_values = all_bits[: len(new_values)]
    return [
        _round_stochastically(new, old.dtype, bits)
        for new, old, bits in zip(new_values, old_values, bits_of_values, strict=True)
    ]


def _hash32(x: Tensor) -> Tensor:
    """Hash each 32-bit integer to a 32-bit integer, for reproducible random bits.

    The integers are stored as int64, so that products do not overflow. The multiplier is from
    https://stackoverflow.com/a/12996028.
    """
    for _ in range(2):
        product = ((x >> 16) ^ x) * 0x45D9F3B
        x = product & UINT32_MASK
    return (x >> 16) ^ x


def _seed_shard(parameter: Tensor, name: str) -> ShardSeed:
    """Return the stochastic rounding seed of this rank's shard of the parameter `name`."""
    name_seed = torch.tensor(zlib.crc32(name.encode()))
    full_width = parameter.shape[-1]
    if not isinstance(parameter, DTensor):
        return ShardSeed(name_seed, full_width, full_width, first=0)

    slices = shard_slices(parameter)
    first = slices[0].start
    if parameter.ndim > 1:
        first = slices[0].start * full_width + slices[1].start
    local_width = slices[-1].stop - slices[-1].start
    return ShardSeed(name_seed, max(1, local_width), full_width, first)
