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
        self._sizes = {name: (folder / name).stat().st_size for name in LOGS if (folder / name).exists()}

    def begin(self, job: JobConfig, environment: Mapping[str, Any], resumed_step: int | None) -> str:
        """Continue the files or set them aside. Then write config.toml, which loads to `job`, and environment.json.

        A start that resumes the run which has written the files sets aside what it measures again, and changes none if
        it has no step left to do. Any other start sets all of them aside.

        Args:
            environment: The content of environment.json. `run` in it is the identity of the run.
            resumed_step: Last step of the checkpoint that was loaded; None if none was.

        Returns:
            A line for the log about what was set aside, or "".

        Raises:
            OSError: The folder cannot be written to.
        """
        folder, run = self._folder, environment["run"]
        last = resumed_step if self.environment().get("run", run) == run else None  # version 0.1 named none
        if last is not None and last >= job.training.steps and self.environment():
            return ""  # nothing is measured again, and config.toml is still what was trained
        measured = [name for name in JSON_FILES if (folder / name).is_file() and (folder / name).stat().st_size]
        target = next(path for n in range(1, 10_000) if not (path := folder / f"superseded-{n}").exists())
        if last is not None:
            for name in measured:  # after step 0 a resume validates again
                _cut(folder / name, target, last if name == "metrics.jsonl" else last or -1)
        elif measured:
            target.mkdir()
            for name in FILES:
                if name in self._sizes:
                    content, size = (folder / name).read_bytes(), self._sizes[name]
                    put(target / name, content[:size])
                    put(folder / name, content[size:])
                elif name not in LOGS and (folder / name).exists():
                    (folder / name).rename(target / name)
        (folder / "config.toml").write_text(dump_config(job), encoding="utf-8")
        (folder / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
        why = "of an earlier run, which this one does not continue" if last is None else "which is measured again"
        return f"{target}: {', '.join(sorted(os.listdir(target)))}, {why}" if target.exists() else ""

    def environment(self) -> dict[str, Any]:
        """environment.json of the start before; empty where there is none."""
        try:
            return dict(json.loads((self._folder / "environment.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}


def _cut(path: Path, target: Path, last: int) -> None:
    """Move lines of JSON after step `last` to a file of the same name in `target`. What a crash has left of a line goes
    with them."""
    lines: dict[bool, list[bytes]] = {True: [], False: []}
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            stays = line.endswith(b"\n") and int(json.loads(line)["step"]) <= last
        except (ValueError, KeyError, TypeError, OverflowError):
            stays = False
        lines[stays].append(line)
    if lines[False]:
        target.mkdir(exist_ok=True)
        put(target / path.name, b"".join(lines[False]))
        put(path, b"".join(lines[True]))
