"""Each loss has the same value on each layout, and validation always reports the cross entropy."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from ranks import run_ranks, train_small
from small_runs import read_documented_program, read_log, read_metrics

from titanlite.config.errors import UserError
from titanlite.hooks.hook import Hook

pytestmark = pytest.mark.slow
OPTIONS = (
    "--training.steps 2 --checkpoint.no-enable --model.n_kv_heads 2 --training.z_loss 1e-3 "
    "--validation.freq 9 --validation.holdout 0.1 --validation.sequences 2 "
    "--training.local_batch_size 1 --job.plugins my_loss --training.loss"
)
LOSSES = {
    "fused": "cross_entropy",
    "reference": "reference",
    "unsmoothed": "label_smoothing --label_smoothing.smoothing 0",
    "smoothed": "label_smoothing",
}
LAYOUTS = {
    "fsdp": "--parallelism.fsdp_min_num_params 0 --parallelism.fsdp_reshard_after_forward always",
    "microbatch": "--parallelism.fsdp_min_num_params 0 --parallelism.fsdp_reduce microbatch",
    "tensor": "--parallelism.tensor_parallel_degree 2",
    "context": "--parallelism.context_parallel_degree 2",
    "pipeline": "--parallelism.pipeline_parallel_degree 2",
    "compiled": "--compile.enable --compile.components loss",
}


def train(folder: Path, losses: Iterable[str], layouts: Iterable[str]) -> None:
    for loss in losses:
        for layout in layouts:
            options = (OPTIONS, LOSSES[loss], LAYOUTS.get(layout, ""))
            train_small(folder / f"{loss}-{layout}", Hook(), *options)


def train_summed(folder: Path) -> None:
    with pytest.raises(UserError, match="per token"):
        train_small(folder, Hook(), OPTIONS, "label_smoothing")


@pytest.fixture
def source(write_plugin) -> str:
    """Make the plugin from the documentation importable, and return its source."""
    source = read_documented_program("plugin_optimizers", "my_loss.py")
    write_plugin("my_loss", source)
    return source


def test_a_loss_that_is_not_per_token_is_an_error(tmp_path, source, write_plugin):
    summed = source.replace('reduction="none"', 'reduction="sum"')
    assert summed != source
    write_plugin("my_loss", summed)

    run_ranks(1, train_summed, tmp_path)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    "computed",
    [
        pytest.param(["smoothed"], id="sample"),
        pytest.param(["fused", "reference", "smoothed"], id="all", marks=pytest.mark.long),
    ],
)
def test_each_loss_is_the_same_on_each_layout(tmp_path, computed):
    run_ranks(1, train, tmp_path, LOSSES, ["alone"])
    run_ranks(2, train, tmp_path, computed, LAYOUTS)

    def measured(loss: str, layout: str) -> list[float]:
        entries = read_metrics(tmp_path / f"{loss}-{layout}" / "out")
        return [entries[step][key] for step in (1, 2) for key in ("loss", "grad_norm")]

    def validated(loss: str) -> str:
        log = read_log(tmp_path / f"{loss}-alone" / "out")
        return re.findall(r"Validation after step 0: (.*)", log)[0]

    pairs = [(loss, layout) for loss in computed for layout in LAYOUTS]
    for loss, layout in [("reference", "alone"), ("unsmoothed", "alone"), *pairs]:
        expected = measured("smoothed" if loss == "smoothed" else "fused", "alone")
        # fp32 sums in another order
        assert measured(loss, layout) == pytest.approx(expected, rel=1e-5), (loss, layout)

    assert measured("smoothed", "alone") != pytest.approx(measured("fused", "alone"), rel=1e-3)
    assert validated("smoothed") == validated("fused")
