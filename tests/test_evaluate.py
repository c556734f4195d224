"""Validation: what a score means."""

import math

import pytest

from titanlite.score import Score, make_score


def test_a_model_that_guesses_costs_the_logarithm_of_the_vocabulary() -> None:
    result = make_score(160 * math.log(4096), 160, 480)
    assert result.loss == pytest.approx(math.log(4096))
    assert result.perplexity == pytest.approx(4096)
    assert result.bits_per_byte == pytest.approx(12 * 160 / 480)


def test_a_hopeless_model_is_no_overflow() -> None:
    assert make_score(160e6, 160, 480).perplexity == math.inf


def test_a_score_reads_well() -> None:
    assert str(Score(1.0, math.e, 0.5)) == "loss 1.0000  perplexity 2.72  bits/byte 0.5000"
