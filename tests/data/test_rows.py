"""Invariants 2 and 4: row k of global batch s is the same on any layout, after any restart, and in each version."""

import hashlib
import itertools
import json

import pytest
import torch
from data_helpers import TOKENIZER, Ranks, dataset_of, hide_bad_records, make_loader, some_texts, write_hub, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from titanlite import Loader
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.flavors import Architecture
from titanlite.config.schema import Dataset, DataSource, DataStage
from titanlite.data.loader import OutOfData
from titanlite.data.tokenizer import load_tokenizer
from titanlite.model.attention import document_mask
from titanlite.model.llama import Llama

STEPS = 9
TEXTS = some_texts(230)
# Rows of nine global batches, and the states after each. They must never change, because old runs are resumed.
DIGESTS = {
    "concat": "d0caf91b1757f7f3",
    "best_fit": "b4f3a602995c609f",
    "mask": "0482132c9c1858dc",
    "holdout": "747736b19dbeb28a",
    "capped": "4b3bb69282cc632b",
    "capped best_fit": "bc379da785e01277",
    "skip": "23ada54c4b10a58b",
    "gz": "9014d83484f73d4a",
    "zst": "dc70b286c70ee3fd",
    "parquet": "75ce60ff74e6ccb4",
    "arrow": "ab284fce0ae4c7b1",
    "streaming": "e8f528c49a6c8ee7",
    "text": "1385d6b57c636f00",
    "windows": "4d6c225a408d9357",
    "mix": "77f552317a3b5d25",
}
CHANGING = ("gz", "zst", "mix", "windows", "parquet")  # their fingerprints hold times, or a version of their library


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Those of DIGESTS."""
    import datasets

    folder = tmp_path_factory.mktemp("data")
    for i in range(5):
        write_jsonl(folder / f"a{i}.jsonl.gz", TEXTS[i::5])
        write_jsonl(folder / f"a{i}.jsonl.zst", TEXTS[i::5])
    write_jsonl(folder / "large.jsonl.gz", some_texts(1500, words=20))  # more than one window
    for name, part in (("a", TEXTS[:100]), ("b", TEXTS[100:])):
        datasets.Dataset.from_dict({"text": part}).to_parquet(folder / f"{name}.parquet", batch_size=20)
    write_hub(folder / "hub", TEXTS)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "arrow")
    hide_bad_records(folder / "bad.jsonl", TEXTS, count=5)
    for name, line in (("a", "x" * 99 + "\n"), ("b", "日本" * 40_000 + "\n"), ("c", "é" * 999)):
        (folder / f"{name}.txt").write_text(line * (200_000 // len(line.encode()) + 1), encoding="utf-8", newline="")
    (folder / "d.txt").write_text("small\n", encoding="utf-8-sig")
    plain = dataset_of(folder, some_texts(150))

    def of(source, path, **keys):
        return Dataset.model_validate({"source": source, "path": str(folder / path), "num_workers": 0, **keys})

    mix = (
        DataSource(source="jsonl", path=plain.path, weight=0.7),
        DataSource(source="jsonl", path=str(folder / "*0.jsonl.gz"), weight=0.2),
        DataSource(source="jsonl", path=plain.path, weight=0.1, max_epochs=3),
    )
    stages = (DataStage(start_step=4, weights=(0.2, 0.7, 0.1)),)
    return {
        "concat": plain,
        "best_fit": plain.model_copy(update={"packing": "best_fit"}),
        "mask": plain.model_copy(update={"document_mask": True}),
        "holdout": plain,
        "capped": plain.model_copy(update={"max_epochs": 2}),
        "capped best_fit": plain.model_copy(update={"max_epochs": 2, "packing": "best_fit"}),
        "skip": of("jsonl", "bad.jsonl", on_bad_record="skip"),
        "gz": of("jsonl", "a*.gz"),
        "zst": of("jsonl", "*.zst", packing="best_fit", max_epochs=1),
        "parquet": of("parquet", "*.parquet"),
        "arrow": of("arrow", "arrow"),
        "streaming": of("huggingface", "hub", streaming=True, packing="best_fit"),
        "text": of("text", "*.txt"),
        "windows": of("jsonl", "large.jsonl.gz"),
        "mix": Dataset(sources=mix, stages=stages, num_workers=0),
    }


def keys_of(name):
    return {"holdout": 0.2 if name == "holdout" else 0.0, "seq_len": 512 if name == "text" else 32}


@pytest.fixture(scope="module")
def references(datasets):
    """Rows and states on one rank."""
    found = {}
    for name, dataset in datasets.items():
        ranks = Ranks(dataset, 1, **keys_of(name))
        found[name] = [], []
        for _ in range(STEPS):
            found[name][0].append(ranks.batch())
            found[name][1].append(ranks.state())
    return found


@pytest.mark.parametrize("name", DIGESTS)
def test_rows_and_states_never_change_between_versions(references, name):
    digest = hashlib.sha256()
    for rows, state in zip(*references[name], strict=True):
        places = [state["schedule"], state["seed"], state["packing"], [s["streams"] for s in state["sources"]]]
        prints = [s["fingerprint"] for s in state["sources"] if name not in CHANGING]
        digest.update(rows.numpy().tobytes() + json.dumps([places, prints], sort_keys=True).encode())
    assert digest.hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize("sizes", [(2, 4), (3, 1), (8, 3), (24, 6)])
@pytest.mark.parametrize("name", DIGESTS)
def test_rows_and_states_depend_on_no_layout_and_no_restart(datasets, references, name, sizes):
    batches, states = references[name]
    ranks = Ranks(datasets[name], sizes[0], local=24 // sizes[0] if sizes[0] < 8 else 1, **keys_of(name))
    for step in range(STEPS):
        if step in (2, 5):
            state = ranks.state()
            ranks = Ranks(datasets[name], sizes[step == 2], **keys_of(name)).load(state)
            assert ranks.state() == state
        assert torch.equal(ranks.batch(), batches[step])
        assert ranks.state() == states[step]
    assert len(json.dumps(states[-1])) < 8000


def test_another_global_batch_size_goes_on_with_the_same_rows(datasets, references):
    batches, states = references["concat"]
    ranks = Ranks(datasets["concat"], 2, global_batch=8).load(states[3])
    assert torch.equal(torch.cat([ranks.batch() for _ in range(6)]), torch.cat(batches[4:6]))
    assert not torch.equal(Ranks(datasets["concat"], 1, seed=8).batch(), batches[0])  # nor with another seed


def stream_of(dataset: Dataset, seq_len: int = 32) -> list[tuple[list[int], list[int]]]:
    """Inputs and labels of all rows, in their order, of a dataset that ends."""
    loader = make_loader(dataset, global_batch_size=1, seq_len=seq_len)
    batches = [batch.microbatches[0] for batch in loader]
    return [(batch.input_ids[0].tolist(), batch.labels[0].tolist()) for batch in batches]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=7, max_size=40), seq_len=st.integers(1, 20), epochs=st.integers(1, 2)
)
def test_concat_predicts_each_token_exactly_once(tmp_path_factory, sizes, seq_len, epochs):
    texts = [f"{i}" + " a" * size for i, size in enumerate(sizes)]
    dataset = dataset_of(tmp_path_factory.mktemp("concat"), texts, max_epochs=epochs)
    rows = stream_of(dataset, seq_len)
    for (_, before), (after, _) in itertools.pairwise(rows):
        assert before[-1] == after[0]  # the last token of a row is the first of the next
    tokens = [rows[0][0][0], *(label for _, labels in rows for label in labels if label != -100)]
    documents = TOKENIZER.decode(tokens).removeprefix("<|begin_of_text|>").removesuffix("<|end_of_text|>")
    found = documents.split("<|end_of_text|><|begin_of_text|>")
    for epoch in range(epochs):
        assert sorted(found[epoch * len(texts) : (epoch + 1) * len(texts)]) == sorted(texts)
    for inputs, labels in rows:
        assert all(label in (-100, token) for token, label in zip(inputs[1:], labels, strict=False))


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=7, max_size=40), seq_len=st.integers(4, 20))
def test_best_fit_cuts_only_documents_longer_than_a_row(tmp_path_factory, sizes, seq_len):
    texts, folder = [f"{i}" + " a" * size for i, size in enumerate(sizes)], tmp_path_factory.mktemp("best_fit")
    dataset = dataset_of(folder, texts, max_epochs=1, packing="best_fit", document_mask=True)
    lengths = [len(TOKENIZER.encode(text)) + 2 for text in texts]
    rows = stream_of(dataset, seq_len)
    # With the mask no document predicts the next, so each token of a document but its first is predicted once.
    assert sum(label != -100 for _, labels in rows for label in labels) == sum(lengths) - len(lengths)
    whole = set[str]()
    for inputs, labels in rows:
        tokens = [*inputs, *(label for label in labels[-1:] if label >= 0)]
        whole |= {part.split("<|end_of_text|>")[0] for part in TOKENIZER.decode(tokens).split("<|begin_of_text|>")}
    assert {text for text, length in zip(texts, lengths, strict=True) if length <= seq_len} <= whole


def test_best_fit_wastes_little(tmp_path):
    """Documents of 3 to 180 tokens in rows of 512: over 97 % of the positions are trained on."""
    loader = make_loader(dataset_of(tmp_path, some_texts(900, words=180), packing="best_fit"), seq_len=512)
    for _ in range(8):
        loader.next_global_batch()
    assert 0.97 < loader.stats()["utilization"] <= 1


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
                    alone += F.cross_entropy(model(tokens[own][None])[0], labels[own], reduction="sum")
                    documents += 1
    assert documents > 60
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("count", "holdout"), [(1, 0.0), (3, 0.0), (40, 0.5), (200, 0.5)])
def test_few_documents_give_no_row_twice_in_a_batch(tmp_path, count, holdout):
    texts = [" ".join(map(str, range(1000 * i, 1000 * i + 800))) for i in range(count)]
    ranks = Ranks(dataset_of(tmp_path, texts), 1, global_batch=64, holdout=holdout)
    for _ in range(3 if count == 1 else 10):
        assert len(ranks.batch()[:, 0].unique(dim=0)) == 64


@pytest.mark.parametrize("epochs", [1, 2])
def test_capped_epochs_end_at_one_step_on_all_ranks(datasets, epochs):
    dataset, seen = datasets["concat"].model_copy(update={"max_epochs": epochs}), []
    for size in (1, 2, 3):
        ranks, batches = Ranks(dataset, size, global_batch=6), []
        with pytest.raises(OutOfData, match=r"dataset\.max_epochs = "):
            batches.extend(iter(ranks.batch, None))
        for loader in ranks.loaders:
            assert isinstance(loader.failure(2), OutOfData)
            with pytest.raises(OutOfData):
                loader.next_global_batch()
        assert ranks.state()["schedule"]["step"] == len(batches)
        seen.append(torch.cat(batches))
    assert all(torch.equal(rows, seen[0]) for rows in seen)


WEIGHTS = st.lists(st.one_of(st.just(0.0), st.integers(1, 1000).map(lambda n: n / 100)), min_size=2, max_size=5)


@settings(max_examples=20, deadline=None)
@given(weights=WEIGHTS.filter(any), batch=st.integers(1, 7))
def test_each_share_of_a_mix_is_within_one_row_of_its_weight_at_all_times(tmp_path_factory, weights, batch):
    path = write_jsonl(tmp_path_factory.mktemp("mix") / "a.jsonl", some_texts(30))
    sources = tuple(DataSource(source="jsonl", path=str(path), weight=weight) for weight in weights)
    loader, rows = make_loader(Dataset(sources=sources, num_workers=0), global_batch_size=batch), 0
    for _ in range(25):
        loader.next_global_batch()
        rows += batch
        counts = loader.state_dict()["schedule"]["rows"]
        assert all(abs(count - w / sum(weights) * rows) < 1 for count, w in zip(counts, weights, strict=True))


def test_stages_change_the_weights_at_their_step_and_rows_hold_one_source_each(tmp_path):
    paths = [str(write_jsonl(tmp_path / f"{m}.jsonl", some_texts(90, mark=m))) for m in "ab"]
    sources = tuple(DataSource(source="jsonl", path=path) for path in paths)
    stages = (DataStage(start_step=4, weights=(0.0, 1.0)), DataStage(start_step=2, weights=(1.0, 3.0)))
    ranks = Ranks(Dataset(sources=sources, stages=stages, num_workers=0), 1, global_batch=8)
    before = [0, 0]
    for step in range(6):
        texts = [TOKENIZER.decode(row) for row in ranks.batch()[:, 0].tolist()]
        assert not any("<a" in text and "<b" in text for text in texts)
        rows = ranks.state()["schedule"]["rows"]
        assert [now - then for now, then in zip(rows, before, strict=True)] == [[4, 4], [2, 6], [0, 8]][step // 2]
        before = rows
    for wrong in ((1.0,), (0.0, 0.0)):
        stages = (DataStage(start_step=1, weights=wrong),)
        with pytest.raises(UserError, match=r"dataset\.stages"):  # without the rules of a whole job
            Ranks(Dataset(sources=sources, stages=stages, num_workers=0), 1, global_batch=8)


def test_what_changed_since_the_checkpoint_is_said(datasets, references, tmp_path):
    dataset, state, few = datasets["concat"], references["concat"][1][0], tmp_path / "few"
    few.mkdir()
    (tmp_path / "tokenizer.model").write_bytes(b"".join(TOKENIZER.path.read_bytes().splitlines(keepends=True)[:-1]))
    less, same = load_tokenizer(tmp_path / "tokenizer.model"), load_tokenizer(TOKENIZER.path.with_suffix(".json"))
    Ranks(dataset, 1, tokenizer=same).load(state)
    capped = dataset.model_copy(update={"max_epochs": 1})
    mix = Dataset(sources=tuple(DataSource(source="jsonl", path=dataset.path) for _ in range(2)), num_workers=0)
    for ranks, message in [
        (Ranks(dataset_of(tmp_path, some_texts(99)), 1), r"the source jsonl .*a\.jsonl is now jsonl .*a\.jsonl"),
        (Ranks(dataset.model_copy(update={"text_column": "text"}), 1, seed=8), "the seed .* was 7, it is now 8"),
        (Ranks(dataset_of(few, some_texts(20)), 1), r"read in 64 streams, .* in 16: another .* number of documents"),
        (Ranks(capped, 1), r"read in 64 streams, .* is in 1: another dataset"),
        (Ranks(mix, 1), "there were 1 sources, there are now 2"),
        (Ranks(dataset, 1, tokenizer=less), "the tokenizer is another one"),
        (Ranks(dataset, 1, seq_len=64), r"training\.seq_len was 32, it is now 64"),
        (Ranks(dataset, 1, holdout=0.2), r"holdout was 0\.0, it is now 0\.2$"),
    ]:
        with pytest.raises(UserError, match=message):
            ranks.load(state)
    with pytest.raises(CheckpointError, match="version 99"):
        Ranks(dataset, 1).load({**state, "version": 99})
    other = dataset_of(tmp_path, some_texts(99, seed=5, mark="new"), on_change="warn")
    assert "<new" in TOKENIZER.decode(Ranks(other, 1).load(state).batch()[:, 0].flatten().tolist())


def test_tokens_and_epochs_of_each_source_are_those_of_all_ranks(tmp_path):
    paths = [str(write_jsonl(tmp_path / f"{count}.jsonl", some_texts(count))) for count in (40, 150, 150)]
    weights = zip(paths, (1.0, 3.0, 0.0), strict=True)
    sources = tuple(DataSource(source="jsonl", path=path, weight=weight) for path, weight in weights)
    dataset, found = Dataset(sources=sources, num_workers=0), []
    for size in (1, 2, 3):
        ranks = Ranks(dataset, size)
        for number in range(8):
            ranks.batch()
            if number == 3:  # where a log line or a checkpoint comes, or a resume, makes no difference
                ranks = Ranks(dataset, size).load(ranks.state()) if size == 2 else ranks
                ranks.state()
        found += ranks.together(Loader.stats)
    for key in ("source_tokens", "source_epochs"):
        assert all(stats[key] == found[0][key] for stats in found)
    a, b, unused = found[0]["source_tokens"]
    assert found[0]["source_tokens"] == {a: 24 * 8 * 32 // 4, b: 24 * 8 * 32 * 3 // 4, unused: 0}
    tokens = len(TOKENIZER.encode("".join(some_texts(40)))) + 40  # each ends with a token of its own
    # A document counts once it is passed, and each of the streams stands in the middle of one.
    epochs = found[0]["source_epochs"]
    assert epochs[a] == pytest.approx(24 * 8 * 32 // 4 / tokens, abs=32 / 40)
    assert epochs[a] > epochs[b] > epochs[unused] == 0
