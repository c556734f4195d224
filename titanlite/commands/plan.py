"""`titanlite plan`: memory, time and advice for a job, before it runs anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import tyro
from pydantic import Field

from titanlite.config.errors import UserError
from titanlite.config.files import not_writable, write_whole
from titanlite.config.load import dump_config
from titanlite.config.options import OptionPath, OptionRanks, Options, parse_beside_job
from titanlite.config.run import Run
from titanlite.load_run import load_run, world_size
from titanlite.observe.forecast import GIB, Forecast
from titanlite.observe.gpus import MOST_GIB, Gpu, find_gpu, gpu_of_device


class Plan(Options):
    """Say what a job will take before it runs: the peak of memory on each kind of rank, the time of a step, and what
    makes it fit or go faster. It runs the trainer's own code on tensors without data, so it needs no GPU."""

    world_size: OptionRanks | None = None
    """Number of ranks: the processes of all machines together. Left out: the environment variable WORLD_SIZE, or 1
    without it."""
    gpu: str | None = None
    """The device: a name such as H100 or A100-80GB, cpu for this machine's cores, or a TOML file with the numbers of
    its data sheet. Left out: the GPU of this machine, or H100 if it has none."""
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


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: the job or an option is wrong."""
    options, words = parse_beside_job(Plan, argv, "plan")
    if options.write and not options.search:
        raise UserError("--write FILE: writes what --search finds. Add --search.")
    if options.write and os.path.lexists(options.write):
        raise UserError(f"--write {options.write}: exists already. Name another file, or remove this one.")
    if options.write and (problem := not_writable(options.write.absolute().parent)):
        raise UserError(f"--write {options.write}: {problem}")
    run = load_run(words, options.world_size or world_size())
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print while they are imported
        gpu, assumed = _chosen_gpu(options.gpu)
        if options.memory:
            gpu = gpu.model_copy(update={"memory_gib": options.memory})
        from titanlite.plan.advice import make_plan

        if not options.search:
            plan = make_plan(run, gpu, assumed, options.quick, options.remedies)
    if options.search:
        _search(run, gpu, options)
    else:
        print(plan.model_dump_json() if options.as_json else "\n".join(_described(run, plan)))


def _chosen_gpu(name: str | None) -> tuple[Gpu, bool]:
    """The device that --gpu names, or the one of this machine; and whether it is only assumed.

    Raises:
        UserError: the name or the file is wrong, or this machine's GPU is not in the table.
    """
    if name == "cpu":
        from titanlite.plan.roofline import this_cpu

        return this_cpu(), False
    if name is not None:
        return find_gpu(name), False
    import torch

    if not torch.cuda.is_available():
        return find_gpu("H100"), True
    properties = torch.cuda.get_device_properties(0)
    gpu = gpu_of_device(properties.name)
    if gpu is None:
        raise UserError(
            f"This machine's GPU, {properties.name}, is not in the table. Name a GPU that is like it with --gpu, or a "
            "TOML file with its numbers (docs/planning.md lists the keys)."
        )
    return gpu.model_copy(update={"memory_gib": properties.total_memory / GIB}), False


def _described(run: Run, plan: Forecast) -> Iterator[str]:
    """The plan as text."""
    assumed = " (assumed, because this machine has none: --gpu names another)" if plan.assumed else ""
    yield f"{plan.job} on {plan.world_size} x {plan.gpu}{assumed}\n"
    alike = f", the worst of {len(plan.peaks)} kinds of ranks" if len(plan.peaks) > 1 else ", as on every rank"
    yield f"Memory of rank {plan.rank}{alike}, GiB"
    room = plan.memory - plan.needs
    verdict = f"of {plan.memory / GIB:.1f}: {'fits, left over' if room >= 0 else 'DOES NOT FIT, missing'}"
    sizes = {name: size for name, size in sorted(plan.kinds.items(), key=lambda kind: -kind[1]) if size}
    sizes |= {f"peak, in {plan.moment}": plan.peak, "allocator and libraries (allowance)": plan.allowance}
    sizes |= {verdict: abs(room)} | ({"in host memory, for each rank": plan.host} if plan.host else {})
    yield from (f"  {name:<36}{size / GIB:>10.3f}" for name, size in sizes.items())
    if len(plan.peaks) > 1:
        yield "  peak of rank " + ", ".join(f"{rank}: {peak / GIB:.2f}" for rank, peak in plan.peaks.items())
    yield f"\nTime of a step, s ({plan.basis}; a roofline, right to a third)"
    for name, seconds in plan.parts.items():
        yield f"  {name:<36}{seconds:>10.4f}{seconds / plan.step_seconds:>7.0%}"
    if plan.hidden_seconds > 0:
        yield f"  {'(communication behind other work)':<36}{plan.hidden_seconds:>10.4f}"
    speed = f"{plan.tokens_per_second:,.0f} tokens/s per device, MFU {plan.mfu:.1%}"
    yield f"  {'step':<36}{plan.step_seconds:>10.4f}  {speed}"
    took = f"  {run.job.training.steps:,} steps take {plan.days:,.2f} days."
    yield f"{took} What takes the most time: {plan.dominant}.\n"
    if plan.changes:
        yield "\n  ".join(["What makes it fit, cheapest first:", *map(str, plan.changes)])
    elif not plan.fits:
        yield plan.remedy()
    elif plan.largest_local_batch_size is not None:
        rows = run.job.training.local_batch_size
        yield f"Largest training.local_batch_size that fits: {plan.largest_local_batch_size} (it is {rows})."


def _search(run: Run, gpu: Gpu, options: Plan) -> None:
    """Print the fastest jobs that fit, and write the first if it is asked for."""
    from titanlite.plan.advice import search

    found, traced = search(run, gpu)
    if not found:
        raise UserError(
            f"Nothing that was tried fits: {traced} layouts were traced. Take more or larger devices than "
            f"{run.world_size} x {gpu.name}, or a smaller model."
        )
    if options.write:
        write_whole(options.write, dump_config(found[0].run.job).encode())
    if options.as_json:
        best = [{"options": each.options, **each.plan.model_dump()} for each in found]
        print(json.dumps({"traced": traced, "best": best}))
        return
    print(f"The best of {traced} jobs that were traced, for {run.world_size} x {gpu.name} ({found[0].plan.basis})\n")
    print(f"{'tokens/s':>10}{'MFU':>7}{'peak GiB':>10}   job")
    for each in found:
        plan = each.plan
        print(f"{plan.tokens_per_second:>10,.0f}{plan.mfu:>7.1%}{plan.peak / GIB:>10.1f}   {each.words}")
    print(f"\nThe first: {' '.join(found[0].options)}")
    if options.write:
        print(f"Written to {options.write}.")
