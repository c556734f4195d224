"""`titanlite check`: check a job without starting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from shutil import get_terminal_size
from typing import Any

from titanlite.checkpoint.find import is_saved, load_newest, read_job, read_newest_job
from titanlite.checkpoint.manifest import list_set_aside
from titanlite.config.errors import format_count, printable
from titanlite.config.job_diff import SAME_DATA, check_changes, compare_jobs
from titanlite.config.options import OptionRanks, Options, parse_options_and_job
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.amounts import explain_toy_run, inspect_data
from titanlite.data.documents import source_specs
from titanlite.data.mixture import source_shares
from titanlite.data.tokenizer import load_tokenizer
from titanlite.load_run import load_run, read_world_size
from titanlite.observe.gpus import check_memory
from titanlite.optim.schedule import learning_rate_at
from titanlite.rules import find_suspicious_values

_MARGIN = 10  # width of the labels to the left of a curve, in characters
_MIN_COLUMNS = 10  # minimum width of a plot, even if the terminal is narrower
_MIN_LABEL_WIDTH = 6  # minimum width of the last step below a plot, in characters
_BARS = " ▁▂▃▄▅▆▇█"


class CheckOptions(Options):
    """Check a job without starting it, and print OK or all of its mistakes."""

    world_size: OptionRanks | None = None
    """Number of ranks (processes on all nodes together). Default: the environment variable
    WORLD_SIZE, or 1."""
    plot: bool = False
    """Plot the learning rate, and the values that [[dataset.stages]] can change: the global batch
    size and the share of each source."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite check`: validate a job and its data without starting it, and print OK.

    Raises:
        UserError: If the job, its data or an option is invalid.
    """
    options, words = parse_options_and_job(CheckOptions, argv, "check")
    run = load_run(words, options.world_size or read_world_size())
    # With --world_size, the run is for other nodes, whose memory is unknown.
    check_memory(run, on_other_nodes=options.world_size is not None)

    has_checkpoint = is_saved(run)
    if has_checkpoint or _has_only_damaged_checkpoints(run):
        _check_resume(run)

    tokenizer = load_tokenizer(run.tokenizer_path, run.job)
    data = inspect_data(run, tokenizer)
    note_if_too_small = explain_toy_run(run, tokenizer, data)  # "" if the run can be useful

    _print_result(run, has_checkpoint, note_if_too_small)
    if options.plot:
        width = get_terminal_size().columns
        print(f"\n{plot_schedule(run, width)}")


def _has_only_damaged_checkpoints(run: Run) -> bool:
    """Return whether damaged checkpoints prevent a run from starting from scratch.

    Call this if the run has no other checkpoints. If checkpoints are disabled, or if the run could
    download a valid one from its mirror, return False.
    """
    checkpoint = run.job.checkpoint
    needs_checkpoint = checkpoint.enable and checkpoint.mirror is None
    return needs_checkpoint and bool(list_set_aside(run.checkpoint_folder))


def _check_resume(run: Run) -> None:
    """Check that training can resume from the newest checkpoint of the run.

    Raises:
        UserError: If a key has changed that must not change when a run resumes.
        CheckpointError: If all checkpoints are damaged.
    """
    saved_run = Run(_read_saved_job(run))
    # The data is compared only when the run starts, so assume that it is the same.
    changes = compare_jobs(_list_values(saved_run), _list_values(run), SAME_DATA)
    check_changes(run.checkpoint_folder, changes)


def _read_saved_job(run: Run) -> JobConfig:
    """Read the job in the newest checkpoint of the run, and check the files of the checkpoint.

    Tensor files must have the right size, but their contents are not read. If the job has a mirror,
    no files are checked, because the run could restore a checkpoint from it.

    Raises:
        CheckpointError: If all checkpoints are damaged.
    """
    if run.job.checkpoint.mirror is not None:
        return read_newest_job(run.checkpoint_folder)
    return load_newest(run.checkpoint_folder, read_job, skip_tensor_checksums=True)


def _list_values(run: Run) -> dict[str, Any]:
    """Return the sections of a job in the form that `compare_jobs` expects.

    The section "model" contains all fields of the architecture.
    """
    return run.job.model_dump(mode="json") | {"model": asdict(run.arch)}


def _print_result(run: Run, has_checkpoint: bool, note_if_too_small: str) -> None:
    """Print that the run can start, followed by warnings and notes about it.

    Args:
        run: The valid run.
        has_checkpoint: Whether the run would resume from a checkpoint.
        note_if_too_small: Note about a run that is too small to be useful, or "".
    """
    name = run.job.job.config_file or "the job"
    ok = f"OK: {name} can start on {format_count(run.world_size, 'rank')}"
    if has_checkpoint:  # the data position is compared only when the run starts
        ok += f", if {run.checkpoint_folder} has the same data, seq_len and tokenizer"
    print(printable(f"{ok}."))
    for line in find_suspicious_values(run):
        print(printable(f"Warning: {line}"))
    if note_if_too_small:
        print(printable(f"\n{note_if_too_small}"))


def plot_schedule(run: Run, width: int) -> str:
    """Plot the learning rate, the batch size and the share of each data source as text.

    Each column shows one step, and the steps are evenly spaced, up to rounding. A value that never
    changes takes only one line.

    Args:
        run: The run.
        width: Maximum length of a line in characters.
    """
    num_steps = run.job.training.steps
    available_columns = max(_MIN_COLUMNS, width - _MARGIN)
    num_columns = min(num_steps, available_columns)
    # Number of completed steps at each column. For example, 3 columns show 0, 33 and 66 of 100.
    completed_steps = [column * num_steps // num_columns for column in range(num_columns)]

    learning_rates = [learning_rate_at(run.job, step=done + 1) for done in completed_steps]
    lines = _plot_curve("learning rate", learning_rates, "{:.2e}", height=8)
    batch_sizes = [run.batch_size(done) for done in completed_steps]
    lines += _plot_curve("global batch size", batch_sizes, "{:,}", height=4)
    lines += _plot_shares(run, completed_steps)
    lines.append(_draw_step_axis(num_steps, num_columns))
    # Cut lines that are longer than the terminal, because wrapped lines would spoil the charts.
    return "\n".join(line[:width] for line in lines)


def _draw_step_axis(num_steps: int, num_columns: int) -> str:
    """Return the axis below the charts, which labels the first and the last step.

    With few columns, the right label extends beyond the charts, so that the labels do not touch.
    """
    margin = "step  ".rjust(_MARGIN)
    last_step_width = max(_MIN_LABEL_WIDTH, num_columns - 1)
    return f"{margin}1{num_steps:>{last_step_width},}"


def _plot_shares(run: Run, completed_steps: Sequence[int]) -> list[str]:
    """Plot the share of each data source, as one chart per source."""
    dataset = run.job.dataset
    shares_by_step = [source_shares(dataset, done).tolist() for done in completed_steps]
    lines = []
    for index, source in enumerate(source_specs(dataset)):
        name = f"share of {source.source} {source.path or ''}"
        shares = [step_shares[index] for step_shares in shares_by_step]
        lines += _plot_curve(name, shares, "{:.0%}", height=2)
    return lines


def _plot_curve(name: str, values: Sequence[float], label_format: str, *, height: int) -> list[str]:
    """Draw a bar chart as lines of text. If all values are equal, return a single line instead.

    Args:
        name: Title above the chart.
        values: Value of each column, from left to right. Must be 0 or greater.
        label_format: Format of the label at the maximum, such as "{:.2e}".
        height: Height of the bars in lines.
    """
    maximum = max(values)
    title = " " * _MARGIN + name
    if min(values) == maximum:
        return [f"{title}: {label_format.format(maximum)} in each step"]

    # The top row is labeled with the maximum, and the bottom row, row 0, with 0.
    labels = {height - 1: label_format.format(maximum), 0: "0"}
    bar_heights = [value / maximum * height for value in values]
    lines = [title]
    for row in reversed(range(height)):
        label = labels.get(row, "").rjust(_MARGIN - 2)
        lines.append(f"{label} |{_draw_row(row, bar_heights)}".rstrip())
    return lines


def _draw_row(row: int, bar_heights: Sequence[float]) -> str:
    """Draw one row of a bar chart as text, with one character per bar.

    Block characters such as "▄" fill a row in eighths. For example, a bar of height 2.5 fills rows
    0 and 1 completely, and row 2 by 4/8.

    Args:
        row: Index of the row, where 0 is the lowest.
        bar_heights: Height of the bar in each column, in rows.
    """
    characters = []
    for bar_height in bar_heights:
        filled_eighths = round(8 * (bar_height - row))
        characters.append(_BARS[max(0, min(8, filled_eighths))])
    return "".join(characters)
