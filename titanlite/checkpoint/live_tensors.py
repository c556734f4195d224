"""What is saved of a live model and optimizer: their tensors under names that no layout changes.

Invariant: the values are views of the live tensors. Saving reads them, loading writes them in place; nothing is
gathered and no second copy is made.
"""

from __future__ import annotations

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
from titanlite.checkpoint.rank_agreement import Ranks


@dataclass(frozen=True)
class LiveState:
    """What this rank holds of a model and of its optimizer; with `optimizer` None, weights only are saved and loaded.

    Args:
        model: sharded or not; its parameters may lie in host memory.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None

    def tensors(self, *, optimizer: bool = True, rng: bool = False) -> dict[str, Tensor]:
        """The tensors by the names that they have in a checkpoint: `model.*`, `optimizer.*`, `rng.*`."""
        tensors = {f"model.{name}": tensor for name, tensor in model_tensors(self.model).items()}
        if self.optimizer is not None and optimizer:
            of_optimizer = optimizer_tensors(self.optimizer, parameter_names(self.model))
            tensors |= {f"optimizer.{name}": tensor for name, tensor in of_optimizer.items()}
        if rng:
            tensors |= {f"rng.{name}": tensor for name, tensor in rng_tensors(dist.get_rank()).items()}
        return tensors

    def optimizer_groups(self, ranks: Ranks) -> list[dict[str, Any]]:
        """Settings and parameter names of the groups, over all ranks; empty without an optimizer or without state."""
        if self.optimizer is None or not self.optimizer.state:
            return []
        return merge_groups(ranks.distinct(optimizer_groups(self.optimizer, parameter_names(self.model))))

    def estimated_size(self, ranks: Ranks) -> int:
        """Bytes of one checkpoint, over all ranks. Before the first step, two states are assumed for each weight."""
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in self.tensors().items()}
        if self.optimizer is not None and not self.optimizer.state:
            sizes |= {f"state of {name}": 2 * size for name, size in sizes.items()}
        return sum({name: size for of_rank in ranks.distinct(sizes) for name, size in of_rank.items()}.values())


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name. A tied one appears once, under the first of its names.

    `state_dict()` makes FSDP put its sharded parameters in place, whatever the last forward pass left there.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = plain(tensor)
    return tensors


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Each parameter's name; call after `model_tensors`, which puts the sharded ones in place."""
    return {parameter: name for name, parameter in model.named_parameters()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter>.<state>`; empty before the first step."""
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert isinstance(value, Tensor), f"state {key!r} of {names[parameter]} is no tensor: {type(value)}"
            tensors[f"{names[parameter]}.{key}"] = plain(value)
    return tensors


def optimizer_groups(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> list[dict[str, Any]]:
    """Each group's settings and the names of its parameters, as a JSON value. The rate is left out: it is the
    schedule's."""
    groups = []
    for group in optimizer.param_groups:
        settings = {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
        kept = {
            k: v for k, v in settings.items() if k not in ("lr", "params") and isinstance(v, bool | int | float | list)
        }
        groups.append({**kept, "params": sorted(names[parameter] for parameter in group["params"])})
    return groups


def merge_groups(of_ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The groups of a model whose parameters are spread over ranks (pipeline stages)."""
    merged = [{**group, "params": set(group["params"])} for group in of_ranks[0]]
    for groups in of_ranks[1:]:
        for target, group in zip(merged, groups, strict=True):
            target["params"].update(group["params"])
    return [{**group, "params": sorted(group["params"])} for group in merged]


def group_differences(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> list[str]:
    """One line for each parameter that changed its group. State is kept by name, so that it would fit, but the
    settings of another group (such as weight decay) would silently differ from those of the run that is resumed."""
    before = {name: index for index, group in enumerate(saved) for name in group["params"]}
    now = {name: index for index, group in enumerate(current) for name in group["params"]}

    def words(groups: list[dict[str, Any]], index: int | None) -> str:
        if index is None:
            return "in no group"
        return f"in group {index} (weight_decay {groups[index].get('weight_decay')})"

    return [
        f"{name}: saved {words(saved, before.get(name))}, now {words(current, now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


@torch.no_grad()
def initialise_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an optimizer that has not stepped yet, by a step that moves nothing (zero rate, zero
    gradients). Costs one gradient's memory for a moment."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def rng_tensors(rank: int) -> dict[str, Tensor]:
    """The states of torch's default generators on this rank, as byte tensors."""
    states = {f"cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: dict[str, Tensor], rank: int) -> None:
    """Put back what `rng_tensors` returned."""
    torch.set_rng_state(states[f"cpu.{rank}"])
    if f"cuda.{rank}" in states:
        torch.cuda.set_rng_state(states[f"cuda.{rank}"])


def world_layout(model: nn.Module) -> dict[str, Any]:
    """How many ranks, and the meshes that parameters lie on, as a JSON value."""
    meshes = {}
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            meshes[" x ".join(mesh.mesh_dim_names or ("unnamed",) * mesh.ndim)] = list(mesh.shape)
    return {"world_size": dist.get_world_size(), "meshes": meshes}


@cache
def library_versions() -> dict[str, str]:
    """The versions of what writes a checkpoint. They are looked up once, because that takes 5 ms of the step loop."""
    return {"titanlite": __version__} | {name: version(name) for name in ("torch", "torchao", "numpy")}


def plain(tensor: Tensor) -> Tensor:
    """The same memory without autograd, and without the subclass by which torchao casts weights to FP8 as it gathers
    them. A checkpoint holds ordinary tensors only, so that it can be read with or without FP8.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return unwrapped(tensor)
    local = tensor.to_local()
    inner = unwrapped(local)
    if inner is local:
        return tensor
    # DTensor.from_local would move a tensor that is offloaded to the device of the mesh.
    return DTensor(inner, tensor._spec, requires_grad=False)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor within torchao's wrapper of weights that are gathered in FP8; other tensors as they are."""
    if is_traceable_wrapper_subclass(tensor) and "_tensor" in tensor.__tensor_flatten__()[0]:
        return getattr(tensor, "_tensor")  # noqa: B009 - torchao's WeightWith*Float8CastTensor
    return tensor
