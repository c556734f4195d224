"""Stages change the batch size, learning rate and weights of a run at a step, on any layout."""

from itertools import accumulate, pairwise
from unittest.mock import patch

import pytest
import torch
from data_helpers import RankLoaders, change, jsonl_dataset, some_texts
from ranks import run_ranks, small_trainer
from small_runs import SMALL_WITHOUT_WORKERS, read_metrics

from titanlite.config.schema import DataStage
from titanlite.hooks.hook import Hook

STAGES = """
[[dataset.stages]]
start_step = 2
global_batch_size = 8
[[dataset.stages]]
start_step = 5
lr_factor = 0.5
[[dataset.stages]]
start_step = 6
global_batch_size = 4
"""
BATCH_SIZES = [4, 4, 8, 8, 8, 8, 4, 4]
TOKENS = list(accumulate(64 * size for size in BATCH_SIZES))


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_stages_with_other_batch_sizes_read_the_same_sequences(tmp_path, packing):
    plain = jsonl_dataset(tmp_path, some_texts(150), packing=packing)
    reference = RankLoaders(plain, 1)
    expected = torch.cat([reference.batch() for _ in range(4)])
    sizes = {0: 8, 2: 16, 3: 24, 5: 4}  # by first step
    stages = [DataStage(start_step=step, global_batch_size=size) for step, size in sizes.items()]
    dataset = change(plain, stages=tuple(stages))

    ranks = RankLoaders(dataset, 1)
    batches = []
    for num_ranks in (2, 4, 1, 2, 4, 2, 1):
        batches.append(ranks.batch())
        ranks = RankLoaders(dataset, num_ranks).load(ranks.state())

    assert [len(batch) for batch in batches] == [8, 8, 16, 24, 24, 4, 4]

    sequences = torch.cat(batches)
    assert torch.equal(sequences, expected[: len(sequences)])


SHARDED = "--parallelism.fsdp_min_num_params 0"
VALIDATED = "--validation.freq 3 --validation.holdout 0.2"
# Last step of each start, and the options of all starts.
RUNS = {
    "whole": (["8"], SHARDED),
    "resumed": (["5", "8"], f"{SHARDED} --dataset.num_workers 1"),
    "pipeline": (["8"], f"{VALIDATED} --parallelism.pipeline_parallel_degree 2"),
    "validated": (["8"], VALIDATED),
}


def train_with_stages(folder: str) -> None:
    options = (
        "--model.n_kv_heads 2 --training.local_batch_size 1 --lr_scheduler.total_steps 9 "
        "--training.steps"
    )
    with patch("ranks.SMALL_WITHOUT_WORKERS", SMALL_WITHOUT_WORKERS + STAGES):
        for name, (ends, layout) in RUNS.items():
            for end in ends:
                arguments = f"{layout} {options} {end}".split()
                with small_trainer(f"{folder}/{name}", Hook(), *arguments) as trainer:
                    trainer.train()


@pytest.mark.slow
def test_a_run_in_stages_is_the_same_after_a_resume_and_on_a_pipeline(tmp_path):
    run_ranks(2, train_with_stages, str(tmp_path))

    runs = {name: read_metrics(tmp_path / name / "out") for name in RUNS}
    for lines in runs.values():
        assert [lines[step]["tokens"] for step in range(1, 9)] == TOKENS
        factors = {4: 1, 5: 1, 6: 0.5, 7: 0.5, 8: 0.5}
        for step, factor in factors.items():
            share_left = 1 - (step - 3) / 7
            assert lines[step]["lr"] == pytest.approx(factor * 2e-3 * share_left)

    for key in ("loss", "grad_norm", "lr"):
        values = {}
        for name, lines in runs.items():
            values[name] = [line[key] for line in lines.values()]
        assert values["whole"] == values["resumed"]
        # A pipeline adds fp32 values of sequences and blocks in another order.
        assert values["pipeline"] == pytest.approx(values["validated"], rel=1e-5)


@pytest.mark.parametrize("columns", [45, 100])
def test_the_plot_of_the_schedule_fits_the_terminal(tmp_path, monkeypatch, run_command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    stages = STAGES.replace("lr_factor = 0.5", "lr_factor = 0.5\nweights = [1, 3]")
    sources = (
        '[[dataset.sources]]\n[[dataset.sources]]\nsource = "text"\npath = "LICENSE"\nweight = 0\n'
    )
    job = tmp_path / "job.toml"
    job.write_text(SMALL_WITHOUT_WORKERS + stages + sources)

    printed = run_command(f"check --job.config_file {job} --plot")

    lines = printed.split("learning rate")[1].split("\n")
    assert max(map(len, lines)) <= columns

    first_line = {title.strip(): below for title, below in pairwise(lines)}
    assert first_line["global batch size"] == "       8 |  ████"
    assert first_line["share of text LICENSE"] == "     75% |     ███████"
