"""What is saved of a live model and optimizer: their tensors under names that no layout changes.

Invariant: the values are views of the live tensors. Saving reads them, loading writes them in place; nothing is
gathered and no second copy is made.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
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
from titanlite.checkpoint.folder import Ranks
from titanlite.config.flavors import Architecture


@dataclass(frozen=True)
class LiveState:
    """What this rank holds of a model and of its optimizer; with `optimizer` None, weights only are saved and loaded.

    Args:
        model: sharded or not; its parameters may lie in host memory.
        hooks: gives the tensors of the run's hooks by name.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    hooks: Callable[[], dict[str, Tensor]] = dict

    def tensors(self, *, optimizer: bool = True, rng: bool = False) -> dict[str, Tensor]:
        """The tensors by the names that they have in a checkpoint: `model.*`, `optimizer.*`, `hooks.*`, `rng.*`."""
        tensors = {f"model.{name}": tensor for name, tensor in model_tensors(self.model).items()}
        if self.optimizer is not None and optimizer:  # it has no state before the first step
            names = self._names()
            for parameter, state in self.optimizer.state.items():
                for key, value in state.items():
                    assert isinstance(value, Tensor), f"state {key!r} of {names[parameter]} is no tensor: {type(value)}"
                    tensors[f"optimizer.{names[parameter]}.{key}"] = plain(value)
            tensors |= {f"hooks.{name}": plain(tensor) for name, tensor in self.hooks().items()}
        if rng:
            tensors[f"rng.cpu.{dist.get_rank()}"] = torch.get_rng_state()
            if torch.cuda.is_available():
                tensors[f"rng.cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state()
        return tensors

    def optimizer_groups(self, ranks: Ranks) -> list[dict[str, Any]]:
        """Weight decay and parameter names of each group, over all ranks; empty without an optimizer or its state."""
        if self.optimizer is None or not self.optimizer.state:
            return []
        names, groups = self._names(), self.optimizer.param_groups
        own = [[names[parameter] for parameter in group["params"]] for group in groups]
        of_ranks = zip(*ranks.distinct(own), strict=True)  # with pipeline stages, each rank knows some names only
        params = [sorted(set(itertools.chain(*names))) for names in of_ranks]
        return [{"weight_decay": g.get("weight_decay"), "params": p} for g, p in zip(groups, params, strict=True)]

    def estimated_size(self, ranks: Ranks) -> int:
        """Bytes of one checkpoint, over all ranks. Before the first step, two states are assumed for each weight."""
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in self.tensors().items()}
        if self.optimizer is not None and not self.optimizer.state:
            sizes |= {f"state of {name}": 2 * size for name, size in sizes.items()}
        return sum({name: size for of_rank in ranks.distinct(sizes) for name, size in of_rank.items()}.values())

    def _names(self) -> dict[Tensor, str]:
        """Each parameter's name, after `model_tensors` has put the sharded ones in place."""
        return {parameter: name for name, parameter in self.model.named_parameters()}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name. A tied one appears once, under the first of its names.

    `state_dict()` makes FSDP put its sharded parameters in place, whatever the last forward pass left there.
    """
    named = model.state_dict(keep_vars=True)
    firsts = {id(tensor): name for name, tensor in reversed(named.items())}
    return {name: plain(tensor) for name, tensor in named.items() if firsts[id(tensor)] == name}


def group_differences(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> list[str]:
    """One line for each parameter that changed its group. State is kept by name, so that it would fit, but the
    settings of another group (such as weight decay) would silently differ from those of the run that is resumed."""

    def places(groups: list[dict[str, Any]]) -> dict[str, str]:
        return {name: f"group {number}" for number, group in enumerate(groups) for name in group["params"]}

    before, now = places(saved), places(current)
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [f"{name}: saved in {before.get(name, 'no group')}, now in {now.get(name, 'no group')}" for name in names]


@torch.no_grad()
def initialise_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an optimizer that has not stepped yet, by a step that moves nothing (zero rate, zero
    gradients). Costs one gradient's memory for a moment."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def manifest_info(
    model: Architecture | None,
    train_state: dict[str, Any],
    job: dict[str, Any] | None = None,
    optimizer_groups: Sequence[dict[str, Any]] = (),
    world_size: int = 1,
) -> dict[str, Any]:
    """What the manifest of a checkpoint says of its tensors."""
    return {
        "train_state": train_state,
        "job": job,
        "architecture": model and dataclasses.asdict(model),
        "optimizer_groups": optimizer_groups,
        "layout": {"world_size": world_size},
        "versions": library_versions(),
    }


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
