"""Build the optimizer that a job names, and provide operations that work with any optimizer.

Invariant: The parameter groups depend only on the names and shapes of the parameters, not on the
layout of the ranks.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config import schema
from titanlite.config.flavors import Architecture
from titanlite.config.registry import OPTIMIZERS
from titanlite.optim.adamw import AdamW, Groups, Recipe, create_state
from titanlite.optim.muon import Muon


def build_optimizer(
    model: nn.Module,
    config: schema.Optimizer,
    compiled: bool = False,
    ranks: dist.ProcessGroup | None = None,
    job: schema.JobConfig | None = None,
    arch: Architecture | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that `config.name` selects, for all parameters of a model.

    Shard the model first, because the optimizer state gets the dtype, device and layout of the
    parameters.

    Args:
        model: Sharded model with the parameter names of the whole model.
        config: Section [optimizer] of the job.
        compiled: Whether to compile the update.
        ranks: Ranks that hold shards of the same parameters. None means all ranks.
        job: The whole job. Only plugin optimizers need it, to get the section with their options.
        arch: Architecture of the model, which determines the muP learning rates. None disables muP.
    """
    name_of_parameter = {parameter: name for name, parameter in model.named_parameters()}
    groups = _group_parameters(name_of_parameter, config, arch)
    recipe = Recipe(config, name_of_parameter, compiled, ranks)
    return OPTIMIZERS.make_instance(torch.optim.Optimizer, config.name, groups, recipe, job=job)


class _GroupOptions(NamedTuple):
    """Options that all parameters of a group share."""

    lr_factor: float
    weight_decay: float


def _group_parameters(
    names: dict[nn.Parameter, str], config: schema.Optimizer, arch: Architecture | None
) -> Groups:
    """Divide parameters into groups with the same learning rate factor and weight decay.

    Args:
        names: Name of each parameter in the whole model.
        config: Section [optimizer] of the job.
        arch: Architecture of the model for muP. None disables muP.
    """
    # The usual groups come first, so that their order is the same for all models.
    members: dict[_GroupOptions, list[nn.Parameter]] = {
        _GroupOptions(1.0, config.weight_decay): [],
        _GroupOptions(1.0, 0.0): [],
    }
    for parameter, name in names.items():
        options = _choose_options(name, parameter.ndim, config)
        if arch is not None:
            _, mup_lr_factor = arch.mup_factors(name, parameter.ndim)
            options = _scale_learning_rate(options, mup_lr_factor)
        members.setdefault(options, []).append(parameter)

    return [
        {"params": parameters, "lr_factor": lr_factor, "weight_decay": weight_decay}
        for (lr_factor, weight_decay), parameters in members.items()
        if parameters
    ]


def _choose_options(name: str, ndim: int, config: schema.Optimizer) -> _GroupOptions:
    """Choose the learning rate factor and the weight decay of a parameter, without muP.

    Matrices have weight decay; norms and biases do not. The embedding has weight decay only if
    `config.decay_embeddings` is true. Each table in `config.groups` that matches `name` then
    overrides these values, in order.
    """
    is_embedding = "tok_embeddings" in name
    has_decay = ndim >= 2 and (config.decay_embeddings or not is_embedding)
    lr_factor = 1.0
    weight_decay = config.weight_decay if has_decay else 0.0
    for table in config.groups:
        if table.claims(name):
            lr_factor = table.lr_factor
            if table.weight_decay is not None:
                weight_decay = table.weight_decay
    return _GroupOptions(lr_factor, weight_decay)


def _scale_learning_rate(options: _GroupOptions, factor: float) -> _GroupOptions:
    """Multiply the learning rate of a group by `factor`, and divide its weight decay by `factor`.

    A step multiplies weights by 1 - learning rate * weight decay, so they still decay as fast.
    """
    return _GroupOptions(options.lr_factor * factor, options.weight_decay / factor)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each parameter group to `lr` times the `lr_factor` of the group."""
    for group in optimizer.param_groups:
        group_lr = lr * group["lr_factor"]
        if isinstance(group["lr"], Tensor):  # torchao compiles a kernel that reads this tensor
            group["lr"].fill_(group_lr)
        else:
            group["lr"] = group_lr


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer keeps different weights for training and for evaluation.

    Schedule-free optimizers do: their methods `eval` and `train` swap the weights of the model.
    """
    return hasattr(optimizer, "eval") and hasattr(optimizer, "train")


def set_mode(optimizer: torch.optim.Optimizer, mode: Literal["eval", "train"]) -> None:
    """Put the training or the evaluation weights of a schedule-free optimizer into the model.

    With any other optimizer, this function does nothing.

    Args:
        optimizer: Optimizer of the model.
        mode: "eval" before the model is evaluated or saved, "train" afterward.
    """
    if has_modes(optimizer):
        getattr(optimizer, mode)()


def step_unless(skip: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer step, or leave parameters and state bitwise unchanged if `skip` is 1.

    Fused torch optimizers, `AdamW`, `Muon` and their subclasses decide on the device whether to
    skip. All others, such as AdamW8bit, need a host sync in each step.

    Args:
        skip: Scalar fp32 tensor on the device of the parameters, 1 to skip the step, otherwise 0.
        optimizer: Any optimizer from `build_optimizer`.
    """
    # `torch.amp.GradScaler` also sets `found_inf` to skip a step.
    reads_found_inf = isinstance(optimizer, AdamW | Muon) or optimizer.defaults.get("fused")
    if reads_found_inf:
        optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
    elif not skip:  # waits for the GPU
        optimizer.step()


def adamw(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    """Build AdamW (https://arxiv.org/abs/1711.05101).

    By default, return `torch.optim.AdamW`. Return `titanlite.optim.adamw.AdamW` if the update is
    compiled or rounds stochastically, or if the moments and the parameters have different dtypes.
    """
    config = recipe.config
    has_other_dtype = recipe.state_dtype != recipe.parameter_dtype
    if recipe.compiled or config.stochastic_rounding or has_other_dtype:
        return AdamW(groups, recipe)

    return torch.optim.AdamW(
        groups,  # each with its weight decay
        config.lr,
        (config.beta1, config.beta2),
        config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def muon(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    """Build Muon for the matrices of transformer blocks, with AdamW for all other parameters.

    The other parameters are norms, biases, the embedding and the output projection.
    """
    block_matrices = {
        parameter
        for parameter, name in recipe.names.items()
        if parameter.ndim == 2 and name.startswith("layers.")
    }
    other_parameters = recipe.names.keys() - block_matrices
    matrix_groups = _select_parameters(groups, block_matrices)
    other_groups = _select_parameters(groups, other_parameters)
    return Muon(matrix_groups, _build_adamw_with_state(other_groups, recipe), recipe)


def _build_adamw_with_state(groups: Groups, recipe: Recipe) -> torch.optim.Optimizer:
    """Build AdamW for the parameters that Muon does not update, and create its state.

    `torch.optim.AdamW` creates its state only in the first step. Loading a checkpoint before that
    step would not restore it: torch creates missing state only for an optimizer without any state,
    but Muon, which contains this AdamW, always has momentum.
    """
    optimizer = adamw(groups, recipe)
    if isinstance(optimizer, torch.optim.AdamW):
        create_state(optimizer)
    return optimizer


def _select_parameters(groups: Groups, selected: set[nn.Parameter]) -> list[dict[str, Any]]:
    """Return copies of parameter groups with only the selected parameters, without empty groups."""
    selected_groups: list[dict[str, Any]] = []
    for group in groups:
        parameters = [parameter for parameter in group["params"] if parameter in selected]
        if parameters:
            selected_groups.append(group | {"params": parameters})
    return selected_groups
