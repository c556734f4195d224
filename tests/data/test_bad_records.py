"""Whole runs that meet a record which cannot be read: they save first, say it once, and can go on without it."""

import re
from functools import partial
from pathlib import Path

import pytest
from data_helpers import hide_bad_records, some_texts
from small_runs import SMALL, as_logged, launched, logged, losses

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_saved_before_a_bad_record_ends_it_and_goes_on_where_such_records_are_skipped(
    tmp_path: Path, ranks: int
) -> None:
    (tmp_path / "job.toml").write_text(f'{SMALL}[dataset]\nsource = "jsonl"\npath = "{tmp_path}/text.jsonl"\n')
    run = partial(launched, tmp_path / "job.toml", ranks=ranks)
    out, whole = tmp_path / "run", tmp_path / "whole"
    lines = hide_bad_records(tmp_path / "text.jsonl", some_texts(200), count=3)
    bad, skip = r"text\.jsonl, line \d+: not valid JSON", ("--dataset.on_bad_record", "skip")
    said = run(out, code=2)
    last = max(losses(out))
    assert 3 < last < 12
    assert f"The last good step is {last}, saved in" in said
    assert len(re.findall(bad, said)) == 1
    reason = said[re.search(rf"\S*{bad}", said).start() :]  # type: ignore[union-attr]
    assert (out / "train.log").read_text().endswith(as_logged(reason))
    again = run(out, code=2)
    assert max(losses(out)) == last
    assert len(re.findall(bad, again)) == 1

    told = run(out, *skip, code=0)
    run(whole, *skip, code=0)
    assert losses(out) == losses(whole)
    assert max(losses(out)) == 12
    found = [int(line) for line in re.findall(r"skipped a record: \S*text\.jsonl, line (\d+)", told)]
    assert len(set(found)) == len(found) == logged(out)[12]["skipped_records"] > 0
    assert set(found) <= set(lines)
