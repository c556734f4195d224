"""`titanlite check` prints the warnings of a start, and finds mistakes for any number of ranks."""

from pathlib import Path

import pytest
from data_helpers import write_jsonl
from ranks import titanlite
from small_runs import SMALL

TEXT = "--dataset.source text --dataset.path"
PAGES = "<!DOCTYPE html>\n" + "<p>Some words to learn from.</p>\n" * 500


@pytest.fixture
def job_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "records.txt", ["some words. " * 40] * 50)
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
def test_check_and_train_warn_about_a_suspicious_value(options, named, job_file, run_command):
    job = f"--job.config_file {job_file} {options}"

    assert f"Warning: {named}" in run_command(f"check {job}")
    assert f"WARNING: {named}" in titanlite("train", *job.split(), "--training.steps", "1")


def test_usual_values_and_plain_text_cause_no_warning(job_file, run_command):
    for options in ("", "--optimizer.name SGD --optimizer.lr 30"):
        assert "Warning" not in run_command(f"check --job.config_file {job_file} {options}")


def test_source_weights_may_have_many_digits(job_file, run_command):
    sources = [f"[[dataset.sources]]\nweight = {weight}\n" for weight in (2000.5, 1 / 3)]
    job_file.write_text(SMALL + "".join(sources))

    assert "OK" in run_command(f"check --job.config_file {job_file}")
