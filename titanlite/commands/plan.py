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
from titanlite.plan.start import Settings, device_memory, with_keys
from titanlite.plan.start import options as in_options
from titanlite.runtime.logging import note


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
    """Search, and write the job file of the fastest to this new file."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: the job or an option is wrong."""
    options, words = parse_beside_job(Plan, argv, "plan")
    if options.write:
        taken = (
            "It exists already." if os.path.lexists(options.write) else not_writable(options.write.absolute().parent)
        )
        if taken:
            raise UserError(f"--write {options.write}: {taken} Name another file.")
    run = load_run(words, options.world_size or world_size())
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print while they are imported
        from titanlite.plan import advice

        gpu = _chosen_gpu(options.gpu)
        if options.memory:
            gpu = gpu.model_copy(update={"memory_gib": options.memory})
        gpu = gpu.of_rank(run.world_size)
        if gpu.cpu:  # device and host are one memory there
            run = with_keys(run, {"training.enable_cpu_offload": False})
        if options.search or options.write:
            text = _searched(run, gpu, options, *advice.search(run, gpu))
        else:
            plan = advice.make_plan(run, gpu, options.quick, options.remedies)
            text = plan.model_dump_json() if options.as_json else "\n".join(_described(run, plan))
    print(text)


def _chosen_gpu(name: str | None) -> Gpu:
    """The device that --gpu names, or the one of this machine, or H100 if it has none.

    Raises:
        UserError: the name or the file is wrong, or this machine's GPU is not in the table.
    """
    if name == "cpu":
        from titanlite.plan.roofline import this_cpu

        return this_cpu()
    if name is not None:
        return find_gpu(name)
    device, memory = device_memory()
    if device is None:
        note("This machine has no GPU, so the plan is for H100. --gpu names another.")
        return find_gpu("H100")
    if (gpu := gpu_of_device(device)) is None:
        raise UserError(
            f"This machine's GPU, {device}, is not in the table. Name a GPU that is like it with --gpu, or a TOML file "
            "with its numbers (docs/planning.md lists the keys)."
        )
    return gpu.model_copy(update={"memory_gib": memory / GIB})


def _described(run: Run, plan: Forecast) -> Iterator[str]:
    """The plan as text."""
    yield f"{plan.job} on {plan.world_size} x {plan.gpu}\n"
    alike = f", the worst of {len(plan.peaks)} kinds of ranks" if len(plan.peaks) > 1 else ", as on every rank"
    yield f"Memory of rank {plan.rank}{alike}, GiB"
    room = plan.memory - plan.needs
    verdict = f"of {plan.memory / GIB:.1f}: {'fits, left over' if room >= 0 else 'DOES NOT FIT, missing'}"
    sizes = {name: size for name, size in sorted(plan.kinds.items(), key=lambda kind: -kind[1]) if size}
    sizes |= {f"peak, in {plan.moment}": plan.peak, "allocator and libraries (allowance)": plan.allowance}
    sizes |= {verdict: abs(room)} | ({"in host memory, for each rank": plan.host} if plan.host else {})
    sizes |= {f"peak of rank {rank}": peak for rank, peak in plan.peaks.items() if len(plan.peaks) > 1}
    yield from (f"  {name:<36}{size / GIB:>10.3f}" for name, size in sizes.items())
    yield f"\nTime of a step, s ({plan.basis}; a roofline, right to a third)"
    for name, seconds in plan.parts.items():
        yield f"  {name:<36}{seconds:>10.4f}{seconds / plan.step_seconds:>7.0%}"
    if plan.hidden_seconds > 0:
        yield f"  {'(communication behind other work)':<36}{plan.hidden_seconds:>10.4f}"
    speed = f"{plan.tokens_per_second:,.0f} tokens/s per device, MFU {plan.mfu:.1%}"
    yield f"  {'step':<36}{plan.step_seconds:>10.4f}  {speed}"
    steps = run.job.training.steps
    yield f"  {steps:,} steps take {plan.step_seconds * steps / 86400:,.2f} days.\n"
    if plan.changes:
        yield "\n  ".join(["What makes it fit, cheapest first:", *plan.changes])
    elif not plan.fits:
        yield plan.remedy()
    elif plan.largest_local_batch_size is not None:
        rows = run.job.training.local_batch_size
        yield f"Largest training.local_batch_size that fits: {plan.largest_local_batch_size} (it is {rows})."


def _searched(run: Run, gpu: Gpu, options: Plan, found: Sequence[tuple[Settings, Forecast]], traced: int) -> str:
    """What a search has found, as text or JSON. The first job is written if that is asked for."""
    if not found:
        raise UserError(
            f"Nothing that was tried fits: {traced} layouts were traced. Take more or larger devices than "
            f"{run.world_size} x {gpu.name}, or a smaller model."
        )
    if options.write:
        write_whole(options.write, dump_config(with_keys(run, found[0][0]).job).encode())
    if options.as_json:
        best = [{"options": in_options(settings), **plan.model_dump()} for settings, plan in found]
        return json.dumps({"traced": traced, "best": best})
    lines = [f"The best of {traced} jobs that were traced, for {run.world_size} x {gpu.name} ({found[0][1].basis})", ""]
    lines.append(f"{'tokens/s':>10}{'MFU':>7}{'peak GiB':>10}   job")
    for settings, plan in found:
        words = " ".join(in_options(settings))
        lines.append(f"{plan.tokens_per_second:>10,.0f}{plan.mfu:>7.1%}{plan.peak / GIB:>10.1f}   {words}")
    return "\n".join(lines)
