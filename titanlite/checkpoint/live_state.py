"""Collect the tensors of a run by name: the weights, the optimizer state and the hook tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.manifest import EMA
from titanlite.model.llama import Llama
from titanlite.optim.adamw import shard_slices
from titanlite.optim.clip import is_fp8_wrapper, local_shard

AVERAGES = f"hooks.{EMA}."
"""Name prefix of the averaged weights (EMA)."""
WEIGHTS = ("model.", AVERAGES)
"""Name prefixes of the weights and the averaged weights."""


@dataclasses.dataclass(frozen=True)
class LiveState:
    """The model, optimizer and hooks of this rank, which checkpoints save and restore.

    Attributes:
        model: The model, sharded or not. Its parameters may be offloaded to the CPU.
        optimizer: Optimizer of `model`, or None to save and load only the weights.
        new_optimizer: Builds a new optimizer for the same parameters. Its initial state is used to
            reset `optimizer`.
        hook_tensors: Returns the tensors of all hooks, keyed by "<hook name>.<tensor name>".
        prepare_hooks: Called before hook tensors are loaded, with the sizes of the saved tensors
            and the saved `state_dict` of each hook.
    """

    model: Llama
    optimizer: torch.optim.Optimizer | None = None
    new_optimizer: Callable[[], torch.optim.Optimizer] | None = None
    hook_tensors: Callable[[], dict[str, Tensor]] = dict
    prepare_hooks: Callable[[Mapping[str, torch.Size], Mapping[str, Any]], None] = (
        lambda sizes, states: None
    )

    def tensors(
        self, *, optimizer: bool = True, hooks: bool = True, rng: bool = False
    ) -> dict[str, Tensor]:
        """Return the tensors to save or to load into, by name in the checkpoint.

        The names, such as "optimizer.layers.3.attention.wq.weight.exp_avg", do not depend on the
        parallel layout. The tensors share memory with the model, the optimizer and the hooks, so
        loading into the tensors restores all three in place. Only the random states are copies.

        Args:
            optimizer: Include the optimizer state.
            hooks: Include the hook tensors.
            rng: Include the states of the random number generators on this rank.
        """
        tensors = {f"model.{name}": tensor for name, tensor in model_tensors(self.model).items()}
        if optimizer and self.optimizer is not None:
            tensors |= _optimizer_tensors(self.model, self.optimizer)
        if hooks:
            for name, tensor in self.hook_tensors().items():
                tensors[f"hooks.{name}"] = to_plain(tensor)
        if rng:
            tensors |= _random_states()
        return tensors

    def weights(self) -> dict[str, Tensor]:
        """Return the weights and the averaged weights (EMA), by name in the checkpoint."""
        tensors = self.tensors(optimizer=False)  # with hooks, because a hook holds the averages
        return {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}


def _random_states() -> dict[str, Tensor]:
    """Return the states of this rank's random number generators by name, such as "rng.cpu.0"."""
    rank = dist.get_rank()
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by name, detached from autograd.

    A tied tensor appears once, under its first name.
    """
    tensors = {}
    seen = set()
    # Calling `state_dict` also makes FSDP reshard parameters that are still gathered.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = to_plain(tensor)
    return tensors


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer state, keyed by "optimizer.<parameter name>.<state key>"."""
    parameter_names: dict[Tensor, str] = {
        parameter: name for name, parameter in model.named_parameters()
    }
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"optimizer.{parameter_names[parameter]}.{key}"
            assert isinstance(value, Tensor), f"{name} is not a tensor: {type(value)}"
            if _is_quantized(value) or _is_empty_quantized_shard(value, optimizer):
                tensors |= _split_quantized(name, value)
            else:
                tensors[name] = to_plain(value)
    return tensors


def _is_quantized(tensor: Tensor) -> bool:
    """Return whether an optimizer state is a DTensor whose shard torchao stores in 8 bits.

    Detect the torchao class of the shard by its attribute `codes`, because importing torchao takes
    a second.
    """
    return isinstance(tensor, DTensor) and hasattr(tensor.to_local(), "codes")


def _is_empty_quantized_shard(tensor: Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a tensor is an 8-bit optimizer moment with an empty shard on this rank.

    Such a shard is an ordinary tensor, because torchao cannot quantize it (see `AdamW8bit`).
    """
    shard = to_local(tensor)
    if shard.dtype != torch.uint8 or shard.numel() > 0:
        return False

    from titanlite.optim.adamw8bit import AdamW8bit  # torchao takes a second to import

    return isinstance(optimizer, AdamW8bit)


def _split_quantized(name: str, tensor: Any) -> dict[str, Tensor]:
    """Split a torchao 8-bit optimizer state into two ordinary DTensors, which DCP can save.

    torchao stores an 8-bit code for each value and a scale for each block of values in a row. For
    example, with blocks of 256 values, an (8, 512) matrix has codes of shape (8, 512) and scales of
    shape (8, 2).

    Args:
        name: Name of the state.
        tensor: DTensor whose shard has the attributes `codes` and `scale`, or is empty.

    Returns:
        "<name>.codes" and "<name>.scale", sharded by rows in the same way as `tensor`.
    """
    shard = tensor.to_local()
    is_quantized = hasattr(shard, "codes")
    if is_quantized:
        num_rows = shard.shape[0]
        codes = shard.codes
        scale = shard.scale.view(num_rows, -1)  # (rows, blocks per row)
    else:  # an empty shard, which torchao cannot quantize
        from titanlite.optim.adamw8bit import BLOCK_SIZE  # torchao takes a second to import

        num_columns = shard.shape[1]
        codes = shard
        scale = shard.new_empty(0, num_columns // BLOCK_SIZE, dtype=torch.float32)

    return {
        f"{name}.codes": _create_dtensor_like(tensor, codes),
        f"{name}.scale": _create_dtensor_like(tensor, scale),
    }


def _create_dtensor_like(tensor: DTensor, shard: Tensor) -> DTensor:
    """Create a DTensor matrix from this rank's rows, sharded in the same way as `tensor`.

    Args:
        tensor: Sharded tensor with the same number of rows as the result.
        shard: This rank's rows of the result.
    """
    return DTensor.from_local(
        shard,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=torch.Size((tensor.shape[0], shard.shape[1])),
        stride=shard.stride(),
    )


def to_plain(tensor: Tensor) -> Tensor:
    """Return a view of a tensor without autograd and without the torchao FP8 wrapper class.

    Checkpoints contain ordinary tensors, so that they can be loaded with or without FP8. The result
    shares memory with `tensor`.
    """
    tensor = tensor.detach()
    if not is_fp8_wrapper(to_local(tensor)):
        return tensor
    if not isinstance(tensor, DTensor):
        return local_shard(tensor)

    from torch.utils._python_dispatch import transform_subclass  # private, so only for FP8

    # DTensor.from_local would move an offloaded tensor to the device of the mesh.
    return transform_subclass(tensor, lambda _name, shard: local_shard(shard))


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard if `tensor` is a DTensor, or else `tensor` itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor contains neither NaN nor infinity."""
    if tensor.sum().isfinite():  # usually sufficient, and needs no temporary tensor
        return True
    return bool(tensor.isfinite().all())


def shard_chunk(tensor: Tensor) -> ChunkStorageMetadata:
    """Return the offsets and sizes of this rank's shard within the whole tensor.

    If `tensor` is not a DTensor, this rank holds all of it.

    DCP itself (up to torch 2.15) computes wrong offsets and sizes if tensor parallelism and FSDP
    over three or more ranks divide the same dimension unevenly, such as a vocabulary with an odd
    size.
    """
    if not isinstance(tensor, DTensor):
        return ChunkStorageMetadata(offsets=torch.Size([0] * tensor.ndim), sizes=tensor.shape)
    slices = shard_slices(tensor)
    return ChunkStorageMetadata(
        offsets=torch.Size(part.start for part in slices),
        sizes=torch.Size(part.stop - part.start for part in slices),
    )
