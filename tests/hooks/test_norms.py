"""Gradient norms and update ratios of parameter groups are the same in every layout."""

import math
from pathlib import Path

import pytest
import torch
from ranks import run_ranks, small_trainer, start_small
from small_runs import read_metrics
from torch.distributed.tensor import DTensor

from titanlite.hooks.hook import Hook
from titanlite.optim.clip import StepSums
from titanlite.train.trainer import Trainer

pytestmark = pytest.mark.slow

Ratios = dict[str, float]

ALL_ON = ("--metrics.details", "gradients", "updates", "--metrics.enable_tensorboard")
GROUPS = {
    *("tok_embeddings", "norm", "output", "attention_norm", "ffn_norm"),
    *(f"attention.{name}" for name in ("wq", "wk", "wv", "wo")),
    *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
}


def test_all_layouts_log_the_same_norms_and_norms_do_not_change_training(tmp_path):
    # Each of the two tensor-parallel ranks needs a key head.
    options = "--training.steps 4 --checkpoint.no-enable --model.n_kv_heads 2"
    layout = "--parallelism.pipeline_parallel_degree 2 --parallelism.tensor_parallel_degree 2"
    start_small(tmp_path / "off", options).wait_for_exit(0)
    start_small(tmp_path / "one", options, *ALL_ON).wait_for_exit(0)
    start_small(tmp_path / "both", options, *ALL_ON, layout, ranks=4).wait_for_exit(0)

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

    check_histograms(tmp_path / "both" / "tb", both[4]["grad_norms"])


def check_histograms(folder: Path, grad_norms: dict[str, float]) -> None:
    """Check that TensorBoard has a histogram over both blocks for each group in blocks."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    tags = board.Tags()["histograms"]
    in_blocks = [group for group in GROUPS if "." in group or "_norm" in group]

    assert {*tags} == {f"grad_norms/{group}" for group in in_blocks}
    for tag in tags:
        norm = grad_norms[tag.removeprefix("grad_norms/")]
        last = board.Histograms(tag)[-1].histogram_value
        assert last.num == 2
        # The larger of two norms is at least the norm of both, divided by the square root of 2.
        assert norm / math.sqrt(2) * 0.999 <= last.max <= norm * 1.001


def copy_weights(trainer: Trainer) -> list[torch.Tensor]:
    """Return copies of the unsharded weights."""
    weights = []
    for weight in trainer.model.parameters():
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        weights.append(full.detach().clone())
    return weights


def find_group(name: str) -> str:
    """Return the name of a parameter without the block that it belongs to."""
    if name.startswith("layers."):
        return name.split(".", 2)[-1]
    return name


def measure_updates(folder: str, *options: str) -> list[tuple[Ratios, Ratios]]:
    """Return logged update ratios, and ratios computed from the weights around each step."""
    ratios = []
    with small_trainer(folder, Hook(), *options) as trainer:
        names = [name.removesuffix(".weight") for name, _ in trainer.model.named_parameters()]
        groups = [find_group(name) for name in names]
        for _ in range(3):
            before = copy_weights(trainer)
            entry = trainer.step()
            after = copy_weights(trainer)
            assert entry is not None
            changes = dict.fromkeys(GROUPS, 0.0)
            sizes = dict.fromkeys(GROUPS, 0.0)
            for group, old, new in zip(groups, before, after, strict=True):
                changes[group] += (new - old).double().square().sum().item()
                sizes[group] += new.double().square().sum().item()
            computed = {group: math.sqrt(changes[group] / sizes[group]) for group in GROUPS}
            ratios.append((entry.update_ratios, computed))
    return ratios


@pytest.mark.parametrize("own_adamw", [False, True])
def test_logged_update_ratios_equal_the_change_of_the_weights(tmp_path, own_adamw: bool):
    options = "--checkpoint.no-enable --optimizer.weight_decay 0 --metrics.details updates".split()
    options += ["--optimizer.state_dtype", "bfloat16"] if own_adamw else []
    # The change of an fp32 weight is rounded to 6e-8 of the weight; changes are about 1e-3.
    # Moments in bfloat16 are rounded to 2**-9 after the update is computed from them.
    tolerance = 5e-3 if own_adamw else 1e-3

    (ratios,) = run_ranks(1, measure_updates, str(tmp_path), *options)

    for logged, computed in ratios:
        assert logged == pytest.approx(computed, rel=tolerance)


class SkipSteps(Hook):
    """Skip the first and the third step."""

    def before_update(self, step: int, sums: StepSums, skip: torch.Tensor) -> None:
        skip.fill_(float(step in (1, 3)))


def train_with_skipped_steps(folder: str) -> None:
    options = ["--training.steps", "4", "--checkpoint.no-enable", "--metrics.details", "updates"]
    with small_trainer(folder, SkipSteps(), *options) as trainer:
        trainer.train()


def test_a_skipped_step_logs_no_update_ratios(tmp_path):
    run_ranks(1, train_with_skipped_steps, str(tmp_path))

    logged = {}
    for step, entry in read_metrics(tmp_path / "out").items():
        logged[step] = {*entry.get("update_ratios", ())}
    assert logged == {1: set(), 2: GROUPS, 3: set(), 4: GROUPS}
