"""What a checkpoint says of the data: what has changed is said, and what no run saves is refused."""

from pathlib import Path
from typing import Any

import pytest
from data_helpers import ROOT, TOKENIZER, Ranks, dataset_of, some_texts, write_jsonl

from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.schema import Dataset, DataSource
from titanlite.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return dataset_of(tmp_path_factory.mktemp("data"), some_texts(150))


@pytest.fixture(scope="module")
def state(dataset: Dataset) -> dict[str, Any]:
    ranks = Ranks(dataset, 1)
    ranks.batch()
    return ranks.state()


def test_what_changed_since_the_checkpoint_is_said(dataset: Dataset, state: dict[str, Any], tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    lines = (ROOT / "assets/tokenizer/tokenizer.model").read_bytes().splitlines(keepends=True)
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines[:-1]))
    less, same = (load_tokenizer(path / "tokenizer.model") for path in (tmp_path, ROOT / "assets/tokenizer"))
    Ranks(dataset, 1, tokenizer=same).load(state)
    Ranks(dataset, 1, tokenizer=load_tokenizer(ROOT / "assets/tokenizer/tokenizer.json")).load(state)  # the same ids
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


def test_changed_data_is_accepted_where_the_job_says_so(
    dataset: Dataset, state: dict[str, Any], tmp_path: Path
) -> None:
    other = dataset_of(tmp_path, some_texts(99, seed=5, mark="new"), on_change="warn")
    rows = Ranks(other, 1).load(state).batch()[:, 0]
    assert "<new" in TOKENIZER.decode(rows.flatten().tolist())
    with pytest.raises(UserError, match="is now jsonl"):
        Ranks(other.model_copy(update={"on_change": "error"}), 1).load(state)


def test_tokens_and_epochs_of_each_source_are_those_of_all_ranks(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", some_texts(40))
    write_jsonl(tmp_path / "b.jsonl", some_texts(150))
    sources = tuple(
        DataSource(source="jsonl", path=str(tmp_path / f"{name}.jsonl"), weight=weight)
        for name, weight in (("a", 1.0), ("b", 3.0), ("b", 0.0))
    )
    dataset, found = Dataset(sources=sources, num_workers=0), []
    for size in (1, 2, 3):
        ranks = Ranks(dataset, size)
        for number in range(8):
            ranks.batch()
            if number == 3:  # where a log line or a checkpoint comes, or a resume, makes no difference
                ranks = Ranks(dataset, size).load(ranks.state()) if size == 2 else ranks
                ranks.state()
        stats = ranks.together(lambda loader: loader.stats())
        assert all(stat == stats[0] for stat in stats)
        found.append({key: stats[0][key] for key in ("source_tokens", "source_epochs")})
    assert found[0] == found[1] == found[2]
    a, b, unused = found[0]["source_tokens"]
    assert (b.endswith(" (1)"), unused.endswith(" (2)")) == (True, True)  # two sources of one name
    assert found[0]["source_tokens"] == {a: 24 * 8 * 32 // 4, b: 24 * 8 * 32 * 3 // 4, unused: 0}
    tokens = len(TOKENIZER.encode("".join(some_texts(40)))) + 40  # each ends with a token of its own
    # A document counts once it is passed, and each of the streams stands in the middle of one.
    epochs = found[0]["source_epochs"]
    assert epochs[a] == pytest.approx(24 * 8 * 32 // 4 / tokens, abs=32 / 40)
    assert epochs[a] > epochs[b] > epochs[unused] == 0
