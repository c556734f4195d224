"""What is saved of a live model and optimizer: their tensors under names that no layout changes.

Invariant: the values are views of the live tensors. Saving reads them, loading writes them in place; nothing is
gathered and no second copy is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite import __version__
from titanlite.config.flavors import Architecture
from titanlite.model.llama import Llama

AVERAGES = "hooks.Ema."  # in place of "model.": the averages of the weights that the hook of this name keeps

WEIGHTS = ("model.", AVERAGES)


@dataclass(frozen=True)
class LiveState:
    """What this rank holds of a model and of its optimizer; with `optimizer` None, weights only are saved and loaded.

    Args:
        model: sharded or not; its parameters may lie in host memory.
        hooks: gives the tensors of the run's hooks by name.
    """

    model: Llama
    optimizer: torch.optim.Optimizer | None = None
    hooks: Callable[[], dict[str, Tensor]] = dict

    def tensors(self, *, optimizer: bool = True, rng: bool = False) -> dict[str, Tensor]:
        """The tensors by the names that they have in a checkpoint: `model.*`, `optimizer.*`, `hooks.*`, `rng.*`."""
        tensors = {f"model.{name}": tensor for name, tensor in model_tensors(self.model).items()}
        if self.optimizer is not None and optimizer:
            names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
            for parameter, state in self.optimizer.state.items():
                for key, value in state.items():
                    assert isinstance(value, Tensor), f"state {key!r} of {names[parameter]} is no tensor: {type(value)}"
                    tensors |= _parts(f"optimizer.{names[parameter]}.{key}", value)
            tensors |= {f"hooks.{name}": plain(tensor) for name, tensor in self.hooks().items()}
        if rng:
            tensors[f"rng.cpu.{dist.get_rank()}"] = torch.get_rng_state()
            if torch.cuda.is_available():
                tensors[f"rng.cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state()
        return tensors


def _parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A state as ordinary tensors: of torchao's with 8 bits the codes, and the scales of the blocks of each row."""
    own: Any = local(tensor)
    if not isinstance(tensor, DTensor) or not hasattr(own, "codes"):
        return {name: plain(tensor)}
    parts, rows = {f"{name}.codes": own.codes, f"{name}.scale": own.scale.view(own.shape[0], -1)}, tensor.shape[0]
    how = {"run_check": False, "placements": tensor.placements, "device_mesh": tensor.device_mesh}
    return {
        key: DTensor.from_local(part, **how, shape=torch.Size((rows, part.shape[1])), stride=part.stride())
        for key, part in parts.items()
    }


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name. A tied one appears once, under the first of its names.

    `state_dict()` makes FSDP put its sharded parameters in place, whatever the last forward pass left there.
    """
    named = model.state_dict(keep_vars=True)
    firsts = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: plain(tensor) for name, tensor in named.items() if firsts[id(tensor)] == name}


def manifest_info(arch: Architecture, train_state: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What the manifest of a checkpoint says of its tensors."""
    always = {"train_state": train_state, "job": None, "layout": {"world_size": 1}, "versions": library_versions()}
    return always | {"architecture": dataclasses.asdict(arch)} | more


@cache
def library_versions() -> dict[str, str]:
    """The versions of what writes a checkpoint. They are looked up once, because that takes 5 ms of the step loop."""
    return {"titanlite": __version__} | {name: version(name) for name in ("torch", "torchao", "numpy")}


def plain(tensor: Tensor) -> Tensor:
    """The same memory without autograd, and without the subclass by which torchao casts weights to FP8 as it gathers
    them. A checkpoint holds ordinary tensors only, so that it can be read with or without FP8.
    """
    tensor = tensor.detach()
    own = local(tensor)
    if not is_traceable_wrapper_subclass(own) or "_tensor" not in own.__tensor_flatten__()[0]:
        return tensor
    inner = getattr(own, "_tensor")  # noqa: B009 - torchao's WeightWith*Float8CastTensor
    # DTensor.from_local would move a tensor that is offloaded to the device of the mesh.
    return DTensor(inner, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else inner


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether no number of it is NaN or infinite. A sum shows nearly always that, and takes no memory."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
