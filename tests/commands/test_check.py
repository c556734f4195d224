"""`titanlite check` prints the warnings of a start, and finds mistakes for any number of ranks."""

import json
from pathlib import Path

import pytest
from ranks import titanlite
from small_runs import SMALL

from titanlite import cli

RECORDS = "".join(
    json.dumps({"text": f"document {i}: " + "some words. " * 40}) + "\n" for i in range(50)
)
TEXT = "--dataset.source text --dataset.path"
PAGES = "<!DOCTYPE html>\n" + "<p>Some words to learn from.</p>\n" * 500


@pytest.fixture
def job_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "records.txt").write_text(RECORDS)
    (tmp_path / "pages.txt").write_text(PAGES)
    (tmp_path / "table.csv").write_text("id,text\n" + "1,some words\n" * 2000)
    (tmp_path / "job.toml").write_text(SMALL)
    return tmp_path / "job.toml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--optimizer.lr 0.5", "optimizer.lr = 0.5"),
        (f"{TEXT} records.txt", "records.txt: contains JSON, HTML or tables"),
        (f"{TEXT} pages.txt", "pages.txt: contains JSON, HTML or tables"),
        (f"{TEXT} table.csv", "table.csv: contains JSON, HTML or tables"),
    ],
    ids=["high learning rate", "JSON as text", "HTML as text", "CSV as text"],
)
def test_check_and_train_warn_about_a_suspicious_value(options, named, job_file, capsys):
    job = ["--job.config_file", str(job_file), *options.split()]

    assert cli.main(["check", *job]) == 0
    assert f"Warning: {named}" in capsys.readouterr().out

    assert f"WARNING: {named}" in titanlite("train", *job, "--training.steps", "1")


def test_usual_values_and_plain_text_cause_no_warning(job_file, capsys):
    for options in ([], ["--optimizer.name", "SGD", "--optimizer.lr", "30"]):
        assert cli.main(["check", "--job.config_file", str(job_file), *options]) == 0

    assert "Warning" not in capsys.readouterr().out


def test_source_weights_may_have_many_digits(job_file):
    sources = [f"[[dataset.sources]]\nweight = {weight}\n" for weight in (2000.5, 1 / 3)]
    job_file.write_text(SMALL + "".join(sources))

    assert cli.main(["check", "--job.config_file", str(job_file)]) == 0


def test_mistakes_in_a_layout_are_found_without_the_number_of_ranks(job_file, capsys):
    options = (
        "--parallelism.tensor_parallel_degree 3 --training.seq_len 64 "
        "--parallelism.pipeline_parallel_degree 4"
    )

    assert cli.main(["check", "--job.config_file", str(job_file), *options.split()]) == 2

    message = capsys.readouterr().err
    for named in ("model.n_kv_heads", "training.seq_len", "4 stages"):
        assert named in message
