"""Continue or archive the files in the output folder of a run, except its checkpoints.

The files are metrics, logs, config.toml and environment.json.

Invariant: a start never deletes or overwrites metrics, logs, or files that no run has written.
Files that it does not continue are moved to a folder `archived-N`, which can be monitored like the
output folder of a run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.config.files import write_atomically
from titanlite.config.load import dump_config
from titanlite.config.schema import JobConfig
from titanlite.observe.metrics_loggers import METRICS_FILES
from titanlite.runtime.logging import EVENTS_FILE, LOG_FILE

ENVIRONMENT_FILE = "environment.json"
# Both files are written before it is known whether this start resumes the earlier run.
LOGS = (LOG_FILE, EVENTS_FILE)
PROFILES = "profile"
# Files in the order in which they are archived. The metrics are last: as long as they exist, the
# next start archives the remaining files after an interruption.
ARCHIVED_FILES = (
    "config.toml",
    ENVIRONMENT_FILE,
    *LOGS,
    "tb",
    "wandb",
    PROFILES,
    *reversed(METRICS_FILES),
)

REQUIRED_KEYS = {
    "metrics.jsonl": {"step", "loss", "grad_norm"},
    "validation.jsonl": {"step", "loss"},
    "samples.jsonl": {"step", "prompt", "completion"},
    EVENTS_FILE: {"time", "event", "text"},
}
LOG_LINE = re.compile(rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ")
HEAD_BYTES = 1 << 16


def find_overwrite_problem(folder: Path) -> str | None:
    """Find a reason why a run must not write its files to the output folder.

    A run must not overwrite files of other programs, write through symbolic links, or write to
    anything else that is not a regular file.

    Returns:
        An error message that names the file and how to fix this, or None if there is no problem.
    """
    names = ("config.toml", ENVIRONMENT_FILE, *LOGS, *METRICS_FILES)
    paths = [folder / name for name in names]
    for path in paths:
        if path.is_symlink():
            return f"{path} is a symbolic link, through which a run would write. Remove it"
        if path.exists() and not path.is_file():
            return f"{path} is not a regular file, so a run cannot write to it. Move it"

    # `_is_written_by_run` also reads other files of `names`, so all must be known to be regular.
    for path in paths:
        if path.exists() and not _is_written_by_run(path):
            return f"{path} was not written by a run, and this run would change it. Move it"
    return None


def _is_written_by_run(path: Path) -> bool:
    """Return whether a file in an output folder was written by a run, judging by its content.

    For example, a metrics.jsonl must contain a line with a step, a loss and a gradient norm.
    """
    if path.name == ENVIRONMENT_FILE:
        environment = read_environment(path.parent)
        return "python" in environment and "packages" in environment
    if path.name == "config.toml":
        # A job can have any content, so check the files that a run writes beside it. One of them
        # must be from a run. Versions before 0.3 did not write environment.json.
        siblings = [path.with_name(name) for name in (ENVIRONMENT_FILE, "metrics.jsonl")]
        return any(sibling.exists() and _is_written_by_run(sibling) for sibling in siblings)
    return _is_log_of_run(path)


def _is_log_of_run(path: Path) -> bool:
    """Return whether a log or a JSON Lines file was written by a training run.

    Check the format of the first lines. An empty file counts as written by a run.
    """
    with path.open("rb") as file:
        first_lines = file.read(HEAD_BYTES)
    if not first_lines:  # overwriting an empty file loses nothing
        return True
    if path.name == LOG_FILE:
        return LOG_LINE.match(first_lines) is not None

    # One valid line is enough, because a crash can leave incomplete lines.
    required_keys = REQUIRED_KEYS[path.name]
    return any(required_keys <= _parse_object(line).keys() for line in first_lines.splitlines())


def read_environment(folder: Path) -> dict[str, Any]:
    """Read environment.json, which describes the node, the packages and the ID of a run.

    Returns:
        The content of the file, or an empty dictionary if it is missing or damaged.
    """
    try:
        return _parse_object((folder / ENVIRONMENT_FILE).read_bytes())
    except OSError:
        return {}


class OutputFolder:
    """Continues or archives the files that earlier launches left in the output folder.

    Use this class on rank 0 only. Create the object before logging starts, because it records the
    sizes of the logs to distinguish new lines from earlier lines.

    Args:
        folder: The output folder, which must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._old_log_sizes = {
            name: (folder / name).stat().st_size for name in LOGS if (folder / name).exists()
        }

    def prepare(
        self, job: JobConfig, environment: Mapping[str, Any], resumed_step: int | None
    ) -> str:
        """Continue or archive existing files, and write config.toml and environment.json.

        - If this start resumes the run that wrote the files, it archives the metrics after
          `resumed_step`, because these steps will be trained again.
        - If the resumed run has no step left to train, it changes no file.
        - If an earlier run wrote the files, it archives all of them.

        Args:
            job: The job to write to config.toml.
            environment: Content of environment.json. Its key "run" is the ID of the run.
            resumed_step: Step of the checkpoint that was loaded, or None if no checkpoint was
                loaded.

        Returns:
            A log line about the archived files, or "" if there are none.

        Raises:
            OSError: If the folder cannot be written to.
        """
        folder = self._folder
        previous = read_environment(folder)
        # Version 0.1 did not write an ID.
        is_same_run = previous.get("run", environment["run"]) == environment["run"]
        last_step = resumed_step if is_same_run else None
        if last_step is not None and last_step >= job.training.steps and previous:
            return ""

        archive = _choose_archive(folder)
        if last_step is None:
            self._archive_all(archive)
            reason = "of an earlier run"
        else:
            _archive_after(folder / "metrics.jsonl", archive, last_step)
            # A run that resumes from step 0 validates and samples again before its first step.
            last_kept_step = last_step if last_step > 0 else -1
            for name in ("validation.jsonl", "samples.jsonl"):
                _archive_after(folder / name, archive, last_kept_step)
            reason = "of steps that will be repeated"

        # Write environment.json first, because `find_overwrite_problem` recognizes a config.toml by
        # the files beside it.
        content = json.dumps(environment, indent=2) + "\n"
        write_atomically(folder / ENVIRONMENT_FILE, content.encode())
        write_atomically(folder / "config.toml", dump_config(job).encode())
        if not archive.exists():
            return ""
        files = ", ".join(sorted(os.listdir(archive)))
        return f"Archived {files} {reason} to {archive}"

    def _archive_all(self, archive: Path) -> None:
        """Move the files of an earlier run to the new folder `archive`.

        The current process already writes to the logs (`LOGS`: train.log and events.jsonl), so its
        lines stay there. If the earlier run has written no metrics, do nothing.
        """
        paths = [self._folder / name for name in METRICS_FILES]
        has_metrics = any(path.is_file() and path.stat().st_size > 0 for path in paths)
        if not has_metrics:
            return

        archive.mkdir()
        for name in ARCHIVED_FILES:
            path = self._folder / name
            if name in LOGS:
                self._archive_old_lines(path, archive)
            elif path.exists():
                path.rename(archive / name)

    def _archive_old_lines(self, log: Path, archive: Path) -> None:
        """Move the lines that a log contained before this start to `archive`, and keep later lines.

        If the log did not exist before this start, do nothing.
        """
        old_size = self._old_log_sizes.get(log.name)
        if old_size is None:
            return
        # Write the archive first: an interruption here duplicates lines, but loses none.
        content = log.read_bytes()
        write_atomically(archive / log.name, content[:old_size])
        write_atomically(log, content[old_size:])


def _choose_archive(folder: Path) -> Path:
    """Return the first path archived-1, archived-2, ... that does not exist yet."""
    number = 1
    while (folder / f"archived-{number}").exists():
        number += 1
    return folder / f"archived-{number}"


def _archive_after(path: Path, archive: Path, last_step: int) -> None:
    """Move lines with a step after `last_step` from a JSON Lines file to an archive folder.

    Also move damaged lines. If the file does not exist, do nothing.

    Args:
        path: JSON Lines file whose lines have the key "step".
        archive: Archive folder, which is created if there are lines to move.
        last_step: Last step whose line stays in the file.
    """
    if not path.is_file():
        return

    kept: list[bytes] = []
    archived: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        step = _read_step(line)
        if step is not None and step <= last_step:
            kept.append(line)
        else:
            archived.append(line)

    if archived:
        archive.mkdir(exist_ok=True)
        write_atomically(archive / path.name, b"".join(archived))
        write_atomically(path, b"".join(kept))


def _read_step(line: bytes) -> int | None:
    """Return the value of "step" in a line of JSON, or None if the line is invalid."""
    step = _parse_object(line).get("step")
    return step if isinstance(step, int) and line.endswith(b"\n") else None


def has_line_of_step(path: Path, step: int) -> bool:
    """Return whether a JSON Lines file exists and has a line whose "step" is `step`."""
    if not path.is_file():
        return False
    lines = path.read_bytes().splitlines(keepends=True)
    return any(_read_step(line) == step for line in lines)


def _parse_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object, or return an empty dictionary if the content is anything else."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
