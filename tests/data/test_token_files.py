"""Token files of other frameworks give the sequences of prepared shards with the same documents."""

import re

import numpy as np
import pytest
import torch
from data_helpers import (
    TOKENIZER,
    RankLoaders,
    encode,
    find_documents,
    jsonl_dataset,
    make_dataset,
    make_loader,
    make_run,
    make_validation,
    some_texts,
    write_datatrove,
    write_megatron,
)

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset, DataSource, Validation
from titanlite.data.prepare import prepare

TEXTS = some_texts(400)
DOCUMENTS = [encode(text) for text in TEXTS]
EOS = TOKENIZER.eos_id


def write_raw(path, documents, dtype="uint16"):
    path.write_bytes(np.concatenate(documents).astype(dtype).tobytes())


def write_npy(path, documents, dtype="uint16"):
    np.save(path, np.concatenate(documents).astype(dtype))


FORMATS = {
    "megatron uint16": ("bin", write_megatron, "uint16"),
    "megatron int32": ("bin", write_megatron, "int32"),
    "olmo uint16": ("npy", write_raw, "uint16"),
    "numpy uint32": ("npy", write_npy, "uint32"),
    "datatrove uint16": ("ds", write_datatrove, "uint16"),
    "datatrove uint32": ("ds", write_datatrove, "uint32"),
}


def write_tokens(folder, name):
    """Write the documents in two files, and return the keys of the source that reads them."""
    suffix, write, dtype = FORMATS[name]
    write(folder / f"a.{suffix}", DOCUMENTS[:150], dtype)
    write(folder / f"b.{suffix}", DOCUMENTS[150:], dtype)
    (folder / "empty.npy").touch()
    option = {"token_dtype": dtype} if suffix == "npy" else {}
    return {"source": "tokens", "path": str(folder / f"*.{suffix}"), **option}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Return a function that mixes a source with text, and the batches of a mixture with shards."""
    folder = tmp_path_factory.mktemp("shards")
    text = jsonl_dataset(folder, TEXTS)
    prepare(make_run(text), folder / "out", 1)

    def mix(**keys):
        sources = (DataSource(**keys, weight=0.7), DataSource(source="jsonl", path=text.path))
        return Dataset(sources=sources, num_workers=0)

    loaders = RankLoaders(mix(source="shards", path=str(folder / "out")), 1)
    return mix, torch.stack([loaders.batch() for _ in range(4)])


@pytest.mark.parametrize("name", FORMATS)
def test_a_mixture_gives_and_resumes_the_sequences_of_shards(mixture, tmp_path, name):
    mix, expected = mixture
    tokens = mix(**write_tokens(tmp_path, name))
    first = RankLoaders(tokens, 2)

    batches = [first.batch(), first.batch()]
    resumed = RankLoaders(tokens, 3).load(first.state())
    batches += [resumed.batch(), resumed.batch()]

    assert torch.equal(torch.stack(batches), expected)


def test_sequences_of_a_megatron_document_are_joined(mixture, tmp_path):
    mix, expected = mixture
    write_megatron(tmp_path / "a.bin", DOCUMENTS, cuts=3)
    joined = mix(source="tokens", path=str(tmp_path / "a.bin"))
    assert torch.equal(RankLoaders(joined, 1).batch(), expected[0])


def split_documents(dataset):
    """Return the numbers of the documents that training and validation read."""
    batches = list(make_loader(dataset, holdout=0.3, global_batch_size=1))
    validation = make_validation(Validation(holdout=0.3, sequences=4096), dataset)
    trained = find_documents(torch.cat([batch.microbatches[0].input_ids for batch in batches]))
    held_out = find_documents(torch.cat([batch.input_ids for batch in validation.batches()]))
    return set(trained), set(held_out)


def test_each_format_holds_out_the_same_documents(tmp_path):
    datasets = [
        Dataset(**write_tokens(tmp_path, name), num_workers=0, max_epochs=1)
        for name in ("megatron int32", "olmo uint16")
    ]

    trained, held_out = split_documents(datasets[0])

    assert split_documents(datasets[1]) == (trained, held_out)
    assert trained | held_out == set(map(str, range(len(TEXTS))))
    assert not trained & held_out
    assert 60 < len(held_out) < 180  # 120 on average


# Differences of these ends overflow to positive numbers: 2**62, -(2**63), -(2**62) and 0.
OVERFLOW = b"\0\0\0\0\0\0\0@\0\0\0\0\0\0\0\x80\0\0\0\0\0\0\0\xc0\0\0\0\0\0\0\0\0"
NUM_TOKENS = sum(map(len, DOCUMENTS))
AT_END = f"token {NUM_TOKENS - 2} is the id "
# File of the source, file to change, its new content, and text in the error.
BAD = {
    "high id": (
        "a.npy",
        "a.npy",
        lambda raw: raw[:-8] + b"\xff\xff\0\0" + raw[-4:],
        f"{AT_END}65535",
    ),
    "negative id": (
        "a.npy",
        "a.npy",
        lambda raw: raw[:-8] + b"\xff" * 4 + raw[-4:],
        f"{AT_END}-1",
    ),
    "no data type": ("a.npy", "a.npy", lambda raw: raw[128:], "token_dtype"),
    "empty type": ("a.npy", "a.npy", lambda raw: raw.replace(b"<i4", b"|V0"), "V0"),
    "damaged header": ("a.npy", "a.npy", lambda raw: raw.replace(b"}", b" "), "header"),
    "truncated array": ("a.npy", "a.npy", lambda raw: raw[:-4], f"{NUM_TOKENS - 1:,}"),
    "no EOS": (
        "a.npy",
        "a.npy",
        lambda raw: raw[:128] + bytes(len(raw) - 128),
        f"{EOS}",
    ),
    "unknown suffix": ("a.idx", "a.idx", lambda raw: raw, r"\.npy"),
    "truncated index": ("a.bin", "a.idx", lambda raw: raw[:-8], r"a\.idx"),
    "floating point index": ("a.bin", "a.idx", lambda raw: raw[:17] + b"\7" + raw[18:], "code 7"),
    "loss mask": ("a.ds", "a.ds.loss", lambda raw: raw, r"\.loss"),
    "cut index": ("a.ds", "a.ds.index", lambda raw: raw[:-3], r"a\.ds\.index"),
    "overflowing index": ("a.ds", "a.ds.index", lambda raw: OVERFLOW + raw, r"a\.ds\.index"),
}


@pytest.mark.parametrize(
    ("name", "changed", "change", "named"),
    BAD.values(),
    ids=BAD,
)
def test_a_bad_file_is_an_error_that_names_it(tmp_path, name, changed, change, named):
    write_megatron(tmp_path / "a.bin", DOCUMENTS)
    write_npy(tmp_path / "a.npy", DOCUMENTS, "int32")
    write_datatrove(tmp_path / "a.ds", DOCUMENTS)
    file = tmp_path / changed
    file.write_bytes(change(file.read_bytes() if file.exists() else b""))

    with pytest.raises(UserError, match=rf"{name}\b.*{named}"):
        list(make_loader(make_dataset("tokens", tmp_path / name, max_epochs=1)))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "olmo uint16"])
def test_a_token_dtype_that_contradicts_the_file_is_rejected(tmp_path, name):
    keys = write_tokens(tmp_path, name) | {"token_dtype": "uint64"}

    with pytest.raises(UserError, match=r"a\.\w+ .*dataset\.token_dtype"):
        make_loader(Dataset.model_validate(keys))


@pytest.mark.parametrize(
    ("name", "index"),
    [("a.bin", "a.idx"), ("a.ds", "a.ds.index")],
)
def test_an_index_that_changes_while_it_is_read_ends_the_run(tmp_path, name, index):
    write_megatron(tmp_path / "a.bin", DOCUMENTS)
    write_datatrove(tmp_path / "a.ds", DOCUMENTS)
    batches = iter(make_loader(make_dataset("tokens", tmp_path / name, max_epochs=1)))
    next(batches)

    with (tmp_path / index).open("ab") as file:
        file.write(b"\0" * 8)

    with pytest.raises(UserError, match=re.escape(index)):
        list(batches)


def test_a_file_whose_documents_do_not_end_with_eos_is_reported(tmp_path, caplog):
    write_megatron(tmp_path / "a.bin", [ids[:-1] for ids in DOCUMENTS])
    make_loader(make_dataset("tokens", tmp_path / "a.bin"))
    assert f"a.bin ends with the id {EOS}" in caplog.text
