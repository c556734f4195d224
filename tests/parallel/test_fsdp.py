"""FSDP is used wherever a job needs it, and does not change the results."""

from pathlib import Path

import pytest
from small_runs import SMALL, read_metrics
from torch.distributed.fsdp import FSDPModule

from titanlite.config.errors import UserError
from titanlite.load_run import load_run
from titanlite.train.trainer import Trainer

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar

from titanlite import Architecture, Llama, register
from titanlite.optim.adamw import AdamW

register("optimizer", "plugin_adamw")(AdamW)


class SharingLlama(Llama):
    def __init__(self, arch, blocks=None):
        super().__init__(arch, blocks)
        first, *others = self.layers.values()
        for block in others:
            block.feed_forward.w1.weight = first.feed_forward.w1.weight


@register("architecture", "sharing")
@dataclass(frozen=True)
class SharingArchitecture(Architecture):
    model: ClassVar = "plugin:SharingLlama"
    architecture: str = "sharing"
"""


@pytest.mark.parametrize(
    ("options", "uses_fsdp"),
    [
        ("", False),
        ("--optimizer.name Lion", False),
        ("--optimizer.name SGD", False),
        ("--optimizer.name Muon", True),
        ("--job.plugins plugin --optimizer.name plugin_adamw", True),
        ("--training.mixed_precision_param bfloat16", False),
        ("--training.mixed_precision_reduce bfloat16", True),
        ("--training.dtype bfloat16 --training.mixed_precision_reduce bfloat16", True),
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


def train(job_file: Path, folder: Path, options: str) -> dict[int, tuple[float, float]]:
    """Train in bfloat16, and return the loss and the gradient norm of each step."""
    arguments = f"--job.config_file {job_file} --job.dump_folder {folder} {options}"
    arguments += " --training.mixed_precision_param bfloat16"
    with Trainer(load_run(arguments.split(), world_size=1)) as trainer:
        trainer.train()
    entries = read_metrics(folder).items()
    return {step: (entry["loss"], entry["grad_norm"]) for step, entry in entries}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_can_share_a_parameter_within_one_fsdp_group(tmp_path, write_plugin, dtype):
    write_plugin("plugin", PLUGIN)
    options = f"--job.dump_folder {tmp_path} --job.plugins plugin --model.architecture sharing"
    options += f" --training.mixed_precision_param {dtype}"
    one_group = "--parallelism.fsdp_min_num_params 1000000000"

    with pytest.raises(UserError, match="fsdp_min_num_params"):
        Trainer(load_run(options.split(), world_size=1), standard=False)

    run = load_run(f"{options} {one_group}".split(), world_size=1)
    with Trainer(run, standard=False) as trainer:
        blocks = trainer.model.layers.values()
        first, *others = [block.get_parameter("feed_forward.w1.weight") for block in blocks]
        assert all(weight is first for weight in others)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--model.tied_embeddings",
        "--training.local_batch_size 1",
        "--activation_checkpoint.mode full",
        "--activation_checkpoint.mode selective",
        "--compile.enable --compile.components model loss --activation_checkpoint.mode selective",
    ],
    ids=["plain", "tied", "microbatches", "full", "selective", "compiled"],
)
def test_a_single_cpu_rank_computes_like_fsdp_mixed_precision(tmp_path, options):
    job_file = tmp_path / "job.toml"
    job_file.write_text(SMALL)

    without_fsdp = train(job_file, tmp_path / "without", options)
    # On a CPU, offload changes nothing except that the job needs FSDP.
    with_fsdp = train(job_file, tmp_path / "with", f"{options} --training.enable_cpu_offload")

    assert without_fsdp == with_fsdp
