"""What a run is, written beside its outputs. May import config, torch and the standard library."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.config.load import dump_config
from titanlite.config.schema import JobConfig

PACKAGES = ("titanlite", "torch", "torchao", "numpy", "tokenizers", "tiktoken")


def write_outputs(dump_folder: Path, job: JobConfig, device_name: str) -> None:
    """Write config.toml, which reloads to the same job, and environment.json beside the outputs."""
    dump_folder.mkdir(parents=True, exist_ok=True)
    (dump_folder / "config.toml").write_text(dump_config(job))
    environment = {
        "python": platform.python_version(),
        "packages": {package: version(package) for package in PACKAGES},
        "device": device_name,
        "world_size": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }
    (dump_folder / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
