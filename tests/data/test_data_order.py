"""Sequence k of a batch is the same on any layout, after any restart, and in each version."""

import hashlib
import itertools
import json

import datasets as hf_datasets
import pytest
import tomli
import torch
from data_helpers import (
    TOKENIZER,
    RankLoaders,
    change,
    hide_bad_records,
    jsonl_dataset,
    load_smaller_tokenizer,
    make_dataset,
    make_loader,
    make_mixture,
    some_texts,
    write_hub,
    write_jsonl,
    write_parquet,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from titanlite import Loader
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.flavors import Architecture
from titanlite.config.schema import Dataset, DataStage
from titanlite.data.loader import OutOfData
from titanlite.data.tokenizer import load_tokenizer
from titanlite.model.attention import document_mask
from titanlite.model.llama import Llama

STEPS = 9
TEXTS = some_texts(230)
# The fixture `datasets` replaces FOLDER by the folder of `write_files`.
DATASETS = """
concat = {source = "jsonl", path = "FOLDER/a.jsonl"}
best_fit = {source = "jsonl", path = "FOLDER/a.jsonl", packing = "best_fit"}
mask = {source = "jsonl", path = "FOLDER/a.jsonl", document_mask = true}
holdout = {source = "jsonl", path = "FOLDER/a.jsonl"}
capped = {source = "jsonl", path = "FOLDER/a.jsonl", max_epochs = 2}
skip = {source = "jsonl", path = "FOLDER/bad.jsonl", on_bad_record = "skip"}
gz = {source = "jsonl", path = "FOLDER/a*.gz"}
zst = {source = "jsonl", path = "FOLDER/*.zst", packing = "best_fit", max_epochs = 1}
parquet = {source = "parquet", path = "FOLDER/*.parquet"}
arrow = {source = "arrow", path = "FOLDER/arrow"}
text = {source = "text", path = "FOLDER/*.txt"}
windows = {source = "jsonl", path = "FOLDER/large.jsonl.gz"}

["capped best_fit"]
source = "jsonl"
path = "FOLDER/a.jsonl"
max_epochs = 2
packing = "best_fit"

[streaming]
source = "huggingface"
path = "FOLDER/hub"
streaming = true
packing = "best_fit"

[mix]
sources = [
    {source = "jsonl", path = "FOLDER/a.jsonl", weight = 0.7},
    {source = "jsonl", path = "FOLDER/*0.jsonl.gz", weight = 0.2},
    {source = "jsonl", path = "FOLDER/a.jsonl", weight = 0.1, max_epochs = 3},
]
stages = [{start_step = 4, weights = [0.2, 0.7, 0.1]}]
"""
# Hashes of nine global batches and of the state after each one. They must never change, because old
# runs are resumed.
DIGESTS = tomli.loads("""
concat = "d0caf91b1757f7f3"
best_fit = "b4f3a602995c609f"
mask = "0482132c9c1858dc"
holdout = "747736b19dbeb28a"
capped = "4b3bb69282cc632b"
"capped best_fit" = "bc379da785e01277"
skip = "23ada54c4b10a58b"
gz = "9014d83484f73d4a"
zst = "dc70b286c70ee3fd"
parquet = "75ce60ff74e6ccb4"
arrow = "ab284fce0ae4c7b1"
streaming = "e8f528c49a6c8ee7"
text = "1385d6b57c636f00"
windows = "4d6c225a408d9357"
mix = "77f552317a3b5d25"
""")
# Fingerprints of these datasets depend on file times or on the version of a library.
UNSTABLE_FINGERPRINTS = ("gz", "zst", "mix", "windows", "parquet")


def write_files(folder):
    """Write the files of DATASETS."""
    write_jsonl(folder / "a.jsonl", some_texts(150))
    for i in range(5):
        write_jsonl(folder / f"a{i}.jsonl.gz", TEXTS[i::5])
        write_jsonl(folder / f"a{i}.jsonl.zst", TEXTS[i::5])
    # This file is larger than one shuffle window.
    write_jsonl(folder / "large.jsonl.gz", some_texts(1500, words=20))
    write_parquet(folder / "a.parquet", TEXTS[:100])
    write_parquet(folder / "b.parquet", TEXTS[100:])
    write_hub(folder / "hub", TEXTS)
    hf_datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder / "arrow")
    hide_bad_records(folder / "bad.jsonl", TEXTS, count=5)
    (folder / "a.txt").write_text(("x" * 99 + "\n") * 2001)
    (folder / "b.txt").write_text("日本" * 40_000 + "\n", encoding="utf-8")
    (folder / "c.txt").write_text("é" * 999 * 101, encoding="utf-8")
    (folder / "d.txt").write_text("small\n", encoding="utf-8-sig")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Create the datasets of DATASETS."""
    folder = tmp_path_factory.mktemp("data")
    write_files(folder)
    datasets = {}
    for name, options in tomli.loads(DATASETS.replace("FOLDER", str(folder))).items():
        datasets[name] = Dataset.model_validate(options | {"num_workers": 0})
    return datasets


def make_keys(name):
    return {"holdout": 0.2 if name == "holdout" else 0.0, "seq_len": 512 if name == "text" else 32}


@pytest.fixture(scope="module")
def references(datasets):
    """Return the batches of each dataset on one rank, and the states after them."""
    references = {}
    for name, dataset in datasets.items():
        ranks = RankLoaders(dataset, 1, **make_keys(name))
        steps = [(ranks.batch(), ranks.state()) for _ in range(STEPS)]
        references[name] = list(zip(*steps, strict=True))
    return references


@pytest.mark.parametrize("name", DIGESTS)
def test_sequences_and_states_are_the_same_in_each_version(references, name):
    digest = hashlib.sha256()
    for batch, state in zip(*references[name], strict=True):
        sources = state["sources"]
        positions = [state["schedule"], state["seed"], state["packing"]]
        positions.append([source["streams"] for source in sources])
        is_stable = name not in UNSTABLE_FINGERPRINTS
        fingerprints = [source["fingerprint"] for source in sources if is_stable]
        content = json.dumps([positions, fingerprints], sort_keys=True)
        digest.update(batch.numpy().tobytes() + content.encode())

    assert digest.hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize(
    ("first", "second"), [(2, 4), (3, 1), pytest.param(24, 6, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", DIGESTS)
def test_sequences_and_states_are_the_same_on_any_layout_and_after_restarts(
    datasets, references, name, first, second
):
    batches, states = references[name]
    ranks = RankLoaders(datasets[name], first, local_batch_size=24 // first, **make_keys(name))
    restarts = {2: second, 5: first}  # number of ranks by step

    for step in range(STEPS):
        if step in restarts:
            state = ranks.state()
            ranks = RankLoaders(datasets[name], restarts[step], **make_keys(name)).load(state)
            assert ranks.state() == state
        assert torch.equal(ranks.batch(), batches[step])
        assert ranks.state() == states[step]

    assert len(json.dumps(states[-1])) < 8000


def test_another_global_batch_size_continues_with_the_same_sequences(datasets, references):
    batches, states = references["concat"]
    ranks = RankLoaders(datasets["concat"], 2, global_batch_size=8).load(states[3])

    continued = [ranks.batch() for _ in range(6)]

    assert torch.equal(torch.cat(continued), torch.cat(batches[4:6]))


def read_all(dataset, seq_len):
    """Return the inputs and labels of all sequences of a dataset with max_epochs."""
    loader = make_loader(dataset, global_batch_size=1, seq_len=seq_len)
    sequences = []
    for batch in loader:
        micro = batch.microbatches[0]
        tokens = micro.input_ids[0].tolist()
        labels = micro.labels[0].tolist()
        sequences.append((tokens, labels))
    return sequences


SIZES = st.lists(st.integers(0, 60), min_size=7, max_size=40)
# Texts of 0 to 60 words, which start with their number.
TEXTS_TO_PACK = SIZES.map(lambda sizes: [f"{i}" + " a" * size for i, size in enumerate(sizes)])


@settings(max_examples=25)
@given(
    texts=TEXTS_TO_PACK,
    seq_len=st.integers(1, 20),
    epochs=st.integers(1, 2),
)
def test_concat_predicts_each_token_exactly_once(tmp_path_factory, texts, seq_len, epochs):
    dataset = jsonl_dataset(tmp_path_factory.mktemp("concat"), texts, max_epochs=epochs)

    sequences = read_all(dataset, seq_len)

    for (_, labels), (next_inputs, _) in itertools.pairwise(sequences):
        # The last token of a sequence is also the first input of the next sequence.
        assert labels[-1] == next_inputs[0]

    for inputs, labels in sequences:
        for next_token, label in zip(inputs[1:], labels, strict=False):
            assert label in (-100, next_token)

    # Each token of the text except the first is a label once.
    first_inputs, _ = sequences[0]
    tokens = first_inputs[:1]
    for _, labels in sequences:
        tokens += [label for label in labels if label != -100]
    text = TOKENIZER.decode(tokens)
    text = text.removeprefix("<|begin_of_text|>").removesuffix("<|end_of_text|>")
    documents = text.split("<|end_of_text|><|begin_of_text|>")

    for epoch in range(epochs):
        part = documents[epoch * len(texts) : (epoch + 1) * len(texts)]
        assert sorted(part) == sorted(texts)


@settings(max_examples=25)
@given(texts=TEXTS_TO_PACK, seq_len=st.integers(4, 20))
def test_best_fit_cuts_only_documents_longer_than_a_sequence(tmp_path_factory, texts, seq_len):
    folder = tmp_path_factory.mktemp("best_fit")
    dataset = jsonl_dataset(folder, texts, max_epochs=1, packing="best_fit", document_mask=True)
    lengths = [len(TOKENIZER.encode(text)) + 2 for text in texts]

    sequences = read_all(dataset, seq_len)

    # With the mask, each token of a document except the first is predicted once.
    num_labels = 0
    for _, labels in sequences:
        num_labels += sum(label != -100 for label in labels)

    assert num_labels == sum(lengths) - len(lengths)

    documents_read = set()
    for inputs, labels in sequences:
        # The last token of a sequence is only a label. It is -100 if it is not predicted.
        last_token = [label for label in labels[-1:] if label >= 0]
        for document in TOKENIZER.decode(inputs + last_token).split("<|begin_of_text|>"):
            documents_read.add(document.split("<|end_of_text|>")[0])

    for text, length in zip(texts, lengths, strict=True):
        assert length > seq_len or text in documents_read


def test_best_fit_leaves_less_than_3_percent_of_the_positions_unused(tmp_path):
    # The documents have 3 to 180 tokens.
    documents = some_texts(900, words=180)
    loader = make_loader(jsonl_dataset(tmp_path, documents, packing="best_fit"), seq_len=512)
    for _ in range(8):
        loader.next_global_batch()

    assert 0.97 < loader.stats()["token_utilization"] <= 1


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_documents_in_a_sequence_are_scored_independently(tmp_path, packing):
    model = Llama(Architecture(64, 2, 2, 1, 96, vocab_size=4096))
    model.init_weights()
    dataset = jsonl_dataset(tmp_path, some_texts(60, words=40), packing=packing, document_mask=True)
    loader = make_loader(dataset, seq_len=96, local_batch_size=24)
    (micro,) = loader.next_global_batch().microbatches

    assert micro.document_ids is not None

    def sum_loss(logits, labels):
        return F.cross_entropy(logits, labels, reduction="sum")

    alone = torch.zeros(())
    num_documents = 0
    with torch.no_grad():
        logits = model(micro.input_ids, micro.positions, document_mask(micro.document_ids))
        packed = sum_loss(logits.flatten(0, 1), micro.labels.flatten())
        sequences = zip(micro.input_ids, micro.labels, micro.document_ids, strict=True)
        for tokens, labels, ids in sequences:
            for document in ids.unique():
                inside = ids == document
                if (labels[inside] != -100).any():
                    alone += sum_loss(model(tokens[inside][None])[0], labels[inside])
                    num_documents += 1

    assert num_documents > 60
    # The sums over tokens have another order.
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("count", "holdout"),
    [(1, 0.0), (3, 0.0), (40, 0.5), (200, 0.5)],
)
def test_a_batch_from_few_documents_contains_no_sequence_twice(tmp_path, count, holdout):
    texts = []
    for start in range(0, 1000 * count, 1000):
        numbers = map(str, range(start, start + 800))
        texts.append(" ".join(numbers))
    ranks = RankLoaders(jsonl_dataset(tmp_path, texts), 1, global_batch_size=64, holdout=holdout)

    for _ in range(3 if count == 1 else 10):
        assert len(ranks.batch()[:, 0].unique(dim=0)) == 64


@pytest.mark.parametrize("epochs", [1, 2])
def test_data_with_max_epochs_ends_at_the_same_step_on_all_ranks(datasets, epochs):
    dataset = change(datasets["concat"], max_epochs=epochs)
    sequences = []
    for size in (1, 2, 3):
        ranks = RankLoaders(dataset, size, global_batch_size=6)
        batches = []
        with pytest.raises(OutOfData, match=r"dataset\.max_epochs = "):
            batches.extend(iter(ranks.batch, None))
        for loader in ranks.loaders:
            assert isinstance(loader.prefetch(2), OutOfData)
            with pytest.raises(OutOfData):
                loader.next_global_batch()
        assert ranks.state()["schedule"]["step"] == len(batches)
        sequences.append(torch.cat(batches))

    assert all(torch.equal(other, sequences[0]) for other in sequences)


POSITIVE_WEIGHT = st.integers(1, 1000).map(lambda hundredths: hundredths / 100)
WEIGHT = st.one_of(st.just(0.0), POSITIVE_WEIGHT)
WEIGHTS = st.lists(WEIGHT, min_size=2, max_size=5).filter(any)


@settings(max_examples=20)
@given(weights=WEIGHTS, batch=st.integers(1, 7))
def test_each_count_of_a_mixture_is_always_within_one_sequence_of_its_share(
    tmp_path_factory, weights, batch
):
    path = write_jsonl(tmp_path_factory.mktemp("mixture") / "a.jsonl", some_texts(30))
    mixture = make_mixture(*((path, weight) for weight in weights))
    loader = make_loader(mixture, global_batch_size=batch)

    for step in range(1, 26):
        loader.next_global_batch()
        counts = loader.state_dict()["schedule"]["rows"]
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - weight / sum(weights) * step * batch) < 1


def test_stages_change_the_weights_and_each_sequence_has_one_source(tmp_path):
    paths = [write_jsonl(tmp_path / f"{m}.jsonl", some_texts(90, mark=m)) for m in "ab"]
    stages = (
        DataStage(start_step=4, weights=(0.0, 1.0)),
        DataStage(start_step=2, weights=(1.0, 3.0)),
    )
    dataset = make_mixture((paths[0], 1.0), (paths[1], 1.0), stages=stages)
    ranks = RankLoaders(dataset, 1, global_batch_size=8)

    counts = []
    for _ in range(6):
        sequences = ranks.batch()[:, 0].tolist()
        texts = [TOKENIZER.decode(inputs) for inputs in sequences]
        assert not any("<a" in text and "<b" in text for text in texts)
        counts.append(ranks.state()["schedule"]["rows"])

    assert counts == [
        [4, 4],
        [8, 8],
        [10, 14],
        [12, 20],
        [12, 28],
        [12, 36],
    ]


@pytest.mark.parametrize(
    ("weights", "stage_weights", "key"),
    [
        ((0.0, 0.0), None, "dataset.sources"),
        ((1.0, 1.0), (1.0,), "dataset.stages"),
        ((1.0, 1.0), (1.0, 1.0, 1.0), "dataset.stages"),
    ],
    ids=["only zeros", "too few in a stage", "too many in a stage"],
)
def test_a_program_cannot_read_a_mixture_with_wrong_weights(tmp_path, weights, stage_weights, key):
    """The rules of a job do not run before `Loader`."""
    path = write_jsonl(tmp_path / "a.jsonl", some_texts(90))
    stages = (DataStage(start_step=4, weights=stage_weights),)
    dataset = make_mixture(*((path, weight) for weight in weights), stages=stages)

    with pytest.raises(UserError, match=f"{key}.* expected 2 weights"):
        make_loader(dataset)


CHANGES = {
    "seed": ({}, {"seed": 8}, "seed .* 7 .* 8"),
    "max_epochs": ({"max_epochs": 1}, {}, r" 64 streams .* 1, .*dataset\.max_epochs"),
    "seq_len": ({}, {"seq_len": 64}, r"training\.seq_len .*32 .*64"),
    "holdout": ({}, {"holdout": 0.2}, r"holdout .*0\.0 .*0\.2$"),
}


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    CHANGES.values(),
    ids=CHANGES,
)
def test_a_changed_job_cannot_resume(datasets, references, keys, options, message):
    state = references["concat"][1][0]
    ranks = RankLoaders(change(datasets["concat"], **keys), 1, **options)

    with pytest.raises(UserError, match=message):
        ranks.load(state)


def test_changed_sources_cannot_resume(datasets, references, tmp_path):
    state = references["concat"][1][0]
    changed = jsonl_dataset(tmp_path, some_texts(99, seed=5, mark="new"))
    (tmp_path / "few").mkdir()
    few = jsonl_dataset(tmp_path / "few", some_texts(20))
    path = datasets["concat"].path
    mixture = make_mixture((path, 1.0), (path, 1.0))
    for dataset, message in (
        (changed, r"jsonl .*a\.jsonl is now jsonl .*a\.jsonl"),
        (few, r" 64 streams .* 16, .*documents"),
        (mixture, "1 sources .* 2"),
    ):
        with pytest.raises(UserError, match=message):
            RankLoaders(dataset, 1).load(state)

    batch = RankLoaders(change(changed, on_change="warn"), 1).load(state).batch()

    assert "<new" in TOKENIZER.decode(batch[:, 0].flatten().tolist())


def test_only_a_tokenizer_with_the_same_ids_can_resume(datasets, references, tmp_path):
    state = references["concat"][1][0]
    same = load_tokenizer(TOKENIZER.path.with_suffix(".json"))
    smaller = load_smaller_tokenizer(tmp_path)

    RankLoaders(datasets["concat"], 1, tokenizer=same).load(state)

    with pytest.raises(UserError, match="tokenizer"):
        RankLoaders(datasets["concat"], 1, tokenizer=smaller).load(state)


def test_a_state_of_an_unknown_version_cannot_be_loaded(datasets, references):
    state = references["concat"][1][0]

    with pytest.raises(CheckpointError, match="version 99"):
        RankLoaders(datasets["concat"], 1).load({**state, "version": 99})


def test_tokens_and_epochs_of_each_source_count_all_ranks(tmp_path):
    small = write_jsonl(tmp_path / "small.jsonl", some_texts(40))
    large = write_jsonl(tmp_path / "large.jsonl", some_texts(150))
    dataset = make_mixture((small, 1.0), (large, 3.0), (large, 0.0))

    stats = []
    for size in (1, 2, 3):
        ranks = RankLoaders(dataset, size)
        for step in range(8):
            if size == 2 and step == 4:  # a resumed loader continues the counts
                ranks = RankLoaders(dataset, size).load(ranks.state())
            ranks.batch()
        stats += ranks.call(Loader.stats)

    for key in ("source_tokens", "source_epochs"):
        assert all(other[key] == stats[0][key] for other in stats)
    a, b, unused = stats[0]["source_tokens"]
    total = 24 * 8 * 32
    expected = {a: total // 4, b: total * 3 // 4, unused: 0}

    assert stats[0]["source_tokens"] == expected

    # Each of the 40 texts ends with EOS.
    num_tokens = len(TOKENIZER.encode("".join(some_texts(40)))) + 40
    epochs = stats[0]["source_epochs"]

    # A document counts when it was read to its end, and each of the 32 streams is inside of one.
    assert epochs[a] == pytest.approx(total // 4 / num_tokens, abs=32 / 40)
    assert epochs[a] > epochs[b] > epochs[unused] == 0


@pytest.mark.parametrize(
    ("source", "max_epochs"), [("huggingface", 0), ("jsonl", 0), ("jsonl", 20)]
)
def test_a_warning_reports_once_that_text_is_read_too_often(tmp_path, caplog, source, max_epochs):
    hub = write_hub(tmp_path / "hub", some_texts(40), files=1)
    is_streamed = source == "huggingface"
    path = hub if is_streamed else hub / "train-0.jsonl"
    loader = make_loader(make_dataset(source, path, streaming=is_streamed, max_epochs=max_epochs))
    caplog.set_level("WARNING", logger="titanlite")

    for _ in range(30):
        epochs = max(loader.stats()["source_epochs"].values())
        assert len(caplog.records) == (epochs >= 4 and not max_epochs)
        loader.next_global_batch()

    assert epochs > 5
