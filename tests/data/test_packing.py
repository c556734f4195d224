"""Rows: what is lost, what is cut, and what document masks say."""

import numpy as np
import pytest
import torch
from data_helpers import TOKENIZER, Ranks, dataset_of, make_loader, some_texts
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from titanlite.config.flavors import Architecture
from titanlite.data.documents import Document, Documents, Exhausted, Place
from titanlite.data.packing import BestFitPacker, ConcatPacker, Cursor
from titanlite.model.attention import document_mask
from titanlite.model.llama import Llama


class Numbers(Documents):
    """Document i is the tokens 1000 i, 1000 i + 1, ..."""

    def __init__(self, sizes):
        self.sizes, self.place = sizes, Place()

    def seek(self, place):
        self.place = place

    def advance(self):
        self.place = Place(self.place.turn + 1)

    def current(self):
        i = self.place.turn
        if i >= len(self.sizes):
            raise Exhausted
        return Document(0, i, np.arange(1000 * i, 1000 * i + self.sizes[i], dtype=np.int32))


def all_rows(packer):
    rows, cursors = [], [packer.cursor]
    while True:
        try:
            rows.append(packer.next_row())
        except Exhausted:
            return rows, cursors
        cursors.append(packer.cursor)


SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=60)


@given(sizes=SIZES, seq_len=st.integers(1, 20))
def test_concat_predicts_each_token_exactly_once(sizes, seq_len):
    rows, _ = all_rows(ConcatPacker(Numbers(sizes), seq_len, -1, Cursor()))
    stream = [t for i, size in enumerate(sizes) for t in range(1000 * i, 1000 * i + size)]
    assert [t for row in rows for t in row.tokens[1:] if t != -1] == stream[1:]
    assert all(len(row.tokens) == seq_len + 1 for row in rows)
    assert all(row.segments[:, 3].sum() == (row.tokens != -1).sum() for row in rows)


@given(sizes=SIZES, seq_len=st.integers(1, 20))
def test_best_fit_cuts_only_documents_longer_than_a_row(sizes, seq_len):
    rows, _ = all_rows(BestFitPacker(Numbers(sizes), seq_len, -1, Cursor()))
    pieces = [tuple(piece[1:]) for row in rows for piece in row.segments]
    for i, size in enumerate(sizes):
        mine = sorted((int(offset), int(length)) for number, offset, length in pieces if number == i)
        if 0 < size <= seq_len + 1:
            assert mine == [(0, size)]
        predicted = [offset + t for offset, length in mine for t in range(1, length)]
        assert predicted == list(range(1, size))  # each token but the first, exactly once
    for row in rows:  # the segments say what the tokens are
        tokens = [
            t
            for _, number, offset, n in row.segments
            for t in range(1000 * number + offset, 1000 * number + offset + n)
        ]
        assert row.tokens[: len(tokens)].tolist() == tokens
        assert (row.tokens[len(tokens) :] == -1).all()


@pytest.mark.parametrize("packer", [ConcatPacker, BestFitPacker])
@given(sizes=SIZES, seq_len=st.integers(1, 20), data=st.data())
def test_any_row_can_be_the_first_after_a_restart(packer, sizes, seq_len, data):
    rows, cursors = all_rows(packer(Numbers(sizes), seq_len, -1, Cursor()))
    i = data.draw(st.integers(0, len(rows)))
    again, _ = all_rows(packer(Numbers(sizes), seq_len, -1, cursors[i]))
    assert [r.tokens.tolist() for r in again] == [r.tokens.tolist() for r in rows[i:]]
    assert [r.segments.tolist() for r in again] == [r.segments.tolist() for r in rows[i:]]


def test_best_fit_wastes_little(tmp_path):
    """Documents of 3 to 180 tokens in rows of 512: over 97 % of the positions are trained on."""
    loader = make_loader(dataset_of(tmp_path, some_texts(900, words=180), packing="best_fit"), seq_len=512)
    for _ in range(8):
        loader.next_global_batch()
    assert 0.97 < loader.stats()["utilization"] <= 1


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("mask", [False, True])
def test_rows_do_not_depend_on_the_layout(tmp_path, packing, mask):
    dataset = dataset_of(tmp_path, some_texts(150), packing=packing, document_mask=mask)
    one, rows, states = Ranks(dataset, 1), [], []
    for _ in range(8):
        rows.append(one.batch())
        states.append(one.state())
    for size in (2, 3, 8):
        ranks = Ranks(dataset, size)
        for row, state in zip(rows[:4], states[:4], strict=True):
            assert torch.equal(ranks.batch(), row)
            assert ranks.state() == state
        other = Ranks(dataset, 4).load(ranks.state())
        assert all(torch.equal(other.batch(), row) for row in rows[4:])


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_document_masks_say_where_documents_begin(tmp_path, packing):
    dataset = dataset_of(tmp_path, some_texts(150), packing=packing, document_mask=True)
    loader = make_loader(dataset, global_batch_size=64, local_batch_size=64)
    for _ in range(3):
        micro = loader.next_global_batch().microbatches[0]
        assert micro.document_ids is not None
        assert micro.positions is not None
        for ids, positions, tokens, labels in zip(
            micro.document_ids.tolist(),
            micro.positions.tolist(),
            micro.input_ids.tolist(),
            micro.labels.tolist(),
            strict=True,
        ):
            starts = [t for t in range(32) if positions[t] == 0]
            assert starts[0] == 0
            assert ids == [sum(s <= t for s in starts) - 1 for t in range(32)]
            assert positions == [t - max(s for s in starts if s <= t) for t in range(32)]
            for t in range(31):
                inside = ids[t] == ids[t + 1]
                assert labels[t] == (tokens[t + 1] if inside else -100) or tokens[t + 1] == TOKENIZER.eos_id
            if packing == "concat":  # best_fit may begin in mid-document, too: after a cut, and with the padding
                assert all(tokens[s] == TOKENIZER.bos_id for s in starts[1:])


def test_without_a_mask_there_is_no_metadata(tmp_path):
    micro = make_loader(dataset_of(tmp_path, some_texts(50))).next_global_batch().microbatches[0]
    assert micro.document_ids is None
    assert micro.positions is None


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_the_loss_of_packed_rows_is_that_of_their_documents_one_by_one(tmp_path, packing):
    """From the loader through the model; equal up to the order of summation in float32."""
    model = Llama(Architecture(64, 2, 2, 1, 96, vocab_size=4096))
    model.init_weights()
    dataset = dataset_of(tmp_path, some_texts(60, words=40), packing=packing, document_mask=True)
    (micro,) = make_loader(dataset, seq_len=96, local_batch_size=24).next_global_batch().microbatches
    assert micro.document_ids is not None
    with torch.no_grad():
        logits = model(micro.input_ids, micro.positions, document_mask(micro.document_ids))
        packed = F.cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), reduction="sum")
        alone, documents = torch.zeros(()), 0
        for tokens, labels, ids in zip(micro.input_ids, micro.labels, micro.document_ids, strict=True):
            for document in ids.unique():
                own = ids == document
                if (labels[own] != -100).any():
                    logits = model(tokens[own][None])[0]
                    alone += F.cross_entropy(logits, labels[own], reduction="sum")
                    documents += 1
    assert documents > 60
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0)
