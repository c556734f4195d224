"""FP8 linear layers by torchao (https://github.com/pytorch/ao/tree/main/torchao/float8).

Invariant: conversion happens on the meta device, before activation checkpointing, compile and FSDP.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from titanlite.config import schema


def has_float8_hardware() -> bool:
    """Whether the device has FP8 matmuls: NVIDIA Ada, Hopper or newer (compute capability 8.9)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def is_converted(name: str, sides: tuple[int, int], config: schema.Float8) -> bool:
    """Whether a linear layer is converted. Exceptions are the layers that `filter_fqns` names, those smaller than
    `min_features`, and those whose sides are no multiples of 16, because an FP8 matmul needs multiples of 16."""
    fits = all(side % 16 == 0 and side >= config.min_features for side in sides)
    return fits and not any(part in name for part in config.filter_fqns)


def convert_to_float8(
    model: nn.Module, config: schema.Float8, log: Callable[[str], None], compiled: bool = False
) -> None:
    """Replace the linear layers by Float8Linear in place."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulate = config.emulate or not has_float8_hardware()
    if config.recipe_name == "tensorwise":
        recipe = Float8LinearConfig(enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather, emulate=emulate)
    else:
        recipe = dataclasses.replace(Float8LinearConfig.from_recipe_name(config.recipe_name), emulate=emulate)
    names: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # converted, kept

    def choose(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        chosen = is_converted(name, (module.in_features, module.out_features), config)
        names[chosen][name.split(".", 2)[-1]] += 1  # without the number of the block
        return chosen

    convert_to_float8_training(model, config=recipe, module_filter_fn=choose)
    if compiled and config.precompute_float8_dynamic_scale_for_fsdp:
        _compile_weight_cast()
    how = "emulated in high precision" if emulate else "on FP8 hardware"
    said = [", ".join(f"{count} {name}" for name, count in names[chosen].items()) or "none" for chosen in (True, False)]
    count = f"{names[True].total()} linear layers converted ({said[0]}), {names[False].total()} kept ({said[1]})"
    log(f"Float8 {config.recipe_name}: {count}; {how}")


@cache
def _compile_weight_cast() -> None:
    """Compile the cast of the shards to FP8, which FSDP2 does outside of the compiled blocks. Uncompiled, it moves 29
    bytes per element, compiled 5. torchao has no setting for it."""
    from torchao.float8 import fsdp_utils

    cast = fsdp_utils.hp_tensor_and_scale_to_float8
    fsdp_utils.hp_tensor_and_scale_to_float8 = torch.compile(cast, dynamic=True)


def float8_plan(plan: Mapping[str, ParallelStyle], block: nn.Module) -> dict[str, ParallelStyle]:
    """The plan, with all-gathers of activations and of their gradients in FP8, for scales of whole tensors.

    An input is gathered for all its layers at once, so none of them may be kept in high precision.
    """
    from torchao.float8 import float8_ops
    from torchao.float8 import float8_tensor_parallel as float8
    from torchao.float8.float8_linear import Float8Linear

    layers = {ColwiseParallel: float8.Float8ColwiseParallel, RowwiseParallel: float8.Float8RowwiseParallel}

    def convert(name: str, style: Any) -> ParallelStyle:
        linears = [module for module in block.get_submodule(name).modules() if isinstance(module, nn.Linear)]
        known = type(style) in (PrepareModuleInput, *layers)  # a plugin's plan may have others
        if not (known and linears and all(isinstance(module, Float8Linear) for module in linears)):
            return style
        if type(style) is PrepareModuleInput:
            layouts = style.input_layouts, style.desired_input_layouts
            return float8.PrepareFloat8ModuleInput(input_layouts=layouts[0], desired_input_layouts=layouts[1])
        layouts = {"input_layouts": style.input_layouts[0], "output_layouts": style.output_layouts[0]}
        return layers[type(style)](**layouts, use_local_output=style.use_local_output)

    def gather(op: Any, *what: Any) -> Any:  # as bytes, because gloo knows no FP8
        return gather_float8(lambda data, *of: op(data.view(torch.uint8), *of).view(data.dtype), *what)

    table, gather_float8 = float8_ops.FLOAT8_OPS_TABLE, float8_ops.allgather_fp8
    table.update({op: gather for op, function in table.items() if function is gather_float8})
    return {name: convert(name, style) for name, style in plan.items()}


def precompute_scales(model: nn.Module, config: schema.Float8) -> None:
    """Compute the scales of all weights for the next all-gather, with one all-reduce, if the job asks for it.

    Call it after the weights have been loaded or drawn, and after each `optimizer.step`. Without it, each rank of
    tensor parallelism uses its own scale for its part of a weight.
    """
    if config.precompute_float8_dynamic_scale_for_fsdp:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
