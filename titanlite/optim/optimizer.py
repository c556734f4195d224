"""AdamW with weight decay where it belongs.

Invariant: the split into groups depends on names and shapes only, never on the layout. May import torch and config.
"""

from __future__ import annotations

import torch
from torch import nn

from titanlite.config import schema


def build_optimizer(model: nn.Module, config: schema.Optimizer) -> torch.optim.AdamW:
    """AdamW (https://arxiv.org/abs/1711.05101) over `model`; norms, and by a setting the embedding, are not decayed.

    Build it after sharding: the state takes the dtype, device and layout of the parameters.
    """
    decayed, not_decayed = [], []
    for name, parameter in model.named_parameters():
        exempt = parameter.ndim < 2 or ("tok_embeddings" in name and not config.decay_embeddings)
        (not_decayed if exempt else decayed).append(parameter)
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )
