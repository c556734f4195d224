"""`titanlite plan`: estimate the memory and time of a job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

from pydantic import Field

from titanlite.commands.common import format_table
from titanlite.config.errors import UserError
from titanlite.config.files import find_write_problem, write_output
from titanlite.config.load import dump_config
from titanlite.config.options import (
    AsJson,
    OptionPath,
    OptionRanks,
    Options,
    parse_options_and_job,
)
from titanlite.config.run import Run, with_keys
from titanlite.config.schema import parse_tokens
from titanlite.load_run import load_run, read_world_size
from titanlite.observe.forecast import Forecast, TrainingTime
from titanlite.observe.gpus import GIB, MIB, MOST_GIB, Gpu, find_gpu, find_local_gpu, gpu_of_device
from titanlite.plan.workers import workers
from titanlite.rules import check_warmup
from titanlite.runtime.logging import note

if TYPE_CHECKING:
    from titanlite.plan.advice import SearchResult

_MAX_LISTED = 10  # number of search results to print
_MIN_PIPELINE_RANKS_FOR_WORKERS = 3  # with fewer, starting workers takes longer than it saves


class PlanOptions(Options):
    """Estimate peak memory and step time of a job, and find changes that make it fit or run faster.

    The command runs the training code on tensors without data, so it needs no GPU.
    """

    world_size: OptionRanks | None = None
    """Number of ranks (processes on all nodes together). Default: the environment variable
    WORLD_SIZE, or 1."""
    gpu: str | None = None
    """Device: a name such as H100 or A100-80GB, cpu for the cores of this node, or a TOML file with
    numbers from a data sheet. Default: the GPU of this node, or H100 if it has none."""
    memory: Annotated[float, Field(gt=0, le=MOST_GIB)] | None = None
    """Memory of a device or, with --gpu cpu, of the node, in GiB. Default: the memory of the device
    that --gpu selects."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""
    tokens: str | None = None
    """Estimate the GPU-hours and days to train on this number of tokens, with a 90% interval.
    Examples: 500M, 10B, 1T or 2.5e12."""
    quick: bool = False
    """Do not search for the largest batch that fits."""
    remedies: bool = False
    """List changes that reduce memory even if the job fits."""
    search: bool = False
    """Search for the fastest layouts, activation checkpointing, batch sizes and precisions that
    fit."""
    write: OptionPath | None = None
    """Search, and write the job of the fastest result to this new file, without the section
    [job]."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite plan`: estimate memory and step time of a job, or search for faster ones.

    Raises:
        UserError: If the job or an option is invalid, or no job fits.
    """
    options, words = parse_options_and_job(PlanOptions, argv, "plan")
    tokens = None if options.tokens is None else _parse_tokens(options.tokens)
    run = _load_run(options, words)

    # Handle SIGTERM like Ctrl-C, which also ends the worker processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Only results go to standard output. Some libraries print when they are imported, which would
    # mix with the JSON object of --json.
    results = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        device = _choose_device(options, run.world_size)
        if device.cpu:  # then CPU offload would not save memory
            run = with_keys(run, {"training.enable_cpu_offload": False})
        if options.search or options.write is not None:
            _search(options, run, device, tokens, results)
        else:
            _estimate(options, run, device, tokens, results)


def _load_run(options: PlanOptions, words: Sequence[str]) -> Run:
    """Load and validate the job to plan.

    With --write, also check that the output file can be created, and that the job is long enough
    for its warmup and decay.

    Args:
        options: Options of the command.
        words: Command-line options that set keys of the job.

    Raises:
        UserError: If the job is invalid, or a check for --write fails.
    """
    if options.write is not None:
        _check_new_file(options.write)
    run = load_run(words, options.world_size or read_world_size(), trains=False)
    if options.write is not None:
        # If the command line shortens a job, `load_run` does not check that its warmup and decay
        # fit. Such a job can be planned, but its job file would be invalid.
        _check_not_shortened(options.write, run)
    return run


def _parse_tokens(text: str) -> int:
    """Parse the value of --tokens, such as "500M" or "2.5e12", into a number of tokens.

    Raises:
        UserError: If the value is not a number from 1 to 1e18, with or without a unit.
    """
    try:
        return parse_tokens(text)
    except ValueError as error:
        raise UserError(f"--tokens {text}: {error}.") from None


def _check_new_file(path: Path) -> None:
    """Check that the output file of --write does not exist yet and can be created.

    Raises:
        UserError: If the file exists, or its folder is not writable.
    """
    if os.path.lexists(path):
        raise UserError(f"--write {path}: already exists. Choose another file.")
    problem = find_write_problem(path.absolute().parent)
    if problem:
        raise UserError(f"--write {path}: {problem}")


def _check_not_shortened(path: Path, run: Run) -> None:
    """Check that a job is long enough for its warmup and decay before --write saves it.

    `load_run` skips this check if a command-line option such as --training.steps shortens the job.

    Raises:
        UserError: If the job ends before its warmup and decay are complete.
    """
    problems = list(check_warmup(run, is_preview=False))
    if problems:
        raise UserError(
            f"--write {path}: the job would end before its warmup and decay are complete. "
            "Remove the key that makes it shorter, such as training.steps."
        )


def _estimate(
    options: PlanOptions,
    run: Run,
    device: Gpu,
    tokens: int | None,
    results: TextIO,
) -> None:
    """Print the memory and time of a job, followed by changes that improve the job.

    Args:
        options: Options of the command. With --json, print everything as one JSON object.
        run: The run to estimate.
        device: GPU or CPU of each rank.
        tokens: Number of tokens of the whole training run, or None if --tokens is not set.
        results: Standard output.
    """
    if options.as_json:
        forecast = _estimate_and_search(options, run, device)
        forecast = _add_training_time(forecast, tokens)
        print(forecast.model_dump_json(), file=results, flush=True)
        return

    # Print the estimate before the search for changes starts, because the search takes longer.
    def print_estimate(estimate: Forecast) -> None:
        estimate = _add_training_time(estimate, tokens)
        print(_format_forecast(run, estimate), file=results, flush=True)

    forecast = _estimate_and_search(options, run, device, before_search=print_estimate)

    # Print the changes that the search has found.
    advice = _format_advice(run, forecast)
    if advice:
        print(advice, file=results, flush=True)


def _estimate_and_search(
    options: PlanOptions,
    run: Run,
    device: Gpu,
    before_search: Callable[[Forecast], None] | None = None,
) -> Forecast:
    """Estimate the memory and step time of a job, and search for improvements.

    If the job does not fit into memory, search for changes that make it fit. Otherwise, search for
    its largest batch size, unless the options select another goal.

    Args:
        options: Options of the command.
        run: The run to estimate.
        device: GPU or CPU of each rank.
        before_search: Function that is called with the estimate before the search starts.
    """
    from titanlite.plan import advice  # slow, so import it before the worker processes fork

    # Choose what to search for if the job fits.
    if options.remedies:
        goal = "remedies"
    elif options.quick:
        goal = "nothing"
    else:
        goal = "largest_batch"

    # With few pipeline ranks, starting workers takes longer than it saves.
    if run.degrees.pipeline < _MIN_PIPELINE_RANKS_FOR_WORKERS:
        return advice.make_plan(run, device, goal, before_search)

    # Trace the pipeline ranks in parallel.
    with workers() as pool:
        return advice.make_plan(run, device, goal, before_search, pool.map)


def _format_advice(run: Run, forecast: Forecast) -> str:
    """Describe changes that make a job fit into memory or, if it fits, its largest batch size.

    Return "" if there is nothing to advise, for example if --quick has skipped the search for the
    largest batch size.
    """
    # With --remedies, there can be changes even if the job fits.
    if forecast.changes:
        return "\n  ".join(["Changes that make it fit, cheapest first:", *forecast.changes])
    if not forecast.fits:
        return forecast.remedy()

    largest = forecast.largest_local_batch_size
    if largest is None:
        return ""
    current = run.job.training.local_batch_size
    return f"Largest training.local_batch_size that fits: {largest} (now {current})."


def _search(
    options: PlanOptions, run: Run, device: Gpu, tokens: int | None, results: TextIO
) -> None:
    """Search for variants of a job that fit into memory, and print the fastest.

    With --write, also write the fastest variant as a job file, without the section [job].

    Args:
        options: Options of the command. With --json, print a JSON object instead of a table.
        run: The run to change.
        device: GPU or CPU of each rank.
        tokens: Number of tokens of the whole training run, or None if --tokens is not set.
        results: Standard output.

    Raises:
        UserError: If no variant fits.
    """
    from titanlite.plan import advice  # slow, so import it before the worker processes fork

    with workers() as pool:
        result = advice.search(run, device, pool.map)
    if not result.variants:
        raise UserError(
            f"None of {result.num_traced} jobs fits. "
            "Use more or larger devices, or a smaller model."
        )

    # Write the fastest variant, which comes first.
    if options.write:
        fastest_settings, _ = result.variants[0]
        fastest_job = with_keys(run, fastest_settings).job
        job_file = dump_config(fastest_job, without=("job",))
        write_output(options.write, job_file.encode())

    # Print the fastest variants.
    devices = f"{run.world_size} x {device.name}"
    text = _format_search(result, devices, tokens, options.as_json)
    print(text, file=results, flush=True)


def _format_search(result: SearchResult, devices: str, tokens: int | None, as_json: bool) -> str:
    """Format the fastest variants of a job as a table, or as a JSON object.

    Args:
        result: Result of the search.
        devices: Number and name of the devices, such as "8 x H100".
        tokens: Number of tokens of the whole training run, or None if --tokens is not set.
        as_json: Return a JSON object.
    """
    from titanlite.plan.advice import format_options

    variants, num_traced, num_candidates = result
    best = []
    for settings, forecast in variants[:_MAX_LISTED]:
        best.append((format_options(settings), _add_training_time(forecast, tokens)))

    if as_json:
        objects = [{"options": words, **forecast.model_dump()} for words, forecast in best]
        return json.dumps({"traced": num_traced, "candidates": num_candidates, "best": objects})
    title = f"Fastest of {num_traced} traced jobs (of {num_candidates} candidates) on {devices}"
    return f"{title}\n\n{_format_variants(best)}"


def _add_training_time(forecast: Forecast, tokens: int | None) -> Forecast:
    """Add the time to train on `tokens` tokens to a forecast, unless `tokens` is None."""
    if tokens is None:
        return forecast

    from titanlite.plan.training_time import estimate_training

    return forecast.model_copy(update={"training": estimate_training(forecast, tokens)})


def _choose_device(options: PlanOptions, world_size: int) -> Gpu:
    """Return the hardware of one rank, which the options --gpu and --memory select.

    This is a GPU, or an equal share of the CPU.

    Raises:
        UserError: If --gpu is invalid, or --tokens is set for a CPU.
    """
    device = _find_device(options.gpu)
    if device.cpu and options.tokens is not None:
        raise UserError(
            "--tokens needs a GPU, because its interval comes from measurements on GPUs. "
            "Choose one with --gpu."
        )
    if options.memory is not None:
        device = device.model_copy(update={"memory_gib": options.memory})
    return device.of_rank(world_size)  # divides a CPU, but not a GPU, among the ranks


def _find_device(name: str | None) -> Gpu:
    """Return the device that --gpu describes, or the GPU of this node if the option is not set.

    Args:
        name: "cpu", the name of a GPU, or the path of a TOML file.

    Raises:
        UserError: If the name or the file is invalid, or the GPU of this node is not in the table.
    """
    if name == "cpu":
        from titanlite.plan.roofline import measure_cpu  # imports torch, which is slow

        return measure_cpu()
    if name is not None:
        return find_gpu(name)

    # Use the GPU of this node.
    local_gpu = find_local_gpu()
    if local_gpu is None:
        note("This node has no GPU, so the plan is for H100. To choose another, pass --gpu.")
        return find_gpu("H100")
    gpu = gpu_of_device(local_gpu.name)
    if gpu is None or local_gpu.memory is None:
        raise UserError(
            f"The GPU of this node, {local_gpu.name}, is not in the table. "
            "Pass a similar one with --gpu."
        )
    return gpu.model_copy(update={"memory_gib": local_gpu.memory / GIB})


def _format_forecast(run: Run, forecast: Forecast) -> str:
    """Format the estimate of a job as text: peak memory in GiB, step time in seconds, and speed."""
    lines = [f"{forecast.job} on {forecast.world_size} x {forecast.gpu}", ""]
    lines += [*_format_memory(forecast), "", *_format_step_time(forecast)]

    days = forecast.step_seconds * run.job.training.steps / 86400
    speed = f"{forecast.tokens_per_second:,.0f} tokens/s per device"
    lines.append(f"  {speed}, {days:,.2f} days for all steps")
    full = f"{forecast.mfu_full_attention:.1%} (full attention, as in torchtitan and PaLM)"
    lines.append(f"  MFU {forecast.mfu:.1%} (causal attention), {full}")
    if forecast.training is not None:
        lines += _format_training_time(forecast.training)
    return "\n".join([*lines, ""])


def _format_step_time(forecast: Forecast) -> list[str]:
    """Format the time of each kind of work, such as matmuls, and of the whole step."""
    times = dict(forecast.parts)
    times["(hidden communication)"] = forecast.hidden_seconds
    times["step"] = forecast.step_seconds

    lines = [f"Step time, s (roofline of {forecast.gpu}, accurate to about a third)"]
    for name, seconds in times.items():
        share = seconds / forecast.step_seconds
        lines.append(f"  {name:<36}{seconds:>10.4f}{share:>7.0%}")
    return lines


def _format_training_time(time: TrainingTime) -> list[str]:
    """Format how many GPU-hours and days a training run takes, with 90% prediction intervals."""
    hours = (
        f"{time.gpu_hours:,.0f} GPU-hours ({time.gpu_hours_low:,.0f} to {time.gpu_hours_high:,.0f})"
    )
    days = f"{time.days:,.2f} days ({time.days_low:,.2f} to {time.days_high:,.2f})"
    return [
        f"  {time.tokens:,} tokens: {hours}, {days}",
        "  In parentheses: 90% intervals, from the spread of published measurements",
    ]


def _format_memory(forecast: Forecast) -> list[str]:
    """Format the peak memory of a rank in GiB, by kind of tensor, as lines of a table.

    The largest kinds come first. Sizes below 1 MiB are omitted. The last line shows the total, and
    whether it fits into memory.
    """
    rows = sorted(forecast.kinds.items(), key=lambda row: row[1], reverse=True)
    rows.append(("allocator and libraries (allowance)", forecast.allowance))
    rows.append(("in CPU memory", forecast.cpu_peak))
    rows += [(f"tensors of rank {rank}", peak) for rank, peak in forecast.peaks.items()]
    rows = [(name, size) for name, size in rows if size >= MIB]

    result = "fits" if forecast.fits else "DOES NOT FIT"
    rows.append((f"total, of {forecast.memory / GIB:.1f}: {result}", forecast.needs))

    lines = [f"  {name:<36}{size / GIB:>10.3f}" for name, size in rows]
    return [f"Peak memory, in {forecast.moment}, GiB", *lines]


def _format_variants(variants: Sequence[tuple[Sequence[str], Forecast]]) -> str:
    """Format variants of a job as a table of speed, memory and the options that differ.

    Args:
        variants: Options that change the job, and the forecast of the changed job. Fastest first.
    """
    rows = [_format_variant(words, forecast) for words, forecast in variants]
    columns = list(rows[0])
    return format_table(columns, [list(row.values()) for row in rows])


def _format_variant(words: Sequence[str], forecast: Forecast) -> dict[str, str]:
    """Return the table cells of a variant of a job, by column title.

    With --tokens, the row contains the days of training.

    Args:
        words: Options that change the job, such as ["--training.local_batch_size", "4"].
        forecast: Forecast of the changed job.
    """
    row = {"tokens/s": f"{forecast.tokens_per_second:,.0f}"}
    training_time = forecast.training
    if training_time is not None:
        interval = f"{training_time.days_low:,.2f} to {training_time.days_high:,.2f}"
        row["days (90% interval)"] = f"{training_time.days:,.2f} ({interval})"
    row["MFU (causal)"] = f"{forecast.mfu:.1%}"
    row["MFU (full)"] = f"{forecast.mfu_full_attention:.1%}"
    row["peak GiB"] = f"{forecast.peak / GIB:.1f}"
    row["job"] = " ".join(words) or "(unchanged)"
    return row
