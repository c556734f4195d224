"""FP8 linear layers by torchao (https://github.com/pytorch/ao/tree/main/torchao/float8).

Invariant: conversion happens on the meta device, before activation checkpointing, compile and FSDP.
May import torch, torchao, model and config.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from titanlite.config import schema


def has_float8_hardware() -> bool:
    """Whether the device multiplies FP8: NVIDIA Ada, Hopper or newer (compute capability 8.9)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def convert_to_float8(
    model: nn.Module, config: schema.Float8, log: Callable[[str], None], compiled: bool = False
) -> None:
    """Swap the linear layers for Float8Linear in place, except those that `filter_fqns` names, those that are smaller
    than `min_features`, and those whose sides are no multiples of 16, which the FP8 matmul does not take.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulate = config.emulate or not has_float8_hardware()
    if config.recipe_name == "tensorwise":
        recipe = Float8LinearConfig(enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather, emulate=emulate)
    else:
        recipe = dataclasses.replace(Float8LinearConfig.from_recipe_name(config.recipe_name), emulate=emulate)
    converted: Counter[str] = Counter()
    kept: Counter[str] = Counter()

    def choose(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        sides = (module.in_features, module.out_features)
        fits = all(side % 16 == 0 and side >= config.min_features for side in sides)
        chosen = fits and not any(part in name for part in config.filter_fqns)
        (converted if chosen else kept)[name.split(".", 2)[-1]] += 1  # without the number of the block
        return chosen

    convert_to_float8_training(model, config=recipe, module_filter_fn=choose)
    if compiled and config.precompute_float8_dynamic_scale_for_fsdp:
        _compile_weight_cast()
    how = "emulated in high precision: this device has no FP8" if emulate and not config.emulate else ""
    how = how or ("emulated, as float8.emulate says" if emulate else "on FP8 hardware")
    count = f"{converted.total()} linear layers converted ({_listed(converted)}), {kept.total()} kept ({_listed(kept)})"
    log(f"Float8 {config.recipe_name}: {count}; {how}")


@cache
def _compile_weight_cast() -> None:
    """FSDP2 casts the shards outside of the compiled blocks: op by op that moves 29 bytes an element, in one kernel 5.
    torchao has no setting for it."""
    from torchao.float8 import fsdp_utils

    cast = fsdp_utils.hp_tensor_and_scale_to_float8
    fsdp_utils.hp_tensor_and_scale_to_float8 = torch.compile(cast, dynamic=True)


def _listed(names: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in names.items()) or "none"


def precompute_scales(model: nn.Module) -> None:
    """Compute the scales of all weights for the next all-gather, in one all-reduce.

    Call it once the weights are there and after each `optimizer.step`. Without it, ranks of tensor parallelism scale
    their parts of a weight apart.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
