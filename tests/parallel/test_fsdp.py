"""FSDP is used wherever a job needs it."""

import pytest
from torch.distributed.fsdp import FSDPModule

from titanlite.load_run import load_run
from titanlite.train.trainer import Trainer

PLUGIN = """
from titanlite import register
from titanlite.optim.adamw import AdamW

register("optimizer", "plugin_adamw")(AdamW)
"""


@pytest.mark.parametrize(
    ("options", "uses_fsdp"),
    [
        ("", False),
        ("--optimizer.name Lion", False),
        ("--optimizer.name SGD", False),
        ("--optimizer.name Muon", True),
        ("--job.plugins plugin --optimizer.name plugin_adamw", True),
        ("--training.mixed_precision_reduce bfloat16", True),
        ("--training.enable_cpu_offload", True),
        ("--float8.enable --float8.emulate --float8.min_features 0", True),
    ],
)
def test_a_single_rank_uses_fsdp_only_if_the_job_needs_it(
    tmp_path, write_plugin, options, uses_fsdp
):
    write_plugin("plugin", PLUGIN)
    arguments = f"--job.dump_folder {tmp_path} --training.mixed_precision_param float32 {options}"
    with Trainer(load_run(arguments.split(), world_size=1), standard=False) as trainer:
        assert isinstance(trainer.model, FSDPModule) == uses_fsdp
