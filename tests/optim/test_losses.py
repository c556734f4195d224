"""Each loss has the same value on each layout, and validation always reports the cross entropy."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from ranks import run_ranks, small_trainer
from small_runs import read_metrics

from titanlite.config.errors import UserError
from titanlite.hooks.hook import Hook

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "plugin_optimizers.md"
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


def train(folder: str, losses: Iterable[str], layouts: Iterable[str]) -> None:
    for loss in losses:
        for layout in layouts:
            options = f"{OPTIONS} {LOSSES[loss]} {LAYOUTS.get(layout, '')}".split()
            with small_trainer(f"{folder}/{loss}-{layout}", Hook(), *options) as trainer:
                trainer.train()


def train_summed(folder: str) -> None:
    options = f"{OPTIONS} summed --job.plugins my_summed_loss"
    with (
        small_trainer(f"{folder}/summed", Hook(), *options.split()) as trainer,
        pytest.raises(UserError, match="per token"),
    ):
        trainer.train()


@pytest.fixture
def plugin(tmp_path, monkeypatch) -> None:
    """Make the plugin from the documentation importable."""
    (source,) = re.findall(r'```python title="my_loss.py"\n(.*?)```', PAGE.read_text(), flags=re.S)
    (tmp_path / "my_loss.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("plugin")
def test_a_loss_that_is_not_per_token_is_an_error(tmp_path):
    source = tmp_path / "my_loss.py"
    code = source.read_text()

    assert 'reduction="none"' in code

    code = code.replace('"label_smoothing"', '"summed"').replace(
        'reduction="none"', 'reduction="sum"'
    )
    (tmp_path / "my_summed_loss.py").write_text(code)

    run_ranks(1, train_summed, str(tmp_path))


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    "computed",
    [
        pytest.param(["smoothed"], id="sample"),
        pytest.param(["fused", "reference", "smoothed"], id="all", marks=pytest.mark.long),
    ],
)
def test_each_loss_is_the_same_on_each_layout(tmp_path, computed):
    run_ranks(1, train, str(tmp_path), LOSSES, ["alone"])
    run_ranks(2, train, str(tmp_path), computed, LAYOUTS)

    def measured(loss: str, layout: str) -> list[float]:
        entries = read_metrics(tmp_path / f"{loss}-{layout}" / "out")
        return [entries[step][key] for step in (1, 2) for key in ("loss", "grad_norm")]

    def validated(loss: str) -> str:
        log = (tmp_path / f"{loss}-alone" / "out" / "train.log").read_text()
        return re.findall(r"validation after step 0: (.*)", log)[0]

    pairs = [(loss, layout) for loss in computed for layout in LAYOUTS]
    for loss, layout in [("reference", "alone"), ("unsmoothed", "alone"), *pairs]:
        expected = measured("smoothed" if loss == "smoothed" else "fused", "alone")
        # fp32 sums in another order
        assert measured(loss, layout) == pytest.approx(expected, rel=1e-5), (loss, layout)

    assert measured("smoothed", "alone") != pytest.approx(measured("fused", "alone"), rel=1e-3)
    assert validated("smoothed") == validated("fused")
