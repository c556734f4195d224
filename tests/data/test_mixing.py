"""Mixes: shares are exact, and everything that holds for one source holds for many."""

from collections import Counter
from fractions import Fraction

import pytest
import torch
from data_helpers import TOKENIZER, Ranks, some_texts, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset, DataSource, DataStage
from titanlite.data.mixing import Schedule


def mix(weights, stages=()):
    return Dataset(sources=tuple(DataSource(weight=w) for w in weights), stages=tuple(stages))


WEIGHTS = st.lists(st.one_of(st.just(0.0), st.integers(1, 1000).map(lambda n: n / 100)), min_size=1, max_size=6).filter(
    any
)


@given(weights=WEIGHTS, batch=st.integers(1, 7))
def test_each_share_is_within_one_sequence_of_its_weight_at_all_times(weights, batch):
    schedule, counts, n = Schedule(mix(weights), batch), Counter(), 0
    shares = [Fraction(str(w)) / sum(Fraction(str(v)) for v in weights) for w in weights]
    while n < 150:
        for source, row in schedule.next_batch():
            assert row == counts[source]
            counts[source] += 1
            n += 1
            assert all(abs(counts[i] - share * n) < 1 for i, share in enumerate(shares))


@given(weights=WEIGHTS, steps=st.integers(0, 20))
def test_the_schedule_goes_on_from_its_state(weights, steps):
    one = Schedule(mix(weights), 5)
    for _ in range(steps):
        one.next_batch()
    two = Schedule(mix(weights), 5)
    two.load_state_dict(one.state_dict())
    assert [one.next_batch() for _ in range(9)] == [two.next_batch() for _ in range(9)]


def test_stages_change_the_weights_at_their_step():
    stages = [DataStage(start_step=20, weights=(0.0, 1.0)), DataStage(start_step=10, weights=(1.0, 3.0))]
    schedule = Schedule(mix([1.0, 1.0], stages), 8)
    counts = [Counter(source for source, _ in schedule.next_batch()) for _ in range(30)]
    for step, count in enumerate(counts):
        assert count == ({0: 4, 1: 4} if step < 10 else {0: 2, 1: 6} if step < 20 else {1: 8})


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (mix([0.0, 0.0]), "all weights are 0 from step 0 on"),
        (
            mix([1.0, 1.0], [DataStage(start_step=5, weights=(0.0, 0.0))]),
            r"dataset\.stages\.0: all weights are 0 from step 5",
        ),
        (mix([1.0, 1.0], [DataStage(start_step=5, weights=(1.0,))]), "1 weights for 2 sources"),
        (Dataset(stages=(DataStage(start_step=5, weights=(1.0,)),)), "1 weights for 0 sources"),
    ],
)
def test_weights_that_cannot_be_are_errors(dataset, message):
    with pytest.raises(UserError, match=message):
        Schedule(dataset, 8)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix")
    one = write_jsonl(folder / "one.jsonl", some_texts(90, seed=1, mark="a"))
    two = write_jsonl(folder / "two.jsonl", some_texts(60, seed=2, mark="b"))
    return (
        DataSource(source="jsonl", path=str(one), weight=0.7),
        DataSource(source="jsonl", path=str(two), weight=0.2),
        DataSource(source="jsonl", path=str(one), weight=0.1, max_epochs=3),
    )


def test_a_mix_does_not_depend_on_the_layout(sources):
    stages = (DataStage(start_step=4, weights=(0.2, 0.7, 0.1)),)
    dataset = Dataset(sources=sources, stages=stages, num_workers=0)
    one, rows, states = Ranks(dataset, 1), [], []
    for _ in range(8):
        rows.append(one.batch())
        states.append(one.state())
    for sizes in ((2, 4), (3, 1), (8, 3)):
        ranks = Ranks(dataset, sizes[0])
        for row, state in zip(rows[:3], states[:3], strict=True):
            assert torch.equal(ranks.batch(), row)
            assert ranks.state() == state
        ranks = Ranks(dataset, sizes[1]).load(ranks.state())
        assert all(torch.equal(ranks.batch(), row) for row in rows[3:])


def test_rows_of_a_mix_hold_one_source_each(sources):
    ranks = Ranks(Dataset(sources=sources[:2], num_workers=0), 1, global_batch=90)
    kinds = Counter()
    for row in ranks.batch()[:, 0].tolist():
        text = TOKENIZER.decode(row)
        assert not ("<a" in text and "<b" in text)
        kinds["a" if "<a" in text else "b" if "<b" in text else "?"] += 1
    assert kinds["a"] > 2 * kinds["b"] > 0


def test_a_changed_source_of_a_mix_is_named(sources, tmp_path):
    state = Ranks(Dataset(sources=sources, num_workers=0), 1).state()
    other = write_jsonl(tmp_path / "two.jsonl", some_texts(61, seed=2))
    changed = (sources[0], sources[1].model_copy(update={"path": str(other)}), sources[2])
    with pytest.raises(UserError, match=r"the source jsonl \S*two\.jsonl is now jsonl \S*two\.jsonl\. Restore"):
        Ranks(Dataset(sources=changed, num_workers=0), 1).load(state)
    with pytest.raises(UserError, match="there were 3 sources, there are now 2"):
        Ranks(Dataset(sources=sources[:2], num_workers=0), 1).load(state)
