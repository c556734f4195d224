"""FP8 linear layers from torchao (https://github.com/pytorch/ao/tree/main/torchao/float8).

MXFP8 layers come from a torchao prototype, which is imported only for the recipe "mxfp8".

Convert a model while it is on the meta device, before you apply activation checkpointing,
compilation and FSDP.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from titanlite.config import schema
from titanlite.config.errors import UserError


def has_float8_hardware() -> bool:
    """Return whether the GPU supports FP8 matmuls: NVIDIA Ada, Hopper or newer."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def is_supported(recipe_name: str, capability: float, has_float8: bool) -> bool:
    """Return whether a GPU has the matmul kernels of an FP8 recipe.

    torchao 0.18 has MXFP8 kernels for compute capability 10.x only. GeForce GPUs with the Blackwell
    architecture have 12.0.

    Args:
        recipe_name: Value of float8.recipe_name.
        capability: CUDA compute capability, such as 10.0. 0 if the GPU has none.
        has_float8: Whether the GPU supports the FP8 matmuls of recipes other than "mxfp8".
    """
    return 10 <= capability < 11 if recipe_name == "mxfp8" else has_float8


def check_mxfp8_gpu(gpu_name: str, capability: float, has_float8: bool) -> None:
    """Check that a GPU can run the torchao MXFP8 kernels.

    Args:
        gpu_name: Name of the GPU for the error message.
        capability: CUDA compute capability, such as 10.0. 0 if the GPU has none.
        has_float8: Whether the GPU supports FP8 matmuls of other recipes, such as "rowwise".

    Raises:
        UserError: If the GPU cannot run the kernels. The message recommends another precision.
    """
    if is_supported("mxfp8", capability, has_float8):
        return

    actual = f"compute capability {capability}" if capability else "no CUDA compute capability"
    alternative = 'float8.recipe_name = "rowwise"' if has_float8 else "float8.enable = false"
    raise UserError(
        f'float8.recipe_name = "mxfp8" requires a GPU of compute capability 10.x (B200, GB200, '
        f"B300 or GB300), but {gpu_name} has {actual}. Use {alternative}, or set "
        "float8.emulate = true to test the values of MXFP8 without its speed."
    )


def is_converted(name: str, sides: tuple[int, int], config: schema.Float8) -> bool:
    """Return whether a linear layer is converted to FP8.

    Small layers stay in high precision, because FP8 matmuls do not make them faster.

    Args:
        name: Name of the layer, for example "layers.3.attention.wq". A layer whose name contains an
            item of `config.filter_fqns` is not converted.
        sides: Numbers of input and output features. A layer is converted only if both are multiples
            of `config.size_multiple`, as FP8 matmuls require, and at least `config.min_features`.
        config: Section [float8] of the job.
    """
    if any(part in name for part in config.filter_fqns):
        return False
    multiple = config.size_multiple
    return all(side % multiple == 0 and side >= config.min_features for side in sides)


def convert_to_float8(
    model: nn.Module,
    config: schema.Float8,
    log: Callable[[str], None],
    compiled: bool = False,
    has_hardware: bool | None = None,
    compute_dtype: str = "bfloat16",
) -> None:
    """Replace linear layers of a model with FP8 layers from torchao, in place.

    Log the recipe, the hardware, and how many layers of each name were converted and kept.

    Args:
        model: Model on the meta device.
        config: Section [float8] of the job. `is_converted` selects the layers.
        log: Function that logs a line.
        compiled: Whether the blocks are compiled. If so, the cast of weight shards to FP8 is
            compiled as well.
        has_hardware: Whether the GPUs of the ranks support the matmuls of the recipe. If not, FP8
            is emulated in high precision. By default, detect the GPU of this process.
        compute_dtype: Dtype in which layers receive their inputs and weights.

    Raises:
        UserError: If the GPU of this process or the dtype does not support MXFP8, or torchao is too
            old for it.
    """
    is_mxfp8 = config.recipe_name == "mxfp8"
    if has_hardware is None:
        has_hardware = _detect_mxfp8(config) if is_mxfp8 else has_float8_hardware()
    emulate = config.emulate or not has_hardware
    if is_mxfp8 and not emulate and compute_dtype != "bfloat16":
        raise UserError(
            'float8.recipe_name = "mxfp8" requires training.mixed_precision_param = "bfloat16" on '
            f'a GPU, not "{compute_dtype}".'
        )

    converted: Counter[str] = Counter()
    kept: Counter[str] = Counter()

    def should_convert(module: nn.Module, name: str) -> bool:
        """Return whether to convert a module. Count linear layers in `converted` or `kept`."""
        if not isinstance(module, nn.Linear):
            return False
        is_chosen = is_converted(name, (module.in_features, module.out_features), config)
        counts = converted if is_chosen else kept
        name_in_block = name.split(".", 2)[-1]
        counts[name_in_block] += 1
        return is_chosen

    if is_mxfp8:
        _replace_by_mxfp8(model, should_convert, emulate)
    else:
        _replace_by_float8(model, config, should_convert, emulate)
    if compiled and config.precompute_float8_dynamic_scale_for_fsdp:
        _compile_weight_cast()

    hardware = "emulated in high precision" if emulate else "on FP8 hardware"
    log(
        f"Float8 {config.recipe_name}, {hardware}: converted {converted.total()} linear layers "
        f"({_list_counts(converted)}), kept {kept.total()} ({_list_counts(kept)})"
    )


def _detect_mxfp8(config: schema.Float8) -> bool:
    """Return whether to run MXFP8 on the GPU of this process instead of emulating it.

    MXFP8 is emulated if the job requests it, or if there is no GPU.

    Raises:
        UserError: If there is a GPU without MXFP8 kernels, and the job does not request emulation.
    """
    if config.emulate or not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    gpu_name = torch.cuda.get_device_name()
    check_mxfp8_gpu(gpu_name, float(f"{major}.{minor}"), has_float8_hardware())
    return True


def _replace_by_float8(
    model: nn.Module,
    config: schema.Float8,
    should_convert: Callable[[nn.Module, str], bool],
    emulate: bool,
) -> None:
    """Replace some linear layers of a model with torchao Float8Linear layers, in place.

    Args:
        model: Model on the meta device.
        config: Section [float8] of the job.
        should_convert: Function that receives a module and its name, and returns whether to
            replace the module.
        emulate: Compute in high precision, with values rounded to FP8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(config.recipe_name),
        enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
        emulate=emulate,
    )
    convert_to_float8_training(model, config=recipe, module_filter_fn=should_convert)


def _replace_by_mxfp8(
    model: nn.Module, should_convert: Callable[[nn.Module, str], bool], emulate: bool
) -> None:
    """Replace some linear layers of a model with torchao MXFP8Linear layers, in place.

    Args:
        model: Model on the meta device.
        should_convert: Function that receives a module and its name, and returns whether to
            replace the module.
        emulate: Compute in high precision, with values rounded to MXFP8.

    Raises:
        UserError: If torchao has no MXFP8Linear.
    """
    try:
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common import KernelPreference
    except ImportError as error:
        raise UserError(
            'float8.recipe_name = "mxfp8" requires torchao 0.18 or newer: '
            f"pip install -U torchao. Importing it failed: {error}"
        ) from error

    kernels = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    for name, module in list(model.named_modules()):
        if not should_convert(module, name):
            continue
        assert isinstance(module, nn.Linear)
        layer = MXFP8Linear(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            device="meta",
            kernel_preference=kernels,
        )
        layer.weight = module.weight
        layer.bias = module.bias
        model.set_submodule(name, layer)


def _list_counts(counts: Counter[str]) -> str:
    """Format the number of layers by name, for example "32 attention.wq, 32 attention.wk".

    If there are no layers, return "none".
    """
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


@cache
def _compile_weight_cast() -> None:
    """Compile the torchao function that casts weight shards to FP8, for the whole process.

    FSDP casts the shards before each FP8 all-gather, outside of the compiled blocks. The cast moves
    29 bytes per element in eager mode and 5 when compiled. torchao has no option to compile the
    function, so replace it with a compiled one.
    """
    from torchao.float8 import fsdp_utils

    cast = fsdp_utils.hp_tensor_and_scale_to_float8
    fsdp_utils.hp_tensor_and_scale_to_float8 = torch.compile(cast, dynamic=True)


def float8_plan(plan: Mapping[str, ParallelStyle], block: nn.Module) -> dict[str, ParallelStyle]:
    """Return a tensor parallel plan that all-gathers activations and their gradients in FP8.

    FP8 values take half as many bytes as bfloat16, but need tensorwise scales. A submodule keeps
    its original style in `plan` if any of its linear layers is not an FP8 layer, because that layer
    may read the gathered input in high precision.

    Args:
        plan: Parallel style of each submodule of the block, such as "attention.wq".
        block: Transformer block after `convert_to_float8`.
    """
    # Patch torchao for the whole process. Repeated calls change nothing.
    _patch_torchao_to_gather_bytes()
    return {
        name: _to_float8_style(style, block.get_submodule(name)) for name, style in plan.items()
    }


def _to_float8_style(style: ParallelStyle, module: nn.Module) -> ParallelStyle:
    """Return the torchao variant of a tensor parallel style, which gathers activations in FP8.

    Return `style` unchanged if torchao has no such variant, or if any linear layer of the module is
    not an FP8 layer, because it may read the gathered input in high precision.

    Args:
        style: Parallel style of `module`.
        module: Submodule of a block: a linear layer, or a module that contains linear layers.
    """
    from torchao.float8 import float8_tensor_parallel as float8

    if not _has_only_float8_linears(module):
        return style
    # Compare exact types, because a subclass in a plugin may behave differently.
    if type(style) is PrepareModuleInput:
        return float8.PrepareFloat8ModuleInput(
            input_layouts=style.input_layouts, desired_input_layouts=style.desired_input_layouts
        )
    if type(style) is ColwiseParallel:
        return _copy_linear_style(style, float8.Float8ColwiseParallel)
    if type(style) is RowwiseParallel:
        return _copy_linear_style(style, float8.Float8RowwiseParallel)
    return style


def _copy_linear_style(style: Any, style_class: Any) -> ParallelStyle:
    """Convert the parallel style of a linear layer to `style_class` and keep its settings."""
    # A linear layer has one input and one output.
    (input_layout,) = style.input_layouts
    (output_layout,) = style.output_layouts
    return style_class(
        input_layouts=input_layout,
        output_layouts=output_layout,
        use_local_output=style.use_local_output,
    )


def _has_only_float8_linears(module: nn.Module) -> bool:
    """Return whether a module contains linear layers, and all of them are FP8 layers."""
    linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
    return bool(linears) and all(type(linear) is not nn.Linear for linear in linears)


def _patch_torchao_to_gather_bytes() -> None:
    """Let torchao all-gather FP8 tensors as uint8, because gloo does not support FP8 dtypes.

    torchao keeps a table of the functions that implement each operator for FP8 tensors. Replace its
    entries for the all-gather operators, for the whole process.
    """
    from torchao.float8 import float8_ops

    table = float8_ops.FLOAT8_OPS_TABLE  # functions by operator
    for operator, function in list(table.items()):
        if function is float8_ops.allgather_fp8:
            table[operator] = _allgather_fp8_as_bytes


def _allgather_fp8_as_bytes(operator: Callable[..., torch.Tensor], *args: Any) -> Any:
    """Call the torchao function `allgather_fp8`, but gather the FP8 values as uint8.

    Args:
        operator: torch operator that performs the all-gather.
        args: Positional arguments and keyword arguments of the operator, as a tuple and a dict.
    """
    from torchao.float8.float8_ops import allgather_fp8

    def gather_bytes(data: torch.Tensor, *args: Any) -> torch.Tensor:
        return operator(data.view(torch.uint8), *args).view(data.dtype)

    return allgather_fp8(gather_bytes, *args)  # calls `gather_bytes` to gather the FP8 values


def precompute_scales(model: nn.Module, config: schema.Float8) -> None:
    """Compute the FP8 scales of all weights with a single all-reduce, if the job enables it.

    Call this function whenever weights change: after initialization, after loading, and after each
    optimizer step. If the job does not enable it, FSDP computes the scale of each weight with a
    separate all-reduce.

    Args:
        model: Model after FSDP, with FP8 layers.
        config: Section [float8] of the job.
    """
    if config.precompute_float8_dynamic_scale_for_fsdp:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
