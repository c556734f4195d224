"""`titanlite prove` finds every mistake of the catalog, and accepts correct jobs of all kinds.

tests/distributed/test_equivalence.py proves all layouts, pipeline schedules and memory options, and
tests/test_plugins.py proves fused projections.
"""

import re

import pytest
from ranks import start_titanlite, titanlite

from mutants.catalog import CATALOG, FLOAT8, FSDP, FSDP_TP, HSDP, ONE, TP, Layout, plugin

pytestmark = pytest.mark.slow
SAMPLE = ("optimizer_state_of_one_rank_on_all",)
FP32 = "--training.mixed_precision_param float32"
CASES = []
for name in CATALOG:
    marks = () if name in SAMPLE else pytest.mark.long
    CASES.append(pytest.param(name, marks=marks))


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_detected_and_explained(name, tmp_path):
    mutant = CATALOG[name]
    layout = mutant.layout.plus(FP32)
    command = ("prove", "--job.dump_folder", tmp_path / "out", *layout.words)
    world = start_titanlite(*command, ranks=layout.ranks, before=mutant.apply)
    world.wait()

    assert world.processes[0].exitcode == 3, world.output
    first_line = next(line for line in world.output.splitlines() if "First difference" in line)
    assert re.search(mutant.expected, first_line), first_line


BF16 = "--training.mixed_precision_param bfloat16"
BF16_WEIGHTS = f"{BF16} --training.dtype bfloat16 --optimizer.stochastic_rounding"
FAMILIES = (
    *("8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "olmo2-1b", "olmo3-7b", "smollm3-3b"),
    "smollm2-1.7b",
)
OPTIMIZERS = ("AdamW", "Muon", "Lion", "SGD", "AdamW8bit")
PLUGINS = ("dropout_blocks", "parallel_blocks")
JOBS: dict[str, Layout] = {
    "one rank": ONE.plus(FP32),
    "bf16 weights": FSDP.plus(BF16_WEIGHTS),
    "float8 all-gather": HSDP.plus(BF16, FLOAT8),
    "float8 rowwise": TP.plus(BF16, "--float8.enable --float8.recipe_name rowwise"),
    "average": FSDP.plus(FP32, "--ema.decay 0.9"),
    "z-loss": TP.plus(FP32, "--training.z_loss 1e-4"),
}
for name in OPTIMIZERS:
    JOBS[f"optimizer {name}"] = FSDP.plus(FP32, f"--optimizer.name {name}")
for name in FAMILIES:
    JOBS[f"family {name}"] = FSDP.plus(FP32, f"--model.flavor {name}")
    JOBS[f"family {name}, tp"] = TP.plus(FP32, f"--model.flavor {name}")
for name in PLUGINS:
    JOBS[f"plugin {name}"] = FSDP_TP.plus(FP32, plugin(name), "--activation_checkpoint.mode full")
for seed in range(10):
    JOBS[f"seed {seed}"] = FSDP.plus(FP32, f"--training.seed {seed}")


@pytest.mark.long
@pytest.mark.parametrize("layout", JOBS.values(), ids=JOBS)
def test_a_correct_job_is_proven(layout, tmp_path):
    command = ("prove", "--job.dump_folder", tmp_path / "out", *layout.words)
    assert "Proven" in titanlite(*command, ranks=layout.ranks)
