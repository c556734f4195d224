"""How well FP8 holds the values of the converted layers, when the job asks for it (metrics.details).

Invariant: training computes the same with and without it, bit by bit, and nothing is read from the device. Each value
of the global batch is counted once, whatever is recomputed and however the batch is spread over ranks. In compiled
blocks the compiler may round intermediate results elsewhere, because their graph is another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.config.run import Run
from titanlite.model.llama import Llama
from titanlite.optim.adamw import local_shard
from titanlite.optim.clip import number_of_copies
from titanlite.optim.norms import group_of
from titanlite.parallel.float8 import is_converted

if TYPE_CHECKING:
    from torchao.float8.float8_linear import Float8Linear

KINDS = ("weight", "input", "grad_output")


class Float8Casts:
    """Counts the casts to FP8 of one step: of weights, of inputs, and of the gradients of outputs.

    Do the step within `counting`, and then call `total`. All ranks do both together.

    Args:
        model: this rank's part of the model, parallelized.
    """

    def __init__(self, model: nn.Module, run: Run, device: torch.device) -> None:
        from torchao.float8.float8_linear import Float8Linear

        self._run, self._device, config = run, device, run.job.float8
        with torch.device("meta"):  # a pipeline has other layers on other ranks
            linear = {name: module for name, module in Llama(run.arch).named_modules() if isinstance(module, nn.Linear)}
        self._names = [
            name for name, each in linear.items() if is_converted(name, (each.in_features, each.out_features), config)
        ]
        self._layers: dict[str, Any] = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, Float8Linear)
        }
        for layer in self._layers.values():
            layer.casts = None
            # In front of the hook of tensor parallelism, which makes a plain tensor of the output.
            layer.register_forward_hook(_watch_backward, prepend=True)
        self._counts = self._zeros(len(self._names), len(KINDS), 4)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self._device)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the step within casts."""
        self._counts.zero_()
        places = [self._names.index(name) for name in self._layers]
        for place, counts in zip(places, self._of_weights(), strict=True):
            self._counts[place, 0] = counts
        for layer in self._layers.values():
            layer.casts = self._zeros(2, 4)
        yield
        for place, layer in zip(places, self._layers.values(), strict=True):
            self._counts[place, 1:], layer.casts = layer.casts, None

    @torch.no_grad()
    def _of_weights(self) -> list[Tensor]:
        """The counts of each layer's weight, from this rank's shard."""
        from torchao.float8.float8_utils import amax_to_scale

        layers = list(self._layers.values())
        shards = [self._as_cast(layer) for layer in layers]
        amaxes = [_amax(shard, _is_rowwise(layer)) for shard, layer in zip(shards, layers, strict=True)]
        self._reduce_amaxes(amaxes)
        found = []
        for layer, shard, amax in zip(layers, shards, amaxes, strict=True):
            dtype = layer.config.cast_config_weight.target_dtype
            scale = amax_to_scale(amax, dtype, layer.config.round_scales_to_power_of_2)
            found.append(counts_of(shard, amax, scale, dtype, number_of_copies(layer.weight)))
        return found

    def _as_cast(self, layer: Float8Linear) -> Tensor:
        """This rank's shard of a weight in the dtype from which it is cast to FP8."""
        shard = local_shard(layer.weight).detach().to(self._device)
        if self._run.job.float8.enable_fsdp_float8_all_gather:
            return shard
        return shard.to(getattr(torch, self._run.job.training.mixed_precision_param))

    def _reduce_amaxes(self, amaxes: list[Tensor]) -> None:
        """Make the largest values of shards, in place, those of what shares a scale: a row, or a weight.

        Before an FP8 all-gather without precomputed scales, each rank of tensor parallelism has its own scale.
        """
        float8, layers = self._run.job.float8, list(self._layers.values())
        own = float8.enable_fsdp_float8_all_gather and not float8.precompute_float8_dynamic_scale_for_fsdp
        mesh = layers[0].weight.device_mesh if layers else None
        for dim, name in enumerate((mesh.mesh_dim_names or ()) if mesh is not None else ()):
            cut = [
                amax
                for amax, layer in zip(amaxes, layers, strict=True)
                if _cuts(layer.weight.placements[dim], _is_rowwise(layer)) and not (own and name == "tp")
            ]
            if cut:
                flat = torch.cat([amax.flatten() for amax in cut])
                dist.all_reduce(flat, dist.ReduceOp.MAX, mesh.get_group(dim))  # pyright: ignore
                for amax, whole in zip(cut, flat.split([amax.numel() for amax in cut]), strict=True):
                    amax.copy_(whole.view_as(amax))

    def total(self) -> Tensor:
        """The counts of the last step over all ranks, (layers, 3, 4) in float64, by two all-reduces.

        The last dimension: largest absolute value, values that overflow, values that underflow, values.
        """
        largest, sums = self._counts[..., :1].contiguous(), self._counts[..., 1:].contiguous()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.all_reduce(sums)
        return torch.cat([largest, sums], dim=-1)

    def describe(self, counts: list[list[list[float]]]) -> dict[str, Any]:
        """The fields of a logged step, by group of alike layers and kind of tensor.

        Args:
            counts: what `total` returned, as lists of numbers.
        """
        found: dict[str, dict[str, float]] = {"float8_amax": {}, "float8_overflow": {}, "float8_underflow": {}}
        groups: dict[str, list[list[list[float]]]] = {}
        for name, of_layer in zip(self._names, counts, strict=True):
            groups.setdefault(group_of(name), []).append(of_layer)
        for group, layers in groups.items():
            for kind, name in enumerate(KINDS):
                largest, over, under, values = zip(*(layer[kind] for layer in layers), strict=True)
                part = f"{group}.{name}"
                found["float8_amax"][part] = max(largest)
                found["float8_overflow"][part] = round(sum(over))
                found["float8_underflow"][part] = sum(under) / sum(values)
        return found


def _watch_backward(layer: Float8Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """A forward hook. It lets the backward pass count, which comes once where activations are recomputed, too."""
    if layer.casts is None or not torch.is_grad_enabled():
        return None
    return _CountInBackward.apply(output, inputs[0].detach(), layer.casts, layer.config)


@torch.compiler.allow_in_graph
class _CountInBackward(torch.autograd.Function):
    """The same output. Its backward pass adds the casts of input and gradient to `casts`, (2, 4)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, casts: Tensor, config: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.casts, ctx.config = casts, config
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (x,), (grad,), config = ctx.saved_tensors, grads, ctx.config
        power_of_2 = config.round_scales_to_power_of_2
        new = torch.stack(
            [
                counts_of_cast(x, config.cast_config_input, power_of_2),
                counts_of_cast(grad, config.cast_config_grad_output, power_of_2),
            ]
        )
        largest = torch.maximum(ctx.casts[:, :1], new[:, :1])
        ctx.casts.copy_(torch.cat([largest, ctx.casts[:, 1:] + new[:, 1:]], dim=1))
        return grad, None, None, None


def counts_of_cast(x: Tensor, cast: Any, power_of_2: bool) -> Tensor:
    """The counts of a tensor that torchao casts with a scale from its own values, as `counts_of`."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

    axis = -1 if cast.scaling_granularity is ScalingGranularity.AXISWISE else None
    amax = tensor_to_amax(x, scaling_granularity=cast.scaling_granularity, axiswise_dim=axis)
    scale = amax_to_scale(amax, cast.target_dtype, power_of_2)  # of the whole tensor under tensor parallelism, too
    copies = number_of_copies(x) if isinstance(x, DTensor) else 1
    return counts_of(*(each.to_local() if isinstance(each, DTensor) else each for each in (x, amax, scale)),
                   cast.target_dtype, copies)  # fmt: skip


@torch.library.custom_op("titanlite::float8_counts", mutates_args=())  # the compiler must not fuse it with its inputs
def counts_of(x: Tensor, amax: Tensor, scale: Tensor, dtype: torch.dtype, copies: int) -> Tensor:
    """(4,) in float64: largest absolute value, values that overflow, that underflow, and all values.

    Args:
        scale: by which x is multiplied before it becomes `dtype`.
        copies: number of ranks that have the same values. The numbers are divided by it.
    """
    limits, scaled = torch.finfo(dtype), x.abs().float() * scale
    # Halves are rounded to the even neighbour: the lower one here, which is 0, and the upper one above the largest.
    half_step = limits.eps * 2.0 ** math.floor(math.log2(limits.max)) / 2
    over = (scaled < limits.max + half_step).logical_not().sum()  # NaN is one
    under = ((scaled <= limits.smallest_normal * limits.eps / 2) & (x != 0)).sum()
    largest = amax.max() if amax.numel() else amax.new_zeros(())
    numbers = torch.stack([over, under, torch.full_like(over, x.numel())]).double() / copies
    return torch.cat([largest.double().nan_to_num(nan=math.inf, posinf=math.inf)[None], numbers])


@counts_of.register_fake
def _(x: Tensor, amax: Tensor, scale: Tensor, dtype: torch.dtype, copies: int) -> Tensor:
    return x.new_empty(4, dtype=torch.float64)


def _amax(shard: Tensor, rowwise: bool) -> Tensor:
    """The largest absolute value of each row, (rows, 1), or of all, a scalar. A rank may have none."""
    if rowwise:
        return shard.abs().amax(dim=1, keepdim=True)
    return shard.abs().max() if shard.numel() else shard.new_zeros(())


def _is_rowwise(layer: Float8Linear) -> bool:
    from torchao.float8.config import ScalingGranularity

    return layer.config.cast_config_weight.scaling_granularity is ScalingGranularity.AXISWISE


def _cuts(placement: Any, rowwise: bool) -> bool:
    """Whether this placement of a weight spreads what shares a scale over ranks."""
    return not placement.is_replicate() and (placement.dim == 1 or not rowwise)
