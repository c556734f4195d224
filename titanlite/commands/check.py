"""`titanlite check`: reports what training would refuse, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from shutil import get_terminal_size

from titanlite.checkpoint.find import is_saved, known_job
from titanlite.checkpoint.job_diff import compare_jobs, say_changes
from titanlite.config.errors import counted, printable
from titanlite.config.options import OptionRanks, Options, parse_beside_job
from titanlite.config.run import Run
from titanlite.data.amounts import looked_at, toy_note
from titanlite.data.mixture import source_shares
from titanlite.data.stream import source_specs
from titanlite.data.tokenizer import load_tokenizer
from titanlite.load_run import load_run, world_size
from titanlite.observe.gpus import check_memory
from titanlite.optim.schedule import rate_of

_MARGIN = 10  # characters on the left of a curve


class Check(Options):
    """Check a job and print OK or all of its mistakes, without starting anything."""

    world_size: OptionRanks | None = None
    """Number of ranks: the processes of all machines together, on any devices. Left out: the environment variable
    WORLD_SIZE, or 1 without it, on this machine."""
    plot: bool = False
    """Draw the learning rate over the steps, and what [[dataset.stages]] change: the rows of a step, and the share of
    each source in them."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: the job or an option is wrong."""
    options, words = parse_beside_job(Check, argv, "check")
    ranks = options.world_size or world_size()
    run = load_run(words, ranks)
    check_memory(run, elsewhere=options.world_size is not None)
    tokenizer = load_tokenizer(run.tokenizer_path, run.job)
    if saved := is_saved(run):  # a start compares the data and the tokenizer, too
        jobs = known_job(run.checkpoint_folder), run.job
        before, now = (job.model_dump(mode="json") | {"model": asdict(Run(job).arch)} for job in jobs)
        say_changes(run.checkpoint_folder, compare_jobs(before, now, ([], [])), lambda line: None)
    note = toy_note(run, tokenizer, looked_at(run, tokenizer))
    proviso = f", if data, seq_len and tokenizer are those of {run.checkpoint_folder}" if saved else ""
    print(printable(f"OK: {run.job.job.config_file or 'the job'} can start on {counted(ranks, 'rank')}{proviso}."))
    if note:
        print(printable(f"\n{note}"))
    if options.plot:
        print(f"\n{plot(run, get_terminal_size().columns)}")


def plot(run: Run, width: int) -> str:
    """The schedule of a run, in lines of at most so many characters."""
    steps, specs = run.job.training.steps, source_specs(run.job.dataset)
    columns = min(steps, max(_MARGIN, width - _MARGIN))
    done = [column * steps // columns for column in range(columns)]
    shares = zip(*(source_shares(run.job.dataset, step).tolist() for step in done), strict=True)
    curves = [("learning rate", "{:.2e}", 8, [rate_of(run.job, step + 1) for step in done])]
    curves += [("rows of a step", "{:,}", 4, [run.batch_size(step) for step in done])]
    curves += [(f"share of {s.source} {s.path or ''}", "{:.0%}", 2, of) for s, of in zip(specs, shares, strict=True)]
    lines = list[str]()
    for name, form, height, values in curves:
        top, changes = max(values), len({*values}) > 1
        lines.append(f"{'':{_MARGIN}}{name}{'' if changes else f': {form.format(top)} in each step'}"[:width])
        for row in reversed(range(height if changes else 0)):
            levels = (round(8 * (value / top * height - row)) for value in values)
            label = form.format(top) if row == height - 1 else "" if row else "0"
            drawn = "".join(" ▁▂▃▄▅▆▇█"[max(0, min(8, level))] for level in levels)
            lines.append(f"{label:>{_MARGIN - 2}} |{drawn}".rstrip())
    return "\n".join([*lines, f"{'step':>{_MARGIN - 2}}  1{f'{steps:,}':>{max(6, columns - 1)}}"])
