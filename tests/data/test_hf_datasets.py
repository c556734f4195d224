"""What the `datasets` library loads, in memory-mapped and in streamed form."""

import pytest
from data_helpers import some_texts, write_hub

from titanlite.config.errors import UserError
from titanlite.config.schema import Dataset
from titanlite.data.sources import open_source
from titanlite.data.sources.base import Sequential

TEXTS = some_texts(60)


@pytest.fixture(scope="module")
def streaming(tmp_path_factory):
    return Dataset(
        source="huggingface", path=str(write_hub(tmp_path_factory.mktemp("hf") / "hub", TEXTS)), streaming=True
    )


def sequential(dataset) -> Sequential:
    source = open_source(dataset)
    assert isinstance(source, Sequential)
    return source


def test_the_library_in_memory_mapped_and_streamed_form_holds_the_same_documents(streaming, tmp_path):
    import datasets

    mapped = open_source(streaming.model_copy(update={"streaming": False}))
    streamed = sequential(streaming)
    texts = [text for part in range(streamed.num_parts) for text in streamed.read(part, 0)]
    assert [mapped[i] for i in range(len(mapped))] == texts  # type: ignore[index]
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"held": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(tmp_path / "dict")
    one = open_source(Dataset(source="arrow", path=str(tmp_path / "one"), text_column="body"))
    two = open_source(Dataset(source="arrow", path=str(tmp_path / "dict"), split="held"))
    for source in (one, two):
        assert [source[i] for i in range(len(source))] == TEXTS  # type: ignore[index]
    again = open_source(Dataset(source="arrow", path=str(tmp_path / "one"), text_column="body"))
    assert again.fingerprint == one.fingerprint


def test_a_stream_may_begin_with_an_empty_file(tmp_path):
    folder = write_hub(tmp_path / "hub", ["fine"], files=1)
    (folder / "train--.jsonl").touch()
    source = sequential(Dataset(source="huggingface", path=str(folder), streaming=True))
    assert [list(source.read(part, 0)) for part in range(source.num_parts)] == [[], ["fine"]]


def test_c4_is_preconfigured(streaming, monkeypatch):
    import datasets

    asked, load = [], datasets.load_dataset

    def fake(path, **keys):
        asked.append((path, keys))
        return load(streaming.path, split="train", streaming=True)

    monkeypatch.setattr("datasets.load_dataset", fake)
    assert sequential(Dataset(source="c4")).num_parts == 6
    assert asked == [("allenai/c4", {"name": "en", "split": "train", "streaming": True})]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_datasets_cannot_load_is_an_error_that_says_what_was_tried(tmp_path, streaming, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"no local folder 'nobody/nothing' here, so the Hugging Face hub was asked"):
        open_source(Dataset(source="huggingface", path="nobody/nothing", streaming=streaming))
    folder = write_hub(tmp_path / "hub", ["fine"], files=1)
    dataset = Dataset(source="huggingface", path=str(folder), streaming=streaming)
    with pytest.raises(UserError, match=r"no field 'body' \(dataset\.text_column\); there are: 'id', 'text'"):
        open_source(dataset.model_copy(update={"text_column": "body"}))
    with pytest.raises(UserError, match=r"split held.*tried the local folder .*hub"):
        open_source(dataset.model_copy(update={"split": "held"}))
