"""What would help: the largest batch, the cheapest changes, and the search, over traces made by hand."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from traces import run, trace_of_rows

from titanlite.config.rules import Context, broken_rules
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.observe.gpus import find_gpu
from titanlite.plan.advice import candidates, changed, largest_batch, room_for_state, search, what_fits, words
from titanlite.plan.bounds import upper_bound
from titanlite.plan.forecast import forecast
from titanlite.plan.trace import trace_run

H100 = find_gpu("H100")


def plan_of(job):
    return forecast(job, trace_of_rows(job), H100)


@pytest.mark.parametrize(("mode", "rows"), [("none", 3), ("full", 32)])
def test_the_largest_batch_that_fits(mode: str, rows: int):
    """10 GiB and 20 (or 2) for each row, of 79.1 GiB, of which about 4 are for allocator and libraries."""
    job = run(activation_checkpoint={"mode": mode})
    assert largest_batch(job, plan_of(job), trace_of_rows, H100) == rows


def test_three_traces_find_the_largest_batch_because_the_peak_is_convex_in_the_rows():
    traced = []

    def trace_of(job):
        traced.append(job.job.training.local_batch_size)
        return trace_of_rows(job)

    job = run(training={"local_batch_size": 1}, activation_checkpoint={"mode": "full"})
    assert largest_batch(job, plan_of(job), trace_of, H100) == 32
    assert traced == [2, 32]  # the line through both says that 33 do not fit
    traced.clear()
    several = run(
        training={"local_batch_size": 1, "global_batch_size": 8 * 33 * 32}, activation_checkpoint={"mode": "full"}
    )
    assert largest_batch(several, plan_of(several), trace_of, H100) == 32
    assert 33 in traced  # the number of microbatches is another one, so no line says so


@pytest.mark.slow
def test_the_peak_of_more_rows_is_on_the_line_through_two_numbers_of_rows():
    """What `largest_batch` relies on, on traces of a model with all kinds of memory."""
    model = {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 640, "vocab_size": 4096}
    peaks = []
    for rows in (8, 9, 16):
        training = {"seq_len": 2048, "local_batch_size": rows}
        checkpoint = {"mode": "selective", "selective_ac_option": "op"}
        job = {"model": model, "training": training, "activation_checkpoint": checkpoint}
        job["parallelism"] = {"fsdp_min_num_params": 0}
        peaks.append(trace_run(Run(JobConfig.model_validate(job), 2))[0].peak)
    assert peaks[2] == peaks[0] + 8 * (peaks[1] - peaks[0])


def test_no_batch_fits():
    job = run(training={"local_batch_size": 1}, activation_checkpoint={"mode": "none"})
    small = find_gpu("L4")
    assert largest_batch(job, forecast(job, trace_of_rows(job), small), trace_of_rows, small) is None


def test_a_global_batch_of_the_job_stays_where_it_can_be_split():
    job = run(training={"local_batch_size": 8, "global_batch_size": 64}, activation_checkpoint={"mode": "none"})
    changes = what_fits(job, plan_of(job), trace_of_rows, H100)
    assert changes[0].words == ("--training.local_batch_size", "2", "--training.global_batch_size", "64")
    assert changes[0].price == pytest.approx(0, abs=0.01)


def test_changes_that_fit_are_listed_cheapest_first_with_their_price():
    job = run(training={"local_batch_size": 8}, activation_checkpoint={"mode": "none"})
    plan = plan_of(job)
    assert not plan.fits
    changes = what_fits(job, plan, trace_of_rows, H100)
    assert [change.price for change in changes] == sorted(change.price for change in changes)
    full = next(change for change in changes if change.words == ("--activation_checkpoint.mode", "full"))
    assert full.price == pytest.approx(1 - 1 / 1.3, abs=0.01)
    assert full.needs < plan.memory
    assert str(full).startswith("--activation_checkpoint.mode full: ")
    assert "23% slower" in str(full)


def test_a_change_that_breaks_a_rule_is_no_change():
    assert changed(run(), {"parallelism.tensor_parallel_degree": 3}) is None
    assert changed(run(), {"parallelism.tensor_parallel_degree": 2}) is not None


def test_settings_are_options_of_the_command_line():
    settings = {"training.enable_cpu_offload": True, "float8.enable": False, "training.local_batch_size": 2}
    assert words(settings) == (
        "--training.enable_cpu_offload",
        "--float8.no-enable",
        "--training.local_batch_size",
        "2",
    )


def test_a_state_that_is_too_large_needs_other_dtypes_or_more_devices():
    job = run(1)  # 16 bytes for each of 8.03 billion parameters
    assert "--optimizer.state_dtype bfloat16" in room_for_state(job, 100 * 2**30)
    assert "--training.dtype bfloat16" in room_for_state(job, 70 * 2**30)
    assert room_for_state(job, 40 * 2**30).startswith("At least 3 such devices")


def test_all_candidates_keep_the_rules_and_the_number_of_ranks():
    job = run(16, compile={"enable": True})
    found = list(candidates(job, H100))
    assert len(found) > 50
    assert {new.degrees.world for _, new in found} == {16}
    assert not any(broken_rules(Context(new)) for _, new in found[::25])
    assert {new.job.float8.enable for _, new in found} == {True, False}
    assert {new.job.activation_checkpoint.mode for _, new in found} == {"none", "selective", "full"}


def test_what_is_far_too_large_is_no_candidate():
    tried = {
        (new.job.activation_checkpoint.mode, new.job.training.local_batch_size)
        for _, new in candidates(run(8), H100)
        if new.degrees.tensor == new.degrees.pipeline == 1
    }
    assert ("full", 4) in tried
    assert ("none", 16) not in tried


def test_the_search_lists_what_fits_fastest_first():
    with ThreadPoolExecutor(2) as pool:
        found, traced = search(run(8), trace_of_rows, H100, pool, 2, seconds=3.0)
    assert 1 <= len(found) <= 10
    assert traced >= len(found)
    assert all(each.plan.fits for each in found)
    speeds = [each.plan.tokens_per_second for each in found]
    assert speeds == sorted(speeds, reverse=True)


def test_the_quick_bound_grows_with_all_that_takes_memory():
    least = upper_bound(run(activation_checkpoint={"mode": "full"}))
    assert least < upper_bound(run(activation_checkpoint={"mode": "selective"}))
    assert upper_bound(run(activation_checkpoint={"mode": "selective"})) < upper_bound(
        run(activation_checkpoint={"mode": "none"})
    )
    assert least < upper_bound(run(training={"local_batch_size": 4}, activation_checkpoint={"mode": "full"}))
    assert least < upper_bound(run(4, activation_checkpoint={"mode": "full"}))


def trace_without_recomputation(run):
    """A tracer that fails where all is recomputed."""
    if run.job.activation_checkpoint.mode == "full":
        raise RuntimeError("no kernel for this layout\nand a second line")
    return trace_of_rows(run)


def test_a_layout_that_cannot_be_traced_is_left_out_of_a_search_and_named(capsys):
    with ThreadPoolExecutor(2) as pool:
        found, traced = search(run(8), trace_without_recomputation, H100, pool, 2, seconds=3.0)
    assert found
    assert traced >= len(found)
    assert all(each.run.job.activation_checkpoint.mode != "full" for each in found)
    err = capsys.readouterr().err
    assert "cannot be traced: --parallelism.tensor_parallel_degree " in err
    assert "--activation_checkpoint.mode full (RuntimeError: no kernel for this layout)\n" in err


def test_a_change_that_cannot_be_traced_is_left_out_of_the_advice_and_named(capsys):
    job = run(training={"local_batch_size": 8}, activation_checkpoint={"mode": "none"})
    changes = what_fits(job, plan_of(job), trace_without_recomputation, H100)
    assert changes
    assert not any("full" in change.words for change in changes)
    assert "cannot be traced: --activation_checkpoint.mode full (RuntimeError" in capsys.readouterr().err
