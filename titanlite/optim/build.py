"""The optimizers that a job can name, and what the training does with any of them.

Invariant: which parameters are in which group follows from their names and shapes only, so from no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config import schema
from titanlite.config.registry import OPTIMIZERS
from titanlite.optim.adamw import SGD, AdamW, Lion, new_state
from titanlite.optim.muon import Muon

Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """What an optimizer is made of.

    Attributes:
        names: of all parameters, as in the whole model.
        compiled: Whether the job asks to compile the update.
        ranks: Those that hold a part of the same parameters. None: this process alone.
    """

    config: schema.Optimizer
    names: dict[nn.Parameter, str]
    compiled: bool
    ranks: dist.ProcessGroup | None

    @property
    def state_dtype(self) -> torch.dtype:
        stored = next(iter(self.names)).dtype
        return stored if self.config.state_dtype is None else getattr(torch, self.config.state_dtype)


def build_optimizer(
    model: nn.Module,
    config: schema.Optimizer,
    compiled: bool = False,
    ranks: dist.ProcessGroup | None = None,
    tables: object = None,
) -> torch.optim.Optimizer:
    """The optimizer that the job names, for the parameters of `model`.

    Norms are not decayed, nor is the embedding if decay_embeddings is false, unless a table of `groups` says so. Build
    it after sharding, because the state gets the dtype, device and layout of the parameters.

    Args:
        ranks: see `Recipe`.
        tables: the job, if a plugin's optimizer may have a table in it.
    """
    recipe = Recipe(config, {parameter: name for name, parameter in model.named_parameters()}, compiled, ranks)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {(1.0, config.weight_decay): [], (1.0, 0.0): []}
    for parameter, name in recipe.names.items():
        exempt = parameter.ndim < 2 or ("tok_embeddings" in name and not config.decay_embeddings)
        factor, decay = 1.0, 0.0 if exempt else config.weight_decay
        for table in (table for table in config.groups if table.claims(name)):
            factor, decay = table.lr_factor, decay if table.weight_decay is None else table.weight_decay
        groups.setdefault((factor, decay), []).append(parameter)
    made = [{"params": own, "lr_factor": factor, "weight_decay": decay} for (factor, decay), own in groups.items()]
    return OPTIMIZERS.make(config.name, tables, [group for group in made if group["params"]], recipe)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Let the next steps have this rate, times the factor of each group."""
    for group in optimizer.param_groups:
        rate = lr * group["lr_factor"]
        if isinstance(group["lr"], Tensor):  # torchao's, of which a kernel was compiled
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def step_unless(skip: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step, or leave weights, moments and step counts as they are, bit for bit. The host does not learn which, except
    with optimizers that cannot be told on the device: those of torch that are not fused, and torchao's.

    Args:
        skip: Scalar fp32 on the device of the parameters: 1 to skip, else 0.
    """
    if isinstance(optimizer, AdamW | Muon) or optimizer.defaults.get("fused"):
        optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]  # as torch's GradScaler sets it
        optimizer.step()
    elif not is_set(skip):
        optimizer.step()


def is_set(flag: Tensor) -> bool:
    """Waits for the device. A plan, whose tensors have no values, replaces it."""
    return bool(flag)


# ------------------------------------------------------------------- what optimizer.name stands for: see the registry


def adamw(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW (https://arxiv.org/abs/1711.05101): torch's, or our own for other dtypes and for the compiler."""
    config = recipe.config
    if recipe.compiled or config.stochastic_rounding or recipe.state_dtype != next(iter(recipe.names)).dtype:
        return _by_element(AdamW, groups, recipe)
    kernels = {kind: config.implementation == kind for kind in ("fused", "foreach")}
    optimizer = torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2), config.eps, **kernels)
    if kernels["fused"]:  # of the others torch wants to make it itself
        optimizer.state |= {p: new_state(p, AdamW.moments) for group in groups for p in group["params"]}
    return optimizer


def _by_element(kind: type[AdamW], groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    # Compiled on a GPU always, because it would be 72 kernels.
    compiled = recipe.compiled or next(iter(recipe.names)).is_cuda
    return kind(groups, recipe.names, recipe.config, recipe.state_dtype, compiled)


def muon(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    def part(of_muon: bool) -> list[dict[str, Any]]:
        """The groups of the matrices of blocks, or of all else."""
        found = []
        for group in groups:
            kept = [p for p in group["params"] if (p.ndim == 2 and recipe.names[p].startswith("layers.")) == of_muon]
            found += [{**group, "params": kept}] if kept else []
        return found

    compiled = recipe.compiled or next(iter(recipe.names)).is_cuda
    others = adamw(part(False), recipe)
    return Muon(part(True), others, recipe.config, recipe.state_dtype, recipe.ranks, compiled)


def adamw8bit(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    from titanlite.optim.adamw8bit import AdamW8bit  # torchao takes a second to import

    config = recipe.config
    return AdamW8bit(groups, config.lr, (config.beta1, config.beta2), config.eps)


def lion(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    """Lion (https://arxiv.org/abs/2302.06675)."""
    return _by_element(Lion, groups, recipe)


def sgd(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    """Gradient descent with momentum."""
    return _by_element(SGD, groups, recipe)
