"""`titanlite data show` prints what training reads, and the log describes the sources."""

import re

import pytest
from data_helpers import (
    TOKENIZER,
    jsonl_dataset,
    make_dataset,
    make_loader,
    make_run,
    some_texts,
    write_jsonl,
)
from tokenizers import Tokenizer as Library
from tokenizers import models

from titanlite.config.schema import Dataset, DataSource, DataStage
from titanlite.data.amounts import describe_sources, measure_source
from titanlite.data.prepare import prepare
from titanlite.data.sources.files import open_source
from titanlite.data.tokenizer import load_tokenizer

SMALL = "--training.seq_len 32 --training.local_batch_size 6 --training.seed 7"


def show(run_command, dataset, options):
    """Run `titanlite data show` without a folder for outputs, and return its output."""
    command = f"data show {SMALL} --job.dump_folder /proc/none {options}"
    if dataset.path:
        command += f" --dataset.source jsonl --dataset.path {dataset.path}"
        command += f" --dataset.packing {dataset.packing}"
    return run_command(command)


@pytest.mark.parametrize(
    ("packing", "holdout"),
    [("concat", 0.0), ("best_fit", 0.5)],
)
def test_the_text_that_training_reads_is_shown(tmp_path, run_command, packing, holdout):
    dataset = jsonl_dataset(tmp_path, some_texts(200), packing=packing)
    loader = make_loader(dataset, global_batch_size=6, holdout=holdout)
    for _ in range(3):
        batch = loader.next_global_batch()
    held_out = f"--validation.holdout {holdout} --validation.freq 1" if holdout else ""

    output = show(run_command, dataset, f"--step 3 {held_out}")

    trained = []
    for micro in batch.microbatches:
        trained += micro.input_ids.tolist()
    shown = output.split("=== step 3, sequence ")[1:]
    for tokens, sequence in zip(trained, shown, strict=True):
        segments = sequence[:-1].split("\n--- ")[1:]
        text = "".join(segment.split("\n", 1)[1] for segment in segments)
        without_padding = TOKENIZER.decode(tokens).split("<|end_of_text|><|end_of_text|>")[0]
        assert text.startswith(without_padding)


def test_padding_is_shown_by_its_length(tmp_path, run_command):
    two_do_not_fit = ["word " * 18] * 20
    dataset = jsonl_dataset(tmp_path, two_do_not_fit, packing="best_fit")

    output = show(run_command, dataset, "--sequence 0")

    assert re.search(r"tokens 0 to (\d+)\n.*\n--- \d+ tokens of padding\n$", output, re.DOTALL)


def test_one_sequence_is_shown_with_its_file_and_offsets(run_command):
    heading, location, *_ = show(run_command, Dataset(), "--sequence 2").split("\n")

    assert heading == "=== step 1, sequence 2, python_stdlib"
    assert re.fullmatch(r"--- document \d+: .*\.py, bytes 0 to \d+, tokens 0 to 32", location)
    for old_name in ("--row 2", "--row=2"):
        assert show(run_command, Dataset(), old_name).startswith(heading)


def test_control_characters_are_escaped(tmp_path, run_command):
    dataset = jsonl_dataset(tmp_path, ["\x1b[2J\x9b1m\u202ehidden\r\u2028" * 20])

    output = show(run_command, dataset, "--sequence 0")

    assert r"\x1b[2J\x9b1m\u202ehidden" in output
    assert output.replace("\n", "").isprintable()


def test_ranks_of_a_tensor_parallel_group_read_the_same_sequences(tmp_path, run_command):
    dataset = jsonl_dataset(tmp_path, some_texts(50))
    layout = "--world-size 4 --parallelism.tensor_parallel_degree 2"

    assert show(run_command, dataset, layout).count("=== step 1, sequence ") == 12


def test_the_log_shows_share_size_and_epochs_of_each_source(tmp_path, caplog):
    texts = some_texts(200)
    num_tokens = sum(len(TOKENIZER.encode(text)) + 2 for text in texts)
    file = write_jsonl(tmp_path / "a.jsonl", texts)
    prepare(make_run(make_dataset("jsonl", file)), tmp_path / "out", 1)
    text = DataSource(source="jsonl", path=str(file), weight=3.0)
    shards = DataSource(source="shards", path=str(tmp_path / "out"), weight=1.0)
    stage = DataStage(start_step=50, weights=(1.0, 1.0))
    dataset = Dataset(sources=(text, shards), stages=(stage,), num_workers=0)
    run = make_run(dataset, global_batch_size=8, steps=100)

    sizes = [measure_source(source, TOKENIZER) for source in make_loader(dataset).sources]
    of_text, of_shards = describe_sources(run, sizes).split("\n")

    assert re.match(rf" 37\.5%  shards .*/out: 200 documents, {num_tokens:,} tokens; ", of_shards)
    assert f"{0.375 * 100 * 8 * 32 / num_tokens:,.2f} epochs" in of_shards

    match = re.match(
        r" 62\.5%  jsonl .*/a\.jsonl: 200 documents, about ([\d,]+) tokens, ([\d.]+) bytes per",
        of_text,
    )

    assert match
    # The log estimates sizes from 64 of 200 documents.
    assert int(match[1].replace(",", "")) == pytest.approx(num_tokens, rel=0.1)

    bytes_per_token = sum(map(len, texts)) / (num_tokens - 400)
    assert float(match[2]) == pytest.approx(bytes_per_token, rel=0.1)
    assert not caplog.messages


def test_a_warning_names_characters_that_the_tokenizer_cannot_represent(tmp_path, caplog):
    vocabulary = [(token, 0.0) for token in ("<unk>", "<s>", "</s>")]
    vocabulary += [(letter, -1.0) for letter in "abc "]
    Library(models.Unigram(vocabulary, 0, False)).save(str(tmp_path / "tokenizer.json"))
    dataset = jsonl_dataset(tmp_path, ["abc cab " * 20] * 20 + ["café über"])

    measure_source(open_source(dataset), load_tokenizer(tmp_path / "tokenizer.json"))

    assert "tokenizer.json cannot represent 5 characters in a sample of jsonl" in caplog.messages[0]
