"""The files of a run in its output folder, apart from checkpoints, and what the next start does with them.

Invariant: no start deletes or overwrites what a run has measured. A start keeps of each file what it continues; the
rest goes to a folder `superseded-N`, which is read like that of a run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.config.files import put
from titanlite.config.load import dump_config
from titanlite.config.schema import JobConfig
from titanlite.observe.writers import JSON_FILES
from titanlite.runtime.logging import EVENTS_FILE, LOG_FILE

LOGS = (LOG_FILE, EVENTS_FILE)  # both have lines of this start before it is known whether it continues them
PROFILES = "profile"
# They are set aside in this order. If a start is interrupted, the curves that remain let the next one go on with it.
FILES = ("config.toml", "environment.json", *LOGS, "tb", "wandb", PROFILES, *reversed(JSON_FILES))


class OutputFolder:
    """The files of one output folder, on rank 0. Create it before this start writes a line to its log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes = {name: path.stat().st_size if (path := folder / name).exists() else 0 for name in LOGS}

    def begin(self, job: JobConfig, environment: Mapping[str, Any], resumed_step: int | None) -> str:
        """Continue the files or set them aside. Then write config.toml, which loads to `job`, and environment.json.

        A start that resumes the run which has written the files sets aside what it measures again. Any other start
        sets all of them aside.

        Args:
            environment: The content of environment.json. `run` in it is the identity of the run.
            resumed_step: Last step of the checkpoint that was loaded; None if none was.

        Returns:
            A line for the log about what was set aside, or "".

        Raises:
            OSError: The folder cannot be written to.
        """
        folder, run = self._folder, environment["run"]
        anew = resumed_step is None or self.environment().get("run", run) != run  # version 0.1 named none
        measured = [name for name in JSON_FILES if (folder / name).is_file() and (folder / name).stat().st_size]
        target = next(path for n in range(1, 10_000) if not (path := folder / f"superseded-{n}").exists())
        for name in FILES if anew and measured else measured:
            path = folder / name
            if name in LOGS:
                content, size = path.read_bytes() if path.exists() else b"", self._sizes[name]
                _split(path, target, rest=content[:size], kept=content[size:])
            elif anew and path.exists():
                target.mkdir(exist_ok=True)
                path.rename(target / name)
            elif not anew:
                # After step 0 a resume validates again.
                last = resumed_step if name == "metrics.jsonl" else resumed_step or -1
                lines: dict[bool, list[bytes]] = {True: [], False: []}
                for line in path.read_bytes().splitlines(keepends=True):
                    lines[_is_until(line, last)].append(line)
                _split(path, target, rest=b"".join(lines[False]), kept=b"".join(lines[True]))
        (folder / "config.toml").write_text(dump_config(job), encoding="utf-8")
        (folder / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
        aside = ", ".join(sorted(os.listdir(target))) if target.exists() else ""
        why = "of an earlier run, which this one does not continue" if anew else "which is measured again"
        return f"{target}: {aside}, {why}" if aside else ""

    def environment(self) -> dict[str, Any]:
        """environment.json of the start before; empty where there is none."""
        try:
            return dict(json.loads((self._folder / "environment.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}


def _split(path: Path, target: Path, rest: bytes, kept: bytes) -> None:
    """Move the rest of a file to one of the same name in `target`."""
    if rest:
        target.mkdir(exist_ok=True)
        put(target / path.name, rest)
        put(path, kept)


def _is_until(line: bytes, step: int) -> bool:
    """Whether a line of JSON is of `step` or before. What a crash has left of a line is not."""
    try:
        return line.endswith(b"\n") and int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError, OverflowError):
        return False
