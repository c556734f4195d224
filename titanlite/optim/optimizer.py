"""Builds AdamW, with weight decay for matrices only.

Invariant: the split into groups depends on names and shapes only, never on the layout.
"""

from __future__ import annotations

import torch
from torch import nn

from titanlite.config import schema
from titanlite.optim.adamw import AdamW


def build_optimizer(model: nn.Module, config: schema.Optimizer, compiled: bool = False) -> torch.optim.Optimizer:
    """AdamW (https://arxiv.org/abs/1711.05101) for the parameters of `model`.

    Norms are not decayed, nor is the embedding if decay_embeddings is false. Build it after sharding, because the state
    gets the dtype, device and layout of the parameters.
    """
    decayed, not_decayed = [], []
    for name, parameter in model.named_parameters():
        exempt = parameter.ndim < 2 or ("tok_embeddings" in name and not config.decay_embeddings)
        (not_decayed if exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    stored = next(model.parameters()).dtype
    state_dtype = stored if config.state_dtype is None else getattr(torch, config.state_dtype)
    if compiled or config.stochastic_rounding or state_dtype != stored:
        names = {parameter: name for name, parameter in model.named_parameters()}
        return AdamW(
            groups,
            names,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            state_dtype=state_dtype,
            stochastic_rounding=config.stochastic_rounding,
            compiled=compiled or next(model.parameters()).is_cuda,  # on a GPU always, because it would be 72 kernels
        )
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )
