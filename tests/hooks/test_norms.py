"""Norms by group of parameters: they are those of the whole model, on any layout, and training does not notice them."""

import math

import pytest
import torch
from ranks import run_ranks, small_trainer, start_small
from small_runs import logged
from torch.distributed.tensor import DTensor

from titanlite.hooks.hook import Hook
from titanlite.optim.clip import StepSums
from titanlite.train.trainer import Trainer

pytestmark = pytest.mark.slow

ALL_ON = ("--metrics.details", "gradients", "updates", "--metrics.enable_tensorboard")
GROUPS = {
    *("tok_embeddings", "norm", "output", "attention_norm", "ffn_norm"),
    *(f"attention.{name}" for name in ("wq", "wk", "wv", "wo")),
    *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
}


def test_all_layouts_measure_the_same_and_training_does_not_notice(tmp_path):
    both = (
        "--parallelism.pipeline_parallel_degree",
        "2",
        "--parallelism.tensor_parallel_degree",
        "2",
    )
    runs = {"off": (1, ()), "one": (1, ALL_ON), "both": (4, (*ALL_ON, *both))}
    words = (
        "--training.steps",
        "4",
        "--checkpoint.no-enable",
        "--model.n_kv_heads",
        "2",
    )  # one a tensor rank
    for name, (ranks, options) in runs.items():
        start_small(tmp_path / name, *words, *options, ranks=ranks).ends_with(0)
    off, one, spread = (logged(tmp_path / name) for name in runs)
    for step, entry in one.items():
        for key in ("loss", "loss_max_rank", "grad_norm", "clip_fraction", "tokens"):
            assert entry[key] == off[step][key]  # bitwise
        assert entry["grad_norms"].keys() == entry["update_ratios"].keys() == GROUPS
        squares = sum(norm**2 for norm in entry["grad_norms"].values())
        assert math.sqrt(squares) == pytest.approx(
            entry["grad_norm"], rel=1e-6
        )  # that one is in fp32
        for key in (
            "loss",
            "grad_norms",
            "update_ratios",
            # Sums of fp32 products in another order; measured: 2e-7.
        ):
            assert spread[step][key] == pytest.approx(entry[key], rel=1e-5)
        assert spread[step]["source_tokens"] == entry["source_tokens"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "both" / "tb"))
    board.Reload()
    tags = board.Tags()["histograms"]

    assert {*tags} == {
        f"grad_norms/{group}" for group in GROUPS if "." in group or "_norm" in group
    }

    # the largest of the two blocks' norms is at least that of the group divided by the root of 2
    for tag in tags:
        norm = spread[4]["grad_norms"][tag.removeprefix("grad_norms/")]
        last = board.Histograms(tag)[-1].histogram_value
        assert last.num == 2
        assert norm / math.sqrt(2) * 0.999 <= last.max <= norm * 1.001


def whole(trainer: Trainer) -> list[torch.Tensor]:
    full = (p.full_tensor() if isinstance(p, DTensor) else p for p in trainer.model.parameters())
    return [weight.detach().clone() for weight in full]


def measured_and_real(folder: str, *words: str) -> list[tuple[dict[str, float], dict[str, float]]]:
    """The update ratios of some steps as they are logged, and from the weights before and after each step."""
    found = []
    with small_trainer(folder, Hook(), *words) as trainer:
        names = [name.removesuffix(".weight") for name, _ in trainer.model.named_parameters()]
        groups = [name.split(".", 2)[-1] if name.startswith("layers.") else name for name in names]
        for _ in range(3):
            before, entry, after = whole(trainer), trainer.step(), whole(trainer)
            assert entry is not None
            squares = {group: torch.zeros(2, dtype=torch.float64) for group in GROUPS}
            for group, a, b in zip(groups, after, before, strict=True):
                squares[group] += torch.stack([x.double().square().sum() for x in (a - b, a)])
            real = {
                group: (change / size).sqrt().item() for group, (change, size) in squares.items()
            }
            found.append((entry.update_ratios, real))
    return found


@pytest.mark.parametrize("own_adamw", [False, True])
def test_the_update_is_what_the_weights_have_changed_by(tmp_path, own_adamw: bool):
    words = [
        "--checkpoint.no-enable",
        "--optimizer.weight_decay",
        "0",
        "--metrics.details",
        "updates",
    ]
    words += ["--optimizer.state_dtype", "bfloat16"] if own_adamw else []
    for logged_ratios, real in run_ranks(1, measured_and_real, str(tmp_path), *words)[0]:
        # The change of an fp32 weight is rounded: to 6e-8 of the weight, beside changes of 1e-3.
        # Moments in bfloat16 are rounded after the update was made of them: to 2**-9.
        assert logged_ratios == pytest.approx(real, rel=5e-3 if own_adamw else 1e-3)


class SkipSteps(Hook):
    """Skip the first and the third step."""

    def before_update(self, step: int, sums: StepSums, skip: torch.Tensor) -> None:
        skip.fill_(float(step in (1, 3)))


def train_with_skipped_steps(folder: str) -> None:
    words = ["--training.steps", "4", "--checkpoint.no-enable", "--metrics.details", "updates"]
    with small_trainer(folder, SkipSteps(), *words) as trainer:
        trainer.train()


def test_a_skipped_step_reports_no_update(tmp_path):
    run_ranks(1, train_with_skipped_steps, str(tmp_path))
    reported = {
        step: {*entry.get("update_ratios", ())} for step, entry in logged(tmp_path / "out").items()
    }

    assert reported == {1: set(), 2: GROUPS, 3: set(), 4: GROUPS}
