"""Invariants 2 and 4: the same rows anywhere, and after any restart."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from data_helpers import (
    ROOT,
    TOKENIZER,
    Ranks,
    dataset_of,
    hide_bad_records,
    make_loader,
    some_texts,
    write_jsonl,
)
from ranks import run_ranks
from test_heldout import make_set
from torch import Tensor

from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.schema import Dataset, DataSource, JobConfig, Validation
from titanlite.data.documents import MAX_STREAMS
from titanlite.data.loader import Loader, OutOfData
from titanlite.data.reader import BatchReader
from titanlite.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return dataset_of(tmp_path_factory.mktemp("data"), some_texts(150))


def rows_of(batch):
    """(G, T + 1): the inputs and the last label."""
    return torch.cat([batch[:, 0], batch[:, 1, -1:]], dim=1)


STEPS = 20


@pytest.fixture(scope="module")
def reference(dataset):
    ranks = Ranks(dataset, 1)
    batches, states = [], []
    for _ in range(STEPS):
        batches.append(ranks.batch())
        states.append(ranks.state())
    return batches, states


@pytest.mark.parametrize(
    ("size", "local"), [(1, 24), (1, 3), (2, 1), (2, 12), (4, 2), (8, 1), (8, 3), (3, 4), (6, 2), (12, 1), (24, 1)]
)
def test_rows_and_states_do_not_depend_on_the_layout(dataset, reference, size, local):
    ranks = Ranks(dataset, size, local=local)
    for batch, state in zip(*reference, strict=True):
        assert torch.equal(ranks.batch(), batch)
        assert ranks.state() == state


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (8, 4, 2, 1), (3, 8, 1, 6), (2, 2, 12, 4)])
@pytest.mark.parametrize("every", [1, 3, 5])
def test_restarts_on_other_layouts_change_nothing(dataset, reference, sizes, every):
    batches, states = reference
    state = None
    for start in range(0, STEPS, every):
        ranks = Ranks(dataset, sizes[start // every % len(sizes)])
        if state is not None:
            ranks.load(state)
        for step in range(start, min(start + every, STEPS)):
            assert torch.equal(ranks.batch(), batches[step])
        state = ranks.state()
        assert state == states[min(start + every, STEPS) - 1]


def test_a_loader_of_a_job_is_an_iterable_that_ends_with_the_data(tmp_path):
    spec = dataset_of(tmp_path, some_texts(60)).model_dump() | {"max_epochs": 1}
    tokenizer = {"path": str(ROOT / "assets/tokenizer/tokenizer.json")}
    training = {"seq_len": 64, "local_batch_size": 2, "global_batch_size": 4}
    job = JobConfig.model_validate({"dataset": spec, "tokenizer": tokenizer, "training": training})
    loader = Loader.of_job(job)
    batches = list(loader)
    assert len(batches) > 3
    assert {len(batch.microbatches) for batch in batches} == {2}
    with pytest.raises(OutOfData):
        loader.next_global_batch()
    wrong = JobConfig.model_validate({"training": {"local_batch_size": 2, "global_batch_size": 3}})
    with pytest.raises(UserError, match=r"training.global_batch_size = 3 must be a multiple of .* 2 times .* = 1"):
        Loader.of_job(wrong)


def test_a_state_loaded_and_saved_is_the_same(dataset, reference):
    state = reference[1][4]
    assert Ranks(dataset, 2).load(state).state() == state
    assert len(json.dumps(state)) < 3000


def test_another_global_batch_size_goes_on_with_the_same_sequences(dataset, reference):
    batches, states = reference
    ranks = Ranks(dataset, 2, global_batch=8).load(states[3])
    assert torch.equal(torch.cat([ranks.batch() for _ in range(6)]), torch.cat(batches[4:6]))


def test_each_document_is_read_once_an_epoch_and_each_token_predicted_once(dataset):
    """Joined again, the rows of a stream are whole documents; together the streams hold each once an epoch."""
    ranks = Ranks(dataset, 1, global_batch=MAX_STREAMS)
    rows = torch.stack([rows_of(ranks.batch()) for _ in range(30)], dim=1)  # (V, rows, T + 1)
    assert torch.equal(rows[:, :-1, -1], rows[:, 1:, 0])  # the last token is the first of the next row
    streams = torch.cat([rows[:, :, :-1].flatten(1), rows[:, -1:, -1]], dim=1)
    turns = []
    for stream in streams.tolist():
        text = TOKENIZER.decode(stream)
        parts = text.split("<|end_of_text|>")[:-1]
        assert all(part.startswith("<|begin_of_text|><") for part in parts)
        turns.append([int(part.removeprefix("<|begin_of_text|><").split(">")[0]) for part in parts])
    positions = {v + turn * MAX_STREAMS: doc for v, docs in enumerate(turns) for turn, doc in enumerate(docs)}
    first = [positions[p] for p in range(150)]
    second = [positions[p] for p in range(150, 300)]
    assert sorted(first) == sorted(second) == list(range(150))
    assert first != second


def times_read(dataset, documents, tokens):
    """How often each document was begun when `tokens` tokens have been read."""
    loader = make_loader(dataset, global_batch_size=1)
    loader.start()
    assert isinstance(loader._reader, BatchReader)
    counts = np.zeros(documents, dtype=int)
    for _ in range(tokens // 32):
        (read,) = loader._reader.next_batch()
        segments = read.row.segments[read.cursor.row > 1 :]  # a row begins with the last token of the row before
        counts[segments[segments[:, 2] == 0, 1]] += 1
    return counts


def test_streams_drift_as_the_page_on_data_says_and_not_with_max_epochs(tmp_path):
    texts = some_texts(1000)
    lengths = np.array([len(TOKENIZER.encode(text)) + 2 for text in texts])
    dataset = dataset_of(tmp_path, texts)
    counts = times_read(dataset, 1000, lengths.sum())
    expected = 0.4 * lengths.std() / lengths.mean() * (64 / 1000) ** 0.5
    assert set(counts) == {0, 1, 2}
    assert expected / 2 < (counts == 0).mean() < 2 * expected
    assert expected / 2 < (counts == 2).mean() < 2 * expected
    exactly = times_read(capped(dataset, 9), 1000, lengths.sum() - 32)
    assert (exactly == 1).sum() >= 1000 - 32  # the last row may be missing
    assert exactly.max() == 1


def test_the_seed_changes_the_order(dataset):
    one, two = Ranks(dataset, 1, seed=1).batch(), Ranks(dataset, 1, seed=2).batch()
    assert not torch.equal(one, two)


@pytest.mark.parametrize(("count", "holdout"), [(1, 0.0), (3, 0.0), (40, 0.0), (40, 0.5), (200, 0.5)])
def test_few_documents_give_no_row_twice_in_a_batch(tmp_path, count, holdout):
    texts = [" ".join(map(str, range(1000 * i, 1000 * i + 800))) for i in range(count)]
    ranks = Ranks(dataset_of(tmp_path, texts), 1, global_batch=64, holdout=holdout)
    for _ in range(3 if count == 1 else 10):
        assert len(ranks.batch()[:, 0].unique(dim=0)) == 64


def test_a_rank_tokenizes_only_its_own_streams(dataset):
    ranks = Ranks(dataset, 4)
    for _ in range(STEPS):
        ranks.batch()
    readers = [loader._reader for loader in ranks.loaders]
    touched = Counter(stream for reader in readers if isinstance(reader, BatchReader) for stream in reader._open)
    assert len(touched) == MAX_STREAMS
    assert set(touched.values()) == {1}


def test_what_changed_since_the_checkpoint_is_said(dataset, reference, tmp_path):
    state = reference[1][0]
    other, few = dataset_of(tmp_path, some_texts(99)), tmp_path / "few"
    few.mkdir()
    lines = (ROOT / "assets/tokenizer/tokenizer.model").read_bytes().splitlines(keepends=True)
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines[:-1]))
    other_tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    Ranks(dataset, 1, tokenizer=load_tokenizer(ROOT / "assets/tokenizer/tokenizer.json")).load(state)  # the same ids
    for ranks, message in [
        (Ranks(other, 1), r"the source jsonl .*a\.jsonl is now jsonl .*a\.jsonl"),
        (Ranks(Dataset(), 1), r"the source jsonl .*a\.jsonl is now python_stdlib"),
        (
            Ranks(dataset_of(few, some_texts(20)), 1),
            r"read in 64 streams, .* in 16: another number of documents or files",
        ),
        (
            Ranks(capped(dataset, 1), 1),
            r"read in 64 streams, .* is read in 1: another dataset\.max_epochs or number of",
        ),
        (Ranks(dataset, 1, tokenizer=other_tokenizer), "the tokenizer is another one"),
        (Ranks(dataset, 1, seed=8), "the seed of the data order was 7, it is now 8"),
        (Ranks(dataset, 1, seq_len=64), r"training\.seq_len was 32, it is now 64"),
    ]:
        with pytest.raises(UserError, match=message):
            ranks.load(state)
    with pytest.raises(CheckpointError, match="version 99"):
        Ranks(dataset, 1).load({**state, "version": 99})


def test_another_holdout_is_all_that_changed_where_the_data_is_the_same(dataset, reference):
    """Though it changes the number of streams, too."""
    loader = Ranks(dataset, 1, holdout=0.2).loaders[0]
    assert loader.compare(reference[1][0]) == (["validation.holdout was 0.0, it is now 0.2"], [], [])


@pytest.mark.parametrize("field", range(4))
@pytest.mark.parametrize("value", [10**6, 2**62])
@pytest.mark.parametrize("kind", ["concat", "best_fit", "sequential"])
def test_a_place_that_no_run_saves_ends_in_words(tmp_path, kind, field, value):
    dataset = dataset_of(tmp_path, some_texts(300), packing="best_fit" if kind == "best_fit" else "concat")
    if kind == "sequential":
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(Path(str(dataset.path)).read_bytes()))
        dataset = dataset.model_copy(update={"path": str(tmp_path / "a.jsonl.gz")})
    state = Ranks(dataset, 1).state()
    for stream in state["sources"][0]["streams"]:
        stream[field] = value
    if (field, value) == (0, 10**6):  # a run of a million documents may have come there
        Ranks(dataset, 1).load(state).batch()
        return
    known = field == 0 or (field < 3 and kind != "sequential")  # without a look at the source
    ranks = Ranks(dataset, 1)
    with pytest.raises(CheckpointError, match=r"none that a run comes to|place in the data does not exist") as refused:
        ranks.load(state).batch()
    assert isinstance(refused.value, Damage) == known
    assert not known or Ranks(dataset, 1).loaders[0].state_dict() == ranks.loaders[0].state_dict()


def test_describe_names_the_source(dataset):
    assert Ranks(dataset, 1).loaders[0].describe().endswith("a.jsonl: 150 documents, 0.0 MB")


def test_inputs_and_labels_are_shifted_by_one(dataset):
    batch = Ranks(dataset, 1).batch()
    assert torch.equal(batch[:, 0, 1:], batch[:, 1, :-1])
    assert (batch[:, 1] != -100).all()


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_another_text_column_is_other_data(tmp_path, packing):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * 60, "title": f"title {i}"}) + "\n" for i in range(200)))
    text = Dataset(source="jsonl", path=str(path), num_workers=0, packing=packing, on_change="warn")
    title = text.model_copy(update={"text_column": "title"})
    ranks = Ranks(text, 1, global_batch=64)
    for _ in range(70):
        ranks.batch()
    with pytest.raises(UserError, match="other files, contents or text_column"):
        Ranks(title.model_copy(update={"on_change": "error"}), 1).load(ranks.state())
    assert "title" in TOKENIZER.decode(Ranks(title, 1).load(ranks.state()).batch()[:, 0].flatten().tolist())


def test_changed_data_is_accepted_where_the_job_says_so(dataset, reference, tmp_path):
    other = dataset_of(tmp_path, some_texts(99, seed=5, mark="new"), on_change="warn")
    ranks = Ranks(other, 1).load(reference[1][6])
    assert "<new" in TOKENIZER.decode(ranks.batch()[:, 0].flatten().tolist())


def capped(dataset, epochs):
    return dataset.model_copy(update={"max_epochs": epochs})


@pytest.mark.parametrize("epochs", [1, 2])
def test_capped_epochs_read_everything_exactly_so_often_and_end_at_one_step(dataset, epochs):
    ends, seen = [], []
    for size in (1, 2, 3):
        ranks, batches = Ranks(capped(dataset, epochs), size, global_batch=6), []
        with pytest.raises(OutOfData, match=r"has been read (once|2 times) \(dataset\.max_epochs\)"):
            batches.extend(iter(ranks.batch, None))
        for loader in ranks.loaders:
            with pytest.raises(OutOfData):
                loader.next_global_batch()
        ends.append(len(batches))
        seen.append(torch.cat(batches))
        assert ranks.state()["schedule"]["step"] == len(batches)
    assert len(set(ends)) == 1
    assert all(torch.equal(rows, seen[0]) for rows in seen)
    text = TOKENIZER.decode(seen[0][:, 0].flatten().tolist())
    counts = Counter(int(part.split(">")[0]) for part in text.split("<|begin_of_text|><")[1:] if ">" in part)
    missing = epochs * 150 - sum(counts.values())
    assert 0 <= missing <= 5 * 32 / 4  # at most an incomplete global batch is left over
    assert set(counts.values()) <= {epochs, epochs - 1}


def test_capped_epochs_resume_anywhere(dataset):
    whole = Ranks(capped(dataset, 1), 1, global_batch=6)
    batches = [whole.batch() for _ in range(9)]
    first = Ranks(capped(dataset, 1), 2, global_batch=6)
    assert all(torch.equal(first.batch(), batch) for batch in batches[:4])
    second = Ranks(capped(dataset, 1), 3, global_batch=6).load(first.state())
    assert all(torch.equal(second.batch(), batch) for batch in batches[4:])


def test_a_source_smaller_than_one_row_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"have 3 tokens together, fewer than one sequence: training\.seq_len is 32"):
        make_loader(dataset_of(tmp_path, ["x"]))


def test_the_first_look_ends_a_run_over_a_bad_record_with_place_and_both_remedies(tmp_path, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", some_texts(40))
    with path.open("a") as file:
        file.write('{"text": null}\n')
    dataset = Dataset(source="jsonl", path=str(path), num_workers=0)
    message = (
        r"a\.jsonl, line 41: field 'text' .* null\. Mend the record, or leave .* dataset\.on_bad_record = \"skip\""
    )
    with pytest.raises(UserError, match=message):
        make_loader(dataset)
    assert not caplog.messages
    validation = Validation(source="jsonl", path=str(path), freq=1)
    with pytest.raises(UserError, match=r"or leave such records out by validation\.on_bad_record"):
        make_set(validation, dataset_of(tmp_path / "..", some_texts(40)))


def test_a_bad_record_met_later_is_known_before_its_batch_is_due(tmp_path):
    """The ranks can then save what they have: a rank that fails alone would leave the others in a collective."""
    (line,) = hide_bad_records(tmp_path / "a.jsonl", some_texts(200))
    dataset = Dataset(source="jsonl", path=str(tmp_path / "a.jsonl"), num_workers=0)
    alone = make_loader(dataset, global_batch_size=4)
    batches = []
    with pytest.raises(UserError, match=f"line {line}, column 1: not valid JSON"):
        batches.extend(iter(alone.next_global_batch, None))
    good = len(batches)
    assert good > 3

    ranks = Ranks(dataset, 4, global_batch=4)
    for batch in range(good):
        failing = [loader.fails_within(2) for loader in ranks.loaders]
        assert sum(failing) == (batch == good - 1)
        ranks.batch()
    assert sum(loader.fails_within(1) for loader in ranks.loaders) == 1
    (error,) = [error for loader in ranks.loaders if (error := loader.failure())]
    assert f"line {line}" in str(error)
    assert ranks.state() == alone.state_dict()  # where a run with the record left out, or mended, goes on
    skipping = dataset.model_copy(update={"on_bad_record": "skip"})
    whole = Ranks(skipping, 1, global_batch=4)
    for _ in range(good):
        whole.batch()
    assert torch.equal(Ranks(skipping, 2, global_batch=4).load(ranks.state()).batch(), whole.batch())


def test_the_end_of_the_data_is_no_failure(dataset):
    loader = make_loader(capped(dataset, 1), global_batch_size=24)
    while not isinstance(loader._ahead[-1] if loader._ahead else None, OutOfData):
        assert not loader.fails_within(2)
        if len(loader._ahead) > 1:
            loader.next_global_batch()
    assert loader.failure() is None


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 0), (3, 0), pytest.param(2, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_each_record_that_is_skipped_is_said_and_counted_once(tmp_path, caplog, size, workers, packing):
    lines = hide_bad_records(tmp_path / "a.jsonl", some_texts(200), count=9)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": null}\n')  # the first look may see this one
    keys = {"source": "jsonl", "path": str(tmp_path / "a.jsonl"), "num_workers": workers}
    ranks = Ranks(Dataset(**keys, packing=packing, on_bad_record="skip"), size, holdout=0.1)
    ranks.loaders[0].table(10)
    for _ in range(30):  # epochs
        ranks.batch()
    stats = ranks.together(lambda loader: loader.stats())
    ranks.close()
    assert all(stat == stats[0] for stat in stats)
    assert stats[0]["skipped_records"] == 10
    said = sorted(int(message.split("line ")[1].split(":")[0].split(",")[0]) for message in caplog.messages)
    assert said == [*lines, 210]


def test_tokens_and_epochs_of_each_source_are_those_of_all_ranks(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", some_texts(40))
    write_jsonl(tmp_path / "b.jsonl", some_texts(150))
    sources = tuple(
        DataSource(source="jsonl", path=str(tmp_path / f"{name}.jsonl"), weight=weight)
        for name, weight in (("a", 1.0), ("b", 3.0), ("b", 0.0))
    )
    dataset = Dataset(sources=sources, num_workers=0)
    found, batches = {}, 8
    for size in (1, 2, 3):
        ranks = Ranks(dataset, size)
        for number in range(batches):
            ranks.batch()
            if number == 3:  # where a log line or a checkpoint comes makes no difference
                state = ranks.state()
        stats = ranks.together(lambda loader: loader.stats())
        assert all(stat == stats[0] for stat in stats)
        resumed = Ranks(dataset, 2).load(state)
        for _ in range(batches - 4):
            resumed.batch()
        found[size], again = stats[0], resumed.together(lambda loader: loader.stats())[0]
        assert {key: again[key] for key in ("source_tokens", "source_epochs")} == {
            key: found[size][key] for key in ("source_tokens", "source_epochs")
        }
    assert found[1] == found[2] == found[3]
    a, b, unused = found[1]["source_tokens"]
    assert (b.endswith(" (1)"), unused.endswith(" (2)")) == (True, True)  # two sources of one name
    assert found[1]["source_tokens"] == {a: 24 * 8 * 32 // 4, b: 24 * 8 * 32 * 3 // 4, unused: 0}
    tokens = len(TOKENIZER.encode("".join(some_texts(40)))) + 40  # each ends with a token of its own
    # A document counts once it is passed, and each of the streams stands in the middle of one.
    streams = min(MAX_STREAMS, 32)
    assert found[1]["source_epochs"][a] == pytest.approx(24 * 8 * 32 // 4 / tokens, abs=streams / 40)
    assert found[1]["source_epochs"][a] > found[1]["source_epochs"][b] > 0
    assert found[1]["source_epochs"][unused] == 0


def test_documents_that_are_all_empty_are_an_error_in_words(tmp_path):
    with pytest.raises(UserError, match=r"documents of jsonl .* are empty: none of the first 50 has any text"):
        make_loader(dataset_of(tmp_path, [""] * 50))
    make_loader(dataset_of(tmp_path, [""] * 50 + ["word " * 40]))


def rows_and_state(path: str) -> tuple[list[Tensor], dict[str, Any]]:
    """What a rank gets of four batches, and what it saves then."""
    loader = make_loader(
        Dataset(source="jsonl", path=path),
        dp_rank=dist.get_rank(),
        dp_size=dist.get_world_size(),
        dp_group=dist.group.WORLD,
        local_batch_size=4,
    )
    batches = [loader.next_global_batch().microbatches for _ in range(4)]
    rows = [torch.cat([microbatch.input_ids for microbatch in batch]) for batch in batches]
    state = loader.state_dict()
    loader.close()
    return rows, state


@pytest.mark.slow
def test_two_real_ranks_save_the_state_of_one(dataset, reference):
    batches, states = reference
    for rank, (rows, state) in enumerate(run_ranks(2, rows_and_state, dataset.path)):
        assert state == states[3]
        for step, batch in enumerate(rows):
            assert torch.equal(batch, batches[step][rank::2, 0])
