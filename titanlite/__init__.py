"""titanlite: pretrain Llama-style language models, from one laptop CPU up to thousands of GPUs.

A Python program needs the names below only; docs/python.md shows how. Each is imported when it is first used, so that
`import titanlite` takes no time.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in typing, which is not imported because that takes longer than the start of Python
if TYPE_CHECKING:
    from typing import Any

    from titanlite.completion import Completion, LoadedCheckpoint, generate, generate_many, load_checkpoint
    from titanlite.config.errors import UserError
    from titanlite.config.flavors import FLAVORS, Architecture
    from titanlite.config.load import load_job
    from titanlite.config.schema import JobConfig
    from titanlite.data.loader import Loader
    from titanlite.data.tokenizer import load_tokenizer
    from titanlite.hooks.profiler import StepProfile
    from titanlite.model.llama import Llama
    from titanlite.score import TextScore, evaluate_text
    from titanlite.train.loop import Trainer
    from titanlite.train.profile_steps import profile_steps

__version__ = "0.2.0"
__all__ = [
    "FLAVORS",
    "Architecture",
    "Completion",
    "JobConfig",
    "Llama",
    "LoadedCheckpoint",
    "Loader",
    "StepProfile",
    "TextScore",
    "Trainer",
    "UserError",
    "evaluate_text",
    "generate",
    "generate_many",
    "load_checkpoint",
    "load_job",
    "load_tokenizer",
    "profile_steps",
]

_HOMES = {
    "titanlite.completion": ("Completion", "LoadedCheckpoint", "generate", "generate_many", "load_checkpoint"),
    "titanlite.config.errors": ("UserError",),
    "titanlite.config.load": ("load_job",),
    "titanlite.config.schema": ("JobConfig",),
    "titanlite.data.loader": ("Loader",),
    "titanlite.data.tokenizer": ("load_tokenizer",),
    "titanlite.config.flavors": ("FLAVORS", "Architecture"),
    "titanlite.model.llama": ("Llama",),
    "titanlite.hooks.profiler": ("StepProfile",),
    "titanlite.train.loop": ("Trainer",),
    "titanlite.train.profile_steps": ("profile_steps",),
    "titanlite.score": ("TextScore", "evaluate_text"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'titanlite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
