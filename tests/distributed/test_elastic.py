"""Changing the layout at restarts keeps data and losses; the same layout resumes bitwise."""

import shutil
from pathlib import Path

import pytest
from ranks import run_small
from small_runs import read_losses

from titanlite.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.slow

# 2, 3 and 4 ranks do not divide the vocabulary, so their shards have different sizes.
OPTIONS = (
    "--model.n_layers 4 --model.n_kv_heads 2 --model.vocab_size 4105 --training.seq_len 32 "
    "--lr_scheduler.decay_ratio 0"
)
ONE_SEQUENCE = "--training.local_batch_size 1"
PIPELINE = (
    f"{ONE_SEQUENCE} --parallelism.pipeline_parallel_degree 2 "
    "--parallelism.pipeline_parallel_schedule Interleaved1F1B"
)
LEGS = [  # last step, ranks, options
    (3, 1, ""),
    (5, 2, "--parallelism.tensor_parallel_degree 2"),
    (7, 2, PIPELINE),
    (9, 4, f"{ONE_SEQUENCE} --parallelism.data_parallel_replicate_degree 2"),
    (12, 1, ONE_SEQUENCE),
]


def train(folder: Path, ranks: int, options: str = "") -> Path:
    run_small(folder, OPTIONS, options, ranks=ranks)
    return folder


def test_the_curve_does_not_depend_on_the_layout(tmp_path):
    straight = train(tmp_path / "straight", 1)
    moved = tmp_path / "moved"
    for last, ranks, options in LEGS:
        train(moved, ranks, f"--training.steps {last} {options}")  # ends with a save

    assert list(read_losses(moved)) == list(range(1, 13))
    assert read_losses(moved) == pytest.approx(read_losses(straight), abs=1e-5)


@pytest.mark.long
def test_uneven_shards_of_tensor_parallelism_and_fsdp_are_saved_and_loaded(tmp_path):
    moved = tmp_path / "moved"
    batch = f"{ONE_SEQUENCE} --training.global_batch_size 6"
    straight = train(tmp_path / "straight", 1, f"{batch} --training.steps 6")
    # The two tensor-parallel ranks have 2,053 and 2,052 rows of the vocabulary.
    tensor = "--parallelism.tensor_parallel_degree 2"
    train(moved, 1, f"{batch} --training.steps 2")
    train(moved, 6, f"{batch} --training.steps 4 {tensor}")
    train(moved, 1, f"{batch} --training.steps 6")

    assert read_losses(moved) == pytest.approx(read_losses(straight), abs=1e-5)


def test_a_pipeline_that_validates_first_resumes_exactly(tmp_path):
    options = (
        f"{PIPELINE} --training.steps 4 --checkpoint.interval 2 --validation.freq 4 "
        "--validation.holdout 0.1 --validation.sequences 4"
    )
    straight = train(tmp_path / "straight", 2, options)
    resumed = shutil.copytree(straight, tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoint" / "step-00000004")
    train(resumed, 2, options)

    assert read_losses(resumed) == read_losses(straight)

    last, again = (
        read_manifest(folder / "checkpoint" / "step-00000004")["files"]
        for folder in (straight, resumed)
    )

    # .metadata contains a random number.
    assert {name for name in last if last[name] != again[name]} <= {".metadata"}
