"""The average of the weights: exact on each layout, across resumes, and what other commands take."""

import math
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks, small_trainer, titanlite
from safetensors.torch import load_file
from test_guards import Fault

from titanlite import load_checkpoint
from titanlite.hooks.ema import Ema
from titanlite.model.formats import hf_name

pytestmark = pytest.mark.slow
# Each goes on after the one before; the first has no average.
STARTS = {
    2: "--ema.decay 0",
    4: "--parallelism.fsdp_min_num_params 0",
    6: "--parallelism.tensor_parallel_degree 2",
    8: "--parallelism.pipeline_parallel_degree 2",
    10: "--training.enable_cpu_offload --training.dtype bfloat16",
}


def train(folder: str) -> None:
    words = "--model.n_kv_heads 2 --lr_scheduler.decay_ratio 0 --checkpoint.interval 1 --checkpoint.keep_latest_k 0"
    for until, layout in STARTS.items():
        # The first is that of an earlier version.
        saved_name = "Ema" if until == 4 else "ema"
        layout = (
            f"--training.steps {until} {'' if 'ema' in layout else '--ema.decay 0.75'} {layout}"
        )
        fault = Fault({3: math.nan, 7: math.nan})
        options = [*words.split(), *layout.split()]
        with (
            patch.object(Ema, "name", saved_name),
            small_trainer(folder, fault, *options) as trainer,
        ):
            trainer.train()


def test_the_average_is_exact_on_any_layout_and_is_what_other_commands_take(tmp_path):
    run_ranks(2, train, str(tmp_path))
    out = tmp_path / "out"
    (tmp_path / "text.txt").write_text("import os\n" * 20)
    steps = {step: out / "checkpoint" / f"step-{step:08}" for step in range(2, 11)}
    averages = load_checkpoint(steps.pop(2)).model.state_dict()
    for step, path in steps.items():
        found = dict(load_checkpoint(path, ema=True).model.named_parameters())
        for name, weight in (
            load_checkpoint(path).model.named_parameters() if step not in (3, 7) else ()
        ):
            averages[name] = averages[name].lerp(weight, torch.tensor(0.25))
        assert found.keys() == averages.keys()
        assert all(torch.equal(found[name], average) for name, average in averages.items())
    titanlite(
        "export", "--checkpoint", out, "--out", tmp_path / "hf", "--dtype", "float32", "--ema"
    )
    exported, arch = (
        load_file(tmp_path / "hf" / "model.safetensors"),
        load_checkpoint(out).model.arch,
    )

    assert all(
        torch.equal(exported[hf_name(arch, name)], average) for name, average in averages.items()
    )

    words = "eval", "--data", tmp_path / "text.txt", "--json", "--checkpoint"
    said = [titanlite(*words, out, *more).splitlines()[-1] for more in ((), ("--ema",))]

    assert said[0] != said[1]

    titanlite(*words, out / "checkpoint" / "step-00000002", "--ema", code=2)
