"""What each start of a run runs with, and what of it differs from the start before: code, packages, machine, data, job.

Invariant: it stays in events.jsonl. To make it costs no collective and reads no data, and git has a limit of time:
without its answer, the hash of the package's files tells whether the code has changed.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash

from titanlite import __version__
from titanlite.checkpoint.job_diff import flat
from titanlite.config.load import PACKAGE
from titanlite.hooks.hook import Training

_PACKAGES = ("torch", "torchao", "numpy", "tokenizers", "tiktoken")
_GIT_SECONDS = 5.0


def environment_of(training: Training) -> dict[str, Any]:
    """The content of environment.json: with what a run trains and where, the fingerprint of each source and of the
    tokenizer, and the keys of the job that are not at their default."""
    cpu = platform.processor() or platform.machine()
    data = {"tokenizer": training.tokenizer.fingerprint}
    for source in training.loader.sources:  # two sources can have one name
        data[source.name] = data.get(source.name, "") + source.fingerprint
    return {
        "run": training.identity,
        "code": describe_code(),
        "python": platform.python_version(),
        "packages": {"titanlite": __version__} | {package: version(package) for package in _PACKAGES},
        "device": torch.cuda.get_device_name(training.device) if training.device.type == "cuda" else cpu,
        "world_size": training.run.world_size,
        "layout": asdict(training.run.degrees),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "hosts": sorted(set(training.hosts)),
        "data": data,
        "job": training.run.job.model_dump(mode="json", exclude_defaults=True),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two environments, a line each, such as "packages.torch: 2.12.0 -> 2.13.0". Parts that the
    one before does not have (of an older version) are left out."""
    old, new = flat(before), flat({part: value for part, value in now.items() if part in before})
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name}: {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in changed]


def describe_code(package: Path = PACKAGE) -> dict[str, str]:
    """Which code of this package runs. "files": a hash of its files. In a clone of the repository also "commit", which
    ends with "-dirty" if a file of the clone differs from it."""
    digest = xxhash.xxh3_64()
    for file in sorted(package.rglob("*.py")):
        if file.is_file():  # an editor's lock is a link to nothing
            digest.update(os.fsencode(file.relative_to(package)) + b"\0" + file.read_bytes())
    folder = package.parent
    # Of this repository alone, without a lock in it, and without a process that outlives this one.
    git = ["git", f"--git-dir={folder / '.git'}", f"--work-tree={folder}", "-c", "core.fsmonitor=false"]
    command = [*git, "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or no clone
        return {"files": digest.hexdigest()}
    return {"files": digest.hexdigest(), "commit": said.stdout.decode().strip()}
