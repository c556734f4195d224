"""The exponential moving average of the weights is exact on each layout and across resumes."""

import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks, titanlite, train_small
from safetensors.torch import load_file
from test_guards import Fault

from titanlite import load_checkpoint
from titanlite.hooks.ema import Ema
from titanlite.model.formats import hf_name

pytestmark = pytest.mark.slow
# Last step and layout of each start. Each start resumes from the one before.
# The first has no average.
STARTS = {
    2: "--ema.decay 0",
    4: "--parallelism.fsdp_min_num_params 0",
    6: "--parallelism.tensor_parallel_degree 2",
    8: "--parallelism.pipeline_parallel_degree 2",
    10: "--training.enable_cpu_offload --training.dtype bfloat16",
}


def train(folder: Path) -> None:
    common = (
        "--model.n_kv_heads 2 --lr_scheduler.decay_ratio 0 "
        "--checkpoint.interval 1 --checkpoint.keep_latest_k 0 --training.steps"
    )
    for until, layout in STARTS.items():
        # The first checkpoint with an average has the hook name of an earlier version.
        saved_name = "Ema" if until == 4 else "ema"
        decay = "" if "ema" in layout else "--ema.decay 0.75"
        fault = Fault({3: math.nan, 7: math.nan})
        with patch.object(Ema, "name", saved_name):
            train_small(folder, fault, common, until, decay, layout)


def test_the_average_is_exact_on_any_layout_and_export_and_eval_use_it(tmp_path):
    run_ranks(2, train, tmp_path)

    out = tmp_path / "out"
    checkpoints = {step: out / "checkpoint" / f"step-{step:08}" for step in range(2, 11)}
    averages = load_checkpoint(checkpoints[2]).model.state_dict()
    for step in range(3, 11):
        # Steps 3 and 7 are skipped, so they do not change the average.
        if step not in (3, 7):
            for name, weight in load_checkpoint(checkpoints[step]).model.named_parameters():
                averages[name] = averages[name].lerp(weight, torch.tensor(0.25))
        saved = dict(load_checkpoint(checkpoints[step], ema=True).model.named_parameters())
        assert saved.keys() == averages.keys()
        assert all(torch.equal(saved[name], average) for name, average in averages.items())

    hf = tmp_path / "hf"
    titanlite("export", "--checkpoint", out, "--out", hf, "--dtype", "float32", "--ema")
    exported = load_file(hf / "model.safetensors")
    arch = load_checkpoint(out).model.arch
    for name, average in averages.items():
        assert torch.equal(exported[hf_name(arch, name)], average)

    (tmp_path / "text.txt").write_text("import os\n" * 20)
    evaluate = ("eval", "--data", tmp_path / "text.txt", "--json", "--checkpoint")
    score = titanlite(*evaluate, out).splitlines()[-1]
    score_of_average = titanlite(*evaluate, out, "--ema").splitlines()[-1]
    assert score != score_of_average

    titanlite(*evaluate, checkpoints[2], "--ema", code=2)
