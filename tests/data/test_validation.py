"""Validation: fixed rows, whatever the number of ranks, and never trained on."""

import pytest
import torch
from data_helpers import TOKENIZER, dataset_of, make_loader, make_validation, some_texts

from titanlite.config.schema import Validation, ValidationSource


def of_files(dataset, **keys):
    return Validation(source="jsonl", path=dataset.path, **keys)


def rows(sets):
    """All rows that hold anything, in their order, and the number of microbatches of each rank."""
    batches = [list(s.batches()) for s in sets]
    flat = [[row for b in rank for row in torch.stack([b.input_ids, b.labels], 1)] for rank in batches]
    ordered = [flat[k % len(flat)][k // len(flat)] for k in range(len(flat) * len(flat[0]))]
    return [row for row in ordered if (row[1] != -100).any()], [len(rank) for rank in batches]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return dataset_of(tmp_path_factory.mktemp("data"), some_texts(400))


@pytest.mark.parametrize(("size", "local"), [(2, 3), (3, 1), (4, 8), (8, 1)])
@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_rows_and_counts_do_not_depend_on_the_number_of_ranks(dataset, size, local, holdout):
    dataset = dataset.model_copy(update={"document_mask": holdout > 0})
    validation = of_files(dataset, sequences=20, holdout=holdout)
    one = make_validation(validation, dataset)
    assert [batch.document_ids is None for batch in one.batches()] == [holdout == 0] * 7
    many = [make_validation(validation, dataset, rank=rank, size=size, local=local) for rank in range(size)]
    (expected, _), (found, counts) = rows([one]), rows(many)
    assert len(expected) == len(found) == one.num_sequences == 20
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert len(set(counts)) == 1  # no rank waits for another one
    assert one.num_tokens == sum((row[1] != -100).sum() for row in expected)
    assert {(s.num_tokens, s.num_bytes) for s in many} == {(one.num_tokens, one.num_bytes)}
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(one.batches(), one.batches(), strict=True))


def test_bytes_are_those_of_the_text(dataset):
    found = make_validation(of_files(dataset, sequences=10_000), dataset)  # all of it, once
    # the first token of all, a bos, is not predicted; bos and eos stand for no text
    assert found.num_bytes == sum(len(text.encode()) for text in some_texts(400))
    assert found.num_tokens == sum(len(TOKENIZER.encode(text)) + 2 for text in some_texts(400)) - 1


def documents_of(rows):
    text = TOKENIZER.decode([t for row in rows for t in row[0].tolist()])
    return [part.split(">")[0] for part in text.split("<|begin_of_text|><")[1:] if ">" in part]


def test_held_out_documents_are_never_trained_on_and_all_others_are(dataset):
    held = documents_of(rows([make_validation(Validation(sequences=10_000, holdout=0.2), dataset)])[0])
    loader = make_loader(dataset.model_copy(update={"max_epochs": 1}), holdout=0.2, global_batch_size=1)
    trained = documents_of([batch.microbatches[0].input_ids for batch in loader])
    # The bos that begins a row of its own may lose its number to the row before or after: read all as one text above.
    assert not set(held) & set(trained)
    assert len(held) + len(trained) >= 398
    assert 40 < len(held) < 120  # 80 are expected of 400; five standard deviations are 40


def test_a_mix_is_shared_out_by_weight(dataset, tmp_path):
    other = dataset_of(tmp_path, [f"other {text}" for text in some_texts(100)])
    tables = [ValidationSource(source="jsonl", path=d.path, weight=w) for d, w in ((dataset, 1.0), (other, 3.0))]
    mix = make_validation(Validation(sources=tuple(tables), sequences=8), dataset)
    alone = [make_validation(of_files(d, sequences=rows), dataset) for d, rows in ((dataset, 2), (other, 6))]
    assert mix.num_tokens == sum(part.num_tokens for part in alone)
    assert mix.num_bytes == sum(part.num_bytes for part in alone)
