"""What would help: the largest batch, the cheapest changes, and the search, over traces made by hand."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from traces import run, trace_of_rows

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.load_run import broken_rules
from titanlite.observe.gpus import find_gpu
from titanlite.plan.advice import candidates, largest_batch, search, what_fits
from titanlite.plan.roofline import forecast
from titanlite.plan.start import changed, options
from titanlite.plan.trace import trace_run

H100 = find_gpu("H100")
TOO_LARGE = run(training={"local_batch_size": 8})


def plan_of(job, gpu=H100):
    return forecast(job, trace_of_rows(job), gpu)


def without_recomputation(run, fp8=False):
    """A tracer that fails where all is recomputed."""
    if run.job.activation_checkpoint.mode == "full":
        raise RuntimeError("no kernel for this layout\nand a second line")
    return trace_of_rows(run)


@pytest.mark.parametrize(("mode", "rows"), [("none", 3), ("full", 32)])
def test_the_largest_batch_that_fits(mode: str, rows: int):
    """10 GiB and 20 (or 2) for each row, of 79.1 GiB, of which about 4 are for allocator and libraries."""
    job = run(activation_checkpoint={"mode": mode})
    assert largest_batch(job, plan_of(job), trace_of_rows, H100) == rows
    small = find_gpu("L4")
    assert largest_batch(job, plan_of(job, small), trace_of_rows, small) == (5 if rows == 32 else None)


def test_three_traces_find_the_largest_batch_because_the_peak_is_convex_in_the_rows():
    traced = []

    def trace_of(job, fp8):
        traced.append(job.job.training.local_batch_size)
        return trace_of_rows(job)

    full = {"mode": "full"}
    job = run(training={"local_batch_size": 1}, activation_checkpoint=full)
    assert largest_batch(job, plan_of(job), trace_of, H100) == 32
    assert traced == [2, 32]  # the line through both says that 33 do not fit
    several = run(training={"local_batch_size": 1, "global_batch_size": 8 * 33 * 32}, activation_checkpoint=full)
    assert largest_batch(several, plan_of(several), trace_of, H100) == 32
    assert 33 in traced  # the number of microbatches is another one, so no line says so


@pytest.mark.slow
def test_the_peak_of_more_rows_is_on_the_line_through_two_numbers_of_rows():
    """What `largest_batch` relies on, on traces of a model with all kinds of memory."""
    model = {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 640, "vocab_size": 4096}
    job = {"model": model, "parallelism": {"fsdp_min_num_params": 0}}
    rows = [job | {"training": {"seq_len": 2048, "local_batch_size": rows}} for rows in (8, 9, 16)]
    few, more, many = (trace_run(Run(JobConfig.model_validate(each), 2))[0].peak for each in rows)
    assert many == few + 8 * (more - few)


def test_changes_that_fit_are_listed_cheapest_first_with_their_price(capsys: pytest.CaptureFixture[str]):
    plan = plan_of(TOO_LARGE)
    assert not plan.fits
    changes = what_fits(TOO_LARGE, plan, trace_of_rows, H100)
    assert [change.price for change in changes] == sorted(change.price for change in changes)
    assert all(change.needs < plan.memory for change in changes)
    full = next(change for change in changes if change.words == ("--activation_checkpoint.mode", "full"))
    assert full.price == pytest.approx(1 - 1 / 1.3, abs=0.01)
    assert "23% slower" in str(full)
    untraced = what_fits(TOO_LARGE, plan, without_recomputation, H100)
    assert [change for change in untraced] == [change for change in changes if "full" not in change.words]
    said = capsys.readouterr().err
    assert "cannot be traced: --activation_checkpoint.mode full (RuntimeError: no kernel for this layout)\n" in said


def test_a_global_batch_of_the_job_stays_where_it_can_be_split():
    job = run(training={"local_batch_size": 8, "global_batch_size": 64})
    changes = what_fits(job, plan_of(job), trace_of_rows, H100)
    assert changes[0].words == ("--training.local_batch_size", "2", "--training.global_batch_size", "64")
    assert changes[0].price == pytest.approx(0, abs=0.01)


def test_a_change_is_options_of_the_command_line_and_breaks_no_rule():
    settings = {"training.enable_cpu_offload": True, "float8.enable": False, "training.local_batch_size": 2}
    words = ("--training.enable_cpu_offload", "--float8.no-enable", "--training.local_batch_size", "2")
    assert options(settings) == words
    assert changed(run(), {"parallelism.tensor_parallel_degree": 3}) is None
    assert changed(run(), {"parallelism.tensor_parallel_degree": 2}) is not None


def test_all_candidates_keep_the_rules_and_are_not_far_too_large():
    found = [new for _, new in candidates(run(16, compile={"enable": True}), H100)]
    assert len(found) > 50
    assert {new.degrees.world for new in found} == {16}
    assert not any(broken_rules(new) for new in found[::25])
    assert {new.job.float8.enable for new in found} == {True, False}
    alone = [new.job for new in found if new.degrees.tensor == new.degrees.pipeline == 1]
    tried = {(job.activation_checkpoint.mode, job.training.local_batch_size) for job in alone}
    assert {("full", 4), ("selective", 1), ("none", 1)} <= tried
    assert ("none", 16) not in tried


def test_the_search_lists_what_fits_fastest_first_and_names_what_cannot_be_traced(capsys: pytest.CaptureFixture[str]):
    with ThreadPoolExecutor(2) as pool:
        found, traced = search(run(8), H100, seconds=2.0, trace=without_recomputation, pool=pool)
    assert 1 <= len(found) <= 10
    assert traced >= len(found)
    assert all(each.plan.fits and each.run.job.activation_checkpoint.mode != "full" for each in found)
    speeds = [each.plan.tokens_per_second for each in found]
    assert speeds == sorted(speeds, reverse=True)
    said = capsys.readouterr().err
    assert "cannot be traced: --parallelism.tensor_parallel_degree " in said
    assert "--activation_checkpoint.mode full (RuntimeError: no kernel for this layout)\n" in said
