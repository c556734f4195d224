"""The files of a run in its output folder, apart from checkpoints, and what the next start does with them.

Invariant: no start deletes or overwrites what a run has measured. A start keeps of each file what it continues; the
rest goes to `NAME.superseded`, with a number from the second time on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
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
# They are set aside in this order. If a start is interrupted, the curves that remain let the next one go on with it.
FILES = ("config.toml", "environment.json", *LOGS, *FOLDERS, *CURVES)


class OutputFolder:
    """The files of one output folder, on rank 0. Create it before this start writes a line to its log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes = {name: _size(folder / name) for name in LOGS}

    def begin(self, job: JobConfig, environment: Mapping[str, Any], resumed_step: int | None) -> str:
        """Continue the files or set them aside. Then write config.toml, which loads to `job`, and environment.json.

        A start that resumes the run which has written the files sets aside what it trains again, and a configuration
        that has changed. Any other start sets all of them aside.

        Args:
            environment: The content of environment.json. `run` in it is the identity of the run.
            resumed_step: Last step of the checkpoint that was loaded; None if none was.

        Returns:
            A line for the log about what was set aside, or "".

        Raises:
            UserError: The folder cannot be written to.
        """
        folder, run = self._folder, environment["run"]
        anew = resumed_step is None or self.environment().get("run", run) != run  # version 0.1 named none
        now = {"config.toml": dump_config(job), "environment.json": json.dumps(environment, indent=2) + "\n"}
        suffixes = (".superseded", *(f".superseded-{number}" for number in range(2, 10_000)))
        suffix = next(suffix for suffix in suffixes if not any(folder.glob(f"*{suffix}")))
        went_back, aside = job.checkpoint.load_step == resumed_step, []
        try:
            for name in FILES if not anew or any(_size(folder / name) for name in CURVES) else ():
                path, target = folder / name, folder / f"{name}{suffix}"
                if path.is_file():
                    self._split(path, target, None if anew else resumed_step, now.get(name, ""))
                elif anew and _size(path):
                    path.rename(target)
                elif name == "tb" and went_back and _size(path):
                    shutil.copytree(path, target)  # TensorBoard hides in the other one what is trained again
                aside += [name] * target.exists()
            for name, content in now.items():
                (folder / name).write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{folder}: the files of this run cannot be written: {error}. Correct that.") from None
        why = "of an earlier run, which this one does not continue" if anew else "which differs or is trained again"
        return f"{folder}: {', '.join(aside)}, {why}: renamed to ...{suffix}" if aside else ""

    def _split(self, path: Path, target: Path, step: int | None, now: str) -> None:
        """Move what is not continued of a file to `target`.

        Args:
            step: The last one that is continued; None: nothing of an earlier start is.
            now: What this start is going to write there.
        """
        content = path.read_bytes()
        if path.name in LOGS:
            cut = self._sizes[path.name] if step is None else 0
            rest, kept = content[:cut], content[cut:]
        elif path.name in CURVES and step is not None:
            lines: tuple[list[bytes], list[bytes]] = [], []
            last = step if path.name == "metrics.jsonl" else step or -1  # after step 0 a resume validates again
            for line in content.splitlines():
                lines[_is_until(line, last)].append(line + b"\n")
            rest, kept = map(b"".join, lines)
        else:
            rest, kept = (content, b"") if step is None or content != now.encode() else (b"", content)
        if rest:
            put(target, rest)
        if kept != content:
            put(path, kept)

    def environment(self) -> dict[str, Any]:
        """environment.json of the start before; empty where there is none."""
        try:
            return dict(json.loads((self._folder / "environment.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}


def _size(path: Path) -> int:
    """0 for a file that is empty or not there, and for an empty folder."""
    return len(os.listdir(path)) if path.is_dir() else path.stat().st_size if path.exists() else 0


def _is_until(line: bytes, step: int) -> bool:
    """Whether a line of JSON is of `step` or before. What a crash has left of a line is not."""
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError, OverflowError):
        return False
