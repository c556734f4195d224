"""What would help: the largest batch, the cheapest changes, and the search, over traces made by hand."""

import pytest
from traces import run, trace_of_rows

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.load_run import broken_rules
from titanlite.observe.gpus import find_gpu
from titanlite.plan import advice
from titanlite.plan.trace import trace_run

H100 = find_gpu("H100")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Traces are made by hand; their rows. None is made of 2 rows that are recomputed."""
    rows: list[int] = []

    def trace(run: Run, *_: object):
        rows.append(run.job.training.local_batch_size)
        if run.job.float8.enable or (run.job.training.seq_len == 4096 and run.job.activation_checkpoint.mode == "full"):
            raise RuntimeError("no kernel for this layout\nand a second line")
        return trace_of_rows(run)

    monkeypatch.setattr(advice, "trace_run", trace)
    return rows


@pytest.mark.parametrize(("mode", "rows"), [("none", 3), ("full", 32)])
def test_the_largest_batch_that_fits_takes_three_traces(mode: str, rows: int, traced: list[int]):
    """10 GiB and 20 (or 2) for each row, of 79.1 GiB, of which about 4 are for allocator and libraries."""
    job = run(training={"local_batch_size": 1}, activation_checkpoint={"mode": mode})
    assert advice.make_plan(job, H100).largest_local_batch_size == rows
    assert traced == [1, 2, rows]
    assert advice.make_plan(job, H100, quick=True).largest_local_batch_size is None


@pytest.mark.slow
def test_the_peak_of_more_rows_is_on_the_line_through_two_numbers_of_rows():
    """What the largest batch relies on, on traces of a model with all kinds of memory."""
    model = {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 640, "vocab_size": 4096}
    job = {"model": model, "parallelism": {"fsdp_min_num_params": 0}}
    rows = [job | {"training": {"seq_len": 2048, "local_batch_size": rows}} for rows in (8, 9, 16)]
    few, more, many = (trace_run(Run(JobConfig.model_validate(each), 2))[0].peak for each in rows)
    assert many == few + 8 * (more - few)


@pytest.mark.usefixtures("traced")
def test_changes_that_fit_are_listed_cheapest_first_with_their_price(capsys: pytest.CaptureFixture[str]):
    plan = advice.make_plan(run(training={"local_batch_size": 8}), H100)
    assert not plan.fits
    assert plan.changes[0] == "--training.local_batch_size 2 --training.global_batch_size 64: 52.6 GiB, as fast"
    assert plan.changes[-1] == "--activation_checkpoint.mode full: 27.9 GiB, 23% slower"
    short = run(training={"local_batch_size": 8, "seq_len": 4096})
    assert not [change for change in advice.make_plan(short, H100).changes if "mode full" in change]
    said = capsys.readouterr().err
    assert "cannot be traced: --activation_checkpoint.mode full (RuntimeError: no kernel for this layout)\n" in said


def test_the_layouts_keep_the_rules_and_are_not_far_too_large():
    job = run(16, compile={"enable": True})
    found = [new for each in advice.layouts(job, H100) if (new := advice.changed(job, each))]
    assert len(found) > 50
    assert {new.degrees.world for new in found} == {16}
    assert not any(broken_rules(new) for new in found[::25])
    assert {new.job.float8.enable for new in found} == {True, False}
    alone = [new.job for new in found if new.degrees.tensor == new.degrees.pipeline == 1]
    tried = {(job.activation_checkpoint.mode, job.training.local_batch_size) for job in alone}
    assert {("full", 16), ("selective", 2), ("none", 1)} <= tried
    assert ("none", 16) not in tried


def test_the_search_lists_what_fits_fastest_first(traced: list[int]):
    found, count = advice.search(run(8, compile={"enable": True}), H100, pooled=False)
    assert 1 <= len(found) <= 10
    assert len(found) <= count < len(traced)  # FP8 could not be traced
    assert all(plan.fits for _, plan in found)
    speeds = [plan.tokens_per_second for _, plan in found]
    assert speeds == sorted(speeds, reverse=True)
    assert advice.search(run(8), H100, seconds=0, pooled=False) == ([], 0)
