"""What people see is what training sees."""

import re

import pytest
from data_helpers import TOKENIZER, dataset_of, make_loader, run_of, some_texts, write_jsonl
from tokenizers import Tokenizer as Library
from tokenizers import models

from titanlite.cli import main
from titanlite.config.schema import Dataset, DataSource, DataStage
from titanlite.data.amounts import measured, table
from titanlite.data.sources.files import open_source
from titanlite.data.tokenizer import load_tokenizer

SMALL = ["--training.seq_len=32", "--training.local_batch_size=6", "--training.seed=7", "--job.dump_folder=/proc/none"]


def show(capsys, dataset, *words):
    """What `titanlite data show` prints, and its exit code. It writes nothing, so the output folder may be any."""
    keys = ["--dataset.source", "jsonl", "--dataset.path", dataset.path, "--dataset.packing", dataset.packing]
    code = main(["data", "show", *SMALL, *(keys if dataset.path else []), *map(str, words)])
    captured = capsys.readouterr()
    return captured.err if code else captured.out, code


@pytest.mark.parametrize(("packing", "holdout"), [("concat", 0.0), ("best_fit", 0.5)])
def test_it_shows_the_text_that_training_saw(tmp_path, capsys, packing, holdout):
    dataset = dataset_of(tmp_path, some_texts(200), packing=packing)
    loader = make_loader(dataset, global_batch_size=6, holdout=holdout)
    for _ in range(3):
        batch = loader.next_global_batch()
    held_out = ("--validation.holdout", holdout, "--validation.freq", 1) if holdout else ()
    output, _ = show(capsys, dataset, "--step", 3, *held_out)
    expected = [row.tolist() for micro in batch.microbatches for row in micro.input_ids]
    for tokens, shown in zip(expected, output.split("=== step 3, row ")[1:], strict=True):
        text = "".join(part.split("\n", 1)[1] for part in shown[:-1].split("\n--- ")[1:])
        assert text.startswith(TOKENIZER.decode(tokens).split("<|end_of_text|><|end_of_text|>")[0])


def test_padding_is_no_text(tmp_path, capsys):
    dataset = dataset_of(tmp_path, ["word " * 18] * 20, packing="best_fit")  # two do not fit into one row
    output, _ = show(capsys, dataset, "--row", 0)
    assert re.search(r"tokens 0 to (\d+)\n.*\n--- \d+ tokens of padding\n$", output, re.DOTALL)


def test_places_ranks_and_mistakes_are_named_and_nothing_commands_the_terminal(tmp_path, capsys):
    heading, place, *_ = show(capsys, Dataset(), "--row", 2)[0].split("\n")
    assert heading == "=== step 1, row 2, python_stdlib"
    assert re.fullmatch(r"--- document \d+: .*\.py, bytes 0 to \d+, tokens 0 to 32", place)
    output, _ = show(capsys, dataset_of(tmp_path, ["\x1b[2J\x9b1m\u202ehidden\r\u2028" * 20]), "--row", 0)
    assert r"\x1b[2J\x9b1m\u202ehidden" in output
    assert output.replace("\n", "").isprintable()
    dataset = dataset_of(tmp_path, some_texts(50))
    # ranks of one tensor-parallel group read the same
    output, _ = show(capsys, dataset, "--world-size", 4, "--parallelism.tensor_parallel_degree", 2)
    assert output.count("=== step 1, row ") == 12
    output, code = show(capsys, dataset, "--step", 99, "--dataset.max_epochs", 1)
    assert code == 2
    assert "step 99" in output


def test_the_table_of_sources(tmp_path, caplog, capsys):
    texts = some_texts(200)
    tokens = sum(len(TOKENIZER.encode(text)) + 2 for text in texts)
    keys = ["--dataset.source", "jsonl", "--dataset.path", str(write_jsonl(tmp_path / "a.jsonl", texts))]
    assert main(["prepare", "--out", str(tmp_path / "out"), "--workers", "1", *keys]) == 0
    assert "documents: 200" in capsys.readouterr().out
    one = DataSource(source="jsonl", path=str(tmp_path / "a.jsonl"), weight=3.0)
    two = DataSource(source="shards", path=str(tmp_path / "out"), weight=1.0)
    stage = DataStage(start_step=50, weights=(1.0, 1.0))
    dataset = Dataset(sources=(one, two), stages=(stage,), num_workers=0)
    sizes = [measured(source, TOKENIZER) for source in make_loader(dataset).sources]
    first, second = table(run_of(dataset, global_batch_size=8, steps=100), sizes).split("\n")
    assert re.match(rf" 37\.5%  shards .*/out: 200 documents, {tokens:,} tokens; ", second)
    assert f"{0.375 * 100 * 8 * 32 / tokens:,.2f} epochs" in second
    line = r"^ 62\.5%  jsonl .*/a\.jsonl: 200 documents, about ([\d,]+) tokens, ([\d.]+) bytes a token; \d"
    ((estimate, width),) = re.findall(line, first)
    assert float(width) == pytest.approx(sum(map(len, texts)) / (tokens - 400), rel=0.1)
    assert abs(int(estimate.replace(",", "")) / tokens - 1) < 0.1  # 64 of 200 documents, by bytes
    assert not caplog.messages
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((letter, -1.0) for letter in "abc ")]
    Library(models.Unigram(vocabulary, 0, False)).save(str(tmp_path / "tokenizer.json"))
    poor = dataset_of(tmp_path, ["abc cab " * 20] * 20 + ["caf\u00e9 \u00fcber"])
    measured(open_source(poor), load_tokenizer(tmp_path / "tokenizer.json"))
    assert "tokenizer.json cannot represent 5 characters in a sample of jsonl" in caplog.messages[0]
