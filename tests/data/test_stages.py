"""Stages of a run: other batches, rates and weights from a step on, exact on any layout and after a restart."""

from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from data_helpers import Ranks, dataset_of, some_texts
from ranks import run_ranks, small_trainer
from small_runs import SMALL, logged

from titanlite.cli import main
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
ROWS = [4, 4, 8, 8, 8, 8, 4, 4]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_stages_of_the_batch_size_cut_the_same_rows_also_on_other_ranks_in_each_stage(tmp_path, packing):
    plain = dataset_of(tmp_path, some_texts(150)).model_copy(update={"packing": packing})
    reference = Ranks(plain, 1)
    expected = torch.cat([reference.batch() for _ in range(4)])
    sizes = {0: 8, 2: 16, 3: 24, 5: 4}
    stages = tuple(DataStage(start_step=start, global_batch_size=size) for start, size in sizes.items())
    dataset, batches = plain.model_copy(update={"stages": stages}), []
    ranks = Ranks(dataset, 1)
    for step, count in enumerate((2, 4, 1, 2, 4, 2, 1)):
        batches.append(ranks.batch())
        assert len(batches[-1]) == sizes[max(start for start in sizes if start <= step)]
        ranks = Ranks(dataset, count).load(ranks.state())
    rows = torch.cat(batches)
    assert torch.equal(rows, expected[: len(rows)])


def staged(folder: str) -> None:
    words = "--model.n_kv_heads 2 --training.local_batch_size 1 --lr_scheduler.total_steps 9 --training.steps"
    with patch("ranks.SMALL", SMALL + STAGES):
        for name, layout, ends in (
            ("whole", "--parallelism.fsdp_min_num_params 0", "8"),
            ("parts", "--parallelism.fsdp_min_num_params 0", "58"),
            ("pp", "--parallelism.pipeline_parallel_degree 2 --validation.freq 3 --validation.holdout 0.2", "8"),
            ("validated", "--validation.freq 3 --validation.holdout 0.2", "8"),
        ):
            for end in ends:
                with small_trainer(f"{folder}/{name}", Hook(), *layout.split(), *words.split(), end) as trainer:
                    trainer.train()


@pytest.mark.slow
def test_a_run_in_stages_is_the_same_after_a_resume_and_on_a_pipeline(tmp_path: Path) -> None:
    run_ranks(2, staged, str(tmp_path))
    runs = {name: logged(tmp_path / name / "out") for name in ("whole", "parts", "pp", "validated")}
    for lines in runs.values():
        tokens = [0, *(lines[step]["tokens"] for step in range(1, 9))]
        assert [now - before for before, now in pairwise(tokens)] == [64 * rows for rows in ROWS]
        shares = [lines[step]["lr"] / (2e-3 * (1 - (step - 3) / 7)) for step in range(4, 9)]
        assert shares == pytest.approx([1, 1, 0.5, 0.5, 0.5])
    for key in ("loss", "grad_norm", "lr"):
        assert [line[key] for line in runs["whole"].values()] == [line[key] for line in runs["parts"].values()]
        # Sums over rows and blocks in another order, in fp32.
        found = [[line[key] for line in runs[name].values()] for name in ("pp", "validated")]
        assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("columns", [45, 100])
def test_the_schedule_is_drawn_within_the_terminal(tmp_path, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    job = tmp_path / "job.toml"
    job.write_text(SMALL + STAGES.replace("lr_factor = 0.5", "lr_factor = 0.5\nweights = [1, 3]"))
    with job.open("a") as file:
        file.write('[[dataset.sources]]\n[[dataset.sources]]\nsource = "text"\npath = "LICENSE"\nweight = 0\n')
    assert main(["check", "--job.config_file", str(job), "--plot"]) == 0
    drawn = capsys.readouterr().out.split("learning rate")[1].split("\n")
    assert max(map(len, drawn)) <= columns
    named = {line.strip(): below for line, below in pairwise(drawn)}
    assert named["rows of a step"] == "       8 |  ████"
    assert named["share of text LICENSE"] == "     75% |     ███████"
