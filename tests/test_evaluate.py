"""Validation: one score, whatever the layout."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.batch import IGNORED, Microbatch
from titanlite.data.heldout import ValidationSet
from titanlite.data.tokenizer import load_tokenizer
from titanlite.score import Score
from titanlite.train.evaluate import evaluate


@pytest.fixture(scope="module")
def group(one_rank: None) -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def score(group: dist.ProcessGroup, loss_per_token: float) -> tuple[Score, ValidationSet]:
    sections = {"validation": {"sequences": 5}, "training": {"seq_len": 32, "local_batch_size": 2}}
    run = Run(JobConfig.model_validate(sections))
    rows = ValidationSet(run, load_tokenizer(run.tokenizer_path), 0, torch.device("cpu"))

    def loss_sum(microbatches: Sequence[Microbatch]) -> torch.Tensor:
        return sum((microbatch.labels != IGNORED).sum() for microbatch in microbatches) * torch.tensor(loss_per_token)

    return evaluate(rows, loss_sum, group, group), rows


def test_a_model_that_guesses_costs_the_logarithm_of_the_vocabulary(group: dist.ProcessGroup) -> None:
    result, rows = score(group, math.log(4096))
    assert result.loss == pytest.approx(math.log(4096))
    assert result.perplexity == pytest.approx(4096)
    assert rows.num_tokens == 5 * 32
    assert result.bits_per_byte == pytest.approx(12 * rows.num_tokens / rows.num_bytes)


def test_a_hopeless_model_is_no_overflow(group: dist.ProcessGroup) -> None:
    assert score(group, 1e6)[0].perplexity == math.inf


def test_a_score_reads_well() -> None:
    assert str(Score(1.0, math.e, 0.5)) == "loss 1.0000  perplexity 2.72  bits/byte 0.5000"
