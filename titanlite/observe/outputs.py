"""The files of a run in its output folder, apart from checkpoints, and what the next start does with them.

Invariant: no start deletes or overwrites what a run has measured. A resumed run continues the files. A start that does
not continue them renames all of them to `NAME.superseded`, with a number from the second time on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from titanlite.config.errors import UserError
from titanlite.config.files import put
from titanlite.config.load import dump_config
from titanlite.config.schema import JobConfig
from titanlite.observe.writers import JSON_FILES
from titanlite.runtime.logging import EVENTS_FILE, LOG_FILE

CURVES = tuple(reversed(JSON_FILES))
LOGS = (LOG_FILE, EVENTS_FILE)  # both have lines of this start before it is known whether it continues them
PROFILES = "profile"
FOLDERS = ("tb", "wandb", PROFILES)
# They are renamed in this order. If a start is interrupted, the files that remain let the next start rename the rest.
FILES = ("config.toml", "environment.json", *LOGS, *FOLDERS, *CURVES)
_SUPERSEDED = re.compile(rf"(?:{'|'.join(map(re.escape, FILES))})\.superseded(?:-(\d+))?")


class OutputFolder:
    """The files of one output folder, on rank 0. Create it before this start writes a line to its log.

    Args:
        log: Is called with one line of text for each event that the user should know.
    """

    def __init__(self, folder: Path, log: Callable[[str], None]) -> None:
        self.folder, self._log = folder, log
        self._log_starts = {name: _size(folder / name) for name in LOGS}  # bytes of each log when this start began

    def start(self, job: JobConfig, environment: Mapping[str, Any], resumed_step: int | None) -> None:
        """Continue the files or rename them. Then write config.toml, which loads to `job`, and environment.json.

        Args:
            environment: The content of environment.json. `run` in it is the identity of the run.
            resumed_step: Last step of the checkpoint that was loaded; None if none was.

        Raises:
            UserError: The folder cannot be written to.
        """
        contents = {"config.toml": dump_config(job), "environment.json": json.dumps(environment, indent=2) + "\n"}
        try:
            self._continue(environment["run"], resumed_step)
            if resumed_step is not None:
                self._set_later_aside(resumed_step, job.checkpoint.load_step == resumed_step, contents)
            for name, content in contents.items():
                (self.folder / name).write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{self.folder}: the files of this run cannot be written: {error}. Free some space, correct the "
                "permissions, or choose another job.dump_folder."
            ) from None

    def _continue(self, run: str, resumed_step: int | None) -> None:
        """Let the files be those of `run`: what another run has measured is renamed. If that had happened to those of
        `run`, they get their names back."""
        measured = any(_size(self.folder / name) for name in CURVES)
        if resumed_step is not None and measured and self._run_of("") in (run, None):
            return
        suffixes = [_suffix(number) for number in range(self._last_number(), 0, -1)]
        archive = next((s for s in suffixes if resumed_step is not None and self._run_of(s) == run), None)
        if measured or archive is not None:
            self._rename("", _suffix(self._last_number() + 1))
        if archive is not None:
            self._rename(archive, "")

    def _rename(self, old: str, new: str) -> None:
        """Replace one suffix of all files by another. What this start has logged stays in its files."""
        logs = [self.folder / name for name in LOGS if (self.folder / name).exists()]
        started_here = {log: log.read_bytes()[self._log_starts[log.name] :] for log in logs}
        for log in logs:
            os.truncate(log, self._log_starts[log.name])
        names = [name for name in FILES if _size(self.folder / f"{name}{old}")]
        for name in names:
            (self.folder / f"{name}{old}").replace(self.folder / f"{name}{new}")
        for log, lines in started_here.items():
            self._log_starts[log.name] = _size(log)
            with log.open("ab") as file:
                file.write(lines)
        what = f"of an earlier run, which this one does not continue, renamed to ...{new}"
        if names:
            back = f"of this run, set aside as ...{old}, have their names again"
            self._log(f"{self.folder}: {_listed(names)} {what if new else back}")

    def _set_later_aside(self, step: int, went_back: bool, contents: Mapping[str, str]) -> None:
        """Copy or move what a resume from `step` does not continue: later entries, and a configuration that has
        changed."""
        suffix, names = _suffix(self._last_number() + 1), []
        for name in CURVES:
            last = step if name == "metrics.jsonl" else step or -1  # a run that resumes from step 0 validates again
            if count := _move_entries_after(self.folder / name, last, self.folder / f"{name}{suffix}"):
                names.append(f"{count} entries of {name}")
        if names and went_back and (self.folder / "tb").exists():
            # In one folder TensorBoard hides steps that are trained again. The copy keeps the old curve for comparison.
            shutil.copytree(self.folder / "tb", self.folder / f"tb{suffix}")
            names.append("a copy of tb")
        for name, content in contents.items():
            path = self.folder / name
            if path.exists() and path.read_text(encoding="utf-8", errors="replace") != content:
                path.rename(self.folder / f"{name}{suffix}")
                names.append(name)
        if names:
            self._log(
                f"{self.folder}: resumed after step {step}; what differs or is trained again, {_listed(names)}, "
                f"is kept as ...{suffix}"
            )

    def _run_of(self, suffix: str) -> str | None:
        """The identity in an environment.json; None where there is none, as in those of version 0.1."""
        try:
            return json.loads((self.folder / f"environment.json{suffix}").read_bytes())["run"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _last_number(self) -> int:
        """The highest number of a superseded file. 0 if there is none."""
        found = [match for path in self.folder.iterdir() if (match := _SUPERSEDED.fullmatch(path.name))]
        return max((int(match[1] or 1) for match in found), default=0)


def _suffix(number: int) -> str:
    return ".superseded" if number == 1 else f".superseded-{number}"


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _size(path: Path) -> int:
    """0 for a file that is empty or not there, and for an empty folder."""
    return len(os.listdir(path)) if path.is_dir() else path.stat().st_size if path.exists() else 0


def _move_entries_after(path: Path, step: int, target: Path) -> int:
    """Move from a file of JSON lines to `target` what lies after `step`, and lines that a crash left incomplete.

    Returns:
        The number of lines moved.
    """
    content = path.read_bytes() if path.exists() else b""
    lines = [line + b"\n" for line in content.splitlines()]
    moved = [line for line in lines if not _is_until(line, step)]
    if moved:
        put(target, b"".join(moved))
    kept = b"".join(line for line in lines if _is_until(line, step))
    if kept != content:
        put(path, kept)
    return len(moved)


def _is_until(line: bytes, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError, OverflowError):
        return False
