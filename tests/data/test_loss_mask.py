"""Only the characters in the ranges of a loss mask become labels."""

import json

import pytest
import torch
from data_helpers import (
    TOKENIZER,
    RankLoaders,
    jsonl_dataset,
    make_dataset,
    make_loader,
    make_run,
    some_texts,
    write_jsonl,
    write_megatron,
    write_parquet,
)
from ranks import run_small
from small_runs import read_metrics

from titanlite.commands.data import show_step
from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset, DataSource

# A token ID that no text contains.
MARK = TOKENIZER.vocab_size - 1


def make_document(number):
    """Return the parts of a chat-like text, and whether each counts in the loss."""
    answer = "word " * (1 + number % 60)
    turns = [(f"<{number}> ", False), (answer, True), ("more?\n", False), (answer, True)]
    first = number % 2
    return turns[first : first + 1 + number % 3]


def find_ranges(parts):
    """Return the [start, end] of each part that counts."""
    ranges = []
    end = 0
    for part, counts in parts:
        start = end
        end += len(part)
        if counts:
            ranges.append([start, end])
    return ranges


DOCUMENTS = [make_document(number) for number in range(300)]
TEXTS = ["".join(part for part, _ in parts) for parts in DOCUMENTS]
MASKS = [find_ranges(parts) for parts in DOCUMENTS]


def encode_parts(parts, has_marks):
    """Return the ids of a document, in which MARK can replace each id that does not count."""
    ids = []
    for index, (part, counts) in enumerate(parts):
        tokens = TOKENIZER.encode(part)
        if index == 0:
            tokens = [TOKENIZER.bos_id, *tokens]
        if index == len(parts) - 1:
            tokens.append(TOKENIZER.eos_id)
        ids += [MARK] * len(tokens) if has_marks and not counts else tokens
    return ids


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_mixture_with_masks_predicts_and_resumes_only_their_ranges(tmp_path, packing):
    write_jsonl(tmp_path / "masked.jsonl", TEXTS, mask=MASKS)
    write_megatron(tmp_path / "plain.bin", [encode_parts(parts, False) for parts in DOCUMENTS])
    write_megatron(tmp_path / "marked.bin", [encode_parts(parts, True) for parts in DOCUMENTS])
    text = jsonl_dataset(tmp_path, some_texts(100))

    def load_mixture(size, source, name, **keys):
        sources = (
            DataSource(source=source, path=str(tmp_path / name), **keys),
            DataSource(source="jsonl", path=text.path, weight=0.5),
        )
        has_mask = packing == "best_fit"
        mixture = Dataset(sources=sources, num_workers=0, packing=packing, document_mask=has_mask)
        return RankLoaders(mixture, size, global_batch_size=6)

    def load_masked(size):
        return load_mixture(size, "jsonl", "masked.jsonl", loss_mask_column="mask")

    masked = load_masked(2)
    plain = load_mixture(1, "tokens", "plain.bin")
    marked = load_mixture(1, "tokens", "marked.bin")
    for step in range(4):
        if step == 2:
            masked = load_masked(3).load(masked.state())
        expected = plain.batch()
        has_mark = marked.batch()[:, 1] == MARK
        expected[:, 1].masked_fill_(has_mark, -100)
        assert has_mark.any()
        assert torch.equal(masked.batch(), expected)


def test_data_show_prints_the_number_of_tokens_that_do_not_count(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["word " * 20] * 9, mask=[[[0, 5]]] * 9)
    dataset = make_dataset("jsonl", path, loss_mask_column="mask", packing="best_fit")
    shown = show_step(make_run(dataset, seq_len=64), 1, 0)
    num_ignored = len(TOKENIZER.encode("word " * 19)) + 1  # with EOS

    assert f"--- {num_ignored} of" in shown


def test_parquet_and_compressed_lines_have_the_same_labels(tmp_path):
    write_parquet(tmp_path / "a.parquet", TEXTS, mask=MASKS)
    for start in range(0, len(TEXTS), 20):  # one file per row group
        part = slice(start, start + 20)
        write_jsonl(tmp_path / f"{start:03}.gz", TEXTS[part], mask=MASKS[part])

    parquet = make_dataset("parquet", tmp_path / "a.parquet", loss_mask_column="mask")
    jsonl = make_dataset("jsonl", tmp_path / "*.gz", loss_mask_column="mask")
    rows = RankLoaders(parquet, 1).batch()
    lines = RankLoaders(jsonl, 1).batch()

    assert torch.equal(rows, lines)
    assert (rows == -100).any()


BAD_MASKS = 'null|"all"|[1, 2]|[[0, 4], [3, 5]]|[[2, 1]]|[[0, 10000]]|[[-1, 2]]|[["0", "2"]]'


@pytest.mark.parametrize("mask", BAD_MASKS.split("|"))
def test_a_bad_mask_is_a_bad_record(tmp_path, mask):
    masks = [MASKS[0], json.loads(mask), *MASKS[2:]]
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS, mask=masks)
    dataset = make_dataset("jsonl", path, loss_mask_column="mask")
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: .*'mask'.*on_bad_record"):
        make_loader(dataset)


def test_another_mask_column_is_another_source(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS, mask=MASKS)
    state = make_loader(make_dataset("jsonl", path, loss_mask_column="mask")).state_dict()
    with pytest.raises(UserError, match="loss_mask_column"):
        make_loader(make_dataset("jsonl", path)).load_state_dict(state)


@pytest.mark.slow
def test_run_with_fewer_labels_than_sequences_resumes(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ["word " * 400] * 80, mask=[[[0, 1]], [], [], []] * 20)
    data = "--dataset.source jsonl --dataset.loss_mask_column mask --dataset.path", path
    options = *data, "--training.global_batch_size 8 --training.steps"
    run_small(tmp_path / "run", *options, 2)
    labels = read_metrics(tmp_path / "run")[2]["tokens"]
    assert 0 < labels < 2 * 8

    log = run_small(tmp_path / "run", *options, 3)

    assert "Resumed after step 2 " in log
