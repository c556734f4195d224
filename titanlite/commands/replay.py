"""`titanlite replay`: recompute a step of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from titanlite.commands.common import print_result, run_on_ngpu_ranks
from titanlite.config.errors import UserError
from titanlite.config.options import AsJson, Options, PositionalPath, parse_options_and_job
from titanlite.config.run import Run
from titanlite.load_run import load_run, read_world_size
from titanlite.observe.logged_step import json_line
from titanlite.report.run_files import read_metrics


class Replay(Options):
    """Recompute a step of a run, and compare its loss with the logged loss.

    The command loads the newest checkpoint before the step, and also recomputes the steps in
    between. You can replay skipped steps. If you start as many ranks as the run had, with NGPU=N or
    torchrun, the loss is bitwise identical. No file of the run changes.
    """

    dir: PositionalPath
    """Output folder of the run."""
    step: PositiveInt
    """Number of the step, counted from 1."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite replay`: recompute a step and compare its loss with the logged loss.

    Raises:
        UserError: If the run or the step does not exist, or the job cannot run on this node.
    """
    options, words = parse_options_and_job(Replay, argv, "replay")
    config = options.dir / "config.toml"
    if not config.is_file():
        raise UserError(
            f"{config} does not exist. Pass the output folder of a run: a checkpoint alone, such "
            "as an imported one, has no steps to replay."
        )
    # With NGPU=N, run this command in N processes instead, and exit.
    run_on_ngpu_ranks("replay", argv)

    # The output folder may have been moved since the run.
    job_words = ["--job.config_file", str(config), "--job.dump_folder", str(options.dir), *words]
    run = load_run(job_words, read_world_size(), trusted=False, trains=False)
    logged = _read_logged_step(options.dir, options.step)
    replayed = _compute_step(run, options.step)

    difference = _describe_difference(logged, replayed)
    text = f"step {options.step}  {_format_loss_and_norm(replayed)}, {difference}"
    result = {"step": options.step, "now": replayed, "logged": logged}
    print_result(result, text, options.as_json)


def _compute_step(run: Run, step: int) -> dict[str, Any]:
    """Recompute a step of a run, starting from the newest checkpoint before it.

    Returns:
        A dictionary with the keys "loss" and "grad_norm", in the form of metrics.jsonl.
    """
    from titanlite.train.replay import replay  # slow, because it imports torch

    metrics = replay(run, step)[-1]
    return _select_loss_and_norm(json.loads(json_line(metrics.model_dump())))


def _describe_difference(logged: Mapping[str, Any] | None, replayed: Mapping[str, Any]) -> str:
    """Describe whether the recomputed loss and gradient norm equal the logged values.

    Args:
        logged: "loss" and "grad_norm" in metrics.jsonl, or None if the step was not logged.
        replayed: The recomputed "loss" and "grad_norm".
    """
    if logged is None:
        return "this step was not logged"
    if logged == replayed:
        return "bitwise identical to the logged step"
    return (
        f"DIFFERENT from the logged step: {_format_loss_and_norm(logged)}. "
        "Sums are rounded differently with other ranks, devices or packages"
    )


def _read_logged_step(folder: Path, step: int) -> dict[str, Any] | None:
    """Read the loss and gradient norm of a step from the metrics file of a run.

    Args:
        folder: Output folder of the run.
        step: Number of the step, counted from 1.

    Returns:
        A dictionary with the keys "loss" and "grad_norm", or None if the step was not logged.

    Raises:
        UserError: If the step is not found and the metrics file is damaged.
    """
    problems: list[str] = []
    for metrics in read_metrics(folder, problems):
        if metrics["step"] == step:
            return _select_loss_and_norm(metrics)
    if problems:
        raise UserError("; ".join(problems))
    return None


def _select_loss_and_norm(line: Mapping[str, Any]) -> dict[str, Any]:
    """Extract the loss and gradient norm from a line of metrics.jsonl.

    Infinite and NaN values are returned as strings, because JSON has no such numbers.
    """
    nonfinite = line.get("nonfinite", {})
    return {key: nonfinite.get(key, line[key]) for key in ("loss", "grad_norm")}


def _format_loss_and_norm(numbers: Mapping[str, Any]) -> str:
    """Format the loss and gradient norm of a step, such as "loss 2.8130  grad_norm 0.941"."""
    return f"loss {float(numbers['loss']):.4f}  grad_norm {float(numbers['grad_norm']):.3f}"
