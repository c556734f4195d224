"""`titanlite plan`: memory, time and advice for a job, before it runs anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from titanlite.config.errors import UserError
from titanlite.config.files import not_writable, write_whole
from titanlite.config.load import dump_config
from titanlite.config.options import AsJson, OptionPath, OptionRanks, Options, parse_beside_job
from titanlite.config.run import Run
from titanlite.load_run import load_run, world_size
from titanlite.observe.forecast import Forecast
from titanlite.observe.gpus import GIB, MIB, MOST_GIB, Gpu, device_memory, find_gpu, gpu_of_device
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
    as_json: AsJson = False
    """Print one JSON object instead of text."""
    quick: bool = False
    """Do not look for the largest batch that fits."""
    remedies: bool = False
    """List what takes less memory even if the job fits."""
    search: bool = False
    """Look for the fastest layouts, recomputation, batch sizes and precisions that fit on these ranks."""
    write: OptionPath | None = None
    """Search, and write the job file of the fastest to this new file, without [job], which names folder and file of
    another."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: the job or an option is wrong."""
    options, words = parse_beside_job(Plan, argv, "plan")
    if options.write:
        taken = os.path.lexists(options.write) and "It exists already. Name another file."
        if problem := taken or not_writable(options.write.absolute().parent):
            raise UserError(f"--write {options.write}: {problem}")
    run = load_run(words, options.world_size or world_size(), trains=False)
    out = sys.stdout
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the processes that trace
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print while they are imported
        gpu = _chosen_gpu(options.gpu)
        from titanlite.plan import advice  # torch, which a wrong name does not wait for

        gpu = gpu.model_copy(update={"memory_gib": options.memory or gpu.memory_gib}).of_rank(run.world_size)
        if gpu.cpu:  # device and host are one memory there
            run = advice.with_keys(run, {"training.enable_cpu_offload": False})
        if options.search or options.write:
            with advice.workers() as pool:
                found, traced, of = advice.search(run, gpu, pool.map)
            if not found:
                raise UserError(f"None of {traced} jobs fits. Take more or larger devices, or a smaller model.")
            if options.write:
                job = advice.with_keys(run, found[0][0]).job
                write_whole(options.write, dump_config(job, without=("job",)).encode())
            best = [{"options": advice.options(settings), **plan.model_dump()} for settings, plan in found[:10]]
            result = {"traced": traced, "candidates": of, "best": best}
            text = json.dumps(result) if options.as_json else _listed(best, f"{traced} of {of}")
        else:

            def tell(plan: Forecast) -> None:
                if not options.as_json:
                    print("\n".join(_described(run, plan)), file=out, flush=True)

            plan = advice.make_plan(run, gpu, options.quick, options.remedies, tell)
            text = plan.model_dump_json() if options.as_json else _advice(run, plan)
    print(text, end="\n" if text else "")


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
        raise UserError(f"This machine's GPU, {device}, is not in the table. Name one that is like it with --gpu.")
    return gpu.model_copy(update={"memory_gib": memory / GIB})


def _described(run: Run, plan: Forecast) -> Iterator[str]:
    """The plan as text."""
    yield f"{plan.job} on {plan.world_size} x {plan.gpu}\n\nMemory at the peak, in {plan.moment}, GiB"
    sizes = dict(sorted(plan.kinds.items(), key=lambda kind: -kind[1]))
    sizes |= {"allocator and libraries (allowance)": plan.allowance, "in host memory": plan.host}
    sizes |= {f"tensors of rank {rank}": peak for rank, peak in plan.peaks.items()}
    yield from (f"  {name:<36}{size / GIB:>10.3f}" for name, size in sizes.items() if size >= MIB)
    fits = "fits" if plan.fits else "DOES NOT FIT"
    yield f"  {f'together, of {plan.memory / GIB:.1f}: {fits}':<36}{plan.needs / GIB:>10.3f}"
    yield f"\nTime of a step, s (by the numbers of {plan.gpu}; a roofline, right to a third)"
    parts = plan.parts | {"(communication behind other work)": plan.hidden_seconds, "step": plan.step_seconds}
    yield from (f"  {name:<36}{seconds:>10.4f}{seconds / plan.step_seconds:>7.0%}" for name, seconds in parts.items())
    days = plan.step_seconds * run.job.training.steps / 86400
    yield f"  {plan.tokens_per_second:,.0f} tokens/s per device, MFU {plan.mfu:.1%}, {days:,.2f} days for all steps\n"


def _advice(run: Run, plan: Forecast) -> str:
    if plan.changes:
        return "\n  ".join(["What makes it fit, cheapest first:", *plan.changes])
    if not plan.fits:
        return plan.remedy()
    largest, rows = plan.largest_local_batch_size, run.job.training.local_batch_size
    return f"Largest training.local_batch_size that fits: {largest} (it is {rows})." if largest is not None else ""


def _listed(best: Sequence[Mapping[str, Any]], traced: str) -> str:
    """What a search has found, as text."""
    lines = [f"The best of the {traced} jobs that were traced, for {best[0]['world_size']} x {best[0]['gpu']}"]
    lines.append(f"\n{'tokens/s':>10}{'MFU':>7}{'peak GiB':>10}   job")
    for plan in best:
        words = " ".join(plan["options"]) or "(as it is)"
        lines.append(f"{plan['tokens_per_second']:>10,.0f}{plan['mfu']:>7.1%}{plan['peak'] / GIB:>10.1f}   {words}")
    return "\n".join(lines)
