"""Gradient norms and update ratios of parameter groups are the same in every layout."""

import math
import re
from pathlib import Path

import pytest
import torch
from ranks import run_small, small_trainer, train_small
from small_runs import read_metrics, read_tensorboard
from train_variants import all_weights

from titanlite.hooks.hook import Hook
from titanlite.optim.clip import StepSums

pytestmark = pytest.mark.slow

ALL_ON = "--metrics.details gradients updates --metrics.enable_tensorboard"
GROUPS = {
    *("tok_embeddings", "norm", "output", "attention_norm", "ffn_norm"),
    *(f"attention.{name}" for name in ("wq", "wk", "wv", "wo")),
    *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
}


def test_all_layouts_log_the_same_norms_and_norms_do_not_change_training(tmp_path):
    # Each of the two tensor-parallel ranks needs a key head.
    options = "--training.steps 4 --checkpoint.no-enable --model.n_kv_heads 2"
    layout = "--parallelism.pipeline_parallel_degree 2 --parallelism.tensor_parallel_degree 2"
    run_small(tmp_path / "off", options)
    run_small(tmp_path / "one", options, ALL_ON)
    run_small(tmp_path / "both", options, ALL_ON, layout, ranks=4)

    off, one, both = (read_metrics(tmp_path / name) for name in ("off", "one", "both"))
    for step, entry in one.items():
        for key in ("loss", "loss_max_rank", "grad_norm", "clip_fraction", "tokens"):
            assert entry[key] == off[step][key]
        assert entry["grad_norms"].keys() == entry["update_ratios"].keys() == GROUPS

        # The norm of the whole model is computed in fp32.
        norm = math.hypot(*entry["grad_norms"].values())
        assert norm == pytest.approx(entry["grad_norm"], rel=1e-6)

        # Other layouts add fp32 products in another order. The measured difference is 2e-7.
        for key in ("loss", "grad_norms", "update_ratios"):
            assert both[step][key] == pytest.approx(entry[key], rel=1e-5)
        assert both[step]["source_tokens"] == entry["source_tokens"]

    check_histograms(tmp_path / "both", both[4]["grad_norms"])


def check_histograms(folder: Path, grad_norms: dict[str, float]) -> None:
    """Check that TensorBoard has a histogram over both blocks for each group in blocks."""
    board = read_tensorboard(folder)
    tags = board.Tags()["histograms"]
    in_blocks = [group for group in GROUPS if "." in group or "_norm" in group]

    assert {*tags} == {f"grad_norms/{group}" for group in in_blocks}
    for tag in tags:
        norm = grad_norms[tag.removeprefix("grad_norms/")]
        last = board.Histograms(tag)[-1].histogram_value
        assert last.num == 2
        # The larger of two norms is at least the norm of both, divided by the square root of 2.
        assert norm / math.sqrt(2) * 0.999 <= last.max <= norm * 1.001


def find_group(name: str) -> str:
    """Return the group of a weight, its name without the block that it belongs to."""
    return re.sub(r"^layers\.\d+\.", "", name.removesuffix(".weight"))


@pytest.mark.parametrize("own_adamw", [False, True])
def test_logged_update_ratios_equal_the_change_of_the_weights(tmp_path, own_adamw, single_rank):
    options = "--checkpoint.no-enable --optimizer.weight_decay 0 --metrics.details updates"
    if own_adamw:
        options += " --optimizer.state_dtype bfloat16"
    # The change of an fp32 weight is rounded to 6e-8 of the weight; changes are about 1e-3.
    # Moments in bfloat16 are rounded to 2**-9 after the update is computed from them.
    tolerance = 5e-3 if own_adamw else 1e-3

    with small_trainer(tmp_path, Hook(), options) as trainer:
        for _ in range(3):
            before = all_weights(trainer.model)
            entry = trainer.step()
            after = all_weights(trainer.model)
            assert entry is not None
            changes = dict.fromkeys(GROUPS, 0.0)
            sizes = dict.fromkeys(GROUPS, 0.0)
            for name, new in after.items():
                group = find_group(name)
                changes[group] += (new - before[name]).double().square().sum().item()
                sizes[group] += new.double().square().sum().item()
            computed = {group: math.sqrt(changes[group] / sizes[group]) for group in GROUPS}
            assert entry.update_ratios == pytest.approx(computed, rel=tolerance)


class SkipSteps(Hook):
    """Skip the first and the third step."""

    def before_update(self, step: int, sums: StepSums, skip: torch.Tensor) -> None:
        skip.fill_(float(step in (1, 3)))


def test_a_skipped_step_logs_no_update_ratios(tmp_path, single_rank):
    options = "--training.steps 4 --checkpoint.no-enable --metrics.details updates"

    train_small(tmp_path, SkipSteps(), options)

    logged = {}
    for step, entry in read_metrics(tmp_path / "out").items():
        logged[step] = {*entry.get("update_ratios", ())}
    assert logged == {1: set(), 2: GROUPS, 3: set(), 4: GROUPS}
