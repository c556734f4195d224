"""The shuffle is a permutation, another one for each key, and it mixes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlite.data.order import Permutation


@given(n=st.integers(1, 5000), key=st.text(max_size=5))
def test_every_document_exactly_once(n, key):
    assert sorted(Permutation(n, key)(np.arange(n))) == list(range(n))


def test_each_value_is_computed_on_its_own():
    whole = Permutation(1000, "k")(np.arange(1000))
    assert [int(Permutation(1000, "k")(np.array([i]))[0]) for i in range(0, 1000, 37)] == list(whole[::37])


def test_a_trillion_documents_cost_nothing():
    n = 10**12 + 7
    images = Permutation(n, "k")(np.arange(n - 1000, n))
    assert len(set(images)) == 1000
    assert 0 <= images.min() <= images.max() < n


def test_keys_give_unrelated_orders():
    n = 4096
    one, two = (Permutation(n, key)(np.arange(n)) for key in ("0 epoch 0", "0 epoch 1"))
    assert (one == two).sum() < 10  # one match is expected of two random orders
    assert (one == np.arange(n)).sum() < 10


@pytest.mark.parametrize("n", [1000, 1024, 1025, 5000])
def test_the_order_is_mixed(n):
    """Places and images are uncorrelated, neighbours too: bounds of five standard deviations, 5 / sqrt(n)."""
    images = Permutation(n, "mix")(np.arange(n))
    assert abs(np.corrcoef(np.arange(n), images)[0, 1]) < 5 / n**0.5
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 5 / n**0.5


def test_the_order_never_changes_between_versions():
    """Resuming an old run depends on it."""
    assert Permutation(10, "0 epoch 0")(np.arange(10)).tolist() == [7, 2, 9, 5, 3, 8, 0, 6, 4, 1]
