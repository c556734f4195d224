"""Validation reads fixed sequences on any number of ranks, and training never reads them."""

import pytest
import torch
from data_helpers import (
    TOKENIZER,
    change,
    find_documents,
    jsonl_dataset,
    make_loader,
    make_validation,
    some_texts,
)

from titanlite.config.schema import Validation, ValidationSource

TEXTS = some_texts(400)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return jsonl_dataset(tmp_path_factory.mktemp("data"), TEXTS)


def read_file(dataset, **keys):
    return Validation(source="jsonl", path=dataset.path, **keys)


def read_sequences(*validation_sets):
    """Return inputs and labels of all sequences that are not padding, in order, as (N, 2, T)."""
    ranks = []
    for validation_set in validation_sets:
        batches = list(validation_set.batches())
        inputs = torch.cat([batch.input_ids for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        ranks.append(torch.stack([inputs, labels], dim=1))
    # This fails if the ranks have different numbers of sequences.
    in_order = torch.stack(ranks, dim=1).flatten(0, 1)
    has_labels = (in_order[:, 1] != -100).any(dim=1)
    return in_order[has_labels]


@pytest.mark.parametrize(
    ("size", "local"),
    [(2, 3), (3, 1), (4, 8), (8, 1)],
)
@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_sequences_and_counts_are_the_same_on_any_number_of_ranks(dataset, size, local, holdout):
    dataset = change(dataset, document_mask=holdout > 0)
    validation = read_file(dataset, sequences=20, holdout=holdout)
    one = make_validation(validation, dataset)
    many = []
    for rank in range(size):
        many.append(make_validation(validation, dataset, rank=rank, size=size, local=local))

    expected = read_sequences(one)

    assert torch.equal(read_sequences(*many), expected)
    assert len(expected) == one.num_sequences == 20
    assert one.num_tokens == (expected[:, 1] != -100).sum()

    for part in many:
        assert (part.num_tokens, part.num_bytes) == (one.num_tokens, one.num_bytes)
    # A second validation reads the same sequences.
    assert torch.equal(read_sequences(one), expected)

    has_mask = [batch.document_ids is not None for batch in one.batches()]
    assert has_mask == [holdout > 0] * 7


def test_all_bytes_and_tokens_of_the_text_are_counted(dataset):
    validation_set = make_validation(read_file(dataset, sequences=10_000), dataset)

    # BOS and EOS represent no text, and the first token is not predicted.
    assert validation_set.num_bytes == sum(len(text.encode()) for text in TEXTS)

    num_tokens = sum(len(TOKENIZER.encode(text)) + 2 for text in TEXTS)
    assert validation_set.num_tokens == num_tokens - 1


def test_training_reads_all_documents_except_those_held_out(dataset):
    validation_set = make_validation(Validation(sequences=10_000, holdout=0.2), dataset)
    loader = make_loader(change(dataset, max_epochs=1), holdout=0.2, global_batch_size=1)

    held_out = find_documents(read_sequences(validation_set)[:, 0])
    trained = find_documents(torch.cat([batch.microbatches[0].input_ids for batch in loader]))

    assert not set(held_out) & set(trained)
    # The first and the last document can be cut.
    assert len(held_out) + len(trained) >= 398
    # The expected number is 80, and five standard deviations are 40.
    assert 40 < len(held_out) < 120


def test_a_mixture_is_divided_by_weight(dataset, tmp_path):
    other = jsonl_dataset(tmp_path, [f"other {text}" for text in some_texts(100)])
    first = ValidationSource(source="jsonl", path=dataset.path, weight=1.0)
    second = ValidationSource(source="jsonl", path=other.path, weight=3.0)

    mixture = make_validation(Validation(sources=(first, second), sequences=8), dataset)

    alone = [
        make_validation(read_file(dataset, sequences=2), dataset),
        make_validation(read_file(other, sequences=6), dataset),
    ]

    assert mixture.num_tokens == sum(part.num_tokens for part in alone)
    assert mixture.num_bytes == sum(part.num_bytes for part in alone)
