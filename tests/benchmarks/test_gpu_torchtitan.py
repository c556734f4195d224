"""The benchmark configurations of titanlite and torchtitan describe the same work."""

from collections import Counter
from pathlib import Path
from typing import Any

import gpu_workloads as gpu
import pytest
import tomlkit
import torch
from torch import nn

from titanlite.config.load import load_job
from titanlite.config.run import build_architecture
from titanlite.config.schema import JobConfig
from titanlite.model.llama import Llama

reason = (
    "needs torchtitan 0.2.2 (and triton, which it imports): pip install torchtitan==0.2.2 triton"
)
for package in ("triton", "torchtitan"):
    pytest.importorskip(package, reason=reason)

from torchtitan.config import ConfigManager  # pyright: ignore  # noqa: E402
from torchtitan.models.llama3 import Transformer, llama3_args  # pyright: ignore  # noqa: E402


def both(case: str, tmp_path: Path) -> tuple[JobConfig, Any]:
    """Return the configurations as each framework reads them."""
    work = gpu.COMPARED[case]
    ours = load_job(gpu.titanlite_options(work, tmp_path, tmp_path, extra_features=False))
    file = tmp_path / "job.toml"
    file.write_text(tomlkit.dumps(gpu.torchtitan_job(work, tmp_path, tmp_path)))
    __import__("gpu_torchtitan")
    return ours, ConfigManager().parse_args(["--job.config_file", str(file)])


def shapes(model: nn.Module) -> Counter[tuple[torch.Size, torch.dtype]]:
    """Count the parameters of each shape and dtype."""
    return Counter((parameter.shape, parameter.dtype) for parameter in model.parameters())


SAME_KEYS = {
    "training": "steps seq_len local_batch_size global_batch_size max_norm dtype gc_freq "
    "mixed_precision_param",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation",
    "activation_checkpoint": "mode selective_ac_option",
    "compile": "enable",
    "metrics": "log_freq enable_tensorboard",
    "lr_scheduler": "warmup_steps decay_ratio decay_type min_lr_factor",
    "checkpoint": "enable",
}


@pytest.mark.parametrize("case", gpu.COMPARED)
def test_models_dtypes_and_steps_of_both_frameworks_are_the_same(case, tmp_path):
    ours, theirs = both(case, tmp_path)
    arch = build_architecture(ours.model)
    args = llama3_args[theirs.model.flavor]
    with torch.device("meta"):
        mine = Llama(arch).to(getattr(torch, ours.training.dtype))
        assert shapes(mine) == shapes(Transformer(args).to(getattr(torch, theirs.training.dtype)))

    assert (args.norm_eps, args.rope_theta) == (arch.norm_eps, arch.rope_theta)
    assert args.attn_type == "sdpa"

    for section, keys in SAME_KEYS.items():
        for key in keys.split():
            values = [getattr(getattr(job, section), key) for job in (ours, theirs)]
            assert values[0] == values[1], f"{section}.{key}"

    assert list(ours.compile.components) == theirs.compile.components
    assert (ours.optimizer.state_dtype, ours.optimizer.stochastic_rounding) == (None, False)
    assert ours.float8.enable == (theirs.model.converters == ["quantize.linear.float8"])

    if ours.float8.enable:
        assert ours.float8.recipe_name == "tensorwise"
        assert theirs.quantize.linear.float8.recipe_name is None  # tensorwise
        # titanlite never converts the output layer.
        assert theirs.quantize.linear.float8.filter_fqns == ["output"]
        # All matrices of 1b and 8b are converted.
        assert ours.float8.min_features <= 1024
