"""`titanlite replay`: a step of a run once more, to look into it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import PositiveInt

from titanlite.commands.common import print_result, start_ranks
from titanlite.config.errors import UserError
from titanlite.config.options import AsJson, Options, PositionalPath, parse_beside_job
from titanlite.load_run import load_run, world_size
from titanlite.observe.logged_step import json_line


class Replay(Options):
    """Compute a step of a run once more, also one that was skipped, and compare its loss with the logged one.

    Weights, optimizer and rows come from the newest checkpoint before the step; the steps between are computed, too.
    Start as many ranks as the run had, with NGPU=N or with torchrun: then the loss has the same bits. No file changes.
    """

    dir: PositionalPath
    """The run's output folder."""
    step: PositiveInt
    """Number of the step; the first one is 1."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run the command. Raises UserError: no such run or step, or a job that cannot run here."""
    options, words = parse_beside_job(Replay, argv, "replay")
    config, metrics = options.dir / "config.toml", options.dir / "metrics.jsonl"
    if not config.is_file():
        raise UserError(f"{config} does not exist. Name the output folder of a run.")
    start_ranks("replay", argv)
    words = ["--job.config_file", str(config), "--job.dump_folder", str(options.dir), *words]
    run = load_run(words, world_size(), trusted=False, trains=False)
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines()) if metrics.is_file() else ()
    logged = next((line for line in lines if line["step"] == options.step), None)

    from titanlite.train.replay import replay  # torch, which a wrong option does not wait for

    now, before = (
        {key: line.get("nonfinite", {}).get(key, line[key]) for key in ("loss", "grad_norm")} if line else None
        for line in (json.loads(json_line(replay(run, options.step)[-1].model_dump())), logged)
    )
    words = "that step was not logged" if before is None else "as logged, bit for bit"
    if before not in (None, now):
        words = f"NOT as logged: {_shown(before)}. On other ranks, devices or packages sums are rounded differently"
    result = {"step": options.step, "now": now, "logged": before}
    print_result(result, f"step {options.step}  {_shown(now)}, {words}", options.as_json)


def _shown(numbers: dict[str, Any] | None) -> str:
    """As a line of the log has them; what is not finite is a text."""
    return "loss {loss:.4f}  grad_norm {grad_norm:.3f}".format(**{k: float(v) for k, v in (numbers or {}).items()})
