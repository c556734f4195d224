"""What people see is what training sees."""

from pathlib import Path
from typing import Any

import pytest
from data_helpers import ROOT, TOKENIZER, TOKENIZER_PATH, dataset_of, make_loader, some_texts, write_jsonl
from tokenizers import Tokenizer as Library
from tokenizers import models

from titanlite.cli import main
from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.config.schema import Dataset, DataSource, DataStage, JobConfig, Tokenizer, Training, Validation
from titanlite.data.prepare import prepare
from titanlite.data.show import show_step
from titanlite.data.tokenizer import load_tokenizer


def run_of(dataset: Dataset, **sections: Any) -> Run:
    training = Training(steps=100, seq_len=32, local_batch_size=6, seed=7)
    return Run(JobConfig(dataset=dataset, training=training, tokenizer=Tokenizer(path=str(TOKENIZER_PATH)), **sections))


def shown_text(output: str) -> list[str]:
    """The text of each row, without the headings."""
    rows = [row[:-1] for row in f"{output}\n".split("=== step ")[1:]]
    parts = [[part.split("\n", 1) for part in row.split("\n--- ")[1:]] for row in rows]
    return ["".join(part[1] for part in row if len(part) == 2) for row in parts]  # a padding has no second line


@pytest.mark.parametrize(("packing", "holdout"), [("concat", 0.0), ("best_fit", 0.0), ("concat", 0.5)])
def test_it_shows_the_text_that_training_saw(tmp_path: Path, packing: str, holdout: float) -> None:
    dataset = dataset_of(tmp_path, some_texts(200), packing=packing)
    loader, run = (
        make_loader(dataset, global_batch_size=6, holdout=holdout),
        run_of(dataset, validation=Validation(holdout=holdout)),
    )
    for _ in range(3):
        batch = loader.next_global_batch()
    expected = [row.tolist() for micro in batch.microbatches for row in micro.input_ids]
    for row, (text, tokens) in enumerate(zip(shown_text(show_step(run, 3, None)), expected, strict=True)):
        assert text.startswith(TOKENIZER.decode(tokens).split("<|end_of_text|><|end_of_text|>")[0])
        assert shown_text(show_step(run, 3, row)) == [text]


def test_places_are_named_and_nothing_commands_the_terminal(tmp_path: Path) -> None:
    heading, place, *_ = show_step(run_of(Dataset()), 1, 2).split("\n")
    assert heading == "=== step 1, row 2, python_stdlib"
    assert place.startswith("--- document ")
    assert ".py, bytes 0 to " in place
    assert place.endswith(", tokens 0 to 32")
    output = show_step(run_of(dataset_of(tmp_path, ["\x1b[2J\x9b1m\u202ehidden\r\u2028" * 20])), 1, 0)
    assert r"\x1b[2J\x9b1m\u202ehidden\x0d\u2028" in output
    assert output.replace("\n", "").isprintable()


def test_steps_and_rows_that_do_not_exist_are_errors(tmp_path: Path) -> None:
    run = run_of(dataset_of(tmp_path, some_texts(50), max_epochs=1))
    assert show_step(Run(run.job, 2), 1, 11)
    for step, row, message in [
        (101, None, "the run has the steps 1 to 100"),
        (1, 6, "a global batch has the rows 0 to 5"),
        (99, None, r"step 99 does not exist: .* has been read once"),
    ]:
        with pytest.raises(UserError, match=message):
            show_step(run, step, row)


def test_the_table_of_sources(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = some_texts(200)
    tokens = sum(len(TOKENIZER.encode(text)) + 2 for text in texts)
    one = DataSource(source="jsonl", path=str(write_jsonl(tmp_path / "a.jsonl", texts)), weight=3.0)
    prepare(run_of(Dataset(sources=(one,))), tmp_path / "out", 1)
    two = DataSource(source="shards", path=str(tmp_path / "out"), weight=1.0, max_epochs=2)
    stage = DataStage(start_step=50, weights=(1.0, 1.0))
    dataset = Dataset(sources=(one, two), stages=(stage,), num_workers=0)
    head, *lines = make_loader(dataset, global_batch_size=8).table(100).split("\n")
    assert head.split("  ")[0] == "source"
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert cells[1][1:4] == ["200", f"{tokens:,}", "37.5%"]
    assert cells[1][4] == f"{0.375 * 100 * 8 * 32 / tokens:,.2f} (ends after 2)"
    assert cells[0][1] == "200"
    assert cells[0][2].startswith("~")
    assert abs(int(cells[0][2][1:].replace(",", "")) / tokens - 1) < 0.1  # 64 of 200 documents, by bytes
    assert cells[0][3] == "62.5%"
    assert not caplog.messages
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((letter, -1.0) for letter in "abc ")]
    Library(models.Unigram(vocabulary, 0, False)).save(str(tmp_path / "tokenizer.json"))
    lossy = load_tokenizer(tmp_path / "tokenizer.json")
    poor = dataset_of(tmp_path, ["abc cab " * 20] * 20 + ["caf\u00e9 \u00fcber"])
    make_loader(poor, tokenizer=lossy, holdout=0.25).table(steps=1)
    assert "tokenizer.json cannot represent 5 characters in a sample of jsonl" in caplog.messages[0]
    assert "'e', 'f', 'r', '\u00e9', '\u00fc'" in caplog.messages[0]


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--training.seq_len", "64", "--tokenizer.path", str(ROOT / "assets/tokenizer/tokenizer.json")]
    assert main(["data", "show", "--step", "2", "--row=1", *arguments]) == 0
    assert capsys.readouterr().out.startswith("=== step 2, row 1, python_stdlib\n--- document ")
    halves = ["--world-size", "4", "--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "1"]
    assert main(["data", "show", *halves, *arguments]) == 0
    assert capsys.readouterr().out.count("=== step 1, row ") == 2  # ranks of one tensor-parallel group read the same
    for wrong in (["data", "show", "--step", "x", *arguments], ["data", "list"], ["prepare"]):
        assert main(wrong) == 2
    assert "--out PATH" in capsys.readouterr().err
    keys = ["--dataset.source", "jsonl", "--dataset.path", str(write_jsonl(tmp_path / "a.jsonl", some_texts(20)))]
    assert main(["prepare", "--out", str(tmp_path / "out"), "--workers", "1", *keys]) == 0
    assert "20 documents" in capsys.readouterr().out
