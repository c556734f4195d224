"""`titanlite plan`: memory, time and advice for a job, before it runs anywhere."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from titanlite.config.errors import UserError
from titanlite.config.files import not_writable, write_whole
from titanlite.config.load import dump_config
from titanlite.config.options import OptionPath, OptionRanks, Options, parse_beside_job
from titanlite.config.run import Run
from titanlite.load_run import load_run, world_size
from titanlite.observe.forecast import GIB, Forecast
from titanlite.observe.gpus import MOST_GIB, Gpu, find_gpu

if TYPE_CHECKING:
    from concurrent.futures import Executor

WORKERS = 2  # processes that trace


class Plan(Options):
    """Say what a job will take before it runs: the peak of memory on each kind of rank, the time of a step, and what
    makes it fit or go faster. It runs the trainer's own code on tensors without data, so it needs no GPU."""

    world_size: OptionRanks | None = None
    """Number of ranks: the processes of all machines together. Left out: the environment variable WORLD_SIZE, or 1
    without it."""
    gpu: str | None = None
    """The device: a name such as H100 or A100-80GB, cpu for this machine's cores, or a TOML file with numbers of your
    own, such as --measure writes. Left out: the GPU of this machine, or H100 if it has none."""
    memory: Annotated[float, Field(gt=0, le=MOST_GIB)] | None = None
    """GiB of a device (of the machine with --gpu cpu), in place of the number in the table. A million at most."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of text."""
    quick: bool = False
    """Do not look for the largest batch that fits."""
    remedies: bool = False
    """List what takes less memory even if the job fits."""
    search: bool = False
    """Look for the fastest layouts, recomputation, batch sizes and precisions that fit on these ranks."""
    write: OptionPath | None = None
    """With --search: write the job file of the fastest to this new file."""
    measure: bool = False
    """Measure the rates of this machine, in two minutes, instead of planning a job."""
    out: OptionPath | None = None
    """With --measure: write the rates to this new TOML file. Left out: my_machine.toml."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: the job or an option is wrong."""
    options, words = parse_beside_job(Plan, argv, "plan")
    if options.write and not options.search:
        raise UserError("--write FILE: writes what --search finds. Add --search.")
    if options.out and not options.measure:
        raise UserError("--out FILE: is where --measure writes. Add --measure.")
    if options.measure:
        _refuse_beside_measure(options, words)
        return _measure(options)
    if options.write:
        _check_new(options.write, "--write")
    run = load_run(words, options.world_size or world_size())
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print while they are imported
        gpu, assumed = chosen_gpu(options.gpu)
        if options.memory:
            gpu = gpu.model_copy(update={"memory_gib": options.memory})
        result = None if options.search else make_plan(run, gpu, assumed, options.quick, options.remedies)
    if result is None:
        return _search(run, gpu, options)
    print(result.model_dump_json() if options.as_json else "\n".join(describe(run, result, gpu)))


def make_plan(run: Run, gpu: Gpu, assumed: bool = False, quick: bool = False, remedies: bool = False) -> Forecast:
    """The plan of a run, with the largest batch that fits (unless `quick`), or with what makes the run fit.

    Args:
        assumed: Nobody has named the device, and this machine has none.
        remedies: List what takes less memory even if the run fits.
    """
    from functools import partial

    from titanlite.plan.advice import largest_batch, what_fits
    from titanlite.plan.forecast import forecast, traces_of
    from titanlite.plan.trace import trace_run

    # A pipeline has several kinds of ranks to trace. For less it would not pay to start processes.
    with _workers() if run.degrees.pipeline > 2 else contextlib.nullcontext() as pool:
        trace = trace_run if pool is None else partial(trace_run, apply=pool.map)
        plan = forecast(run, traces_of(run, gpu, trace), gpu, assumed)
        if not plan.fits or remedies:
            return plan.model_copy(update={"changes": what_fits(run, plan, trace, gpu)})
        if quick:
            return plan
        return plan.model_copy(update={"largest_local_batch_size": largest_batch(run, plan, trace, gpu)})


@contextlib.contextmanager
def _workers() -> Iterator[Executor]:
    """Processes for traces. Raises UserError: one of them was killed."""
    from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
    from multiprocessing import get_context

    try:
        with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"), initializer=_quiet) as pool:
            yield pool
    except BrokenExecutor:
        raise UserError(
            f"A process of the plan was killed, probably because the memory of this machine is full: {WORKERS} layouts "
            "are traced at a time. Plan again where more memory is free."
        ) from None


def chosen_gpu(name: str | None) -> tuple[Gpu, bool]:
    """The device that --gpu names, or the one of this machine; and whether it is only assumed.

    Raises:
        UserError: the name or the file is wrong, or this machine's GPU is not in the table.
    """
    if name == "cpu":
        from titanlite.plan.measure import this_cpu

        return this_cpu(), False
    if name is not None:
        return find_gpu(name), False
    import torch

    from titanlite.observe.gpus import gpu_of_device

    if not torch.cuda.is_available():
        return find_gpu("H100"), True
    properties = torch.cuda.get_device_properties(0)
    gpu = gpu_of_device(properties.name)
    if gpu is None:
        raise UserError(
            f"This machine's GPU, {properties.name}, is not in the table. Measure it with `titanlite plan --measure` "
            "and name the file with --gpu, or name a GPU that is like it."
        )
    return gpu.model_copy(update={"memory_gib": properties.total_memory / GIB}), False


def describe(run: Run, plan: Forecast, gpu: Gpu) -> Iterator[str]:
    """The plan as text."""
    assumed = " (assumed, because this machine has none: --gpu names another)" if plan.assumed else ""
    yield f"{plan.job} on {plan.world_size} x {plan.gpu}{assumed}"
    yield ""
    alike = f", the worst of {len(plan.peaks)} kinds of ranks" if len(plan.peaks) > 1 else ", as on every rank"
    yield f"Memory of rank {plan.rank}{alike}, GiB"
    for name, size in sorted(plan.kinds.items(), key=lambda kind: -kind[1]):
        if size:
            yield f"  {name:<36}{size / GIB:>10.3f}"
    yield f"  {'peak, in ' + plan.moment:<36}{plan.peak / GIB:>10.3f}"
    yield f"  {'allocator and libraries (allowance)':<36}{plan.allowance / GIB:>10.3f}"
    room = (plan.memory - plan.needs) / GIB
    verdict = f"of {plan.memory / GIB:.1f}: {'fits, left over' if room >= 0 else 'DOES NOT FIT, missing'}"
    yield f"  {verdict:<36}{abs(room):>10.3f}"
    if plan.host:
        yield f"  {'in host memory, for each rank':<36}{plan.host / GIB:>10.3f}"
    if len(plan.peaks) > 1:
        yield "  peak of rank " + ", ".join(f"{rank}: {peak / GIB:.2f}" for rank, peak in plan.peaks.items())
    yield ""
    known = "measured" if gpu.measured else "at the usual share of the rates of its data sheet"
    yield f"Time of a step, s ({plan.basis}; {known})"
    for name, seconds in plan.parts.items():
        yield f"  {name:<36}{seconds:>10.4f}{seconds / plan.step_seconds:>7.0%}"
    if plan.hidden_seconds > 0:
        yield f"  {'(communication behind other work)':<36}{plan.hidden_seconds:>10.4f}"
    yield (
        f"  {'step':<36}{plan.step_seconds:>10.4f}  {plan.tokens_per_second:,.0f} tokens/s per device, MFU "
        f"{plan.mfu:.1%}"
    )
    steps = run.job.training.steps
    yield f"  {steps:,} steps take {plan.days:,.2f} days. What takes the most time: {plan.dominant}."
    yield ""
    if plan.changes:
        yield "What makes it fit, cheapest first:"
        yield from (f"  {change}" for change in plan.changes)
    elif not plan.fits:
        yield plan.remedy()
    elif plan.largest_local_batch_size is not None:
        rows = run.job.training.local_batch_size
        yield f"Largest training.local_batch_size that fits: {plan.largest_local_batch_size} (it is {rows})."


# --------------------------------------------------------------------------------------------------- search, measuring


def _search(run: Run, gpu: Gpu, options: Plan) -> None:
    """Print the fastest jobs that fit, and write the first if it is asked for."""
    import json

    from titanlite.plan.advice import search, words
    from titanlite.plan.trace import trace_run

    with _workers() as pool:
        found, traced = search(run, trace_run, gpu, pool, WORKERS)
    if not found:
        raise UserError(
            f"Nothing that was tried fits: {traced} layouts were traced. Take more or larger devices than "
            f"{run.world_size} x {gpu.name}, or a smaller model."
        )
    if options.write:
        write_whole(options.write, dump_config(found[0].run.job).encode())
    if options.as_json:
        best = [{"options": words(each.settings), **each.plan.model_dump()} for each in found]
        print(json.dumps({"traced": traced, "best": best}))
        return
    print(f"The best of {traced} jobs that were traced, for {run.world_size} x {gpu.name} ({found[0].plan.basis})\n")
    print(f"{'tokens/s':>10}{'MFU':>7}{'peak GiB':>10}   job")
    for each in found:
        plan = each.plan
        print(f"{plan.tokens_per_second:>10,.0f}{plan.mfu:>7.1%}{plan.peak / GIB:>10.1f}   {_layout(each.run)}")
    print(f"\nThe first: {' '.join(words(found[0].settings))}")
    if options.write:
        print(f"Written to {options.write}.")


def _layout(run: Run) -> str:
    """What a candidate of a search is, in a few words."""
    degree, job = run.degrees, run.job
    sizes = {"pp": degree.pipeline, "replicate": degree.replicate, "fsdp": degree.shard}
    sizes |= {"cp": degree.context, "tp": degree.tensor}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    precision = "float8" if job.float8.enable else "bf16"
    rows = f"{job.training.local_batch_size} rows of {run.global_batch_size}"
    return f"{layout}, {job.activation_checkpoint.mode} AC, {rows}, {precision}"


def _quiet() -> None:
    """What a process of a search prints goes to standard error."""
    os.dup2(2, 1)


def _check_new(path: Path, option: str) -> None:
    """Refuse a file that exists or cannot be written, before minutes are spent."""
    if os.path.lexists(path):
        raise UserError(f"{option} {path}: exists already. Name another file, or remove this one.")
    if problem := not_writable(path.absolute().parent):
        raise UserError(f"{option} {path}: {problem}")


def _refuse_beside_measure(options: Plan, words: Sequence[str]) -> None:
    """Raises UserError: options that a measurement would ignore."""
    used = ("measure", "out", "as_json")
    ignored = [f"--{name.replace('_', '-')}" for name, value in options if value and name not in used]
    ignored += [word.partition("=")[0] for word in words if word.startswith("--")]
    if ignored:
        raise UserError(
            f"{', '.join(ignored)}: --measure times this machine and plans no job. Measure first, then plan with --gpu "
            "and the file."
        )


def _measure(options: Plan) -> None:
    """Measure this machine and write its rates."""
    from titanlite.plan.measure import measure

    out = options.out or Path("my_machine.toml")
    _check_new(out, "--out")
    gpu = measure(out, lambda line: print(line, file=sys.stderr))
    if options.as_json:
        print(gpu.model_dump_json())
        return
    print(
        f"{gpu.name}: {gpu.bf16:.3g} bf16 TFLOP/s, {gpu.bandwidth:.3g} GB/s of memory, {gpu.link:.3g} GB/s of a link."
    )
    print(f"Written to {out}: name it with `titanlite plan --gpu {out}`.")
