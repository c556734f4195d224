"""Validation: fixed rows, whatever the layout."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.load import resolve_path
from titanlite.config.schema import JobConfig
from titanlite.data.loader import Microbatch
from titanlite.data.tokenizer import load_tokenizer
from titanlite.evaluate import Evaluator, Score
from titanlite.optim.loss import IGNORE_INDEX

SEQ_LEN = 32


@pytest.fixture(scope="module", autouse=True)
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def evaluator(
    sequences: int = 6, local_batch_size: int = 4, rank: int = 0, degree: int = 1, **keys: object
) -> Evaluator:
    values = {
        "training": {"seq_len": SEQ_LEN, "local_batch_size": local_batch_size},
        "dataset": {"num_workers": 0},
        "validation": {"freq": 1, "sequences": sequences, "num_workers": 0, **keys},
    }
    assert dist.group.WORLD is not None
    tokenizer = load_tokenizer(resolve_path("assets/tokenizer/tokenizer.model"))
    job = JobConfig.model_validate(values)
    return Evaluator(job, tokenizer, rank, degree, dist.group.WORLD, torch.device("cpu"))


def rows(*evaluators: Evaluator) -> set[tuple[int, ...]]:
    """Rows that count, of all ranks."""
    return {
        tuple(row.tolist())
        for one in evaluators
        for microbatch in one.microbatches
        for row, labels in zip(microbatch.input_ids, microbatch.labels, strict=True)
        if (labels != IGNORE_INDEX).any()
    }


def token_count(microbatch: Microbatch) -> Tensor:
    return (microbatch.labels != IGNORE_INDEX).sum()


def test_rows_do_not_depend_on_ranks_or_local_batch_size() -> None:
    reference = rows(evaluator())
    assert len(reference) == 6
    for degree, local_batch_size in ((1, 1), (1, 6), (2, 2), (4, 1), (2, 5)):
        ranks = [evaluator(6, local_batch_size, rank, degree) for rank in range(degree)]
        assert rows(*ranks) == reference
        assert len({len(rank.microbatches) for rank in ranks}) == 1, "ranks disagree on the number of batches"


def test_a_model_that_guesses_costs_the_logarithm_of_the_vocabulary() -> None:
    one = evaluator()
    score = one.score(lambda microbatch: token_count(microbatch) * math.log(4096))
    assert score.loss == pytest.approx(math.log(4096))
    assert score.perplexity == pytest.approx(4096)
    tokenizer = load_tokenizer(resolve_path("assets/tokenizer/tokenizer.model"))
    labels = torch.cat([m.labels[m.labels != IGNORE_INDEX] for m in one.microbatches]).tolist()
    num_bytes = sum(len(tokenizer.token_bytes(token)) for token in labels)
    assert score.bits_per_byte == pytest.approx(12 * 6 * SEQ_LEN / num_bytes)


def test_a_hopeless_model_is_no_overflow() -> None:
    assert evaluator().score(lambda microbatch: token_count(microbatch) * 1e6).perplexity == math.inf


def test_a_score_reads_well() -> None:
    assert str(Score(1.0, math.e, 0.5)) == "loss 1.0000  perplexity 2.72  bits/byte 0.5000"
