"""The files of a run in its output folder, apart from checkpoints, and what the next start does with them.

Invariant: no start deletes or overwrites what a run has measured. A resumed run continues the files. A start that does
not continue them renames all of them to `NAME.superseded`, with a number from the second time on.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from titanlite import __version__
from titanlite.config.errors import UserError
from titanlite.config.load import dump_config
from titanlite.config.schema import JobConfig
from titanlite.observe.writers import JSON_FILES
from titanlite.runtime.logging import EVENTS_FILE, LOG_FILE

PACKAGES = ("torch", "torchao", "numpy", "tokenizers", "tiktoken")
CURVES = tuple(reversed(JSON_FILES))
LOGS = (LOG_FILE, EVENTS_FILE)  # both have lines of this start before it is known whether it continues them
PROFILES = "profile"
FOLDERS = ("tb", "wandb", PROFILES)
# They are renamed in this order. If a start is interrupted, the files that remain let the next start rename the rest.
FILES = ("config.toml", "environment.json", *LOGS, *FOLDERS, *CURVES)


def describe_environment(
    device_name: str, run: str, layout: Mapping[str, int], code: Mapping[str, str]
) -> dict[str, Any]:
    """The content of environment.json: with what, where, and on how many ranks a run trains.

    Args:
        run: The identity of the run, which its checkpoints contain, too.
        layout: Parallel degrees by name.
        code: Which code of titanlite runs.
    """
    import torch  # not at the top, because the check of a job uses this module without torch
    import torch.distributed as dist

    return {
        "run": run,
        "code": dict(code),
        "python": platform.python_version(),
        "packages": {"titanlite": __version__} | {package: version(package) for package in PACKAGES},
        "device": device_name,
        "world_size": dist.get_world_size(),
        "layout": dict(layout),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


@dataclass
class OutputFolder:
    """The files of one output folder, on rank 0. Create it before this start writes a line to its log.

    Args:
        log: Is called with one line of text for each event that the user should know.
    """

    folder: Path
    log: Callable[[str], None]
    _log_starts: dict[str, int] = field(init=False)  # bytes of each log when this start began

    def __post_init__(self) -> None:
        self._log_starts = {name: _size(self.folder / name) for name in LOGS}

    def start(self, job: JobConfig, environment: Mapping[str, Any], resumed_step: int | None) -> None:
        """Continue the files or rename them. Then write config.toml, which loads to `job`, and environment.json.

        Args:
            environment: What `describe_environment` returns.
            resumed_step: Last step of the checkpoint that was loaded; None if none was.

        Raises:
            UserError: The folder cannot be written to.
        """
        contents = {"config.toml": dump_config(job), "environment.json": json.dumps(environment, indent=2) + "\n"}
        try:
            measured = any(_size(self.folder / name) for name in CURVES)
            ours = resumed_step is not None and _run_of(self.folder / "environment.json") in (environment["run"], None)
            if not (measured and ours):
                archive = None if resumed_step is None else self._archive_of(environment["run"])
                if measured or archive is not None:
                    self._rename("", self._suffix())
                if archive is not None:
                    self._rename(archive, "")
            if resumed_step is not None:
                self._set_later_aside(resumed_step, job.checkpoint.load_step == resumed_step, contents)
            for name, content in contents.items():
                (self.folder / name).write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{self.folder}: the files of this run cannot be written: {error}. Free some space, correct the "
                "permissions, or choose another job.dump_folder."
            ) from None

    def _archive_of(self, run: str) -> str | None:
        """The newest suffix of the files of `run`. They were renamed if another run used this folder since."""
        suffixes = [_suffix(number) for number in range(self._last_number(), 0, -1)]
        return next((s for s in suffixes if _run_of(self.folder / f"environment.json{s}") == run), None)

    def _rename(self, old: str, new: str) -> None:
        """Replace one suffix of all files by another. What this start has logged stays in its files."""
        logs = [self.folder / name for name in LOGS if (self.folder / name).exists()]
        started_here = {log: log.read_bytes()[self._log_starts[log.name] :] for log in logs}
        for log in logs:
            os.truncate(log, self._log_starts[log.name])
        names = []
        for name in FILES:
            if _size(self.folder / f"{name}{old}"):
                (self.folder / f"{name}{old}").replace(self.folder / f"{name}{new}")
                names.append(name)
        for log, lines in started_here.items():
            self._log_starts[log.name] = _size(log)
            with log.open("ab") as file:
                file.write(lines)
        if names and new:
            what = "of an earlier run, which this one does not continue"
            self.log(f"{self.folder}: {_listed(names)} {what}, renamed to ...{new}")
        elif names:
            self.log(f"{self.folder}: {_listed(names)} of this run, set aside as ...{old}, have their names again")

    def _set_later_aside(self, step: int, went_back: bool, contents: Mapping[str, str]) -> None:
        """Copy or move what a resume from `step` does not continue: later entries, and a configuration that has
        changed."""
        suffix, names = self._suffix(), []
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
            self.log(
                f"{self.folder}: resumed after step {step}; what differs or is trained again, {_listed(names)}, "
                f"is kept as ...{suffix}"
            )

    def _last_number(self) -> int:
        """The highest number of a superseded file. 0 if there is none."""
        pattern = re.compile(rf"(?:{'|'.join(map(re.escape, FILES))})\.superseded(?:-(\d+))?")
        found = [match for path in self.folder.iterdir() if (match := pattern.fullmatch(path.name))]
        return max((int(match[1] or 1) for match in found), default=0)

    def _suffix(self) -> str:
        """A suffix that no file has."""
        return _suffix(self._last_number() + 1)


def _suffix(number: int) -> str:
    return ".superseded" if number == 1 else f".superseded-{number}"


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _size(path: Path) -> int:
    """0 for a file that is empty or not there, and for an empty folder."""
    return len(os.listdir(path)) if path.is_dir() else path.stat().st_size if path.exists() else 0


def _run_of(environment: Path) -> str | None:
    """The identity in an environment.json; None where there is none, as in those of version 0.1."""
    try:
        return json.loads(environment.read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _move_entries_after(path: Path, step: int, target: Path) -> int:
    """Move from a file of JSON lines to `target` what lies after `step`, and lines that a crash left incomplete.

    Returns:
        The number of lines moved.
    """
    if not path.exists():
        return 0
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    kept, moved = [], []
    for line in text.splitlines():
        entry_step = _step_of(line)
        (kept if entry_step is not None and entry_step <= step else moved).append(f"{line}\n")
    if moved:
        _write_durably(target, moved)
    if "".join(kept) != text:
        temporary = path.with_suffix(".jsonl.tmp")
        _write_durably(temporary, kept)
        temporary.replace(path)
    return len(moved)


def _write_durably(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
